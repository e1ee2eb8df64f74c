"""What a start that is told to go back leaves in the log, and what later starts make of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from pyspark.sql.types import StructType

from recovery.decide.taken_back_files import TakenBack
from snapshot.formats.record import Manifest
from snapshot.protocol.tenure import Tenure
from statebackend import StateBackend
from statebackend.errors import (
    ObjectNotFoundError,
    RewindError,
    SettingError,
    StateBackendError,
    StoreCapabilityError,
)
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.spark.start import start_point
from statebackend.spark.start.start_point import StartPoint
from tests.recovery.driver import JOB, JOB_ID, MAX_PARALLELISM, Run, new_id, stamp_of
from tests.recovery.test_starts_that_freeze import Files, Shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class _Log:
    """A log in a list, for `StartPoint`."""

    def __init__(self) -> None:
        self.records: list[Manifest] = []
        self.lag = 0  # how many of the newest no listing shows yet
        self.shown_at_a_read = False  # they were just being appended

    def claim(self, *, run: str = "", settings: dict[str, Any] | None = None) -> Tenure:
        generation = 1 + max((m.generation for m in self.records), default=0)
        sequence = len(self.records)
        self.records.append(
            Manifest(
                kind="claim",
                job=JOB,
                job_id=JOB_ID,
                generation=generation,
                sequence=sequence,
                writer="writer",
                write_id=new_id(),
                oldest_needed=0,
                run=run,
                settings=settings or {},
            )
        )
        return Tenure(generation=generation, sequence=sequence, job_id=JOB_ID, oldest_needed=0)

    def manifests(self, listed: Sequence[int] | None = None) -> list[Manifest]:
        assert listed is None
        return self.records[: len(self.records) - self.lag]

    def sequences(self) -> list[int]:
        return [record.sequence for record in self.manifests()]

    def read(self, sequence: int) -> Manifest:
        if sequence >= len(self.records):
            raise ObjectNotFoundError(f"There is no record {sequence}.")
        if self.shown_at_a_read:
            self.lag = 0
        return self.records[sequence]


class _Location(Files):
    """`cut_at`: the driver is killed at that rename, counted from 1."""

    cut_at = 0

    def _query_id(self) -> str | None:
        return "query"

    def _rename(self, source: str, target: str, *, replace: bool) -> bool:
        self.cut_at -= 1
        if self.cut_at == 0:
            raise KeyboardInterrupt
        return super()._rename(source, target, replace=replace)


class _World:
    """One job, at batch 5, and its location."""

    def __init__(self, root: Path) -> None:
        self.job = Job(root.as_uri(), JOB)
        self.log = _Log()
        self.files = Shared()
        self.location = _Location(self.files, lambda: None)
        self.start().runs(0, 5)

    def start(self, *, go_back_to: int | None = None) -> _Start:
        return _Start(self, go_back_to)

    def lose(self, *batches: int) -> None:
        """As after a power cut."""
        for batch in batches:
            del self.files.offsets[batch]
            self.files.commits.remove(batch)

    def refused(self, go_back_to: int | None = None) -> StateBackendError:
        """What a start is refused with, which changes neither location nor log."""
        before = dict(self.files.offsets), set(self.files.commits), list(self.log.records)
        with pytest.raises(StateBackendError) as caught:
            self.start(go_back_to=go_back_to)
        after = self.files.offsets, self.files.commits, self.log.records
        assert after == before
        return caught.value

    def goes_back(self, epoch: int) -> _Start:
        start = self.start(go_back_to=epoch)
        assert start.point.first_epoch == epoch + 1
        assert max(self.files.commits) == epoch
        assert not self.files.hidden
        return start


class _Start:
    """One start of the query: refused, or it has found its batch."""

    def __init__(self, world: _World, go_back_to: int | None) -> None:
        self._world, self.name = world, new_id()
        operators = {"op": Operator("op", 1, MAX_PARALLELISM, StructType(), {})}
        log: Any = world.log
        self.point = StartPoint(world.job, log, operators, run=self.name, go_back_to=go_back_to)
        location = world.location
        progress, hidden = location.progress(), location.taken_back()
        if progress.last_offset >= 0:
            self.point.find(location, progress, hidden, log.manifests())

    def runs(self, first: int, last: int) -> None:
        """The query runs these batches."""
        files = self._world.files
        self._world.log.claim(run=self.name)
        records, forget = self._world.log.records, self.point.forget_given_up
        run = Run(1, records=records, first_epoch=first, forget=forget)
        for batch in range(first, last + 1):
            files.offsets[batch] = stamp_of(batch)
            run.finish(batch)
            files.commits.add(batch)


@pytest.fixture
def world(tmp_path: Path) -> _World:
    return _World(tmp_path)


def _marks(records: Iterable[Manifest]) -> list[str]:
    return [m.settings["went_back_to"] for m in records if "went_back_to" in m.settings]


@pytest.mark.parametrize("value", [True, 3.0, "3", -1])
def test_what_is_no_epoch_is_refused_before_anything_is_looked_at(value: Any) -> None:
    backend = object.__new__(StateBackend)  # whatever is looked at is not there
    writer: Any = None
    with pytest.raises(SettingError, match=re.escape(f"go_back_to= is {value!r}")):
        backend.start(writer, go_back_to=value)
    with pytest.raises(SettingError, match=re.escape(f"go_back_to= is {value!r}")):
        backend.starting(go_back_to=value).__enter__()


def test_an_epoch_without_a_location_is_refused(world: _World) -> None:
    operators: dict[str, Operator] = {}
    log: Any = world.log
    told = StartPoint(world.job, log, operators, run=new_id(), go_back_to=3)
    with pytest.raises(SettingError, match="checkpoint location"):
        told.check_without_location()
    StartPoint(world.job, log, operators, run=new_id()).check_without_location()


@pytest.mark.parametrize("epoch", [4, 99])
def test_a_going_back_that_is_refused_leaves_nothing_in_the_log(world: _World, epoch: int) -> None:
    world.lose(4, 5)
    assert f"cannot go back to epoch {epoch}" in world.refused(epoch).what


def test_an_epoch_that_was_refused_once_may_be_gone_back_to_later(world: _World) -> None:
    world.lose(4, 5)
    world.refused(4)
    world.goes_back(3).runs(4, 7)
    world.lose(5, 6, 7)
    world.goes_back(4).runs(5, 7)
    assert _marks(world.log.records) == ["3", "4"]


def test_a_claim_of_a_going_back_that_was_refused_after_it_counts_for_nothing(
    world: _World,
) -> None:
    """As another driver, which goes on between the look and the claim, brings it about."""
    world.lose(4, 5)
    world.log.claim(settings={"went_back_to": "4"})
    world.goes_back(3).runs(4, 7)
    world.lose(5, 6, 7)
    world.goes_back(4)


def test_an_epoch_that_was_gone_back_to_is_refused_and_not_offered_any_more(
    world: _World,
) -> None:
    world.lose(4, 5)
    world.goes_back(3).runs(4, 7)
    world.lose(4, 5, 6, 7)
    refused = world.refused(3)
    assert "told to go back to epoch 3 before" in refused.what
    for error in (refused, world.refused(), world.refused(99)):
        assert isinstance(error, RewindError) or error.code == "SB1016"
        assert "3" not in error.todo + error.what.partition("location: ")[2]
    assert "after epoch 2, 1" in refused.todo
    world.goes_back(2)


def test_an_epoch_that_was_made_anew_is_another_one(world: _World) -> None:
    world.lose(4, 5)
    world.goes_back(3).runs(4, 7)
    world.lose(4, 5, 6, 7)
    world.goes_back(1).runs(2, 6)
    world.lose(4, 5, 6)
    world.goes_back(3)


def _puts_back(world: _World) -> None:
    """A start that was told nothing: it puts back what it finds hidden, and is refused."""
    with pytest.raises(StateBackendError, match="another driver went on"):
        world.start()
    assert not world.files.hidden


@pytest.mark.parametrize("renames", range(1, 4))
@pytest.mark.parametrize("told_in_between", [True, False])
def test_a_going_back_that_was_cut_is_done_again_and_then_no_more(
    world: _World, renames: int, told_in_between: bool
) -> None:
    world.lose(4, 5)
    world.location.cut_at = renames
    with pytest.raises(KeyboardInterrupt):
        world.start(go_back_to=1)
    assert len(world.files.hidden) == renames - 1
    if not told_in_between and world.files.hidden:
        _puts_back(world)
    world.goes_back(1)  # and the query fails before its first record
    world.goes_back(1).runs(2, 6)
    world.lose(2, 3, 4, 5, 6)
    assert "told to go back to epoch 1 before" in world.refused(1).what


def test_files_that_an_earlier_start_hid_are_put_back_before_it_is_said_what_is_given_up(
    world: _World,
) -> None:
    world.lose(4, 5)
    world.location.take_back(TakenBack("offsets", 3, 7, "id"))
    with pytest.raises(RewindError, match="cannot go back to epoch 4"):
        world.start(go_back_to=4)
    assert not _marks(world.log.records)
    world.location.take_back(TakenBack("offsets", 3, 7, "id"))
    world.goes_back(3).runs(4, 7)
    assert _marks(world.log.records) == ["3"]


def test_an_argument_that_is_left_out_of_account_leaves_no_mark(world: _World) -> None:
    world.start(go_back_to=3).runs(6, 7)
    assert not _marks(world.log.records)
    world.lose(4, 5, 6, 7)
    world.goes_back(3)


@pytest.mark.parametrize("go_back_to", [None, 3])
@pytest.mark.parametrize("lag", [2, 4])
def test_a_location_is_not_judged_by_a_listing_that_lags(
    world: _World, lag: int, go_back_to: int | None
) -> None:
    world.log.lag = lag  # by what it shows, several batches would have to be repeated
    refused = world.refused(go_back_to)
    assert isinstance(refused, StoreCapabilityError)
    assert "what else was committed is not known" in refused.what
    world.log.lag = 0
    assert world.start(go_back_to=go_back_to).point.first_epoch == 6


def test_a_start_beside_another_drivers_appends_decides_anew(world: _World) -> None:
    world.log.lag, world.log.shown_at_a_read = 2, True
    assert world.start().point.first_epoch == 6


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_what_a_bound_query_lacks_is_not_told_by_a_listing_that_lags(
    world: _World, lag: int
) -> None:
    start = world.start()
    start.point.first_epoch = None  # started without its location being known
    location, world.log.lag = world.location.progress(), lag
    with pytest.raises(StoreCapabilityError, match="what else was committed is not known"):
        start.point.started_at("query", location, world.log.manifests())
    old, world.log.lag = world.log.manifests(), 0
    assert start.point.started_at("query", location, old) == (6, world.log.manifests())


def test_what_is_lacking_is_said_although_the_log_grows_at_every_look(world: _World) -> None:
    start, location = world.start(), world.location.progress()
    start.point.first_epoch = None
    del world.files.offsets[5]
    with mock.patch.object(start_point, "has_grown", return_value=True):
        assert "its plans end with 4" in world.refused().what
        world.log.records.pop()
        with pytest.raises(RewindError, match="must be repeated"):
            start.point.started_at("query", location, world.log.manifests())
