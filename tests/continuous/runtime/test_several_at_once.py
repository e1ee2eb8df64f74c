"""Jobs that have several checkpoints under way at once, and those that take their share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay
from recovery.savepoints.verify_savepoint import verify_savepoint
from statebackend import system
from statebackend.continuous.driver.run_state import Publish, RunState
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.errors import StoreUnreachableError
from statebackend.runtime.worker import participant
from tests.continuous.runtime.jobs import (
    OUTPUT,
    Counting,
    Numbers,
    Scaled,
    check_counts,
    truth,
    windows_truth,
)
from tests.continuous.runtime.test_unaligned import NARROW, SCALED, SlowCounting, SlowWindows
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from statebackend.continuous.sinks.sink import Committer
    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs with several checkpoints at a time

ROWS = 4000
WINDOWS = "key BIGINT, start BIGINT, n BIGINT, total BIGINT"
MANY: dict[str, Any] = {"max_concurrent": 3, "checkpoint_interval_s": 0.02}


class Watch:
    """What a run's machine has under way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self.began_s: list[float] = []
        self.ended_s: list[float] = []
        tick, begin, published = RunState.tick, RunState._begin, RunState.published

        def ticks(machine: RunState, now_s: float, wall_ms: int) -> Any:
            outs = tick(machine, now_s, wall_ms)
            self.now = len(machine._attempts)
            self.most = max(self.most, self.now)
            return outs

        def begins(machine: RunState, request: Any, now_s: float, wall_ms: int) -> Any:
            self.began_s.append(now_s)
            return begin(machine, request, now_s, wall_ms)

        def ends(machine: RunState, done: Publish, now_s: float, wall_ms: int) -> Any:
            self.ended_s.append(now_s)
            return published(machine, done, now_s, wall_ms)

        patch.setattr(RunState, "tick", ticks)
        patch.setattr(RunState, "_begin", begins)
        patch.setattr(RunState, "published", ends)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def every(nth: int, first: int) -> Callable[[], bool]:
    """True for the ``first`` call and each ``nth`` after it: chance leaves few calls alone."""
    calls = itertools.count(-first + 1)
    return lambda: (call := next(calls)) >= 0 and call % nth == 0


def slow_store(patch: pytest.MonkeyPatch, by_s: float, fails: Callable[[], bool]) -> None:
    really = participant.durable_slice

    def durable(*given: Any) -> Any:
        system.sleep_s(by_s)
        if fails():
            raise StoreUnreachableError("drawn")
        return really(*given)

    patch.setattr(participant, "durable_slice", durable)


@pytest.mark.parametrize(("seed", "limit"), [(0, 2), (1, 3), (2, 3)])
def test_the_result_is_exact_whatever_fails_while_several_are_under_way(
    world: World, watch: Watch, monkeypatch: pytest.MonkeyPatch, seed: int, limit: int
) -> None:
    """Subtasks that are behind, snapshots that fail in the middle, slots that do."""
    drawn = random.Random(seed)
    world.renew(inline_limit_bytes=16)
    slow_store(monkeypatch, 0.02, every(20, first=5))
    counts, windows = CollectSink(), CollectSink()
    timed = {"event_time": "at", "watermark_delay": "5 ms"}
    source = world.held_back(ROWS, splits=3, rows_per_s=2000, **timed)
    keyed = world.source(source).key_by("key")
    keyed.process(
        SlowWindows(100),
        uid="windows",
        output_schema=WINDOWS,
        time_mode="event",
        event_time="at",
    ).sink(windows)
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(counts)
    query = world.start(
        3,
        restart=FixedDelay(None, 0.0),
        tolerable_failures=1000,
        **{**MANY, "max_concurrent": limit},
    )
    world.run_with_failures(query, drawn, slots=3, most=3, after_s=(0.3, 0.8))
    assert query.restarts >= 2
    assert watch.most == limit
    assert {"", "declined"} <= {one.aborted for one in query.checkpoints()}
    check_counts(counts.rows(), truth(ROWS))
    found = [tuple(row.values()) for row in windows.rows()]
    assert len(found) == len(set(found))
    assert set(found) == windows_truth(ROWS, 100)


