"""Rare branches: what a portion of runs must have come through, by what was noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from tests.support.faults import Fault

__all__ = ["BRANCHES", "unreached"]

BRANCHES: Final = (
    "a subtask has finished before the job",
    Fault.SLOT_FAILED,
    "aligned snapshot",
    "alignment given up: cancelled",
    "alignment given up: newer",
    "attempt aborted: declined",
    "attempt aborted: earlier",
    "attempt aborted: expired",
    "attempt aborted: failover",
    "attempt aborted: newer",
    "attempt aborted: stopped",
    "attempt aborted: store",
    "checkpoint durable",
    "checkpoint with finished subtasks",
    "driver died before the sinks were committed",
    "message of another run",
    "record landed after its driver's death",
    "record not written",
    "rescale refused: rows in flight",
    "restored",
    Fault.RESCALED,
    "rows in flight put back",
    "rows kept",
    "rows overtaken",
    "savepoint durable",
    "stopped, and started again",
    Fault.DRIVER_KILLED,
    "too many checkpoints failed",
    "unaligned checkpoint durable",
    "unaligned snapshot",
)


def unreached(counts: Mapping[str, int]) -> list[str]:
    """The branches that no run came through."""
    return [branch for branch in BRANCHES if not Counter(counts)[branch]]
