"""The events that tell what a job's epochs cost."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from snapshot.protocol.messages import RestoreReport

__all__ = [
    "BaseProgress",
    "ContinuousCheckpoint",
    "Counts",
    "EpochProgress",
    "ProgressEvent",
    "RebalanceProgress",
    "RescaleProgress",
    "SubtaskProgress",
]

Counts = dict[str, tuple[int, int]]


class SubtaskProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask's snapshot of one epoch.

    Attributes:
        delta_bytes: of what changed, as it is kept.
        delta_rows: how many entries changed.
        inline: whether it is in the record; else it is an object of its own.
        base_bytes: of a full state sent along; 0 for none.
        timings_ms: how long each phase took, by name.
        figures: rows in, rows out, keys, spilled bytes, ... by name.
        requests: asked of the object store by this attempt: (requests, bytes) by verb.
        request_errors: how many of them failed, by verb.
        next_timer_ms: the earliest timer that is left; None: there is none.
        since_begin_ms: from the epoch's first begin to this ack.
        restore: how the state came back, where it had to.
    """

    event: Literal["subtask"] = "subtask"
    job: str
    operator: str
    epoch: int
    subtask: int
    attempt: int
    delta_bytes: int
    delta_rows: int
    inline: bool
    base_bytes: int
    timings_ms: dict[str, float]
    figures: dict[str, int]
    requests: Counts
    since_begin_ms: float
    request_errors: dict[str, int] = {}
    next_timer_ms: int | None = None
    restore: RestoreReport | None = None


class EpochProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One operator's epoch, durable.

    Attributes:
        sequence: the number of its record.
        record_bytes: of the slices in it.
        subtasks: how many there are.
        acks_ms: from the epoch's first begin to its last ack.
        commit_ms: of writing the record.
        delta_bytes: over all subtasks.
        delta_rows: over all subtasks.
        bases: full states that it names.
        requests: over all subtasks; the record's own is one more.
        late_rows: rows that came after the watermark and were dropped, over all subtasks.
        timers_fired: over all subtasks.
        watermark_ms: in force in the epoch, for the whole job; None: it never had one.
    """

    event: Literal["epoch"] = "epoch"
    job: str
    operator: str
    epoch: int
    sequence: int
    record_bytes: int
    subtasks: int
    acks_ms: float
    commit_ms: float
    delta_bytes: int
    delta_rows: int
    bases: int
    requests: Counts
    late_rows: int = 0
    timers_fired: int = 0
    watermark_ms: int | None = None


class BaseProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A base that was uploaded in the background."""

    event: Literal["base"] = "base"
    job: str
    operator: str
    subtask: int
    epoch: int
    kind: str
    state_bytes: int
    uploaded_bytes: int
    seconds: float
    requests: Counts


class RebalanceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Subtasks were spread anew over the executors that are there.

    Attributes:
        epoch: the one that ran.
        reason: ``by hand`` or ``automatic``.
        joined: executors that came since subtasks were placed before.
        left: executors that went since.
        executors_before: how many subtasks (of each operator) each had; empty if it is not known.
        executors_after: how many each has now.
        subtasks_moved: how many have another executor than before.
        seconds: how long it took; the query ran on meanwhile.
    """

    event: Literal["rebalanced"] = "rebalanced"
    job: str
    epoch: int | None
    reason: str
    joined: list[str]
    left: list[str]
    executors_before: dict[str, int]
    executors_after: dict[str, int]
    subtasks_moved: int
    seconds: float


class RescaleProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A query was stopped and started again at another parallelism.

    Attributes:
        reason: what asked for it.
        seconds: from the stop to the new start.
        failure: why it runs at the old one all the same; empty if it does not.
    """

    event: Literal["rescaled"] = "rescaled"
    job: str
    from_parallelism: int
    to_parallelism: int
    reason: str
    seconds: float
    failure: str = ""


class ContinuousCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="continuous_checkpoint"):
    """A checkpoint of a continuous job that is over, complete or not.

    Attributes:
        checkpoint: the number of the attempt.
        epoch: the epoch that it became, if it is complete.
        aborted: why it was given up; "" if it is complete.
        took_ms: from its trigger to the commit of its output.
        subtasks: by ``vertex/index``: start_delay, alignment, sync and async in milliseconds, and
            counts such as alignment_bytes.
        waited_for: ``vertex/index`` of those that had not acked when it was given up.
    """

    job: str
    checkpoint: int
    epoch: int
    aborted: str
    took_ms: float
    subtasks: dict[str, dict[str, float]]
    waited_for: list[str] = []


ProgressEvent: TypeAlias = (
    SubtaskProgress
    | EpochProgress
    | BaseProgress
    | RebalanceProgress
    | RescaleProgress
    | ContinuousCheckpoint
)
