"""A job whose driver does nothing, for its observers."""

from __future__ import annotations

from pathlib import Path

from snapshot.log.progress_book import ProgressBook
from snapshot.log.progress_events import EpochProgress, SubtaskProgress
from snapshot.protocol.messages import RestoreReport
from statebackend.monitoring.observed_job import ObservedJob
from statebackend.runtime.driver.job import Job
from statebackend.settings import Settings


def watched_job(folder: Path, name: str = "j") -> ObservedJob:
    """It has no session, as a continuous job between two runs."""
    return ObservedJob(
        job=Job(folder.as_uri(), name),
        settings=Settings.resolve({}, lambda key: None),
        progress=ProgressBook(name),
        session=lambda: None,
        is_active=lambda: True,
        restarts=lambda: 2,
    )


def restored(source: str) -> RestoreReport:
    return RestoreReport(
        operator="count",
        subtask=0,
        epoch=3,
        source=source,
        local_bytes=10,
        durable_bytes=20,
        durable_reads=1,
        seconds=0.3,
        host="h",
        executor="1",
    )


def acked(subtask: int, *, rows: int = 10, restore: RestoreReport | None = None) -> SubtaskProgress:
    figures = {"rows": rows, "removed_rows": 1, "lookups": 10, "base_lookups": 4, "retries": 2}
    figures |= {"stored_bytes": 100, "estimated_rows": 7, "memory_bytes": 50, "level0_files": 3}
    return SubtaskProgress(
        job="j",
        operator="count",
        epoch=3,
        subtask=subtask,
        attempt=1,
        delta_bytes=40,
        delta_rows=5,
        inline=True,
        base_bytes=0,
        timings_ms={"read": 10.0, "process": 30.0, "snapshot": 5.0},
        figures={**figures, "open_stores": 1},
        requests={"get": (4, 400)},
        request_errors={"get": 1},
        next_timer_ms=60_000 + subtask,
        since_begin_ms=45.0,
        restore=restore,
    )


def durable(*, subtasks: int, watermark_ms: int | None = 5_000) -> EpochProgress:
    return EpochProgress(
        job="j",
        operator="count",
        epoch=3,
        sequence=4,
        record_bytes=80,
        subtasks=subtasks,
        acks_ms=45.0,
        commit_ms=5.0,
        delta_bytes=40 * subtasks,
        delta_rows=5 * subtasks,
        bases=1,
        requests={"get": (4 * subtasks, 400 * subtasks)},
        late_rows=3,
        timers_fired=2,
        watermark_ms=watermark_ms,
    )
