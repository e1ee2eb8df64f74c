"""Operators with state in the shape of Spark's ``stateOperators``, for one epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

from snapshot.log.progress_events import EpochProgress, SubtaskProgress

__all__ = ["StateOperator", "idle", "state_operators"]

_UPDATES: Final = ("process",)
_COMMIT: Final = ("snapshot", "base", "close", "sync", "async")
_IN_EPOCH: Final = (
    *("numRowsUpdated", "numRowsRemoved", "numRowsDroppedByWatermark"),
    *("allUpdatesTimeMs", "allRemovalsTimeMs", "commitTimeMs"),
)


class StateOperator(TypedDict):
    """One operator, as in ``query.lastProgress["stateOperators"]``.

    Attributes:
        operatorName: its uid.
        numRowsTotal: entries of state, as RocksDB estimates them.
        numRowsUpdated: entries that the epoch wrote. numRowsRemoved: those that it removed.
        allUpdatesTimeMs: in the operator's code, over all subtasks. allRemovalsTimeMs: 0, as
            removals are part of that.
        commitTimeMs: of saving the changes, over all subtasks, and of writing the record.
        memoryUsedBytes: RocksDB's write buffers, indexes and filters.
        numRowsDroppedByWatermark: late rows.
        numShufflePartitions, numStateStoreInstances: how many subtasks there are.
        customMetrics: what Spark has no name for.
    """

    operatorName: str
    numRowsTotal: int
    numRowsUpdated: int
    numRowsRemoved: int
    allUpdatesTimeMs: int
    allRemovalsTimeMs: int
    commitTimeMs: int
    memoryUsedBytes: int
    numRowsDroppedByWatermark: int
    numShufflePartitions: int
    numStateStoreInstances: int
    customMetrics: dict[str, int]


def state_operators(
    epochs: Iterable[EpochProgress], subtasks: Iterable[SubtaskProgress], epoch: int
) -> list[StateOperator]:
    """The operators that ran in an epoch, by their uids.

    With asynchronous commits the record of an epoch may still be on its way: it counts as nothing
    then.
    """
    records = {one.operator: one for one in epochs if one.epoch == epoch}
    found: dict[str, list[SubtaskProgress]] = {}
    for one in subtasks:
        if one.epoch == epoch and "stored_bytes" in one.figures:  # a source or a sink has none
            found.setdefault(one.operator, []).append(one)
    return [_operator(uid, acks, records.get(uid)) for uid, acks in sorted(found.items())]


def idle(operator: StateOperator) -> StateOperator:
    """An operator in a batch in which it did not run."""
    resting: StateOperator = {**operator, "customMetrics": dict(operator["customMetrics"])}
    for name in _IN_EPOCH:
        resting[name] = 0
    return resting


def _operator(
    uid: str, acks: Sequence[SubtaskProgress], record: EpochProgress | None
) -> StateOperator:
    figures: dict[str, int] = {}
    for one in acks:
        for name, count in one.figures.items():
            figures[name] = figures.get(name, 0) + count
    removed = figures.get("removed_rows", 0)
    restores = [one.restore for one in acks if one.restore is not None]
    commit_ms = record.commit_ms if record is not None else 0.0
    return {
        "operatorName": uid,
        "numRowsTotal": figures.get("estimated_rows", 0),
        "numRowsUpdated": sum(one.delta_rows for one in acks) - removed,
        "numRowsRemoved": removed,
        "allUpdatesTimeMs": round(sum(_time_ms(one.timings_ms, _UPDATES) for one in acks)),
        "allRemovalsTimeMs": 0,
        "commitTimeMs": round(sum(_time_ms(one.timings_ms, _COMMIT) for one in acks) + commit_ms),
        "memoryUsedBytes": figures.get("memory_bytes", 0),
        "numRowsDroppedByWatermark": figures.get("late_rows", 0),
        "numShufflePartitions": len(acks),
        "numStateStoreInstances": len(acks),
        "customMetrics": {
            "changedBytes": sum(one.delta_bytes for one in acks),
            "inputRows": figures.get("rows", 0),
            "inputSpilledBytes": figures.get("spilled_bytes", 0),
            "numExpiredTimers": figures.get("timers_fired", 0),
            "recordCommitTimeMs": round(commit_ms),
            "restoresFromLocalCopy": sum(one.source == "local" for one in restores),
            "restoresFromStore": sum(one.source in ("mixed", "durable") for one in restores),
            "restoreTimeMs": round(1000 * sum(one.seconds for one in restores)),
            "stateBytes": figures.get("stored_bytes", 0),
            "storeRequests": sum(count for one in acks for count, _ in one.requests.values()),
        },
    }


def _time_ms(timings_ms: Mapping[str, float], phases: Iterable[str]) -> float:
    return sum(timings_ms.get(phase, 0.0) for phase in phases)
