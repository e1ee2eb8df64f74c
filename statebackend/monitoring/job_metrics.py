"""The metrics of one job, made of its progress events and of what its driver knows.

An event costs the epoch an append to a list. It is counted when somebody asks for the metrics.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from snapshot.barriers.pending_checkpoints import Reason
from snapshot.log.progress_events import (
    BaseProgress,
    ContinuousCheckpoint,
    EpochProgress,
    ProgressEvent,
    RebalanceProgress,
    SubtaskProgress,
)
from snapshot.protocol.running_job import RunningJob
from statebackend.errors import FencedError
from statebackend.monitoring.metric_values import Labels, MetricValues, Values
from statebackend.monitoring.observed_job import ObservedJob
from statebackend.runtime.driver.session import RunSession

__all__ = ["JobMetrics"]

_EVENTS_MAX: Final = 20_000  # more are counted at once: nobody asks
_SUMS: Final = {  # of the subtasks' figures
    "rows": "rows_total",
    "removed_rows": "removed_rows_total",
    "expired_entries": "expired_entries_total",
    "spilled_bytes": "input_spilled_bytes_total",
    "overlay_spilled_bytes": "state_spilled_bytes_total",
    "lookups": "state_lookups_total",
}
_STATE: Final = {
    "estimated_rows": "state_rows",
    "stored_bytes": "state_bytes",
    "memory_bytes": "state_memory_bytes",
}
_CHECKPOINT_SUMS: Final = {
    "alignment_bytes": "alignment_bytes_total",
    "inflight_bytes": "inflight_bytes_total",
    "unaligned": "unaligned_subtasks_total",
}
_CHECKPOINT_PHASES: Final = ("start_delay", "alignment", "sync", "async")
# What has not happened yet is 0: Prometheus counts the rise of a series, and not its first value.
_OUTCOMES: Final = ("complete", *(reason.value for reason in Reason))
_SOURCES: Final = ("local", "mixed", "durable", "empty")
_BASE_KINDS: Final = ("base", "files")
_Epoch = tuple[str, int]


class JobMetrics:
    """Thread-safe. It listens to the job's events from when it is made.

    Args:
        observed: called with each duration: the metric's name, seconds, labels.
    """

    def __init__(
        self,
        job: ObservedJob,
        observed: Callable[[str, float, Labels], None] | None = None,
    ) -> None:
        self._observed_job, self._system = job, job.job.system
        self._values = MetricValues(observed) if observed is not None else MetricValues()
        self._events: deque[tuple[int, ProgressEvent]] = deque()
        self._acked: dict[_Epoch, dict[int, SubtaskProgress]] = {}  # not durable yet
        self._watermark_ms: int | None = None
        self._lock = self._system.threads.lock()
        self._values.set("last_commit_timestamp_seconds", self._system.wall_ms() / 1000)
        self._values.add("rebalances_total", 0)
        self._operators: set[str] = set()
        for outcome in _OUTCOMES if job.continuous else ():
            self._values.add("checkpoints_total", 0, outcome)
        self._end = job.progress.listen(self._heard)

    @property
    def job(self) -> str:
        """The job's name."""
        return self._observed_job.job.name

    def end(self) -> None:
        """Listen no more."""
        self._end()

    def _heard(self, event: ProgressEvent) -> None:
        self._events.append((self._system.wall_ms(), event))
        if len(self._events) > _EVENTS_MAX:
            self.count()

    def count(self) -> None:
        """Take in the events that have come."""
        with self._lock:
            while self._events:
                self._take(*self._events.popleft())

    def values(self) -> dict[str, Values]:
        """All values as they are now, by the metric's name and its labels without the job."""
        self.count()
        with self._lock:
            self._look()
            return self._values.copied()

    # --- events --------------------------------------------------------------------------------

    def _take(self, at_ms: int, event: ProgressEvent) -> None:
        match event:
            case SubtaskProgress():
                self._subtask(event)
            case EpochProgress():
                self._epoch(event, at_ms)
            case BaseProgress():
                self._base(event)
            case ContinuousCheckpoint():
                self._checkpoint(event)
            case RebalanceProgress():
                self._values.add("rebalances_total", 1)

    def _subtask(self, event: SubtaskProgress) -> None:
        """An attempt has acked: it was restored, and has asked the store, whatever comes of it."""
        values, operator = self._values, event.operator
        self._acked.setdefault((operator, event.epoch), {})[event.subtask] = event
        if operator not in self._operators and "stored_bytes" in event.figures:
            self._operators.add(operator)
            self._begin(operator)
        if (restore := event.restore) is not None:
            values.add("restores_total", 1, operator, restore.source)
            values.observe("restore_duration_seconds", restore.seconds, operator, restore.source)
            values.add("restored_bytes_total", restore.local_bytes, operator, "local")
            values.add("restored_bytes_total", restore.durable_bytes, operator, "durable")
        self._requests(event.requests, event.request_errors)
        values.add("store_retries_total", event.figures.get("retries", 0), "workers")

    def _begin(self, operator: str) -> None:
        """An operator with state is heard of for the first time."""
        for source in _SOURCES:
            self._values.add("restores_total", 0, operator, source)
        for kind in _BASE_KINDS:
            self._values.add("bases_uploaded_total", 0, operator, kind)

    def _requests(self, requests: dict[str, tuple[int, int]], errors: dict[str, int]) -> None:
        for verb, (count, size_bytes) in requests.items():
            self._values.add("store_requests_total", count, "workers", verb)
            self._values.add("store_transferred_bytes_total", size_bytes, "workers", verb)
            self._values.add("store_request_errors_total", errors.get(verb, 0), "workers", verb)

    def _epoch(self, event: EpochProgress, at_ms: int) -> None:
        """An operator's epoch is durable: its subtasks' figures count."""
        values, operator = self._values, event.operator
        took_s = (event.acks_ms + event.commit_ms) / 1000
        values.observe("epoch_duration_seconds", took_s, operator)
        values.observe("commit_duration_seconds", event.commit_ms / 1000, operator)
        values.set("durable_epoch", event.epoch, operator)
        values.set("last_commit_timestamp_seconds", at_ms / 1000)
        self._watermark_ms = event.watermark_ms
        for name, count in (
            ("late_rows_total", event.late_rows),
            ("timers_fired_total", event.timers_fired),
            ("changed_rows_total", event.delta_rows),
            ("changed_bytes_total", event.delta_bytes),
            ("record_bytes_total", event.record_bytes),
            ("bases_recorded_total", event.bases),
        ):
            values.add(name, count, operator)
        subtasks = list(self._acked.pop((operator, event.epoch), {}).values())
        for key in [key for key in self._acked if key[0] == operator and key[1] < event.epoch]:
            del self._acked[key]
        if subtasks:
            self._subtasks_of(operator, subtasks)

    def _subtasks_of(self, operator: str, subtasks: Sequence[SubtaskProgress]) -> None:
        values, figures = self._values, [one.figures for one in subtasks]

        def total(name: str) -> int:
            return sum(one.get(name, 0) for one in figures)

        for name, metric in _SUMS.items():
            values.add(metric, total(name), operator)
        hits = total("lookups") - total("base_lookups")
        values.add("state_lookup_hits_total", max(0, hits), operator)
        for one in subtasks:
            for phase, took_ms in one.timings_ms.items():
                values.observe("subtask_phase_duration_seconds", took_ms / 1000, operator, phase)
        durations_s = [sum(one.timings_ms.values()) / 1000 for one in subtasks]
        self._spread("subtask_duration_seconds", operator, durations_s)
        self._spread("subtask_rows", operator, [one.get("rows", 0) for one in figures])
        if any("stored_bytes" in one for one in figures):  # not of sources and sinks
            for name, metric in _STATE.items():
                values.set(metric, total(name), operator)
            sizes = [one.get("stored_bytes", 0) for one in figures]
            self._spread("subtask_state_bytes", operator, sizes)
            most = max(one.get("level0_files", 0) for one in figures)
            values.set("level0_files", most, operator)
            values.set("open_stores", max(one.get("open_stores", 0) for one in figures))
        timers_ms = [one.next_timer_ms for one in subtasks if one.next_timer_ms is not None]
        at_s = min(timers_ms) / 1000 if timers_ms else None
        values.set("next_timer_timestamp_seconds", at_s, operator)

    def _spread(self, metric: str, operator: str, numbers: Sequence[float]) -> None:
        ordered = sorted(numbers)
        for stat, place in (("min", 0), ("p50", len(ordered) // 2), ("max", -1)):
            self._values.set(metric, ordered[place], operator, stat)

    def _base(self, event: BaseProgress) -> None:
        values, operator = self._values, event.operator
        values.add("bases_uploaded_total", 1, operator, event.kind)
        values.add("base_uploaded_bytes_total", event.uploaded_bytes, operator)
        values.observe("base_upload_duration_seconds", event.seconds, operator)
        self._requests(event.requests, {})

    def _checkpoint(self, event: ContinuousCheckpoint) -> None:
        values = self._values
        values.add("checkpoints_total", 1, event.aborted or "complete")
        if event.aborted:
            return
        values.observe("checkpoint_duration_seconds", event.took_ms / 1000)
        for name, figures in event.subtasks.items():
            operator = name.rpartition("/")[0]
            for phase in _CHECKPOINT_PHASES:
                if (took_ms := figures.get(f"{phase}_ms")) is not None:
                    metric = "checkpoint_phase_duration_seconds"
                    values.observe(metric, took_ms / 1000, operator, phase)
            for figure, metric in _CHECKPOINT_SUMS.items():
                values.add(metric, figures.get(figure, 0), operator)

    # --- what the driver knows -----------------------------------------------------------------

    def _look(self) -> None:
        job, values = self._observed_job, self._values
        values.set("job_running", int(self._is_active()))
        values.set("restarts_total", job.restarts())
        now_s = self._system.monotonic_s()
        since_s = job.progress.commit_since_s
        values.set("commit_waiting_seconds", 0.0 if since_s is None else now_s - since_s)
        at_ms = self._watermark_ms
        values.set("watermark_timestamp_seconds", None if at_ms is None else at_ms / 1000)
        lag_s = None if at_ms is None else (self._system.wall_ms() - at_ms) / 1000
        values.set("watermark_lag_seconds", lag_s)
        store = job.job.store
        for verb, count in store.counts.items():
            values.set("store_requests_total", count.requests, "driver", verb)
            values.set("store_transferred_bytes_total", count.size_bytes, "driver", verb)
            values.set("store_request_errors_total", count.errors, "driver", verb)
        values.set("store_retries_total", store.retries, "driver")
        values.set("store_unreachable_seconds", store.unreachable_s)
        self._look_at(job.session())

    def _is_active(self) -> bool:
        with contextlib.suppress(Exception):  # Spark is gone
            return self._observed_job.is_active()
        return False

    def _look_at(self, session: RunSession | None) -> None:
        if session is None:
            return
        values, failure = self._values, session.failure
        fenced = isinstance(failure, FencedError)
        values.set("job_fenced", int(fenced))
        values.set("job_failed", int(failure is not None and not fenced))
        values.set("epoch", session.epoch)
        seen = session.looked_at(lambda run: (run.generation, _leases(run)))
        if seen is not None:
            values.set("generation", seen[0])
            values.set("base_upload_leases", seen[1])


def _leases(run: RunningJob) -> int:
    return sum(len(one.bases.grants) for one in run.operators.values())
