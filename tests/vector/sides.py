"""One subtask's state, seen by the column and by the row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.api.arrow import ArrowContext, ArrowProcessor
from statebackend.operators.arrow_calls import ArrowEpochCalls, record_arrow_states
from statebackend.operators.declared_states import EpochState, EpochTimes, parse_schema
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.vector.key_vector import Keys
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.types import arrow_type
from statebackend.state.cells import KeyCursor
from statebackend.state.table import StateTable
from statebackend.state.timers import TimerIndex
from statebackend.state.ttl_cells import TTL
from tests.schema.strategies import to_arrow

Row = tuple[Any, ...]

NAN = float("nan")
WHEN = datetime(2024, 2, 29, 12, 0, 0, 5)
KEYS: dict[str, list[Row]] = {
    "k bigint": [(5,), (-1,), (0,), (2**40,), (2**63 - 1,)],
    "k string": [("",), ("a",), ("ab",), ("ü" * 5,), ("b" * 300,)],
    "a string, b int": [("a", None), (None, 3), ("a", 3), ("", 0), ("ab", 3)],
    "k decimal(20,2)": [(Decimal(n) / 100,) for n in (0, -1, 123, 10**18, -(10**18))],
    "k timestamp": [(WHEN,), (datetime(1969, 12, 31),), (datetime(1970, 1, 1),)],
    "k double": [(NAN,), (0.0,), (1.5,), (float("-inf"),), (-2.0,)],
    "k struct<a:int,b:string>": [((1, "x"),), ((1, None),), ((None, None),), ((2, ""),)],
    "k array<string>, d date": [(["a", None], None), ([], None), (["a"], None)],
}
GROUPS = [0, 1, 255, 256]

VALUE, FIXED = "x bigint, s string", "n int, d double"
MAP_KEY = "s string, n int"
VALUES: list[Row] = [(1, "a"), (None, None), (-(2**63), ""), (7, "ß" * 20), (None, "x" * 300)]
FIXEDS: list[Row] = [(1, 1.5), (None, None), (-5, None), (2**31 - 1, -0.25)]
MAP_KEYS: list[Row] = [("", 0), ("a", None), (None, None), ("a", 1), ("ab", -1), (None, 2)]


class Probe(ArrowProcessor):
    """Asks for a state of each kind."""

    def __init__(self, ttl: TTL | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: ArrowContext) -> None:
        self.value = ctx.value_state("value", VALUE, ttl=self.ttl)
        self.fixed = ctx.value_state("fixed", FIXED, ttl=self.ttl)
        self.map = ctx.map_state("map", MAP_KEY, VALUE, ttl=self.ttl)
        self.list = ctx.list_state("list", FIXED, ttl=self.ttl)
        self.timers = ctx.timers

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        raise AssertionError("is not called here")


KINDS = {"value": "value", "fixed": "value", "map": "map", "list": "list"}


class Operator:
    """What stays from epoch to epoch: keys, their codec, and the states' declarations."""

    def __init__(self, ddl: str, ttl: TTL | None = None) -> None:
        self.schema = parse_schema(ddl, "the key")
        self.codec = KeyCodec(self.schema)
        self.ttl = ttl
        encoded = [
            (GROUPS[place % len(GROUPS)].to_bytes(2, "big") + self.codec.encode(key), key)
            for place, key in enumerate(KEYS[ddl])
        ]
        encoded.sort(key=lambda item: item[0])
        self.full = [full for full, _ in encoded]
        self.keys = [key for _, key in encoded]
        self.declared = record_arrow_states(Probe(ttl), "u", time_mode="processing").declared
        self.ids = {name: number for number, name in enumerate(self.declared, start=1)}
        places = tuple(range(len(self.schema.fields)))
        self.plan = OperatorPlan(
            uid="u",
            flavour="arrow",
            input_schema=self.schema,
            key_positions=places,
            output_schema=self.schema,
            states=self.declared,
            time_mode="processing",
        )

    def all_keys(self) -> Keys:
        """Every key once, in their order."""
        columns = pa.RecordBatch.from_arrays(to_arrow(self.schema, self.keys), self.schema.names)
        return Keys(pa.array(self.full, pa.binary()), lambda: columns, ascending=True)

    def by_column(self, table: StateTable, now_ms: int) -> Probe:
        """A processor whose states and timers are those of an epoch."""
        cursor = KeyCursor()
        state = self._state(table, now_ms, cursor, TimerIndex(cursor, table))
        probe = Probe(self.ttl)
        ArrowEpochCalls(self.plan, probe, state, range(512))
        return probe

    def by_row(self, table: StateTable, now_ms: int) -> RowSide:
        """Cells of an epoch."""
        cursor = KeyCursor()
        timers = TimerIndex(cursor, table)
        return RowSide(self, self._state(table, now_ms, cursor, timers), timers)

    def _state(
        self, table: StateTable, now_ms: int, cursor: KeyCursor, timers: TimerIndex
    ) -> EpochState:
        times = EpochTimes(processing_time_ms=now_ms)
        return EpochState(
            cursor, table, declared=self.declared, ids=self.ids, times=times, timers=timers
        )


class RowSide:
    """The row-wise cells, one key at a time."""

    def __init__(self, operator: Operator, state: EpochState, timers: TimerIndex) -> None:
        self._operator, self._cursor = operator, state.cursor
        self.timers = timers
        self._cells = {name: state.cell(name, kind) for name, kind in KINDS.items()}

    def at(self, place: int, name: str = "value") -> Any:
        """The cell of a state, with the key in that place as the current one."""
        self.current(place)
        return self._cells[name]

    def current(self, place: int) -> None:
        full = self._operator.full[place]
        self._cursor.load([full[:2]], [full[2:]])
        self._cursor.index = 0


def columns(ddl: str, rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as a record batch."""
    schema = parse_schema(ddl, "rows")
    kinds = [arrow_type(field.dataType) for field in schema]
    arrays = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(arrays, schema.names)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """A record batch as rows."""
    if not batch.num_rows:
        return []
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def python_rows(schema: T.StructType, batch: pa.RecordBatch) -> list[Row]:
    """As `rows_of`, with structs as tuples."""
    return [
        tuple(tuple(v.values()) if isinstance(v, dict) else v for v in row)
        for row in rows_of(batch)
    ]


def places(*items: int) -> np.ndarray[Any, Any]:
    return np.array(items, np.int64)
