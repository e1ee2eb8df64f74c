"""A driver of its own: a continuous job on two executor processes, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import SparkSession

from recovery.decide.restart_strategy import FixedDelay
from recovery.drill.cluster.local_cluster import SHORT_LIVED
from statebackend.backend import StateBackend
from statebackend.continuous.sinks.file_sink import FileSink
from tests.continuous.runtime import jobs
from tests.continuous.runtime.world import soon

ROWS = 6_000


def parent(pid: int) -> int:
    return int(subprocess.check_output(["ps", "-o", "ppid=", "-p", str(pid)]))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def main(master: str, root: Path) -> None:
    register_pickle_by_value(jobs)
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
        spark, uri=f"file://{root}/state", job="cluster", local_dir=str(root / "local")
    )
    go_on = root / "go-on"
    clock = jobs.HeldClock(go_on, 2.0)  # the kill must come before the end
    source = jobs.Numbers(
        ROWS, rows_per_s=800, clock=clock, event_time="at", watermark_delay="5 ms"
    )
    keyed = backend.continuous(source, name="numbers").key_by("key")
    keyed.process(
        jobs.Windows(500),
        uid="windows",
        output_schema="key BIGINT, start BIGINT, n BIGINT, total BIGINT",
        time_mode="event",
        event_time="at",
    ).sink(FileSink(root / "windows"))
    counted = keyed.process(jobs.Counting(), uid="count", output_schema=jobs.OUTPUT)
    query = counted.sink(FileSink(root / "counts")).start(
        parallelism=2, checkpoint_interval=0.5, restart=FixedDelay(5, 1.0)
    )
    soon(lambda: query.is_running and (query.epoch or 0) >= 1, 180.0)
    executors = {slot.executor for slot in query.slots()}
    assert len(executors) == 2, executors
    # The worker's parent is Spark's daemon, and the daemon's is the executor.
    os.kill(parent(parent(query.slots()[1].pid)), signal.SIGKILL)
    go_on.touch()
    assert query.await_termination(240.0)
    assert query.restarts >= 1
    jobs.check_counts(rows_of(root / "counts"), jobs.truth(ROWS))
    found = [tuple(row.values()) for row in rows_of(root / "windows")]
    assert len(found) == len(set(found))
    assert set(found) == jobs.windows_truth(ROWS, 500)
    spark.stop()
    print("exact")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
