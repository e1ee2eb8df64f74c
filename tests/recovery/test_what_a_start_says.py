"""A start that is refused says what to do in whole sentences, and nothing that would do harm."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark.sql.types import StructType

from recovery.decide.start_batch import LocationProgress, LogProgress, decide_start
from snapshot.storage.local_store import LocalStore
from statebackend.errors import (
    CheckpointLocationError,
    JobRunningError,
    MaxParallelismChangedError,
    RewindError,
)
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator, operator_specs
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.start_point import StartPoint
from tests.recovery.driver import Started, begin_of, new_id, stamp_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def point(tmp_path: Path) -> StartPoint:
    job = Job(tmp_path.as_uri(), "ledger")
    return StartPoint(job, job.log(), {}, run="this one")


def test_a_start_that_was_overtaken_leaves_the_healthy_driver_alone(
    point: StartPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = LogProgress("ledger", "file:///jobs", "q", {"ledger": 7})
    monkeypatch.setattr(point._job, "progress", lambda manifests: known)
    point.check_not_overtaken([], 7)
    with pytest.raises(JobRunningError, match=r"Epoch 7 .* started with batch 4") as caught:
        point.check_not_overtaken([], 4)
    assert "Stop the other" not in caught.value.todo
    assert caught.value.todo.startswith("If another driver runs the job, leave it and stop this")
    assert "the checkpoint location that belongs to the job" in caught.value.todo


def test_a_start_without_a_way_back_names_the_savepoint_once(point: StartPoint) -> None:
    purged = LocationProgress("/cp", "q", 5, 4, offsets=frozenset({4, 5}), commits=frozenset())
    log = LogProgress("ledger", "file:///jobs", "q", {"ledger": 3})
    with pytest.raises(RewindError) as caught:
        decide_start(purged, log)
    with pytest.raises(RewindError) as raised:
        point._as_asked(caught.value, purged, [])
    told = raised.value
    assert told.todo.count("savepoint") == 1
    assert told.todo.endswith(
        "begin a new job with the newest savepoint: see docs/howto/repair.md."
    )


class _Location:
    """A checkpoint location with one plan."""

    def __init__(self, stamp_ms: int | None, last_offset: int = 3) -> None:
        self.planned_ms, self.last_offset = stamp_ms, last_offset

    def progress(self) -> LocationProgress:
        return LocationProgress("/cp", "q", self.last_offset, 3)

    def stamp_ms(self, name: str) -> int | None:
        assert name == "offsets/4"
        return self.planned_ms


def test_a_plan_that_was_replaced_before_the_claim_is_refused(point: StartPoint) -> None:
    point.first_epoch, point.first_stamp_ms = 4, 1000
    same, other, gone = (cast("CheckpointLocation", _Location(ms)) for ms in (1000, 999, None))
    point.check_plan_stands(same, 4)
    for location in (other, gone):
        with pytest.raises(CheckpointLocationError, match="The plan of batch 4"):
            point.check_plan_stands(location, 4)


def test_a_plan_that_spark_made_after_the_start_was_decided_counts(point: StartPoint) -> None:
    point.first_epoch = 4
    point.check_plan_stands(cast("CheckpointLocation", _Location(1000)), 4)
    point.check_plan_stands(cast("CheckpointLocation", _Location(None)), 4)


def test_a_plan_that_was_replaced_before_the_first_begin_is_refused(tmp_path: Path) -> None:
    """Nothing was planned when the start was decided, nor when it claimed the job."""
    run = Started(LocalStore(tmp_path, new_id=new_id), {"op": 1}, first_epoch=4)
    location = _Location(stamp_of(4) + 1, 4)
    place = cast("CheckpointLocation", location)
    run.session.open(run.coordinator, run.tenure, partial(CheckpointLocation.check_planned, place))
    with pytest.raises(CheckpointLocationError, match="The plan of batch 4"):
        run.session.begin(begin_of(4))
    location.planned_ms, location.last_offset = None, 3
    with pytest.raises(CheckpointLocationError, match="The plan of batch 4"):
        run.session.begin(begin_of(4))
    assert run.coordinator.run.epoch is None
    location.planned_ms, location.last_offset = stamp_of(4), 4
    run.session.begin(begin_of(4))
    location.planned_ms = 0
    run.session.begin(begin_of(4, attempt=1))


def test_a_plan_of_a_form_that_is_not_known_is_let_pass() -> None:
    CheckpointLocation.check_planned(cast("CheckpointLocation", _Location(None, 4)), 4, 1000)


def test_operators_with_unlike_key_groups_are_told_of_together() -> None:
    """As a savepoint has them that was merged out of two."""
    key = StructType().add("k", "string")
    operators = {uid: Operator(uid, 1, 128, key, {}) for uid in ("a", "b")}
    operators["source"] = Operator("source", 1, 128, StructType(), {})
    found: Any = {
        uid: SimpleNamespace(max_parallelism=number)
        for uid, number in (("a", 128), ("b", 32768), ("source", 64))
    }
    with pytest.raises(MaxParallelismChangedError, match="'a': 128, 'b': 32768") as caught:
        operator_specs("j", operators, found, allow_dropped_state=False, heartbeat=False)
    assert "edit_savepoint" in str(caught.value)
