"""The table of all metrics: the reference page, both exporters, rules and dashboard go by it.

A label's values are few whatever the parallelism: there is none for the subtask. What differs
between subtasks is a histogram, or the smallest, the middle and the largest value. The job's label
is not called ``job``: Prometheus has that for what it scrapes, and would rename ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["DURATION_BUCKETS_S", "JOB_LABEL", "METRICS", "Metric"]

JOB_LABEL: Final = "job_name"

DURATION_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


@dataclass(frozen=True)
class Metric:
    """One metric, as Prometheus has it.

    Attributes:
        name: without ``statebackend_``. labels: besides `JOB_LABEL`, which all have.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str

    @property
    def full_name(self) -> str:
        """As it is exported."""
        return f"statebackend_{self.name}"


def _counter(name: str, labels: str, text: str) -> Metric:
    return Metric(name, "counter", tuple(labels.split()), text)


def _gauge(name: str, labels: str, text: str) -> Metric:
    return Metric(name, "gauge", tuple(labels.split()), text)


def _histogram(name: str, labels: str, text: str) -> Metric:
    return Metric(name, "histogram", tuple(labels.split()), text)


_JOB: Final = (
    _gauge(
        "job_running",
        "",
        "1 while the query runs, else 0. A continuous job that is about to start again runs",
    ),
    _gauge("job_fenced", "", "1 once another driver has taken over the job, else 0"),
    _gauge(
        "job_failed",
        "",
        "1 once this driver saves nothing more, and not because another one has taken over: for "
        "example after a commit whose outcome is not known; else 0",
    ),
    _gauge("generation", "", "the number of this driver's claim of the job; grows with each start"),
    _gauge("epoch", "", "the epoch that runs"),
    _gauge("durable_epoch", "operator", "the newest durable epoch"),
    _gauge(
        "last_commit_timestamp_seconds",
        "",
        "when a record of the job became durable last, in "
        "seconds since 1970. Before the first one: when this driver started the job",
    ),
    _gauge(
        "commit_waiting_seconds",
        "",
        "age of the oldest unfinished write of a record; 0 if there is none",
    ),
    _counter("restarts_total", "", "how often a continuous job was started again after a failure"),
    _counter("rebalances_total", "", "how often subtasks were moved to other executors"),
)
_EPOCHS: Final = (
    _histogram(
        "epoch_duration_seconds",
        "operator",
        "from the first begin of a subtask to the durable record",
    ),
    _histogram("commit_duration_seconds", "operator", "the time to write a record"),
    _histogram(
        "subtask_phase_duration_seconds",
        "operator phase",
        "the time of each subtask in "
        "each phase of an epoch. In micro-batches: read, restore, process, snapshot, base, "
        "close. In continuous jobs: sync, async",
    ),
    _gauge(
        "subtask_duration_seconds",
        "operator stat",
        "all phases of a subtask in the newest epoch: stat is min, p50 or max over the subtasks",
    ),
    _gauge(
        "subtask_rows",
        "operator stat",
        "input rows of a subtask in the newest epoch: stat is min, p50 or max over the subtasks",
    ),
    _counter("rows_total", "operator", "input rows of durable epochs"),
    _counter("late_rows_total", "operator", "rows that came after the watermark and were dropped"),
    _counter("changed_rows_total", "operator", "entries of state that were written or removed"),
    _counter("removed_rows_total", "operator", "entries of state that were removed"),
    _counter("changed_bytes_total", "operator", "changes of state, as they are stored"),
    _counter("record_bytes_total", "operator", "the subtasks' parts in the records"),
    _counter("timers_fired_total", "operator", "timers that were due, and fired"),
    _gauge(
        "next_timer_timestamp_seconds",
        "operator",
        "the earliest timer that is left, in the operator's own time. Absent if there is none",
    ),
    _counter(
        "expired_entries_total",
        "operator",
        "entries of state that were removed because their time to live had passed",
    ),
    _gauge(
        "watermark_timestamp_seconds",
        "",
        "the watermark of the job, in seconds since 1970. Absent if there is none",
    ),
    _gauge(
        "watermark_lag_seconds",
        "",
        "how far the watermark is behind the driver's clock. Absent if there is none",
    ),
)
_STATE: Final = (
    _gauge(
        "state_rows",
        "operator",
        "entries of state, estimated by RocksDB: an entry that was "
        "written several times since RocksDB merged its files counts several times",
    ),
    _gauge("state_bytes", "operator", "the size of the state on local disk and in write buffers"),
    _gauge(
        "state_memory_bytes",
        "operator",
        "RocksDB's write buffers, indexes and filters. The block cache is not in it",
    ),
    _gauge(
        "subtask_state_bytes",
        "operator stat",
        "the size of a subtask's state: stat is min, p50 or max over the subtasks",
    ),
    _gauge(
        "level0_files",
        "operator",
        "files that a lookup in RocksDB may have to read: the most "
        "of a subtask. At 20 RocksDB slows writes down, at 36 it stops them",
    ),
    _gauge("open_stores", "", "RocksDB stores that one worker has open: the most of a worker"),
    _counter("state_lookups_total", "operator", "entries of state that were looked up"),
    _counter(
        "state_lookup_hits_total",
        "operator",
        "looked-up entries that were found in memory, without a read in RocksDB",
    ),
    _counter("input_spilled_bytes_total", "operator", "input that went through local disk"),
    _counter("state_spilled_bytes_total", "operator", "changes that went through local disk"),
)
_COPIES: Final = (
    _counter(
        "restores_total",
        "operator source",
        "subtasks that got their state back. source: "
        "local (a copy on the host), mixed (a local copy and newer parts from the store), "
        "durable (from the store alone), empty (a new operator)",
    ),
    _histogram("restore_duration_seconds", "operator source", "the time of a restore"),
    _counter(
        "restored_bytes_total",
        "operator source",
        "what restores read. source: local (from local disk) or durable (from the store)",
    ),
    _counter(
        "bases_recorded_total", "operator", "full copies of a subtask's state that records name"
    ),
    _counter(
        "bases_uploaded_total",
        "operator kind",
        "full copies that were uploaded in the "
        "background. kind: base (one object) or files (RocksDB's own)",
    ),
    _counter("base_uploaded_bytes_total", "operator", "what was sent for full copies"),
    _histogram("base_upload_duration_seconds", "operator", "the time of an upload"),
    _gauge("base_upload_leases", "", "uploads that are allowed to run now"),
)
_STORE: Final = (
    _counter(
        "store_requests_total",
        "place verb",
        "requests to the store, failed ones included. "
        "place: driver or workers; verb: put, put_file, create, get, get_chunks, get_range, "
        "get_tail, list or delete",
    ),
    _counter(
        "store_request_errors_total",
        "place verb",
        "requests that failed. That an object is not there is no failure",
    ),
    _counter("store_transferred_bytes_total", "place verb", "what was sent or received"),
    _counter("store_retries_total", "place", "tries of calls to S3, without each call's first"),
    _gauge(
        "store_unreachable_seconds",
        "",
        "seconds since the first request of the driver that the store did not answer; 0 once it "
        "has answered again",
    ),
)
_CHECKPOINTS: Final = (
    _counter(
        "checkpoints_total",
        "outcome",
        "checkpoints of a continuous job that are over. "
        "outcome: complete, or why it was given up: declined (a subtask could not save its part), "
        "expired (it took longer than timeout_s), store (its record could not be written), newer "
        "(a newer barrier came first), earlier (a checkpoint before it was given up), failover "
        "(the job was restarted), stopped (the job has ended)",
    ),
    _histogram(
        "checkpoint_duration_seconds",
        "",
        "complete checkpoints, from the trigger to the commit of the output",
    ),
    _histogram(
        "checkpoint_phase_duration_seconds",
        "operator phase",
        "the time of each subtask in "
        "complete checkpoints. phase: start_delay (from the request to the subtask's first "
        "barrier), alignment (from its first barrier to its last), sync (it stops and takes its "
        "snapshot), async (it saves the snapshot meanwhile, and the sinks their part)",
    ),
    _counter("alignment_bytes_total", "operator", "what subtasks processed while they aligned"),
    _counter("inflight_bytes_total", "operator", "rows in flight that checkpoints hold"),
    _counter("unaligned_subtasks_total", "operator", "subtasks that took an unaligned checkpoint"),
)

METRICS: Final[dict[str, Metric]] = {
    one.name: one for one in (*_JOB, *_EPOCHS, *_STATE, *_COPIES, *_STORE, *_CHECKPOINTS)
}
