"""The jobs that drills run when they are given none: small, and exact in every respect.

What each of them puts out does not depend on how Spark cuts the input into batches, so that one
truth, made in plain Python from the input files, holds for every order of faults.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.input_files import feed_ordered_rows, feed_rows, feed_timed_rows

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from statebackend.backend import StateBackend
    from statebackend.continuous.job.streams import ContinuousStream

__all__ = ["BUNDLED", "has_timers", "kind_of"]

WINDOW_MS: Final = 10_000
DELAY_MS: Final = 30_000
SLIDE_MS: Final = 5_000
PATIENCE_MS: Final = 30_000
_SCHEMA: Final = "k bigint, seq bigint, v bigint, file int"


# --- input ----------------------------------------------------------------------------------------


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((folder / "in").glob("[0-9]*.json")):
        yield from map(json.loads, path.read_text().splitlines())


def _stream(spark: SparkSession, folder: Path, schema: str) -> DataFrame:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.json(str(folder / "in"))


# --- running totals: the row API, a value and a map -----------------------------------------------


def running_totals(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    """For each row its key's count and sum so far, and how many of the key's rows its file had."""
    from recovery.drill.jobs.bundled_processors import RunningTotals

    return backend.transform_with_state(
        _stream(spark, folder, _SCHEMA),
        keys="k",
        processor=RunningTotals(),
        output_schema="k bigint, seq bigint, n bigint, total bigint, of_file bigint",
        uid="running-totals",
    )


def running_totals_truth(folder: Path) -> Iterable[tuple[int, ...]]:
    """The same in plain Python."""
    n: dict[int, int] = defaultdict(int)
    total: dict[int, int] = defaultdict(int)
    of_file: dict[tuple[int, int], int] = defaultdict(int)
    for row in sorted(_rows(folder), key=lambda row: row["seq"]):
        k = row["k"]
        n[k] += 1
        total[k] += row["v"]
        of_file[k, row["file"]] += 1
        yield k, row["seq"], n[k], total[k], of_file[k, row["file"]]


# --- timers: windows in event time ----------------------------------------------------------------


def timers(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    """For each key and window of ten seconds its count and sum, once the watermark closed it."""
    from recovery.drill.jobs.bundled_processors import Windows

    return backend.process(
        _stream(spark, folder, "k bigint, v bigint, at timestamp"),
        keys="k",
        processor=Windows(WINDOW_MS),
        output_schema="k bigint, end_ms bigint, n bigint, total bigint",
        uid="windows",
        time_mode="event",
        event_time="at",
        watermark_delay=f"{DELAY_MS} milliseconds",
    )


def timers_truth(folder: Path) -> Iterable[tuple[int, ...]]:
    """The windows that the last watermark has closed, late rows left out."""
    windows: dict[tuple[int, int], list[int]] = defaultdict(list)
    newest_ms = 0
    for row in _rows(folder):
        if not row["late"]:
            newest_ms = max(newest_ms, row["at_ms"])
            end_ms = row["at_ms"] // WINDOW_MS * WINDOW_MS + WINDOW_MS
            windows[row["k"], end_ms].append(row["v"])
    for (k, end_ms), values in windows.items():
        if end_ms <= newest_ms - DELAY_MS:
            yield k, end_ms, len(values), sum(values)


# --- vectorised: state by the column --------------------------------------------------------------


def vectorised(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    """For each key its count, sum and largest value, whenever a batch has changed them."""
    return backend.aggregate(
        _stream(spark, folder, _SCHEMA),
        keys="k",
        aggregations={"n": "count", "total": ("sum", "v"), "largest": ("max", "v")},
        uid="vectorised",
    )


def vectorised_truth(folder: Path) -> Iterable[tuple[int, ...]]:
    """What each key's last update must be."""
    values: dict[int, list[int]] = defaultdict(list)
    for row in _rows(folder):
        values[row["k"]].append(row["v"])
    for k, of_key in values.items():
        yield k, len(of_key), sum(of_key), max(of_key)


# --- continuous windows: without micro-batches ----------------------------------------------------


def continuous_windows(
    spark: SparkSession, backend: StateBackend, folder: Path
) -> ContinuousStream:
    """For each key and window of five seconds its count and sum, in a continuous job."""
    from recovery.drill.jobs.bundled_processors import Windows
    from statebackend.continuous.sources.file_source import FileSource

    rows = FileSource(
        folder / "in",
        schema="k bigint, v bigint, at timestamp",
        format="json",
        follow=True,
        event_time="at",
        watermark_delay=f"{PATIENCE_MS} milliseconds",
    )
    stream: ContinuousStream = (
        backend.continuous(rows, name="rows")
        .key_by("k")
        .process(
            Windows(SLIDE_MS),
            uid="windows",
            output_schema="k bigint, end_ms bigint, n bigint, total bigint",
            time_mode="event",
            event_time="at",
        )
    )
    return stream


def continuous_windows_truth(folder: Path) -> Iterable[tuple[int, ...]]:
    """Every window: the end of the input is the end of time."""
    windows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in _rows(folder):
        end_ms = row["at_ms"] // SLIDE_MS * SLIDE_MS + SLIDE_MS
        windows[row["k"], end_ms].append(row["v"])
    for (k, end_ms), values in windows.items():
        yield k, end_ms, len(values), sum(values)


BUNDLED: Final[dict[str, DrillJob]] = {
    job.name: job
    for job in (
        DrillJob(
            name="running-totals",
            summary="a row of output for each of input; value and map state by transformWithState",
            build=running_totals,
            truth=running_totals_truth,
            feed=feed_rows,
        ),
        DrillJob(
            name="timers",
            summary="windows in event time, closed by timers; late rows are dropped",
            build=timers,
            truth=timers_truth,
            feed=feed_timed_rows,
        ),
        DrillJob(
            name="vectorised",
            summary="count, sum and maximum per key by backend.aggregate",
            build=vectorised,
            truth=vectorised_truth,
            feed=feed_rows,
            keys=("k",),
        ),
        DrillJob(
            name="continuous-windows",
            summary="windows in event time in a job without micro-batches, from files as they come",
            build=continuous_windows,
            truth=continuous_windows_truth,
            feed=feed_ordered_rows,
            inputs=24,
            kind="continuous",
        ),
    )
}


def has_timers(job: DrillJob) -> bool | None:
    """Whether a job sets timers; None: nobody knows."""
    return "windows" in job.name or job.name == "timers" if job.name in BUNDLED else None


def kind_of(job: Any) -> str:
    """The kind of what `run_drill` takes as its job."""
    return str(getattr(BUNDLED.get(job, job) if isinstance(job, str) else job, "kind", "batches"))
