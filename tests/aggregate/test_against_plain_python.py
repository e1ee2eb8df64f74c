"""Aggregations over epochs are what plain Python makes of all rows at once."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.operators.aggregate.aggregation_plan import AggregatePlan, plan_aggregate
from statebackend.operators.aggregate.windows import Window, session, sliding, tumbling
from tests.aggregate.columns import ALL, MERGEABLE, SCHEMA, SECOND_US, numbered, rows
from tests.aggregate.engine import TRUTHS, Job, Row, assert_alike, same

pytestmark = pytest.mark.full  # a model of long histories

ASKED = Mapping[str, tuple[str, str, Any]]


def plan_of(asked: ASKED, **how: Any) -> AggregatePlan:
    wanted = {name: aggregation for name, (_, _, aggregation) in asked.items()}
    return plan_aggregate(SCHEMA, keys="k", aggregations=wanted, **how)


def aggregated(asked: ASKED, members: Sequence[Row]) -> Row:
    return {
        name: TRUTHS[truth]([row[column] for row in members])
        for name, (column, truth, _) in asked.items()
    }


class Model:
    """Every row that was on time, by key and window."""

    def __init__(self, asked: ASKED, window: Window | None) -> None:
        self.asked, self.window = asked, window
        self.groups: dict[tuple[Any, Any, Any], list[Row]] = {}
        self.late_rows = 0

    def take(self, some: Sequence[Row], late_ms: int) -> set[tuple[Any, Any, Any]]:
        """The groups that rows touched."""
        touched: set[tuple[Any, Any, Any]] = set()
        for row in some:
            for start, end in self.windows(row):
                if start is not None and end <= late_ms * 1000:
                    self.late_rows += 1
                    continue
                name = (same(row["k"]), start, end)
                if self.window is not None and self.window.kind == "session":
                    touched.add(self.join(name, row, touched))
                else:
                    self.groups.setdefault(name, []).append(row)
                    touched.add(name)
        return touched

    def windows(self, row: Row) -> list[tuple[Any, Any]]:
        window, at = self.window, row["at"]
        if window is None:
            return [(None, None)]
        if at is None:
            return []
        if window.kind == "session":
            return [(at, at + window.duration_us)]
        last = at - (at - window.offset_us) % window.slide_us
        starts = range(last, at - window.duration_us, -window.slide_us)
        return [(start, start + window.duration_us) for start in starts]

    def join(
        self, new: tuple[Any, Any, Any], row: Row, touched: set[tuple[Any, Any, Any]]
    ) -> tuple[Any, Any, Any]:
        """A session with all others of the key that it meets."""
        key, start, end = new
        members = [row]
        for other in [g for g in self.groups if g[0] == key]:
            if other[1] <= end and start <= other[2]:
                members += self.groups.pop(other)
                touched.discard(other)
                start, end = min(start, other[1]), max(end, other[2])
        self.groups[key, start, end] = sorted(members, key=lambda one: one["seq"])
        return key, start, end

    def close(self, watermark_ms: int) -> list[Row]:
        due = [name for name in self.groups if name[2] <= watermark_ms * 1000]
        closed = [self.shown(name) for name in due]
        for name in due:
            del self.groups[name]
        return closed

    def shown(self, name: tuple[Any, Any, Any]) -> Row:
        times = {} if name[1] is None else {"window_start": name[1], "window_end": name[2]}
        return {"k": name[0], **times, **aggregated(self.asked, self.groups[name])}


def canonical(output: Sequence[Row]) -> list[Row]:
    return [{**row, "k": same(row["k"])} for row in output]


ON_TIME = st.integers(0, 20)
EPOCHS = st.lists(rows(ON_TIME), min_size=1, max_size=4).map(numbered)


@given(EPOCHS)
def test_every_aggregation_without_windows_gives_one_row_for_each_touched_key(
    epochs: list[list[Row]],
) -> None:
    job, model = Job(plan_of(ALL)), Model(ALL, None)
    for some in epochs:
        wanted = [model.shown(name) for name in model.take(some, 0)]
        assert_alike(canonical(job.run(some)), wanted, ["k"])


@given(EPOCHS, st.integers(1, 3))
def test_aggregating_before_the_shuffle_changes_no_result(
    epochs: list[list[Row]], tasks: int
) -> None:
    job, model = Job(plan_of(MERGEABLE), early=tasks), Model(MERGEABLE, None)
    for some in epochs:
        wanted = [model.shown(name) for name in model.take(some, 0)]
        assert_alike(canonical(job.run(some)), wanted, ["k"])


@st.composite
def windowed(draw: st.DrawFn) -> tuple[list[list[Row]], list[int]]:
    """Epochs, the times of whose rows advance, some late, and their watermarks."""
    count = draw(st.integers(1, 5))
    epochs, watermarks = [], []
    now_s = watermark = 0
    for _ in range(count):
        now_s += draw(st.integers(0, 15))
        times = st.none() | st.integers(max(0, now_s - 25), now_s + 8)
        epochs.append(draw(rows(times, max_size=12)))
        watermark = max(watermark, 1000 * draw(st.integers(0, now_s)))
        watermarks.append(watermark)
    return numbered(epochs), watermarks


WINDOWS = {
    "tumbling": tumbling("10 seconds"),
    "tumbling with an offset": tumbling("7 seconds", offset="3 seconds"),
    "sliding": sliding("10 seconds", "5 seconds"),
    "sliding with a remainder": sliding("10 seconds", "4 seconds"),
    "session": session("4 seconds"),
}


def check_windows(
    job: Job, model: Model, epochs: list[list[Row]], watermarks: list[int], emit: str
) -> None:
    names = ["k", "window_start"]
    late_ms = 0
    for some, watermark in zip(epochs, watermarks, strict=True):
        touched = model.take(some, late_ms)
        updates = [model.shown(name) for name in touched]
        closed = model.close(watermark)
        output = canonical(job.run(some, watermark_ms=watermark, late_ms=late_ms))
        assert_alike(output, updates if emit == "updates" else closed, names)
        late_ms = watermark
    assert job.late_rows == model.late_rows
    end_ms = 10**6
    closed = model.close(end_ms)
    output = canonical(job.run([], watermark_ms=end_ms, late_ms=late_ms))
    assert_alike(output, closed if emit == "closed" else [], names)
    assert job.entries() == 0, "what closed has left nothing in state"


@pytest.mark.parametrize("emit", ["updates", "closed"])
@pytest.mark.parametrize("kind", WINDOWS)
@given(data=windowed())
def test_windows_hold_the_rows_that_came_before_they_closed(
    kind: str, emit: str, data: tuple[list[list[Row]], list[int]]
) -> None:
    window = WINDOWS[kind]
    # Which of two sessions that merge arrived first is not known any more.
    unknown = ("first", "last") if kind == "session" else ()
    asked = {name: what for name, what in ALL.items() if name not in unknown}
    job = Job(plan_of(asked, window=window, event_time="at", emit=emit))
    check_windows(job, Model(asked, window), *data, emit)


@pytest.mark.parametrize("kind", [kind for kind in WINDOWS if kind != "session"])
@given(data=windowed(), tasks=st.integers(0, 3))
def test_windows_of_what_can_be_merged_are_the_same_with_and_without_a_stage_before_the_shuffle(
    kind: str, data: tuple[list[list[Row]], list[int]], tasks: int
) -> None:
    window = WINDOWS[kind]
    job = Job(plan_of(MERGEABLE, window=window, event_time="at", emit="closed"), early=tasks)
    check_windows(job, Model(MERGEABLE, window), *data, "closed")


def test_the_truth_knows_that_sessions_meet_at_their_ends() -> None:
    model = Model({}, session("4 seconds"))
    numbers = [{"k": 1.5, "at": s * SECOND_US, "seq": i} for i, s in enumerate([0, 8, 4])]
    model.take(numbers, 0)
    assert list(model.groups) == [(1.5, 0, 12 * SECOND_US)]


@pytest.mark.parametrize("asked", [ALL, MERGEABLE], ids=["all", "mergeable"])
def test_windows_that_overlap_much_are_filled_a_few_rows_at_a_time(
    asked: ASKED, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statebackend.operators.aggregate.window_processor._EXPANDED_ROWS", 30)
    window = sliding("10 seconds", "1 second")
    nothing: Row = dict.fromkeys(SCHEMA.names)
    keys = [1.5, -2.0, 0.0, 1.5, 1.5, -2.0, 1.5] * 2
    some = [
        {**nothing, "k": key, "n": i % 3, "s": "a" * (i % 2), "at": i * SECOND_US}
        for i, key in enumerate(keys)
    ]
    job = Job(plan_of(asked, window=window, event_time="at"))
    check_windows(job, Model(asked, window), numbered([some, some]), [3000, 7000], "updates")


TIMES = T.StructType(
    [
        T.StructField("a", T.StringType()),
        T.StructField("b", T.DecimalType(10, 2)),
        T.StructField("local", T.TimestampNTZType()),
        T.StructField("x", T.DoubleType()),
        T.StructField("clock", T.TimeType()),
        T.StructField("span", T.DayTimeIntervalType()),
        T.StructField("data", T.BinaryType()),
    ]
)


@pytest.mark.parametrize("keys", [["a", "b"], ["local"], ["clock", "span"], ["data", "x"]])
@pytest.mark.parametrize("window", [None, tumbling("20 seconds")])
def test_keys_and_values_of_every_type_are_the_same_with_a_stage_before_the_shuffle(
    keys: list[str], window: Window | None
) -> None:
    some = [
        {
            "a": None if i % 3 == 0 else "q",
            "b": Decimal(i % 2),
            "local": i * SECOND_US,
            "x": [math.nan, 1.0, -0.0, 0.0, None][i % 5],
            "clock": datetime.time(i % 7),
            "span": datetime.timedelta(seconds=i % 4),
            "data": bytes([i % 3]),
        }
        for i in range(60)
    ]
    asked = {
        f"{name}_{function}": (function, name)
        for name in ("x", "clock", "span", "data", "b", "local")
        for function in ("min", "max", "count", "approx_count_distinct")
    }
    event_time = None if window is None else "local"
    plan = plan_aggregate(
        TIMES, keys=keys, aggregations=asked, window=window, event_time=event_time
    )
    names = [*keys, *(["window_start"] if window else [])]
    late, early = Job(plan), Job(plan, early=3)
    for _ in range(2):
        assert_alike(early.run(some), late.run(some), names)
