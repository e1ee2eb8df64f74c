"""The jobs that are killed: every kind of operator, each with a truth in plain Python.

Some are those that drills bring along. What any of them puts out does not depend on how the input
is cut into batches, nor on the clock.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recovery.drill.jobs import batch_sink as sink
from recovery.drill.jobs.bundled_jobs import (
    BUNDLED,
    DELAY_MS,
    WINDOW_MS,
    feed_rows,
    feed_timed_rows,
    running_totals_truth,
    timers_truth,
)
from recovery.drill.jobs.committed_epochs import committed_epochs
from recovery.drill.jobs.drill_job import DrillJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from statebackend.backend import StateBackend
    from statebackend.continuous.job.streams import ContinuousStream

_ROWS = "k bigint, seq bigint, v bigint, file int"
_RULES = "file int, factor bigint"
_AHEAD = 6  # by so many files a rule comes before the rows that it is for


def stream(spark: SparkSession, folder: Path, schema: str, name: str = "in") -> DataFrame:
    """One file in each batch."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.json(str(folder / name))


def rows_of(folder: Path, name: str = "in") -> Iterator[dict[str, Any]]:
    """Of all files that were fed."""
    for path in sorted((folder / name).glob("[0-9]*.json")):
        yield from map(json.loads, path.read_text().splitlines())


def write(folder: Path, name: str, number: int, rows: list[dict[str, Any]]) -> None:
    """A file, whole at once, younger than those before it."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    draft = folder / name / f".{number:06}.json"
    draft.write_text("\n".join(map(json.dumps, rows)))
    os.utime(draft, (1_700_000_000 + number, 1_700_000_000 + number))
    draft.replace(folder / name / f"{number:06}.json")


def counted(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Each row in the order of their numbers, with its key's count and sum by then."""
    n: dict[int, int] = defaultdict(int)
    total: dict[int, int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: row["seq"]):
        n[row["k"]] += 1
        total[row["k"]] += row["v"]
        yield row, n[row["k"]], total[row["k"]]


# --- frames of pandas --------------------------------------------------------------------------


