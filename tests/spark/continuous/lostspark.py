"""A driver of its own that loses Spark while its continuous job runs: how the job ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import SparkSession

from recovery.decide.restart_strategy import FixedDelay
from statebackend.backend import StateBackend
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.errors import StateBackendError
from tests.continuous.runtime import jobs


def main(folder: Path, how: str) -> None:
    register_pickle_by_value(jobs)
    builder: Any = SparkSession.builder
    spark = builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())
    backend = StateBackend(
        spark, uri=f"file://{folder}/state", job="lost", local_dir=str(folder / "local")
    )
    numbers = backend.continuous(jobs.Numbers(None, rows_per_s=500), name="numbers")
    counted = numbers.key_by("key").process(jobs.Counting(), uid="count", output_schema=jobs.OUTPUT)
    query = counted.sink(FileSink(folder / "out")).start(
        parallelism=2, checkpoint_interval=0.2, restart=FixedDelay(12, 0.1)
    )
    while (query.epoch or 0) < 1 and query.is_active:
        time.sleep(0.1)
    if how == "killed":
        os.kill(jvm, signal.SIGKILL)
    else:
        spark.stop()
    try:
        query.await_termination(120.0)
        print("it did not end", query.restarts)
    except StateBackendError as error:
        print(f"restarts={query.restarts} {error}")
    sys.stdout.flush()
    os._exit(0)  # the session's own end would ask the JVM


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
