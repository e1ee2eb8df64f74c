"""A source's subtask says of its event time what holds for all the splits that it reads."""

from __future__ import annotations

import pyarrow as pa

from snapshot.barriers.barrier import Idle, Watermark
from statebackend.continuous.worker.source_subtask import SourceTimes


def rows(*times_ms: int | None) -> pa.RecordBatch:
    column = pa.array([at if at is None else at * 1000 for at in times_ms], pa.int64())
    return pa.record_batch({"at": column.cast(pa.timestamp("us", "UTC"))})


def reading(*splits: str, delay_ms: int = 0, idle_after_s: float | None = None) -> SourceTimes:
    times = SourceTimes(0, delay_ms, idle_after_s)
    for split in splits:
        times.began(split, 0.0)
    return times


def test_the_watermark_is_that_of_the_split_furthest_behind() -> None:
    times = reading("a", "b", delay_ms=1_000)
    times.took("a", rows(5_000, 4_000), 0.0)
    assert times.due() == []  # of b nothing is known yet
    times.took("b", rows(3_000), 0.0)
    assert times.due() == [Watermark(at_ms=2_000)]
    times.took("b", rows(9_000), 0.0)
    assert times.due() == [Watermark(at_ms=4_000)]
    assert times.due() == []


def test_a_split_that_ends_counts_unless_another_one_is_behind() -> None:
    times = reading("a", "b")
    times.took("a", rows(5_000), 0.0)
    times.took("b", rows(3_000), 0.0)
    assert times.ended("a") == [Watermark(at_ms=3_000)]
    assert times.ended("b") == []  # it was said
    times.began("c", 0.0)
    times.took("c", rows(7_000), 0.0)
    assert times.ended("c") == [Watermark(at_ms=7_000)]


def test_the_watermark_never_goes_back() -> None:
    times = reading("a")
    times.took("a", rows(-5, None, 9_000), 0.0)
    assert times.due() == [Watermark(at_ms=9_000)]
    times.began("b", 0.0)
    times.took("b", rows(1), 0.0)
    assert times.due() == []


def test_times_before_1970_are_rounded_down_and_nulls_say_nothing() -> None:
    times = reading("a")
    times.took("a", rows(None), 0.0)
    assert times.due() == []
    column = pa.array([-4_500], pa.int64()).cast(pa.timestamp("us", "UTC"))
    times.took("a", pa.record_batch({"at": column}), 0.0)
    assert times.due() == [Watermark(at_ms=-5)]


def test_an_idle_split_holds_nothing_back_and_comes_back() -> None:
    times = reading("a", "b", idle_after_s=5)
    times.took("a", rows(5_000), 1.0)
    times.had_none("b", 1.0)
    assert times.due() == []
    times.took("a", rows(6_000), 6.0)
    times.had_none("b", 6.0)
    assert times.due() == [Watermark(at_ms=6_000)]
    times.had_none("a", 11.0)
    assert times.due() == [Idle(idle=True)]
    assert times.due() == []
    times.took("b", rows(7_000), 12.0)
    assert times.due() == [Idle(idle=False), Watermark(at_ms=7_000)]


def test_a_split_that_nobody_asked_while_there_was_no_room_is_not_idle() -> None:
    times = reading("a", "b", idle_after_s=5)
    times.took("a", rows(5_000), 1.0)
    times.took("b", rows(4_000), 1.0)
    assert times.due() == [Watermark(at_ms=4_000)]
    times.had_none("b", 2.0)
    times.took("a", rows(60_000), 60.0)  # after a minute without room, and it is full again
    assert times.due() == []
    times.took("b", rows(9_000), 61.0)
    assert times.due() == [Watermark(at_ms=9_000)]


def test_a_split_without_rows_is_never_idle_where_no_time_was_given() -> None:
    times = reading("a")
    for at_s in (0.0, 1e9):
        times.had_none("a", at_s)
        assert times.due() == []


def test_without_an_event_time_there_is_nothing_to_say() -> None:
    times = SourceTimes(None, 0, 1.0)
    times.began("a", 0.0)
    times.took("a", rows(1), 0.0)
    assert times.due() == []
    assert times.ended("a") == []
