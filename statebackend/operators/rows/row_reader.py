"""The row flavour: an iterator of Rows in, an iterable of Rows or tuples out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.operators.rows.row_conversion import columns_to_python, make_rows, row_type

__all__ = ["RowReader"]


class RowReader:
    """Gives a key its rows as pyspark Rows.

    Args:
        schema: the input's columns, in order.
        key_positions: where the key columns stand among them.
        shown: how many of the first columns a processor sees; None: all.
        timezone: the session's, in which timestamps are shown.
    """

    def __init__(
        self,
        schema: StructType,
        key_positions: Sequence[int],
        *,
        timezone: str = "UTC",
        shown: int | None = None,
    ) -> None:
        self._schema = schema
        self._key_positions = tuple(key_positions)
        self._timezone = timezone
        self._shown = shown
        self._row = row_type(schema.names[:shown])

    def chunk(
        self, table: pa.Table, starts: Sequence[int]
    ) -> tuple[list[tuple[Any, ...]], list[Iterator[Any]]]:
        """The keys, and an iterator of rows for each.

        Each iterator is over a list of its own: one that is kept, or not used up, must not eat
        into the next key's rows.
        """
        columns = self._columns(table)
        rows = make_rows(columns[: self._shown], self._row)
        key_columns = [columns[position] for position in self._key_positions]
        if len(starts) - 1 == len(rows):  # a row a key
            keys = list(zip(*key_columns, strict=True))
            return keys, list(map(iter, zip(rows, strict=True)))
        firsts = starts[:-1]
        keys = list(zip(*[[column[i] for i in firsts] for column in key_columns], strict=True))
        return keys, [iter(rows[first:end]) for first, end in pairwise(starts)]

    def key(self, table: pa.Table) -> tuple[Any, ...]:
        """The key of the first row."""
        columns = self._columns(table.slice(0, 1))
        return tuple([columns[position][0] for position in self._key_positions])

    def piece(self, table: pa.Table) -> Iterable[Any]:
        """Rows, some of one key's."""
        return make_rows(self._columns(table)[: self._shown], self._row)

    def _columns(self, table: pa.Table) -> list[list[Any]]:
        return columns_to_python(table, self._schema, timezone=self._timezone)
