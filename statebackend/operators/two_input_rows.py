"""Reads the rows of two inputs, left and right, that come as one table: as Rows, by key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import Row, StructType

from statebackend.operators.rows.row_conversion import columns_to_python, make_rows, row_type

__all__ = ["Side", "SidePiece", "SideReader", "Sides"]

Key = tuple[Any, ...]


class Sides(NamedTuple):
    """One key's rows of both inputs, each in the order of arrival."""

    left: list[Row]
    right: list[Row]


@dataclass(frozen=True, slots=True)
class SidePiece:
    """Some rows of one key, still in columns, by side."""

    reader: SideReader
    left_table: pa.Table
    right_table: pa.Table

    def left(self) -> list[Row]:
        """The left input's, as Rows."""
        return self.reader.left.rows(self.left_table)


class Side:
    """One input's columns in the union of both, and the rows they make."""

    def __init__(self, schema: StructType, first_column: int, timezone: str) -> None:
        self._schema, self._timezone = schema, timezone
        self._columns = list(range(first_column, first_column + len(schema.fields)))
        self._row = row_type(schema.names)

    def table(self, table: pa.Table, mask: pa.Array) -> pa.Table:
        """This input's columns of its own rows, which ``mask`` says."""
        return table.select(self._columns).filter(mask)

    def rows(self, table: pa.Table) -> list[Row]:
        """As Rows, with the names of this input's columns."""
        if not table.num_rows:
            return []
        columns = columns_to_python(table, self._schema, timezone=self._timezone)
        return make_rows(columns, self._row)


class SideReader:
    """Gives a key its rows of two inputs, each as Rows with the names of its own.

    The table's first column says the side (0 left, 1 right); then come the key columns, all columns
    of the left input, and all of the right one (null for rows of the other side). What follows is
    not looked at.

    Args:
        schema: of the table.
        key_positions: where the key columns stand in it: 1 and those that follow.
        left, right: the inputs' schemas, as the processor sees them.
        timezone: the session's, in which timestamps are shown.
    """

    def __init__(
        self,
        schema: StructType,
        key_positions: Sequence[int],
        left: StructType,
        right: StructType,
        *,
        timezone: str = "UTC",
    ) -> None:
        self._timezone = timezone
        self._key_positions = list(key_positions)
        self._key_schema = StructType([schema[i] for i in self._key_positions])
        first = 1 + len(self._key_positions)
        self.left = Side(left, first, timezone)
        self.right = Side(right, first + len(left.fields), timezone)

    def chunk(self, table: pa.Table, starts: Sequence[int]) -> tuple[list[Key], list[Any]]:
        """The keys, and :class:`Sides` for each."""
        firsts = table.select(self._key_positions).take(pa.array(starts[:-1], pa.int64()))
        keys = self._keys(firsts)
        is_right, lefts, rights = self._split(table)
        before = np.zeros(table.num_rows + 1, np.int64)
        np.cumsum(np.asarray(is_right), out=before[1:])
        offsets = np.asarray(starts, np.int64)
        right_starts = before[offsets]
        left_starts = (offsets - right_starts).tolist()
        left, right = self.left.rows(lefts), self.right.rows(rights)
        pairs = zip(pairwise(left_starts), pairwise(right_starts.tolist()), strict=True)
        return keys, [Sides(left[a:b], right[c:d]) for (a, b), (c, d) in pairs]

    def key(self, table: pa.Table) -> Key:
        """The key of the first row."""
        return self._keys(table.select(self._key_positions).slice(0, 1))[0]

    def _keys(self, table: pa.Table) -> list[Key]:
        columns = columns_to_python(table, self._key_schema, timezone=self._timezone)
        return list(zip(*columns, strict=True))

    def piece(self, table: pa.Table) -> Iterable[Any]:
        """Some rows of one key, still in columns."""
        _, left, right = self._split(table)
        return (SidePiece(self, left, right),)

    def _split(self, table: pa.Table) -> tuple[pa.Array, pa.Table, pa.Table]:
        is_right = pc.not_equal(table.column(0), 0).combine_chunks()
        left = self.left.table(table, pc.invert(is_right))
        return is_right, left, self.right.table(table, is_right)
