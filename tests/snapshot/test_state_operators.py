"""Operators with state, in the shape of Spark's ``stateOperators``."""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.listener import StateOperatorProgress

from snapshot.log.checkpoint_progress import CheckpointProgress
from snapshot.log.progress_events import EpochProgress, SubtaskProgress
from snapshot.log.state_operators import idle
from snapshot.protocol.messages import RestoreReport


def acked(operator: str, subtask: int, epoch: int = 4, **more: Any) -> SubtaskProgress:
    figures = {"rows": 10, "stored_bytes": 100, "estimated_rows": 7, "memory_bytes": 50}
    given: dict[str, Any] = {
        "figures": {**figures, "removed_rows": 2, "late_rows": 1, "timers_fired": 3},
        "timings_ms": {"read": 9.0, "process": 30.0, "snapshot": 5.0, "close": 1.0},
        "requests": {"get": (2, 20)},
        **more,
    }
    return SubtaskProgress(
        job="j",
        operator=operator,
        epoch=epoch,
        subtask=subtask,
        attempt=0,
        delta_bytes=40,
        delta_rows=5,
        inline=True,
        base_bytes=0,
        since_begin_ms=45.0,
        **given,
    )


def durable(operator: str, epoch: int) -> EpochProgress:
    return EpochProgress(
        job="j",
        operator=operator,
        epoch=epoch,
        sequence=epoch,
        record_bytes=80,
        subtasks=2,
        acks_ms=45.0,
        commit_ms=8.0,
        delta_bytes=80,
        delta_rows=10,
        bases=0,
        requests={},
    )


def progress(epochs: list[EpochProgress], subtasks: list[SubtaskProgress]) -> CheckpointProgress:
    newest = max((one.epoch for one in epochs), default=None)
    return CheckpointProgress(
        job="j", epoch=newest, durable_epoch=newest, epochs=epochs, subtasks=subtasks, bases=[]
    )


def test_figures_are_sums_over_subtasks_under_sparks_names() -> None:
    back = RestoreReport(
        operator="count",
        subtask=1,
        epoch=4,
        source="durable",
        local_bytes=0,
        durable_bytes=9,
        durable_reads=1,
        seconds=0.2,
        host="h",
        executor="1",
    )
    acks = [acked("count", 0), acked("count", 1, restore=back), acked("count", 0, epoch=3)]
    source = acked("source", 0, figures={})  # keeps no rows
    (found,) = progress([durable("count", 4)], [*acks, source]).state_operators()
    custom = found["customMetrics"]
    assert StateOperatorProgress.fromJson(dict(found)).numRowsUpdated == 6
    assert {name: value for name, value in found.items() if name != "customMetrics"} == {
        "operatorName": "count",
        "numRowsTotal": 14,
        "numRowsUpdated": 6,
        "numRowsRemoved": 4,
        "allUpdatesTimeMs": 60,
        "allRemovalsTimeMs": 0,
        "commitTimeMs": 20,
        "memoryUsedBytes": 100,
        "numRowsDroppedByWatermark": 2,
        "numShufflePartitions": 2,
        "numStateStoreInstances": 2,
    }
    assert (custom["restoresFromStore"], custom["restoreTimeMs"]) == (1, 200)
    assert (custom["inputRows"], custom["numExpiredTimers"], custom["storeRequests"]) == (20, 6, 4)


def test_an_epoch_may_be_asked_for_whose_record_is_on_its_way() -> None:
    book = progress([durable("count", 3)], [acked("count", 0, epoch=4)])
    assert book.state_operators() == []  # nothing is known of epoch 3 any more
    (found,) = book.state_operators(4)
    assert found["customMetrics"]["recordCommitTimeMs"] == 0
    assert progress([], []).state_operators() == []


def test_an_operator_that_did_not_run_keeps_its_totals() -> None:
    (found,) = progress([durable("count", 4)], [acked("count", 0)]).state_operators()
    resting = idle(found)
    assert resting["numRowsTotal"] == found["numRowsTotal"]
    assert resting["numRowsUpdated"] == resting["commitTimeMs"] == 0