@pytest.mark.parametrize("mode", ["exactly_once", "at_least_once"])
def test_checkpoints_follow_on_each_other_through_a_channel_that_is_behind(
    world: World, watch: Watch, mode: str
) -> None:
    sink = CollectSink()
    keyed = world.source(Numbers(3000, splits=3)).key_by("key")
    keyed.process(SlowCounting(), uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(2, mode=mode, **NARROW, **MANY)
    assert query.await_termination(60.0)
    done = query.checkpoints()
    assert [one.aborted for one in done] == [""] * len(done)
    epochs = [one.epoch for one in done]
    assert epochs == list(range(len(done))), "in their order, without a gap"
    assert watch.most == 3
    overlaps = sum(b < e for b, e in zip(watch.began_s[1:], watch.ended_s, strict=False))
    assert overlaps > 3
    check_counts(sink.rows(), truth(3000))


def test_savepoints_are_made_in_between_and_the_job_stops_with_one(
    world: World, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.renew(inline_limit_bytes=16)
    slow_store(monkeypatch, 0.02, lambda: False)
    first = CollectSink()
    numbers = Numbers(6000, splits=4, rows_per_s=300, clock=world.held(15.0))
    keyed = world.source(numbers).key_by("key")
    keyed.process(SlowCounting(), uid="count", output_schema=OUTPUT).sink(first)
    query = world.start(2, **MANY)
    made = []
    for _ in range(3):
        soon(lambda: watch.now > 1)
        before = query.epoch
        taken = query.checkpoint()
        assert taken is not None
        assert before is None or taken > before, "one that began after the call"
        made.append(query.savepoint())
        assert made[-1].epoch > taken
        assert verify_savepoint(world.flow.setup.job.open_at(made[-1].uri)).ok
    soon(lambda: watch.now > 1)
    made.append(query.stop_with_savepoint())
    assert not query.is_active
    assert query.exception() is None
    assert verify_savepoint(world.flow.setup.job.open_at(made[-1].uri)).ok
    assert [one.epoch for one in made] == sorted({one.epoch for one in made})
    stopped = first.rows()
    for place, savepoint in enumerate(made):
        world.renew(job=f"clone-{place}", savepoint=savepoint)
        again = CollectSink()
        keyed = world.source(Numbers(6000, splits=4)).key_by("key")
        keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(again)
        assert world.start(place + 1, **MANY).await_termination(60.0)
        last = {row["key"]: (row["n"], row["total"]) for row in again.rows()}
        assert last == truth(6000)
        assert all(row["n"] > 1 for row in again.rows()), "it did not begin anew"
    check_counts(stopped + again.rows(), truth(6000))


class SlowSink(CollectSink):
    """Takes its time to commit, and fails now and then."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        super().__init__()
        self._fails = fails

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fails": None}

    def committer(self, job: str, uid: str) -> Committer:
        really = super().committer(job, uid)
        commit, sink = really.commit, self

        def slowly(committables: Sequence[bytes]) -> None:
            system.sleep_s(0.05)
            if sink._fails():
                raise StoreUnreachableError("drawn")
            commit(committables)

        really.commit = slowly  # type: ignore[method-assign]
        return really


def test_a_job_of_sources_and_sinks_alone_writes_none_before_the_one_before_is_through(
    world: World, watch: Watch
) -> None:
    """Nobody there waits for the word that one is complete before the next one is acked."""
    drawn = random.Random(3)
    sink = SlowSink(lambda: drawn.random() < 0.05)
    numbers = Numbers(3000, splits=3, rows_per_s=1500, clock=world.held(1.0))
    world.source(numbers).sink(sink)
    query = world.start(2, restart=FixedDelay(None, 0.0), **MANY)
    soon(lambda: query.restarts)
    world.go_on()
    assert query.await_termination(60.0)
    assert watch.most == 3
    assert sorted(row["value"] for row in sink.rows()) == list(range(3000))


def test_rules_that_go_to_all_are_the_same_in_all_subtasks(world: World, watch: Watch) -> None:
    sink = CollectSink()
    rules = world.source(Numbers(200, splits=3, rows_per_s=200), name="rules")
    numbers = Numbers(3000, splits=3, rows_per_s=1500, clock=world.held(1.0))
    keyed = world.source(numbers).key_by("key")
    keyed.connect_broadcast(rules).process(Scaled(), uid="scaled", output_schema=SCALED).sink(sink)
    query = world.start(2, restart=FixedDelay(None, 0.0), **MANY)
    for failures in range(2):
        soon(lambda: watch.now > 1 and (query.epoch or 0) > 2)
        world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))
        soon(lambda before=failures: query.restarts > before and query.is_running)
    world.go_on()
    assert query.await_termination(60.0)
    assert query.restarts == 2
    assert watch.most == 3
    check_counts(sink.rows(), truth(3000))


def test_checkpoints_that_take_long_leave_the_rest_of_the_time_free(
    world: World, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.renew(inline_limit_bytes=16)
    slow_store(monkeypatch, 0.1, lambda: False)
    sink = CollectSink()
    numbers = Numbers(3000, splits=2, rows_per_s=1000, clock=world.held(2.0))
    keyed = world.source(numbers).key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(2, checkpoint_interval_s=0.02, max_share=0.25)
    soon(lambda: len(watch.ended_s) > 4)
    world.go_on()
    assert query.await_termination(60.0)
    assert watch.most == 1
    check_counts(sink.rows(), truth(3000))
    took = list(zip(watch.began_s, watch.ended_s, watch.began_s[1:-1], strict=False))
    assert len(took) >= 3
    for began_s, ended_s, next_s in took:  # but the last one, for which nobody waits
        assert ended_s - began_s >= 0.1
        assert next_s - ended_s >= 3 * (ended_s - began_s) - 1e-6
