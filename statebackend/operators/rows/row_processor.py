"""The row flavour: an iterator of Rows in, an iterable of Rows or tuples out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.operators.keyed_operator import KeyOperator
from statebackend.operators.rows.rowconv import RowWriter, columns_to_python, make_rows, row_type
from statebackend.state.cells import KeyCursor

__all__ = ["RowOperator", "RowReader"]


class RowReader:
    """Gives a key its rows as pyspark Rows.

    Args:
        schema: the columns that a processor sees, in order.
        key_positions: where the key columns stand among them.
        timezone: the session's, in which timestamps are shown.
    """

    def __init__(
        self, schema: StructType, key_positions: Sequence[int], *, timezone: str = "UTC"
    ) -> None:
        self._schema = schema
        self._key_positions = tuple(key_positions)
        self._timezone = timezone
        self._row = row_type(schema.names)

    def chunk(
        self, table: pa.Table, starts: Sequence[int]
    ) -> tuple[list[tuple[Any, ...]], list[Iterator[Any]]]:
        """The keys, and an iterator of rows for each.

        Each iterator is over a list of its own: one that is kept, or not used up, must not eat
        into the next key's rows.
        """
        columns = self._columns(table)
        rows = make_rows(columns, self._row)
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
        return make_rows(self._columns(table), self._row)

    def _columns(self, table: pa.Table) -> list[list[Any]]:
        return columns_to_python(table, self._schema, timezone=self._timezone)


class RowOperator(KeyOperator):
    """The operator of a row processor.

    Args:
        uid: the operator, for errors.
        cursor: told which key is current.
        input_schema: the columns a processor sees, in order.
        key_positions: where the key columns stand among them.
        output_schema: of the rows that the processor returns.
        timezone: the session's, in which timestamps are shown.
    """

    def __init__(
        self,
        *,
        uid: str,
        cursor: KeyCursor,
        input_schema: StructType,
        key_positions: tuple[int, ...],
        output_schema: StructType,
        timezone: str = "UTC",
    ) -> None:
        super().__init__(
            uid=uid,
            cursor=cursor,
            reader=RowReader(input_schema, key_positions, timezone=timezone),
            writer=RowWriter(output_schema, lambda: f"The processor of operator {uid!r}"),
        )
