"""Jobs of a user's own, with what a drill must find: they are imported by the drill's drivers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recovery.drill.jobs.bundled_jobs import running_totals_truth as all_truth
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.input_files import feed_rows
from statebackend import KeyedProcessor

SCHEMA = "k bigint, seq bigint, v bigint, file int"
_totals: dict[int, tuple[int, int]] = {}  # the bug: state that dies with its process


class Forgetful(KeyedProcessor):
    """Keeps its totals in a global of the Python worker."""

    def process(self, key: Any, rows: Any, ctx: Any) -> Iterator[tuple[int, ...]]:
        n, total = _totals.get(key[0], (0, 0))
        for row in sorted(rows, key=lambda row: row.seq):
            n, total = n + 1, total + row.v
            yield key[0], row.seq, n, total
        _totals[key[0]] = (n, total)


def forgetful(spark: Any, backend: Any, folder: Path) -> Any:
    (folder / "in").mkdir(exist_ok=True)
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(f"{folder}/in")
    return backend.process(
        rows,
        keys="k",
        processor=Forgetful(),
        output_schema="k bigint, seq bigint, n bigint, total bigint",
        uid="forgetful",
    )


def truth(folder: Path) -> Iterator[tuple[int, ...]]:
    return (row[:4] for row in all_truth(folder))  # type: ignore[misc]


FORGETFUL = DrillJob(name="forgetful", build=forgetful, truth=truth, feed=feed_rows, inputs=6)


def broken(spark: Any, backend: Any, folder: Path) -> Any:
    raise ValueError("this job cannot even be built")
