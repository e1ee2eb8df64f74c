"""A driver of its own: the reference's windowed sums at parallelism 4, in worker processes.

The source fails once, after a third of its elements and two complete checkpoints; before and after
that, workers are killed at random moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import SparkSession

from recovery.decide.restart_strategy import FixedDelay
from recovery.drill.cluster.local_cluster import SHORT_LIVED
from statebackend import system
from statebackend.backend import StateBackend
from statebackend.continuous.sinks.file_sink import FileSink
from tests.continuous.runtime import conformance

KILLS = 3


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("part-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def main(master: str, root: Path, seed: int) -> None:
    register_pickle_by_value(conformance)
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .config("spark.executor.extraJavaOptions", SHORT_LIVED)
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    backend = StateBackend(
        spark,
        uri=f"file://{root}/state",
        job="conformance",
        local_dir=str(root / "local"),
        settings={"inline_limit_bytes": 16},
    )
    source = conformance.FailingOnce(root, rows_per_s=20_000)
    sums = (
        backend.continuous(source, name="elements")
        .key_by("key")
        .process(
            conformance.Sums(),
            uid="sums",
            output_schema=conformance.OUTPUT,
            time_mode="event",
            event_time="at",
        )
    )
    query = sums.sink(FileSink(root / "out")).start(
        parallelism=4, checkpoint_interval=0.5, restart=FixedDelay(20, 0.2)
    )
    drawn = random.Random(seed)
    kills, next_s = 0, system.monotonic_s()
    while not query.await_termination(0.05):
        now_s = system.monotonic_s()
        if (query.epoch or 0) >= 1:
            (root / "may-fail").touch()
        if not query.is_running or (query.epoch or 0) < 1:
            next_s = now_s + drawn.uniform(0.5, 4.0)
        elif now_s > next_s and kills < KILLS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(drawn.choice(query.slots()).pid, signal.SIGKILL)
                kills += 1
    assert (root / "failed").exists()
    assert kills
    assert query.restarts >= 2, query.restarts
    conformance.exact(rows_of(root / "out"))
    spark.stop()
    print(f"exact after {query.restarts} restarts")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
