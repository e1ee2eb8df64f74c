"""Progress events: what each epoch cost, per operator and subtask.

Spark sees a stateless query and shows nothing of the state, so this is where it is shown. Each
event is one JSON object on the logger ``statebackend.progress`` (level INFO), and the newest epochs
are kept for ``StateBackend.progress()``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from snapshot.protocol.messages import AckRequest, BaseDone, BeginRequest, RestoreReport, SlicePart
from snapshot.protocol.operators import CommitWork
from statebackend.threads import THREADS, Threads

__all__ = [
    "BaseProgress",
    "CheckpointProgress",
    "EpochProgress",
    "ProgressBook",
    "RebalanceProgress",
    "RescaleProgress",
    "SubtaskProgress",
    "tell",
]

_log = logging.getLogger("statebackend.progress")
_EPOCHS_KEPT: Final = 64
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


class CheckpointProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What ``StateBackend.progress()`` returns: the newest events, the oldest first.

    Attributes:
        job: the job's name.
        epoch: the one that runs; None before the first.
        durable_epoch: the newest that is durable.
        epochs: of each operator, when its record is durable.
        subtasks: of each subtask, when its snapshot was taken in.
        bases: full states that were uploaded in the background.
        rebalances: how often subtasks were spread anew since the query was started.
        last_rebalance: the newest of these.
    """

    job: str
    epoch: int | None
    durable_epoch: int | None
    epochs: list[EpochProgress]
    subtasks: list[SubtaskProgress]
    bases: list[BaseProgress]
    rebalances: int = 0
    last_rebalance: RebalanceProgress | None = None


class ProgressBook:
    """Collects events; thread-safe. Times are the caller's monotonic seconds."""

    def __init__(self, job: str = "", threads: Threads = THREADS) -> None:
        self._job = job
        self._lock = threads.lock()
        self._began_s: dict[tuple[str, int], float] = {}
        self._subtasks: dict[tuple[str, int], dict[int, SubtaskProgress]] = {}
        self._epochs: list[EpochProgress] = []
        self._bases: list[BaseProgress] = []
        self._rebalances = 0
        self._last_rebalance: RebalanceProgress | None = None

    def begun(self, request: BeginRequest, now_s: float) -> None:
        """An attempt was admitted."""
        key = (request.operator, request.epoch)
        with self._lock:
            self._began_s.setdefault(key, now_s)
            for old in [k for k in self._began_s if k[1] < request.epoch - _EPOCHS_KEPT]:
                del self._began_s[old]
                self._subtasks.pop(old, None)

    def acked(self, ack: AckRequest, now_s: float) -> None:
        """A snapshot was taken in."""
        key = (ack.operator, ack.epoch)
        with self._lock:
            event = SubtaskProgress(
                job=self._job,
                operator=ack.operator,
                epoch=ack.epoch,
                subtask=ack.subtask,
                attempt=ack.attempt,
                delta_bytes=ack.delta.size_bytes,
                delta_rows=ack.delta.rows,
                inline=not ack.delta.name,
                base_bytes=ack.base.size_bytes if ack.base else 0,
                timings_ms=ack.timings_ms,
                figures=ack.figures,
                requests=ack.requests,
                since_begin_ms=_ms(now_s - self._began_s.get(key, now_s)),
                restore=ack.restore,
            )
            self._subtasks.setdefault(key, {})[ack.subtask] = event
        _say(event)

    def committed(
        self, work: CommitWork, sequence: int, started_s: float, ended_s: float
    ) -> EpochProgress:
        """A record is durable."""
        key = (work.operator, work.epoch)
        deltas = [ack.delta for ack in work.acks.values()]
        with self._lock:
            event = EpochProgress(
                job=self._job,
                operator=work.operator,
                epoch=work.epoch,
                sequence=sequence,
                record_bytes=sum(len(body or b"") for body in work.bodies),
                subtasks=len(work.acks),
                acks_ms=_ms(started_s - self._began_s.get(key, started_s)),
                commit_ms=_ms(ended_s - started_s),
                delta_bytes=_total(deltas),
                delta_rows=sum(part.rows for part in deltas),
                bases=sum(entry.kind in ("base", "files") for entry in work.manifest.slices),
                requests=_summed(ack.requests for ack in work.acks.values()),
                late_rows=_figure(work, "late_rows"),
                timers_fired=_figure(work, "timers_fired"),
                watermark_ms=work.manifest.watermark_ms,
            )
            self._epochs = [*self._epochs[-_EPOCHS_KEPT:], event]
        _say(event)
        return event

    def base_done(self, done: BaseDone) -> None:
        """A base was uploaded."""
        event = BaseProgress(
            job=self._job,
            operator=done.operator,
            subtask=done.subtask,
            epoch=done.epoch,
            kind=done.kind,
            state_bytes=done.state_bytes,
            uploaded_bytes=done.uploaded_bytes,
            seconds=done.seconds,
            requests=done.requests,
        )
        with self._lock:
            self._bases = [*self._bases[-_EPOCHS_KEPT:], event]
        _say(event)

    def rebalanced(self, event: RebalanceProgress) -> None:
        """Subtasks were placed anew."""
        with self._lock:
            self._rebalances += 1
            self._last_rebalance = event
        _say(event)

    def summary(self, epoch: int | None) -> CheckpointProgress:
        """Everything that is kept; ``epoch`` is the one that runs."""
        with self._lock:
            ordered = sorted(self._subtasks.items(), key=lambda item: item[0][1])
            return CheckpointProgress(
                job=self._job,
                epoch=epoch,
                durable_epoch=max((e.epoch for e in self._epochs), default=None),
                epochs=list(self._epochs),
                subtasks=[one for _, by in ordered for _, one in sorted(by.items())],
                bases=list(self._bases),
                rebalances=self._rebalances,
                last_rebalance=self._last_rebalance,
            )


def tell(event: RescaleProgress) -> None:
    """Log an event that outlives a run, and so is in no run's book."""
    _say(event)


def _say(event: msgspec.Struct) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", msgspec.json.encode(event).decode())


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _figure(work: CommitWork, name: str) -> int:
    return sum(ack.figures.get(name, 0) for ack in work.acks.values())


def _total(parts: list[SlicePart]) -> int:
    return sum(part.size_bytes for part in parts)


def _summed(all_counts: Iterable[Counts]) -> Counts:
    total: Counts = {}
    for counts in all_counts:
        for verb, (requests, size_bytes) in counts.items():
            before = total.get(verb, (0, 0))
            total[verb] = (before[0] + requests, before[1] + size_bytes)
    return total
