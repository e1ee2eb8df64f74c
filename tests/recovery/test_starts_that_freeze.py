"""Drivers that start one job at once, each frozen before any step, and thawed at any later one."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.decide.start_batch import LogProgress, Verdict, decide_start
from recovery.decide.taken_back_files import TakenBack
from statebackend.errors import FencedError, JobRunningError, StateBackendError
from statebackend.spark.start.checkpoint_location import CheckpointLocation, _CannotReplaceError
from statebackend.spark.start.location_rewind import LocationRewind
from statebackend.spark.start.start_point import refuse_hidden

if TYPE_CHECKING:
    from collections.abc import Callable

QUERY = "q"
BATCHES = 2


@dataclass
class Shared:
    """The location's files and the log, with what must hold of them.

    Attributes:
        offsets: the plans' times by batch. records: by epoch, of the plan that was run.
        put_out: the plans of batches of which output may be visible. finished: a start that begins
            after that does not run these.
        replaces: whether a file can be replaced by renaming another.
    """

    offsets: dict[int, int] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)
    hidden: dict[str, int] = field(default_factory=dict)
    generation: int = 1
    records: dict[int, int] = field(default_factory=dict)
    put_out: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(100))
    replaces: bool = True

    def record(self, generation: int, batch: int, stamp: int) -> None:
        if generation < self.generation:
            raise FencedError("another driver has claimed the job")
        assert self.put_out.setdefault(batch, stamp) == stamp, f"batch {batch} was cut otherwise"
        last = max(self.records, default=-1)
        assert last <= batch <= last + 1, "an epoch is left out, or those after it are given up"
        self.records[batch] = stamp
        if batch in self.commits:
            self.finished.add(batch)

    def commit(self, batch: int) -> None:
        self.commits.add(batch)
        if batch in self.records:
            self.finished.add(batch)

    def log(self) -> LogProgress:
        return LogProgress("job", "memory", QUERY, {"op": max(self.records, default=-1)})

    @classmethod
    def one_batch_ahead(cls, replaces: bool = True) -> Shared:
        """Spark has committed batch 2, which the operator did not finish, and planned batch 3."""
        made = cls(offsets={n: n for n in range(4)}, commits={0, 1, 2}, records={0: 0, 1: 1})
        made.put_out, made.finished = {0: 0, 1: 1, 2: 2}, {0, 1}
        made.replaces = replaces
        return made


class Files(CheckpointLocation):
    """The real way back over `Shared`; ``pause`` is called before each look and each change."""

    def __init__(self, shared: Shared, pause: Callable[[], None]) -> None:
        self.path = "/location"
        self._shared, self._pause = shared, pause

    def _query_id(self) -> str | None:
        return QUERY

    def _batches(self, folder: str) -> frozenset[int]:
        self._pause()
        return frozenset(self._shared.offsets if folder == "offsets" else self._shared.commits)

    def _names(self, folder: str) -> list[str]:
        self._pause()
        return [name.split("/")[1] for name in self._shared.hidden if name.startswith(folder)]

    def stamp_ms(self, name: str) -> int | None:
        self._pause()
        if name in self._shared.hidden:
            return self._shared.hidden[name]
        folder, _, batch = name.partition("/")
        plans = self._shared.offsets if folder == "offsets" else {}
        return plans.get(int(batch)) if batch.isdigit() else None

    def _exists(self, name: str) -> bool:
        self._pause()
        return name in self._shared.hidden or self._is_there(name)

    def _is_there(self, name: str) -> bool:
        folder, _, batch = name.partition("/")
        files = self._shared.offsets if folder == "offsets" else self._shared.commits
        return batch.isdigit() and int(batch) in files

    def _rename(self, source: str, target: str, *, replace: bool) -> bool:
        self._pause()
        shared = self._shared
        if replace and not shared.replaces:
            raise _CannotReplaceError
        if source in shared.hidden:
            if self._is_there(target) and not replace:
                return False
            folder, _, batch = target.partition("/")
            value = shared.hidden.pop(source)
            if folder == "offsets":
                shared.offsets[int(batch)] = value
            else:
                shared.commits.add(int(batch))
            return True
        if not self._is_there(source):
            return False
        folder, _, batch = source.partition("/")
        if folder == "offsets":
            shared.hidden[target] = shared.offsets.pop(int(batch))
        else:
            shared.commits.remove(int(batch))
            shared.hidden[target] = -1
        return True

    def drop(self, one: TakenBack) -> None:
        self._pause()
        self._shared.hidden.pop(one.name, None)


class Driver:
    """Starts the job, and runs some batches; step by step.

    Attributes:
        done: it has come to its end. error: what it ended with; None: it ran all batches.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._go, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = self.done = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._whole, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Let it do one thing; nothing where it has ended."""
        if not self.done:
            self._go.release()
            self._rests.acquire()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def to_the_end(self) -> None:
        while not self.done:
            self.step()
        self._thread.join()

    def kill(self) -> None:
        self._killed = True
        self.to_the_end()

    def _pause(self) -> None:
        self._rests.release()
        self._go.acquire()
        if self._killed:
            raise SystemExit

    def _whole(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self._run()
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self._rests.release()

    def _run(self) -> None:
        shared = self._shared
        location = Files(shared, self._pause)
        first = self._find(location)
        first_stamp = location.stamp_ms(f"offsets/{first}")
        refuse_hidden(location)
        # Spark starts, and reads its location.
        self._pause()
        planned, committed = max(shared.offsets, default=-1), max(shared.commits, default=-1)
        batch = planned if planned > committed else planned + 1
        finished = set(shared.finished)
        refuse_hidden(location)
        self._check_not_overtaken(first)
        generation = self._claim()
        self._check_not_overtaken(first)
        for number in range(batch, batch + BATCHES):
            self._pause()
            if number > planned and number in shared.offsets:
                raise JobRunningError("Spark: another query writes to this location")
            stamp = shared.offsets.setdefault(number, next(shared.numbers))
            self._pause()
            if number == batch and (number != first or first_stamp not in (None, stamp)):
                raise JobRunningError("the coordinator refuses its first batch")
            assert number not in finished, f"batch {number} was finished, and is run again"
            shared.record(generation, number, stamp)
            self._pause()
            assert max(shared.commits, default=-1) >= number - 1, "Spark skips a batch"
            shared.commit(number)

    def _find(self, location: Files) -> int:
        """As `StartPoint.find`."""
        shared = self._shared
        progress, hidden = location.progress(), location.taken_back()
        self._pause()
        if not hidden:
            decision = decide_start(progress, shared.log())
            self._check_not_overtaken(decision.batch)
            if decision.verdict is Verdict.START:
                return decision.batch
        generation = self._claim()

        def look() -> None:
            self._pause()
            if shared.generation > generation:
                raise FencedError("another driver has claimed the job")

        look()
        recorded = dict(shared.records)
        going = LocationRewind(
            location,
            generation=generation,
            look=look,
            new_id=lambda: str(next(shared.numbers)),
        )
        going.repair(recorded)
        progress = location.progress()
        look()
        decision = decide_start(progress, shared.log())
        self._check_not_overtaken(decision.batch)
        if decision.verdict is not Verdict.START:
            going.back_to(decision.batch, progress.last_commit, recorded)
        return decision.batch

    def _claim(self) -> int:
        self._pause()
        self._shared.generation += 1
        return self._shared.generation

    def _check_not_overtaken(self, first: int) -> None:
        self._pause()
        if max(self._shared.records, default=-1) > first:
            raise JobRunningError("another driver went on meanwhile")


def _check_error(driver: Driver) -> None:
    """It was refused in words, or it was killed."""
    if driver.error is not None and not isinstance(driver.error, StateBackendError | SystemExit):
        raise driver.error


def _healthy(shared: Shared) -> None:
    """A driver that starts while all others are frozen, and runs its batches."""
    before = max(shared.finished)
    driver = Driver(shared)
    driver.to_the_end()
    if driver.error is not None:
        raise driver.error
    assert max(shared.finished) >= before + BATCHES - 1
    assert sorted(shared.finished) == list(range(max(shared.finished) + 1))
    assert sorted(shared.commits) == sorted(shared.records) == sorted(shared.finished)
    assert {n: shared.offsets[n] for n in shared.commits} == shared.records
    assert not shared.hidden


LONGEST = 60  # more steps than a driver makes


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("later", [1, 2, 3, 4, LONGEST])
def test_one_that_froze_before_any_step_and_is_killed_some_steps_after_it_thawed(
    later: int, replaces: bool
) -> None:
    for frozen in range(1, LONGEST):
        shared = Shared.one_batch_ahead(replaces)
        driver = Driver(shared)
        driver.steps(frozen)
        _healthy(shared)
        driver.steps(later)
        driver.kill()
        _check_error(driver)
        _healthy(shared)


@pytest.mark.full  # 300 random histories; the simulation freezes starts too
@settings(max_examples=300, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 30)) | st.just("a healthy one"), max_size=20
    ),
    thaws=st.tuples(*[st.booleans()] * 3),
    replaces=st.booleans(),
)
def test_whatever_starts_are_frozen_where_the_next_one_goes_on_and_nothing_is_lost(
    turns: list[tuple[int, int] | str], thaws: tuple[bool, ...], replaces: bool
) -> None:
    shared = Shared.one_batch_ahead(replaces)
    drivers = [Driver(shared) for _ in thaws]
    try:
        for turn in turns:
            if isinstance(turn, str):
                _healthy(shared)
            else:
                drivers[turn[0]].steps(turn[1])
        for driver, thawed in zip(drivers, thaws, strict=True):
            if thawed:
                driver.to_the_end()
        _healthy(shared)
        for driver in drivers:
            driver.to_the_end()
            _check_error(driver)
        _healthy(shared)
    finally:
        for driver in drivers:
            driver.kill()
