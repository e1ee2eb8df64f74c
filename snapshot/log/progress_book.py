"""The book of a job's progress: what each epoch cost, per operator and subtask.

Spark sees a stateless query and shows nothing of the state, so this is where it is shown. Each
event is one JSON object on the logger ``statebackend.progress`` (level INFO). The newest epochs
are kept for ``StateBackend.progress()``, and listeners are given every event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from snapshot.log.checkpoint_progress import CheckpointProgress
from snapshot.log.figures_book import FiguresBook
from snapshot.log.progress_events import (
    BaseProgress,
    Counts,
    EpochProgress,
    ProgressEvent,
    RebalanceProgress,
    SubtaskProgress,
)
from snapshot.protocol.messages import AckRequest, BaseDone, BeginRequest, SlicePart
from snapshot.protocol.operators import CommitWork
from statebackend.threads import THREADS, Threads

__all__ = ["Listener", "ProgressBook", "tell"]

_log = logging.getLogger("statebackend.progress")
_troubles = logging.getLogger("statebackend.coordinator")  # the other one has JSON alone
_EPOCHS_KEPT: Final = 64
_LOG_KEYS: Final = {"operator": "operator", "epoch": "epoch", "partition_id": "subtask"}
Listener = Callable[[ProgressEvent], None]


class ProgressBook:
    """Collects events; thread-safe. Times are the caller's monotonic seconds.

    Args:
        figures: told the same, for the records: those of the job's earlier runs in this driver.

    Attributes:
        figures: as given.
    """

    def __init__(
        self, job: str = "", threads: Threads = THREADS, figures: FiguresBook | None = None
    ) -> None:
        self._job = job
        self.figures = figures or FiguresBook(threads)
        self._lock = threads.lock()
        self._listeners: tuple[Listener, ...] = ()
        self._began_s: dict[tuple[str, int], float] = {}
        self._committing_s: dict[str, float] = {}  # by operator: since when
        self._subtasks: dict[tuple[str, int], dict[int, SubtaskProgress]] = {}
        self._epochs: list[EpochProgress] = []
        self._bases: list[BaseProgress] = []
        self._rebalances = 0
        self._last_rebalance: RebalanceProgress | None = None

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have a listener called with every event from now on.

        It is called in the thread that the event comes from, and holds up the epoch meanwhile: it
        must not wait. What it raises is logged, and the epoch goes on.

        Returns:
            ends it.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return end

    def publish(self, event: ProgressEvent) -> None:
        """Log an event, and hand it to the listeners."""
        tell(event)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                _troubles.exception("a listener to the progress of job %s failed", self._job)

    def begun(self, request: BeginRequest, now_s: float) -> None:
        """An attempt was admitted."""
        self.figures.begun(request, now_s)
        key = (request.operator, request.epoch)
        with self._lock:
            self._began_s.setdefault(key, now_s)
            for old in [k for k in self._began_s if k[1] < request.epoch - _EPOCHS_KEPT]:
                del self._began_s[old]
                self._subtasks.pop(old, None)

    def acked(self, ack: AckRequest, now_s: float) -> None:
        """A snapshot was taken in."""
        self.figures.acked(ack, now_s)
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
                request_errors=ack.request_errors,
                next_timer_ms=ack.next_timer_ms,
                since_begin_ms=_ms(now_s - self._began_s.get(key, now_s)),
                restore=ack.restore,
            )
            self._subtasks.setdefault(key, {})[ack.subtask] = event
        self.publish(event)

    def commit_begins(self, work: CommitWork, now_s: float) -> None:
        """A record is on its way."""
        with self._lock:
            self._committing_s[work.operator] = now_s

    def commit_failed(self, work: CommitWork) -> None:
        """It is not, and none comes after it in this run."""
        with self._lock:
            self._committing_s.pop(work.operator, None)

    @property
    def commit_since_s(self) -> float | None:
        """When the oldest record that is on its way was begun; None: there is none."""
        with self._lock:
            return min(self._committing_s.values(), default=None)

    def committed(
        self, work: CommitWork, sequence: int, started_s: float, ended_s: float
    ) -> EpochProgress:
        """A record is durable."""
        self.figures.committed(work, sequence, started_s, ended_s)
        key = (work.operator, work.epoch)
        deltas = [ack.delta for ack in work.acks.values()]
        with self._lock:
            self._committing_s.pop(work.operator, None)
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
        self.publish(event)
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
        self.publish(event)

    def rebalanced(self, event: RebalanceProgress) -> None:
        """Subtasks were placed anew."""
        with self._lock:
            self._rebalances += 1
            self._last_rebalance = event
        self.publish(event)

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


def tell(event: ProgressEvent) -> None:
    """Log an event, in the form of Spark's structured logs where a handler asks for that."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", msgspec.json.encode(event).decode(), extra={"context": _context(event)})


def _context(event: ProgressEvent) -> dict[str, str]:
    """What `pyspark.logger` shows beside a message: strings by the names of Spark's log keys."""
    found = {"job": event.job}
    for key, attribute in _LOG_KEYS.items():
        value = getattr(event, attribute, None)
        if value is not None:
            found[key] = str(value)
    return found


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
