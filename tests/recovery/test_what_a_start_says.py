"""A start that is refused says what to do in whole sentences, and nothing that would do harm."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from recovery.decide.rewind import LocationProgress, LogProgress, decide_start
from statebackend.errors import CheckpointLocationError, JobRunningError, RewindError
from statebackend.runtime.driver.job import Job
from statebackend.spark.start import start_point as startpoint
from statebackend.spark.start.start_point import StartPoint

if TYPE_CHECKING:
    from pathlib import Path

    from statebackend.spark.start.checkpoint_location import CheckpointLocation


@pytest.fixture
def point(tmp_path: Path) -> StartPoint:
    job = Job(tmp_path.as_uri(), "ledger")
    return StartPoint(job, job.log(), {}, run="this one")


def test_a_start_that_was_overtaken_leaves_the_healthy_driver_alone(
    point: StartPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startpoint, "last_epochs", lambda manifests: {"ledger": 7})
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
        point._as_told(caught.value, purged, [])
    told = raised.value
    assert told.todo.count("savepoint") == 1
    assert told.todo.endswith(
        "begin a new job with the newest savepoint: see docs/howto/repair.md."
    )


class _Location:
    """A checkpoint location with one plan."""

    def __init__(self, stamp_ms: int | None) -> None:
        self.planned_ms = stamp_ms

    def stamp_ms(self, name: str) -> int | None:
        assert name == "offsets/4"
        return self.planned_ms


def test_a_plan_that_was_replaced_before_the_claim_is_refused(point: StartPoint) -> None:
    point.first_epoch, point.first_stamp_ms = 4, 1000
    same, other, gone = (cast("CheckpointLocation", _Location(ms)) for ms in (1000, 999, None))
    assert point.stamp_of_plan(same, 4) == 1000
    for location in (other, gone):
        with pytest.raises(CheckpointLocationError, match="The plan of batch 4"):
            point.stamp_of_plan(location, 4)


def test_a_plan_that_spark_made_after_the_start_was_decided_counts(point: StartPoint) -> None:
    point.first_epoch = 4
    assert point.stamp_of_plan(cast("CheckpointLocation", _Location(1000)), 4) == 1000
    assert point.stamp_of_plan(cast("CheckpointLocation", _Location(None)), 4) is None
