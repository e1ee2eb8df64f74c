"""The job's watermark and what is due next: the arithmetic, and what a coordinator makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.barriers.job_watermark import (
    JobTime,
    NextDue,
    OperatorTime,
    next_due,
    resumed,
)
from snapshot.formats.record import Manifest
from statebackend.errors import FencedError
from tests.recovery.driver import Run

EVENT: dict[str, Any] = {"time_mode": "event", "watermark_delay_ms": 10}
TAKES: dict[str, Any] = {"time_mode": "event"}
PROCESSING: dict[str, Any] = {"time_mode": "processing"}


def seen(max_ms: int | None, delay_ms: int | None = 10, mode: str = "event") -> OperatorTime:
    return OperatorTime(time_mode=mode, delay_ms=delay_ms, event_max_ms=max_ms)


# --- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operators", "watermark_ms"),
    [
        pytest.param([], 0, id="nobody"),
        pytest.param([seen(100)], 90, id="one"),
        pytest.param([seen(100), seen(70)], 60, id="the smallest"),
        pytest.param([seen(100, 0), seen(90, 50)], 40, id="delays of their own"),
        pytest.param([seen(100), seen(None)], 0, id="one has seen nothing"),
        pytest.param([seen(None)], 0, id="nothing was seen"),
        pytest.param([seen(4)], 0, id="less than the delay"),
        pytest.param([seen(-500)], 0, id="before 1970"),
        pytest.param([seen(100), seen(None, None)], 90, id="one without a delay"),
        pytest.param([seen(100, None)], 0, id="only without a delay"),
        pytest.param([seen(100), seen(None, None, "processing")], 90, id="one in processing time"),
        pytest.param([seen(100), seen(70, 10, "processing")], 60, id="one that shows it there"),
        pytest.param([seen(100, 10, "none")], 90, id="one without timers that shows it"),
        pytest.param([seen(100, None, "none")], 0, id="one without timers"),
    ],
)
def test_the_smallest_of_those_that_define_one_is_the_jobs(
    operators: list[OperatorTime], watermark_ms: int
) -> None:
    assert JobTime().following(operators) == JobTime(watermark_ms, 0)


def test_rows_are_late_by_the_watermark_of_the_epoch_before() -> None:
    first = JobTime().following([seen(100)])
    second = first.following([seen(150)])
    assert (second.watermark_ms, second.late_watermark_ms) == (140, 90)


@given(st.lists(st.lists(st.tuples(st.none() | st.integers(), st.none() | st.integers(0)))))
def test_it_never_goes_back_whatever_is_seen_and_whatever_the_delays(
    epochs: list[list[tuple[int | None, int | None]]],
) -> None:
    time = JobTime()
    for operators in epochs:
        after = time.following([seen(ms, delay) for ms, delay in operators])
        assert after.watermark_ms >= time.watermark_ms >= 0
        assert after.late_watermark_ms == time.watermark_ms
        time = after


@given(
    before=st.lists(st.none() | st.integers(0, 100)),
    again=st.lists(st.none() | st.integers(0, 100)),
    maxima=st.lists(st.none() | st.integers(0, 100)),
)
def test_a_resumed_epoch_keeps_what_its_records_say_and_never_goes_back(
    before: list[int | None], again: list[int | None], maxima: list[int | None]
) -> None:
    time = resumed(before, [seen(ms) for ms in maxima], again)
    last = max((ms for ms in before if ms is not None), default=0)
    assert time.late_watermark_ms == last
    assert time.watermark_ms >= last
    known = [ms for ms in again if ms is not None]
    if known:
        assert time.watermark_ms == max(last, *known)


@pytest.mark.parametrize(
    ("mode", "at_ms", "processing_due_ms"),
    [
        ("event", 50, None),
        ("event", None, None),
        ("processing", 49, 49),
        ("processing", 10**15, 10**15),
        ("none", None, None),
    ],
)
def test_what_is_due_next_is_said_by_each_operators_own_time(
    mode: str, at_ms: int | None, processing_due_ms: int | None
) -> None:
    timers = [OperatorTime(time_mode=mode, next_timer_ms=at_ms), OperatorTime()]
    assert next_due(3, JobTime(50, 50), timers) == NextDue(
        3, processing_due_ms, watermark_moves=False
    )


def test_the_earliest_processing_timer_of_all_operators_counts() -> None:
    timers = [OperatorTime(time_mode="processing", next_timer_ms=ms) for ms in (30, 20, 40)]
    assert next_due(0, JobTime(), timers).processing_due_ms == 20


def test_a_watermark_that_moves_is_said_although_no_timer_waits() -> None:
    assert next_due(0, JobTime(50, 40), []).watermark_moves
    assert not next_due(0, JobTime(50, 50), []).watermark_moves


# --- in a run ------------------------------------------------------------------------------------


def times(run: Run, epoch: int, operator: str = "op") -> tuple[int, int]:
    """Watermark and late watermark, as an attempt is told."""
    time = run.begin(epoch, 0, operator, attempt=10**6).time
    return time.watermark_ms, time.late_watermark_ms


def live(run: Run, maxima: Sequence[int | None], first: int = 0) -> None:
    for epoch, ms in enumerate(maxima, first):
        run.finish(epoch, max_event_ms=ms)


def recorded(run: Run) -> list[tuple[int | None, int | None]]:
    return [(r.watermark_ms, r.event_max_ms) for r in run.records]


def test_a_new_job_begins_at_zero() -> None:
    assert times(Run(1, specs={"op": EVENT}), 0) == (0, 0)


def test_the_watermark_follows_what_was_seen_up_to_the_epoch_before() -> None:
    run = Run(1, specs={"op": EVENT})
    live(run, [100, 50, None, 300])
    assert recorded(run) == [(0, 100), (90, 100), (90, 100), (90, 300)]
    assert times(run, 4) == (290, 90)


def test_the_largest_event_time_is_taken_over_all_subtasks() -> None:
    run = Run(3, specs={"op": EVENT})
    for subtask, ms in enumerate([70, None, 110]):
        run.begin(0, subtask)
        run.ack(0, subtask, max_event_ms=ms)
    run.commit()
    assert times(run, 1) == (100, 0)


def test_every_attempt_of_an_epoch_is_told_the_same() -> None:
    run = Run(2, specs={"op": EVENT})
    live(run, [100])
    run.begin(1, 0)
    run.ack(1, 0, max_event_ms=900)
    assert run.begin(1, 1).time == run.begin(1, 0, attempt=1).time == JobTime(90, 0)


def test_all_operators_have_the_jobs_watermark() -> None:
    run = Run({"a": 1, "b": 1, "c": 1}, specs={"a": EVENT, "b": EVENT, "c": TAKES})
    run.finish(0, ["a", "c"], max_event_ms=100)
    run.finish(0, ["b"], max_event_ms=60)
    assert [times(run, 1, uid) for uid in "abc"] == [(50, 0)] * 3


def test_an_operator_that_has_seen_nothing_holds_the_job_at_zero_and_then_lets_it_go() -> None:
    run = Run({"a": 1, "b": 1}, specs={"a": EVENT, "b": EVENT})
    for epoch, b_ms in enumerate([None, 40, None]):
        run.finish(epoch, ["a"], max_event_ms=100)
        run.finish(epoch, ["b"], max_event_ms=b_ms)
    assert [r.watermark_ms for r in run.records if r.operator == "a"] == [0, 0, 30]


def test_an_attempt_whose_ack_was_superseded_has_seen_nothing() -> None:
    run = Run(1, specs={"op": EVENT})
    run.begin(0)
    run.ack(0, max_event_ms=900)
    run.commit()
    run.ack(0, attempt=1, max_event_ms=100)
    run.commit()
    assert [r.event_max_ms for r in run.records] == [900, 100]
    assert times(run, 1) == times(run.again(), 1) == (90, 0)


def test_a_newer_attempt_with_the_same_state_and_other_late_rows_is_worth_a_record() -> None:
    run = Run(1, specs={"op": EVENT})
    run.begin(0)
    run.ack(0, max_event_ms=100)
    run.commit()
    run.ack(0, attempt=1, max_event_ms=100)
    assert run.commit() is None
    run.ack(0, attempt=2, max_event_ms=200)
    assert run.commit() is not None
    assert times(run, 1) == times(run.again(), 1) == (190, 0)


def test_a_job_without_event_time_says_nothing_of_a_watermark() -> None:
    run = Run({"a": 1, "b": 1}, specs={"a": PROCESSING})
    live(run, [None, None])
    assert {r.watermark_ms for r in run.records} == {None}
    assert times(run, 2, "a") == (0, 0)


def test_time_mode_and_the_earliest_timer_stand_in_the_record() -> None:
    run = Run(2, specs={"op": PROCESSING})
    for subtask, at_ms in enumerate([None, 55]):
        run.begin(0, subtask)
        run.ack(0, subtask, next_timer_ms=at_ms)
    record = run.commit()
    assert record is not None
    assert (record.time_mode, record.next_timer_ms) == ("processing", 55)


# --- restarts ------------------------------------------------------------------------------------


def test_a_repeated_epoch_sees_the_same_times_and_so_does_the_next() -> None:
    run = Run(1, specs={"op": EVENT})
    live(run, [100, 200, 300])
    assert times(run.again(), 2) == (190, 90)
    assert times(run.again(), 3) == (290, 190)
    again = run.again()
    live(again, [300], first=2)
    assert times(again, 3) == (290, 190)


def test_what_an_operator_had_seen_before_a_restart_still_counts() -> None:
    run = Run({"a": 1, "b": 1}, specs={"a": EVENT, "b": EVENT})
    run.finish(0, ["a"], max_event_ms=300)
    run.finish(0, ["b"], max_event_ms=100)
    later = run.again()
    later.finish(1, ["a"])  # nothing new
    later.finish(1, ["b"], max_event_ms=500)
    assert times(later, 2, "a") == times(later.again(), 2, "a") == (290, 90)


def test_an_epoch_whose_records_were_written_for_some_operators_only_is_the_same() -> None:
    run = Run({"a": 1, "b": 1}, specs={"a": EVENT, "b": EVENT})
    live(run, [100, 200])
    expected = times(run, 2, "a")
    run.ack(2, 0, "a", max_event_ms=900)
    run.commit("a")
    later = run.again()
    assert times(later, 2, "a") == times(later, 2, "b") == expected == (190, 90)
    later.finish(2, max_event_ms=300)
    assert times(later, 3, "b") == (290, 190)


@pytest.mark.parametrize(("delay_ms", "watermark_ms"), [(0, 200), (150, 90), (10**6, 90)])
def test_a_changed_delay_counts_from_the_next_epoch_on_and_never_goes_back(
    delay_ms: int, watermark_ms: int
) -> None:
    run = Run(1, specs={"op": EVENT})
    live(run, [100, 200])
    later = run.again(specs={"op": {**EVENT, "watermark_delay_ms": delay_ms}})
    assert times(later, 2) == (watermark_ms, 90)


@pytest.mark.parametrize("delay_ms", [0, 150, None])
def test_an_epoch_that_is_repeated_keeps_its_watermark_even_if_the_delay_was_changed(
    delay_ms: int | None,
) -> None:
    run = Run({"a": 1, "b": 1}, specs={"a": EVENT, "b": EVENT})
    live(run, [100, 200])
    run.finish(2, ["a"], max_event_ms=200)
    changed = {**EVENT, "watermark_delay_ms": delay_ms}
    later = run.again(specs={"a": changed, "b": changed})
    assert times(later, 2, "b") == (190, 90)


def test_an_operator_that_is_added_holds_the_watermark_where_it_is() -> None:
    run = Run({"a": 1}, specs={"a": EVENT})
    live(run, [100, 200])
    later = run.again({"a": 1, "b": 1}, specs={"a": EVENT, "b": EVENT})
    later.finish(2, ["a"], max_event_ms=900)
    later.finish(2, ["b"])
    assert [r.watermark_ms for r in later.records[-2:]] == [90, 90]
    assert times(later, 3, "b") == (90, 90)
    later.finish(3, ["a", "b"], max_event_ms=400)
    assert times(later, 4, "b") == (390, 90)


def old(manifest: Manifest) -> Manifest:
    """As the release before this one wrote it."""
    fields = msgspec.to_builtins(manifest)
    for name in ("event_max_ms", "next_timer_ms", "time_mode", "dropped_ids"):
        del fields[name]
    return msgspec.convert({**fields, "watermark_ms": None}, Manifest)


def test_records_that_say_nothing_of_time_count_as_nothing_seen() -> None:
    run = Run(1)
    live(run, [None, None])
    run.records[:] = [old(record) for record in run.records]
    later = run.again(specs={"op": EVENT})
    assert times(later, 2) == (0, 0)
    live(later, [100], first=2)
    assert times(later, 3) == (90, 0)


# --- asynchronous commits ------------------------------------------------------------------------


def test_acks_whose_record_is_on_its_way_count_and_a_rewind_sees_the_same() -> None:
    run = Run(1, specs={"op": EVENT}, asynchronous=True)
    live(run, [100])
    run.begin(1)
    run.ack(1, max_event_ms=200)
    late = run.coordinator.records.take_due("op", 1)
    assert late is not None
    assert times(run, 2) == (190, 90)
    # The driver dies: Spark had committed epoch 1, and its record is lost.
    again = run.again()
    assert times(again, 1) == (90, 0)
    again.ack(1, max_event_ms=200)
    again.commit()
    assert times(again, 2) == (190, 90)


def test_a_record_that_lands_meanwhile_changes_no_times() -> None:
    run = Run(1, specs={"op": EVENT}, asynchronous=True)
    live(run, [100])
    run.begin(1)
    run.ack(1, max_event_ms=200)
    late = run.coordinator.records.take_due("op", 1)
    assert late is not None
    run.begin(2)
    run.coordinator.records.committed(late, run.append(late))
    assert times(run, 2) == (190, 90)
    run.ack(2, max_event_ms=150)
    run.commit()
    assert recorded(run)[1:] == [(90, 200), (190, 200)]


# --- what is due next ----------------------------------------------------------------------------


def test_what_is_due_is_not_known_while_an_epoch_runs() -> None:
    run = Run({"a": 1, "b": 2}, specs={"a": EVENT})
    run.begin(0, 0, "a")
    assert run.coordinator.run.next_due() is None
    run.ack(0, 0, "a", max_event_ms=100)
    run.commit("a")
    run.begin(0, 0, "b")
    run.ack(0, 0, "b")
    assert run.coordinator.run.next_due() is None
    run.begin(0, 1, "b")
    run.ack(0, 1, "b")
    assert run.coordinator.run.next_due() == NextDue(0, None, True)
    run.commit("b")
    assert run.coordinator.run.next_due() == NextDue(0, None, True)
    run.begin(1, 0, "a")
    assert run.coordinator.run.next_due() is None


def test_an_event_timer_is_due_by_the_next_epochs_watermark() -> None:
    run = Run(1, specs={"op": EVENT})
    run.finish(0, max_event_ms=100, next_timer_ms=91)
    assert run.coordinator.run.next_due() == NextDue(0, None, True)
    run.finish(1, max_event_ms=101, next_timer_ms=91)
    assert run.coordinator.run.next_due() == NextDue(1, None, True)
    # Without a new row: it fires, and nothing more is due.
    run.finish(2)
    assert run.coordinator.run.next_due() == NextDue(2, None, False)


def test_a_timer_that_was_left_below_the_watermark_is_due_although_that_stands_still() -> None:
    run = Run(1, specs={"op": EVENT})
    live(run, [100])
    run.finish(1, next_timer_ms=20)  # registered while timers fired
    assert run.coordinator.run.next_due() == NextDue(1, None, False)


def test_a_newer_attempt_says_what_is_due() -> None:
    run = Run(1, specs={"op": PROCESSING})
    run.begin(0)
    run.ack(0, next_timer_ms=77)
    assert run.coordinator.run.next_due() == NextDue(0, 77, False)
    run.ack(0, attempt=1, next_timer_ms=55)
    assert run.coordinator.run.next_due() == NextDue(0, 55, False)


def test_before_the_first_epoch_of_a_run_the_records_say_what_is_due() -> None:
    run = Run({"a": 1, "b": 1}, specs={"a": EVENT, "b": PROCESSING})
    assert run.coordinator.run.next_due() == NextDue(-1, None, False)
    run.finish(0, ["a"], max_event_ms=100, next_timer_ms=60)
    run.finish(0, ["b"], next_timer_ms=7_000)
    expected = run.coordinator.run.next_due()
    assert expected == NextDue(0, 7_000, True)
    for first_epoch in (None, 0, 1):  # epoch 0 may be skipped: every operator has finished it
        assert run.again(first_epoch=first_epoch).coordinator.run.next_due() == expected


def test_what_some_operator_has_not_finished_does_not_say_what_is_due() -> None:
    run = Run({"a": 1, "b": 1}, specs={"a": PROCESSING})
    run.finish(0, next_timer_ms=500)
    run.finish(1, ["a"], next_timer_ms=900)
    due = run.again(first_epoch=1).coordinator.run.next_due()
    assert due == NextDue(0, 500, False)


def test_a_new_operator_has_nothing_due() -> None:
    run = Run({"a": 1}, specs={"a": PROCESSING})
    run.finish(0, next_timer_ms=500)
    specs = {"a": PROCESSING, "b": EVENT}
    later = run.again({"a": 1, "b": 1}, first_epoch=1, specs=specs)
    assert later.coordinator.run.next_due() == NextDue(0, 500, False)


def test_nothing_is_due_in_a_run_that_has_ended() -> None:
    run = Run(1, specs={"op": PROCESSING})
    run.finish(0, next_timer_ms=500)
    run.coordinator.run.fail(FencedError("Another driver."))
    assert run.coordinator.run.next_due() is None


def test_an_operator_of_two_inputs_goes_by_the_one_that_is_behind() -> None:
    def at(first: int | None, second: int | None) -> int:
        time = OperatorTime(
            time_mode="event",
            delay_ms=10,
            event_max_ms=first,
            two_inputs=True,
            second_max_ms=second,
        )
        return JobTime(5, 0).following([time]).watermark_ms

    assert at(100, 50) == 40
    assert at(50, 100) == 40
    assert at(100, None) == 5, "one that has seen nothing holds it"
    assert at(None, None) == 5
