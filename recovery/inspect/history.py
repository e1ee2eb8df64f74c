"""What a job's checkpoints were like: the figures that a page, a table or a script asks for.

Plain data. `recovery.inspect.history_reader` reads it from a job's store, whether the job runs or
not: without a claim, and without Spark. Times are milliseconds, `_ms` names alone are durations,
and those called `started_ms`, `durable_ms`, `at_ms` and `created_ms` are wall times since 1970.
None is "not known": an older release wrote the record, or the figure does not exist in this mode.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = [
    "CheckpointFigures",
    "CheckpointStatus",
    "History",
    "JobMode",
    "OperatorFigures",
    "RestoreFigures",
    "RestoreSummary",
    "SubtaskFigures",
]

CheckpointStatus: TypeAlias = Literal["complete", "running", "failed", "discarded"]
"""`complete`: every operator's record is durable. `running`: some are. `failed`: it was given up,
see the reason. `discarded`: it was durable, and the job went back to an epoch before it."""
JobMode: TypeAlias = Literal["micro-batch", "continuous"]


class SubtaskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask's part of one checkpoint.

    Attributes:
        executor, host: where it ran; empty if not known.
        start_delay_ms: continuous: from the trigger to the first barrier here. Micro-batch: from
            the epoch's first begin to this subtask's.
        alignment_ms: continuous: how long it waited for the other barriers.
        freeze_ms: continuous: how long processing stood still for the snapshot.
        persist_ms: how long it took to make the snapshot safe. Micro-batch: freezing included.
        end_to_end_ms: from the start of the checkpoint to this subtask's ack.
        timings_ms: all phases that the subtask measured, by name.
        rows: that came in. delta_rows: entries that changed.
        base_bytes: of a full state in this record, or uploaded beside it.
    """

    subtask: int
    executor: str = ""
    host: str = ""
    attempt: int = 0
    start_delay_ms: float | None = None
    alignment_ms: float | None = None
    freeze_ms: float | None = None
    persist_ms: float | None = None
    end_to_end_ms: float | None = None
    timings_ms: dict[str, float] = {}
    rows: int | None = None
    delta_bytes: int = 0
    delta_rows: int = 0
    base_bytes: int = 0


class OperatorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One operator's part of one checkpoint: one record.

    Attributes:
        sequence: of the record.
        subtasks: how many there were.
        record_bytes: of the slices in the record; larger ones are objects of their own.
        bases: full states that the record names. base_bytes: what a restore reads of them.
        uploaded_bytes: sent for bases in the background.
        phases_ms: the longest that any subtask took, by phase.
        acks_ms: from the first begin to the last ack. commit_ms: to write the record.
        ack_median_ms, ack_p95_ms: of the subtasks' end to end; `acks_ms` is their maximum.
        slowest: the subtask that took longest from its begin on. slowest_on: its executor and
            host.
        state_bytes: that the local stores held, by their own estimate.
        by_subtask: filled by `read_checkpoint`, and only while the record is there.
    """

    uid: str
    sequence: int
    subtasks: int
    record_bytes: int = 0
    delta_bytes: int = 0
    delta_rows: int = 0
    bases: int = 0
    base_bytes: int = 0
    uploaded_bytes: int = 0
    phases_ms: dict[str, float] = {}
    started_ms: int | None = None
    durable_ms: int | None = None
    acks_ms: float | None = None
    commit_ms: float | None = None
    ack_median_ms: float | None = None
    ack_p95_ms: float | None = None
    slowest: int | None = None
    slowest_on: str = ""
    rows: int | None = None
    late_rows: int | None = None
    timers_fired: int | None = None
    next_timer_ms: int | None = None
    state_bytes: int | None = None
    requests: dict[str, tuple[int, int]] = {}
    by_subtask: list[SubtaskFigures] = []


class CheckpointFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint (one epoch), over all operators.

    Attributes:
        epoch: its number; of one that failed, the epoch that it would have become.
        sequence: of its newest record; -1 for one that failed.
        attempt: continuous: the number of the attempt, where it is known.
        reason: why it failed, or what it waited for; empty otherwise.
        started_ms, durable_ms: wall times. total_ms: between them.
        phases_ms: the longest of any operator and subtask, by phase, with `acks` and `commit`.
        watermark_ms: in force in it.
        repeated: how often the epoch was made durable before, and then repeated.
        restores: how many subtasks got their state back in it.
        has_detail: its records are there, so `read_checkpoint` knows its subtasks.
        operators: by operator. Empty for one that failed.
    """

    epoch: int
    status: CheckpointStatus
    mode: JobMode
    generation: int
    sequence: int = -1
    attempt: int | None = None
    reason: str = ""
    stamp_ms: int | None = None
    started_ms: int | None = None
    durable_ms: int | None = None
    total_ms: float | None = None
    phases_ms: dict[str, float] = {}
    record_bytes: int = 0
    delta_bytes: int = 0
    delta_rows: int = 0
    bases: int = 0
    rows: int | None = None
    late_rows: int | None = None
    timers_fired: int | None = None
    watermark_ms: int | None = None
    state_bytes: int | None = None
    requests: dict[str, tuple[int, int]] = {}
    repeated: int = 0
    restores: int = 0
    has_detail: bool = False
    operators: list[OperatorFigures] = []


class RestoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How one subtask got its state back.

    Attributes:
        epoch: the first that it ran then. generation: of the driver.
        at_ms: when the epoch began; None if not known.
        source: `local`, `durable`, `mixed` (both) or `empty` (a new operator).
        reason: why a nearer copy was not used, if there was one.
    """

    operator: str
    subtask: int
    epoch: int
    generation: int
    at_ms: int | None
    source: str
    local_bytes: int
    durable_bytes: int
    durable_reads: int
    seconds: float
    host: str
    executor: str
    reason: str = ""


class RestoreSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All restores of one operator in one epoch: records name only the slowest one by one.

    Attributes:
        by_source: how many subtasks, by where the state came from.
        slowest: those that took longest, the longest first; at most 16.
    """

    operator: str
    epoch: int
    generation: int
    at_ms: int | None
    subtasks: int
    by_source: dict[str, int]
    local_bytes: int
    durable_bytes: int
    max_seconds: float
    slowest: list[RestoreFigures]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a job's checkpoints.

    Attributes:
        checkpoints: the newest first; those that failed stand where they happened.
        restores: of the same epochs, the newest first.
        next_before: give it as ``before_epoch`` to read on; None: there is nothing older.
        newest_epoch: the newest complete one in the log; None: there is none.
        generation: of the newest record.
        problems: what does not read; it keeps nothing else from being read.
    """

    job: str
    uri: str
    mode: JobMode
    generation: int
    newest_epoch: int | None
    checkpoints: list[CheckpointFigures]
    restores: list[RestoreSummary]
    next_before: int | None = None
    problems: list[str] = []
