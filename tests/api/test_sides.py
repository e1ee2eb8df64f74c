"""Two inputs in one frame: each key's rows come by side, with the names of their own input."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import CoProcessor
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import group_rows
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.two_input_rows import SideReader, Sides
from statebackend.state.table import MemoryBase, StateTable

LEFT = T.StructType().add("k", "long").add("name", "string").add("l", "integer")
RIGHT = T.StructType().add("score", "double").add("k", "long")
WIDE = T.StructType().add("side", "byte").add("key", "long")
for number, field in enumerate(LEFT):
    WIDE = WIDE.add(f"l{number}", field.dataType)
for number, field in enumerate(RIGHT):
    WIDE = WIDE.add(f"r{number}", field.dataType)
WIDE = WIDE.add("t", "timestamp")
OUT = T.StructType().add("k", "long").add("side", "string").add("what", "string")
ARROW = pa.schema(
    [
        ("side", pa.int8()),
        ("key", pa.int64()),
        ("l0", pa.int64()),
        ("l1", pa.string()),
        ("l2", pa.int32()),
        ("r0", pa.float64()),
        ("r1", pa.int64()),
        ("t", pa.timestamp("us", "UTC")),
    ]
)


class Told(CoProcessor):
    """Says which rows it saw; asks for both inputs' columns by name."""

    def process_left(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[Any]:
        for row in rows:
            assert row.__fields__ == LEFT.names
            assert (row.k,) == key
            yield (*key, "left", row.name)

    def process_right(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[Any]:
        for row in rows:
            assert row.__fields__ == RIGHT.names
            assert (row.k,) == key
            yield (*key, "right", str(row.score))


def table(rows: list[tuple[int, str, Any]]) -> pa.Table:
    """(key, side, name or score) each."""
    wide = [
        (0, k, k, what, 1, None, None, None)
        if side == "left"
        else (1, k, None, None, None, what, k, None)
        for k, side, what in rows
    ]
    columns = list(zip(*wide, strict=True)) or [()] * len(ARROW)
    return pa.table(
        [pa.array(column, one.type) for column, one in zip(columns, ARROW, strict=True)],
        schema=ARROW,
    )


def run(rows: list[tuple[int, str, Any]], processor: CoProcessor) -> list[tuple[Any, ...]]:
    plan = OperatorPlan(
        uid="pairs",
        flavour="sides",
        input_schema=WIDE,
        key_positions=(1,),
        output_schema=OUT,
        sides=(LEFT, RIGHT),
    )
    epoch = StatefulEpoch(
        plan,
        processor,
        table=StateTable(MemoryBase()),
        state_ids={},
        times=EpochTimes(),
        key_groups=range(1),
    )
    given = table(rows)
    encoded = plan.key_codec.encode_arrow([given.column(1)])
    groups = group_rows(given, encoded, np.zeros(given.num_rows, np.uint16))
    batches = list(epoch.run(iter([groups])))
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_each_key_has_its_left_rows_then_its_right_rows() -> None:
    rows = [
        (2, "right", 0.5),
        (1, "left", "a"),
        (2, "left", "b"),
        (1, "left", "c"),
        (3, "right", 7.0),
    ]
    assert run(rows, Told()) == [
        (1, "left", "a"),
        (1, "left", "c"),
        (2, "left", "b"),
        (2, "right", "0.5"),
        (3, "right", "7.0"),
    ]


def test_a_side_without_rows_is_not_called() -> None:
    class Counting(Told):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def process_left(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            self.calls.append(("left", key, len(list(rows))))

        def process_right(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            self.calls.append(("right", key, len(list(rows))))
            return []

    counting = Counting()
    run([(1, "left", "a"), (2, "right", 1.0), (3, "right", 1.0), (3, "left", "b")], counting)
    assert counting.calls == [
        ("left", (1,), 1),
        ("right", (2,), 1),
        ("left", (3,), 1),
        ("right", (3,), 1),
    ]


@pytest.mark.parametrize("lefts", ["all", "none", "some"])
def test_a_key_with_very_many_rows_is_given_all_of_them(lefts: str) -> None:
    rows: list[tuple[int, str, Any]] = []
    for n in range(40_000):
        left = lefts == "all" or (lefts == "some" and n % 3 == 0)
        rows.append((5, "left", str(n)) if left else (5, "right", float(n)))
    rows += [(6, "left", "z"), (4, "right", 1.5)]
    found = run(rows, Told())
    wanted = [(4, "right", "1.5")]
    wanted += [(5, "left", what) for k, side, what in rows if k == 5 and side == "left"]
    wanted += [(5, "right", str(what)) for k, side, what in rows if k == 5 and side == "right"]
    assert found == [*wanted, (6, "left", "z")]


def test_rows_that_are_not_read_do_not_lose_those_of_the_other_side() -> None:
    class Impatient(Told):
        def process_left(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            return [(*key, "left", next(rows).name)]

    rows = [(5, "left", str(n)) if n % 2 else (5, "right", float(n)) for n in range(40_000)]
    found = run(rows, Impatient())  # type: ignore[arg-type]
    assert found[0] == (5, "left", "1")
    assert len(found) == 1 + 20_000


def test_what_the_left_gives_is_taken_before_the_right_is_called() -> None:
    class Ordered(Told):
        def __init__(self) -> None:
            self.done = False

        def process_left(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            yield from super().process_left(key, rows, ctx)
            self.done = True

        def process_right(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            assert self.done
            return super().process_right(key, rows, ctx)

    assert len(run([(1, "right", 1.0), (1, "left", "a")], Ordered())) == 2


def test_a_chunk_without_rows_of_one_side_has_empty_lists() -> None:
    reader = SideReader(WIDE, (1,), LEFT, RIGHT)
    keys, inputs = reader.chunk(
        table([(1, "left", "a"), (1, "left", "b"), (2, "left", "c")]), [0, 2, 3]
    )
    assert keys == [(1,), (2,)]
    assert [type(one) for one in inputs] == [Sides, Sides]
    assert [(len(one.left), len(one.right)) for one in inputs] == [(2, 0), (1, 0)]


def test_instants_are_shown_in_the_sessions_zone() -> None:
    schema = T.StructType().add("side", "byte").add("key", "timestamp").add("l0", "timestamp")
    schema = schema.add("r0", "long")
    at = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)
    moments = pa.array([at], pa.timestamp("us", "UTC"))
    rows = pa.table(
        [pa.array([0], pa.int8()), moments, moments, pa.nulls(1, pa.int64())], list("abcd")
    )
    left, right = T.StructType().add("at", "timestamp"), T.StructType().add("n", "long")
    reader = SideReader(schema, (1,), left, right, timezone="Europe/Paris")
    (key,), (sides,) = reader.chunk(rows, [0, 1])
    for shown in (key[0], sides.left[0].at, reader.key(rows)[0]):
        assert shown == at
        assert shown.hour == 14
