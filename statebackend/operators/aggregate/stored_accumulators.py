"""Accumulators in state: fixed-width fields in one state, the rest in another beside it.

A row of fixed-width fields is encoded and decoded by the column; one text among them would make
all of it slow.
"""

# ruff: noqa: D102  (Accumulator and EntryStore say what their methods do)

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.operators.aggregate.accumulators import Accumulator, Columns
from statebackend.operators.aggregate.arrow_numpy import Ints, numpy_of
from statebackend.schema.field_meanings import ELSEWHERE, MEANING
from statebackend.schema.types import arrow_type, is_fixed_width

__all__ = ["Accumulators", "Entries", "StoredTotals", "StoredWindows"]

Accumulators = list[list[pa.Array]]
"""For each accumulator its columns."""


class _Layout:
    """Which field of which accumulator stands in which state, and where."""

    def __init__(self, accumulators: Sequence[Accumulator], head: Sequence[T.StructField]) -> None:
        self._fields = [list(a.fields.values()) for a in accumulators]
        self.head = len(head)
        self.fixed, self.wide = T.StructType(list(head)), T.StructType()
        self._places: list[list[tuple[bool, int]]] = []
        for accumulator in accumulators:
            places = []
            meaning = {MEANING: accumulator.meaning}
            for number, dtype in enumerate(accumulator.fields.values()):
                into = self.fixed if is_fixed_width(dtype) else self.wide
                places.append((into is self.fixed, len(into.fields)))
                # By number, so that another aggregation under the same name meets it here.
                into.add(f"{accumulator.name}.{number}", dtype, metadata=meaning)
            self._places.append(places)
        # A type may take a field from the one state to the other, where it would begin anew.
        self.fixed, self.wide = _beside(self.fixed, self.wide), _beside(self.wide, self.fixed)

    def together(self, fixed: Columns, wide: Columns) -> Accumulators:
        return [
            [(fixed if is_fixed else wide)[place] for is_fixed, place in places]
            for places in self._places
        ]

    def apart(self, accumulators: Accumulators) -> tuple[list[pa.Array], list[pa.Array]]:
        """Fixed-width columns (without the head) and the rest."""
        fixed: list[pa.Array] = []
        wide: list[pa.Array] = []
        for columns, places in zip(accumulators, self._places, strict=True):
            for column, (is_fixed, _) in zip(columns, places, strict=True):
                (fixed if is_fixed else wide).append(column)
        return fixed, wide

    def nothing(self, rows: int) -> Accumulators:
        """Accumulators of nothing."""
        return [[pa.nulls(rows, arrow_type(dtype)) for dtype in fields] for fields in self._fields]


def _beside(own: T.StructType, other: T.StructType) -> T.StructType:
    """Say in a state's first field which ones the state beside it has."""
    if not own.fields:
        return own
    first, *rest = own.fields
    metadata = {**(first.metadata or {}), ELSEWHERE: json.dumps(other.names)}
    return T.StructType([T.StructField(first.name, first.dataType, metadata=metadata), *rest])


class StoredTotals:
    """One accumulator of each kind per key."""

    def __init__(self, ctx: Any, accumulators: Sequence[Accumulator]) -> None:
        self._layout = _Layout(accumulators, [])
        layout = self._layout
        self._fixed = ctx.value_state("totals", layout.fixed) if layout.fixed.fields else None
        self._wide = ctx.value_state("totals_wide", layout.wide) if layout.wide.fields else None

    def get(self, keys: Any) -> Accumulators:
        """The accumulators of keys; nulls where there are none."""
        fixed = self._fixed.get(keys).columns if self._fixed is not None else []
        wide = self._wide.get(keys).columns if self._wide is not None else []
        return self._layout.together(fixed, wide)

    def put(self, keys: Any, accumulators: Accumulators) -> None:
        """Set the accumulators of keys."""
        fixed, wide = self._layout.apart(accumulators)
        if self._fixed is not None:
            self._fixed.put(keys, fixed)
        if self._wide is not None:
            self._wide.put(keys, wide)


class StoredWindows:
    """Accumulators per key and window.

    Args:
        name: of the state; its map key is a bigint that says where the window starts.
        mark: the first field of every window; never null, so that it tells whether there is one.
    """

    def __init__(
        self, ctx: Any, name: str, mark: T.StructField, accumulators: Sequence[Accumulator]
    ) -> None:
        self._layout = _Layout(accumulators, [mark])
        start = T.StructType([T.StructField("start", T.LongType())])
        self._fixed = ctx.map_state(name, start, self._layout.fixed)
        self._wide = None
        if self._layout.wide.fields:
            self._wide = ctx.map_state(f"{name}_wide", start, self._layout.wide)

    def get(self, keys: Any, starts: Ints) -> tuple[pa.Array, Accumulators]:
        """The mark and the accumulators of window starts[i] of keys[i]; null where none is open."""
        return self._whole(keys, starts, self._fixed.get(keys, [starts]).columns)

    def items(self, keys: Any) -> tuple[Ints, Ints, pa.Array, Accumulators]:
        """All windows of keys: which key, start, mark and accumulators."""
        index, map_keys, rows = self._fixed.items(keys)
        starts: Ints = numpy_of(map_keys.column(0))[0]
        mark, accumulators = self._whole(keys.take(index), starts, rows.columns)
        return index, starts, mark, accumulators

    def _whole(self, keys: Any, starts: Ints, fixed: Columns) -> tuple[pa.Array, Accumulators]:
        wide = self._wide.get(keys, [starts]).columns if self._wide is not None else []
        return fixed[0], self._layout.together(fixed, wide)

    def put(self, keys: Any, starts: Ints, mark: pa.Array, accumulators: Accumulators) -> None:
        """Set windows."""
        fixed, wide = self._layout.apart(accumulators)
        self._fixed.put(keys, [starts], [mark, *fixed])
        if self._wide is not None:
            self._wide.put(keys, [starts], wide)

    def delete(self, keys: Any, starts: Ints) -> None:
        """Remove windows."""
        self._fixed.delete(keys, [starts])
        if self._wide is not None:
            self._wide.delete(keys, [starts])

    def nothing(self, rows: int) -> Accumulators:
        """Accumulators of nothing."""
        return self._layout.nothing(rows)


class Entries:
    """An `EntryStore` over a map state, for n groups.

    Args:
        state: its map key is the window's start, if there is one, and the value.
        keys: of each group. starts: the window of each group; None: there are no windows.
    """

    def __init__(self, state: Any, keys: Any, starts: Ints | None = None) -> None:
        self._state, self._keys, self._starts = state, keys, starts

    def get(self, group: Ints, values: Columns) -> pa.RecordBatch:
        return self._state.get(*self._at(group, values))

    def exists(self, group: Ints, values: Columns) -> pa.BooleanArray:
        return self._state.exists(*self._at(group, values))

    def put(self, group: Ints, values: Columns, entries: Columns) -> None:
        self._state.put(*self._at(group, values), entries)

    def _at(self, group: Ints, values: Columns) -> tuple[Any, list[Any]]:
        starts = [] if self._starts is None else [self._starts[group]]
        return self._keys.take(group), [*starts, *values]