def pandas(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    from tests.kills.processors import PandasTotals

    return backend.transform_with_state(
        stream(spark, folder, _ROWS),
        keys="k",
        processor=PandasTotals(),
        output_schema="k bigint, seq bigint, n bigint, total bigint, of_file bigint",
        uid="pandas",
        flavour="pandas",
    )


# --- timers of the clock -----------------------------------------------------------------------


def clock(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    from tests.kills.processors import Settled

    return backend.process(
        stream(spark, folder, _ROWS),
        keys="k",
        processor=Settled(),
        output_schema="k bigint, seq bigint, n bigint, total bigint",
        uid="clock",
        time_mode="processing",
    )


def clock_truth(folder: Path) -> Iterator[tuple[int, ...]]:
    """Of the last two files, what timers had put out by the end: all of it must be right."""
    rows = list(rows_of(folder))
    last = max(row["file"] for row in rows) - 2
    committed = max(committed_epochs(folder / "checkpoint"), default=-1)
    given = {row["seq"] for _, row in sink.rows_in(folder / "out", committed)}
    for row, n, total in counted(rows):
        if row["file"] <= last or row["seq"] in given:
            yield row["k"], row["seq"], n, total


# --- aggregates of windows ---------------------------------------------------------------------


def windowed(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    from pyspark.sql import functions as F

    from statebackend import tumbling

    sums = backend.aggregate(
        stream(spark, folder, "k bigint, v bigint, at timestamp"),
        keys="k",
        aggregations={"n": "count", "total": ("sum", "v")},
        uid="windowed",
        window=tumbling(f"{WINDOW_MS} milliseconds"),
        event_time="at",
        watermark_delay=f"{DELAY_MS} milliseconds",
        emit="closed",
    )
    end_ms = F.unix_millis("window_end").alias("end_ms")
    return sums.select("k", end_ms, "n", "total")


# --- two streams with one state ----------------------------------------------------------------


def feed_pairs(folder: Path, number: int, seed: int) -> None:
    for side in ("left", "right"):
        rng = random.Random(f"{seed}:{number}:{side}")
        rows = [
            {"k": rng.randrange(30), "seq": number * 150 + i, "v": rng.randrange(1000)}
            for i in range(150)
        ]
        rng.shuffle(rows)
        write(folder, side, number, rows)


def pairs(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    from tests.kills.processors import Pairs

    schema = "k bigint, seq bigint, v bigint"
    left, right = (stream(spark, folder, schema, side) for side in ("left", "right"))
    return backend.connect(
        left,
        right,
        keys="k",
        processor=Pairs(),
        output_schema="k bigint, seq bigint, side int, n bigint, total bigint",
        uid="pairs",
    )


def pairs_truth(folder: Path) -> Iterator[tuple[int, ...]]:
    for number, side in enumerate(("left", "right")):
        for row, n, total in counted(rows_of(folder, side)):
            yield row["k"], row["seq"], number, n, total


# --- rules for all -----------------------------------------------------------------------------


def feed_ruled(folder: Path, number: int, seed: int) -> None:
    """Rows, and before them the rule of a file that comes later."""
    _feed_rule(folder, number, seed)
    feed_rows(folder, number, seed)


def _feed_rule(folder: Path, number: int, seed: int) -> None:
    rules = range(_AHEAD + 1) if not number else [number + _AHEAD]
    told = [{"file": file, "factor": _factor(seed, file)} for file in rules]
    write(folder, "rules", number, told)


def _factor(seed: int, file: int) -> int:
    return random.Random(f"{seed}:{file}:rule").randrange(2, 1000)


def ruled(spark: SparkSession, backend: StateBackend, folder: Path) -> DataFrame:
    from tests.kills.processors import RuledRows

    return backend.connect_broadcast(
        stream(spark, folder, _ROWS),
        stream(spark, folder, _RULES, "rules"),
        keys="k",
        processor=RuledRows(),
        output_schema="k bigint, seq bigint, n bigint, total bigint",
        uid="ruled",
    )


def _ruled_rows(folder: Path) -> list[dict[str, Any]]:
    factors = {rule["file"]: rule["factor"] for rule in rows_of(folder, "rules")}
    return [row | {"v": row["v"] * factors[row["file"]]} for row in rows_of(folder)]


def ruled_truth(folder: Path) -> Iterator[tuple[int, ...]]:
    for row, n, total in counted(_ruled_rows(folder)):
        yield row["k"], row["seq"], n, total


def continuous_ruled(spark: SparkSession, backend: StateBackend, folder: Path) -> ContinuousStream:
    from statebackend.continuous.sources.file_source import FileSource
    from tests.kills.processors import RuledAtTheEnd

    sources = []
    for name, schema in (("in", f"{_ROWS}, at timestamp"), ("rules", _RULES)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        timed = {"event_time": "at", "watermark_delay": "1 hour"} if name == "in" else {}
        source = FileSource(folder / name, schema=schema, format="json", follow=True, **timed)
        sources.append(backend.continuous(source, name=name))
    rows, rules = sources
    made: ContinuousStream = (
        rows.key_by("k")
        .connect_broadcast(rules)
        .process(
            RuledAtTheEnd(),
            uid="ruled",
            output_schema="k bigint, seq bigint, value bigint",
            time_mode="event",
            event_time="at",
        )
    )
    return made


def feed_timed_ruled(folder: Path, number: int, seed: int) -> None:
    """As :func:`feed_ruled`; all rows are of one moment, so that none is late."""
    _feed_rule(folder, number, seed)
    rng = random.Random(f"{seed}:{number}")
    rows = [
        {
            "k": rng.randrange(40),
            "seq": number * 300 + i + 1,  # 0 and less are the last rows of keys
            "v": rng.randrange(1000),
            "file": number,
            "at": "2026-01-01T00:00:00Z",
        }
        for i in range(300)
    ]
    write(folder, "in", number, rows)


def continuous_ruled_truth(folder: Path) -> Iterator[tuple[int, ...]]:
    n: dict[int, int] = defaultdict(int)
    total: dict[int, int] = defaultdict(int)
    for row in _ruled_rows(folder):
        n[row["k"]] += 1
        total[row["k"]] += row["v"]
        yield row["k"], row["seq"], row["v"]
    for k in n:
        yield k, -n[k], total[k]


JOBS: dict[str, DrillJob] = {
    "rows": BUNDLED["running-totals"],
    "pandas": DrillJob(name="pandas", build=pandas, truth=running_totals_truth, feed=feed_rows),
    "event timers": BUNDLED["timers"],
    "clock timers": DrillJob(name="clock", build=clock, truth=clock_truth, feed=feed_rows),
    "aggregate": BUNDLED["vectorised"],
    "windows": DrillJob(name="windowed", build=windowed, truth=timers_truth, feed=feed_timed_rows),
    "connect": DrillJob(name="pairs", build=pairs, truth=pairs_truth, feed=feed_pairs),
    "broadcast": DrillJob(name="ruled", build=ruled, truth=ruled_truth, feed=feed_ruled),
    "continuous windows": BUNDLED["continuous-windows"],
    "continuous broadcast": DrillJob(
        name="continuous-ruled",
        build=continuous_ruled,
        truth=continuous_ruled_truth,
        feed=feed_timed_ruled,
        inputs=24,
        kind="continuous",
    ),
}
