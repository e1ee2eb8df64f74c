"""A start that is refused says what to do in whole sentences, and nothing that would do harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recovery.decide.rewind import LocationProgress, LogProgress, decide_start
from statebackend.errors import JobRunningError, RewindError
from statebackend.runtime.driver.job import Job
from statebackend.spark.start import start_point as startpoint
from statebackend.spark.start.start_point import StartPoint

if TYPE_CHECKING:
    from pathlib import Path


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
    assert told.todo.endswith("begin a new job with the newest savepoint: see docs/operations.md.")
