"""A user's source or sink hangs or raises what it should not, beside the driver of the job."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay, NoRestart
from statebackend import system
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.sinks.sink import Committer
from statebackend.errors import (
    CorruptionError,
    OutputLostError,
    OverdueError,
    StateBackendError,
    UnsupportedFormatError,
)
from tests.continuous.runtime.jobs import Numbers, check_counts, truth
from tests.continuous.runtime.unruly import Scripted, break_slot, count
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # waits for the time that user code is given


class Never:
    """Something that does not come to an end before the test does."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        self._end = threading.Event()

    def __call__(self) -> None:
        self.hangs.set()
        self._end.wait(120.0)

    def end(self) -> None:
        self._end.set()


@pytest.fixture
def never() -> Any:
    made = Never()
    yield made
    made.end()


class Hanging(CollectSink):
    """Its commits hang while they are told to, before or after they have done their work."""

    def __init__(self, never: Never, *, at: int, after: bool) -> None:
        super().__init__()
        self._never, self._at, self._after = never, at, after
        self.commits = 0

    def committer(self, job: str, uid: str) -> Committer:
        inner, sink = super().committer(job, uid), self

        class Slow(Committer):
            def commit(self, committables: Sequence[bytes]) -> None:
                sink.commits += bool(committables)
                hangs = committables and sink.commits == sink._at
                if sink._after or not hangs:
                    inner.commit(committables)
                if hangs:
                    sink._never()
                    inner.commit(committables)

        return Slow()


# --- what hangs ----------------------------------------------------------------------------------


def test_a_source_that_is_looked_at_for_ever_holds_up_neither_checkpoints_nor_the_end(
    world: World, never: Never
) -> None:
    def looked(number: int) -> None:
        if number == 2:
            never()

    count(world, Scripted(None, looked, goes_on=True))
    query = world.start(2, discover_every_s=0.05)
    assert never.hangs.wait(30.0)
    assert query.checkpoint(60.0) is not None
    began_s = system.monotonic_s()
    assert query.stop(30.0)
    assert system.monotonic_s() - began_s < 20.0


def test_a_start_that_hangs_in_a_source_can_be_stopped(world: World, never: Never) -> None:
    count(world, Scripted(None, lambda number: never()))
    query = world.start(2)
    assert never.hangs.wait(30.0)
    assert query.stop(30.0)
    assert query.exception() is None


@pytest.mark.parametrize("after", [False, True])
def test_a_commit_that_hangs_ends_the_run_and_the_next_one_commits(
    world: World, never: Never, after: bool
) -> None:
    sink = Hanging(never, at=2, after=after)
    count(world, Numbers(1500, rows_per_s=1000, clock=world.held(0.5)), sink)
    # Every other commit has to be in time: one restart is all there is.
    query = world.start(2, timeout_s=8.0, tolerable_failures=100, restart=FixedDelay(1, 0.0))
    soon(lambda: sink.commits)
    world.go_on()  # there are rows left for the second one
    assert query.await_termination(90.0)
    assert query.restarts == 1
    never.end()  # what it does now is too late to change anything
    system.sleep_s(0.2)
    check_counts(sink.rows(), truth(1500))


def test_a_commit_that_hangs_is_named(world: World, never: Never) -> None:
    count(world, Numbers(None, rows_per_s=1000), Hanging(never, at=1, after=False))
    query = world.start(2, timeout_s=1.5, tolerable_failures=100, restart=NoRestart())
    with pytest.raises(OverdueError, match="sink-count"):
        query.await_termination(60.0)


def test_a_job_whose_commit_hangs_can_be_stopped(world: World, never: Never) -> None:
    count(world, Numbers(None, rows_per_s=1000), Hanging(never, at=1, after=False))
    query = world.start(2)
    assert never.hangs.wait(60.0)
    assert query.stop(45.0)


# --- what raises anything ------------------------------------------------------------------------


def test_what_a_source_raises_at_a_restart_is_left_to_the_restart_strategy(world: World) -> None:
    def looked(number: int) -> None:
        if number == 2:
            raise ValueError("the listing is not what it was")

    sink = count(world, Scripted(1500, looked))
    query = world.start(2, checkpoint_interval_s=None, restart=FixedDelay(3, 0.0))
    soon(lambda: query.is_running)
    break_slot(world)
    assert query.await_termination(60.0)
    assert query.restarts == 2
    check_counts(sink.rows(), truth(1500))


def test_a_mistake_at_the_first_start_is_said_at_once_by_its_type(world: World) -> None:
    looks: list[int] = []

    def looked(number: int) -> None:
        looks.append(number)
        raise TypeError("no such thing")

    count(world, Scripted(None, looked))
    query = world.start(2, restart=FixedDelay(3, 0.0))
    with pytest.raises(StateBackendError, match="TypeError: no such thing"):
        query.await_termination(30.0)
    assert looks == [1]


def test_a_place_that_is_not_reached_at_the_first_start_is_tried_again(world: World) -> None:
    def looked(number: int) -> None:
        if number < 3:
            raise ConnectionResetError("gone")

    count(world, Scripted(200, looked))
    query = world.start(2, restart=FixedDelay(3, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == 2


class Raising(CollectSink):
    """Its commits raise what they are told to, if anything; those that have something to commit."""

    def __init__(self, raised: Callable[[int], BaseException | None]) -> None:
        super().__init__()
        self._raised = raised
        self.commits = itertools.count(1)

    def committer(self, job: str, uid: str) -> Committer:
        inner, sink = super().committer(job, uid), self

        class Bad(Committer):
            def commit(self, committables: Sequence[bytes]) -> None:
                error = sink._raised(next(sink.commits)) if committables else None
                if error is not None:
                    raise error
                inner.commit(committables)

        return Bad()


def test_a_sink_whose_commit_would_end_the_thread_fails_the_run(world: World) -> None:
    sink = Raising(lambda number: SystemExit(3) if number == 1 else None)
    count(world, Numbers(1500, rows_per_s=1000), sink)
    query = world.start(2, restart=FixedDelay(1, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == 1
    check_counts(sink.rows(), truth(1500))


@pytest.mark.parametrize("at", [2, 3])
def test_a_source_that_would_end_the_thread_fails_the_run(world: World, at: int) -> None:
    """At a look while the job runs, and at the one with which a run begins."""
    looks: list[int] = []

    def looked(number: int) -> None:
        looks.append(number)
        if 2 <= number <= at:
            raise SystemExit(3)

    count(world, Scripted(None, looked, goes_on=True))
    query = world.start(2, discover_every_s=0.05, restart=FixedDelay(3, 0.0))
    soon(lambda: len(looks) > at and query.is_running, 20.0)
    assert query.restarts == at - 1


@pytest.mark.parametrize("kind", [OutputLostError, UnsupportedFormatError])
def test_what_would_be_so_again_at_every_start_ends_the_job(
    world: World, kind: type[StateBackendError]
) -> None:
    count(world, Numbers(None, rows_per_s=1000), Raising(lambda number: kind("for good")))
    query = world.start(2, restart=FixedDelay(None, 0.0))
    with pytest.raises(kind, match="for good"):
        query.await_termination(20.0)
    assert query.restarts == 1  # which looked whether it is so again


def test_what_reads_as_damaged_may_read_the_next_time(world: World) -> None:
    sink = Raising(lambda number: CorruptionError("a bit") if number < 4 else None)
    count(world, Numbers(1000, rows_per_s=1000), sink)
    query = world.start(2, restart=FixedDelay(10, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == 3
    check_counts(sink.rows(), truth(1000))
