"""The Spark program: started, killed and started again by `demo.py`, always in the same way."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from examples.flights.processor import INPUT, OUTPUT, AircraftLog
from examples.flights.workdir import WorkDir
from statebackend import StateBackend

# Three short lives: what the JVM would spend on optimising its code and collecting its garbage in
# parallel is half of all the time. Leave this out of a program that stays.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def run(work: WorkDir, number: int) -> None:
    """Stream what Spark has not committed yet, to the end of the feed."""
    _end_with_the_parent()
    spark = _session(work)
    backend = StateBackend(spark, uri=work.store.as_uri(), job="flights", local_dir=str(work.local))
    query = (
        backend.write_stream(aircraft(spark, backend, work))
        .option("checkpointLocation", str(work.checkpoint))
        .trigger(availableNow=True)
        .start(str(work.sink), "parquet")
    )
    _report_while_active(backend, query, work.report(number))
    # Spark's sink keeps a list of the files that count: one that a killed epoch left behind is not
    # in it. So Spark reads the sink, and everybody else what it read.
    pq.write_table(spark.read.parquet(str(work.sink)).toArrow(), work.result)
    spark.stop()


def aircraft(spark: SparkSession, backend: StateBackend, work: WorkDir) -> DataFrame:
    """The streaming frame: flights in, one row per aircraft and epoch out."""
    flights = (
        spark.readStream.schema(INPUT)
        .option("maxFilesPerTrigger", 1)  # one file, one epoch
        .parquet(str(work.feed))
    )
    return backend.transform_with_state(
        flights.groupBy("tailnum"), AircraftLog(), OUTPUT, timeMode="None", uid="aircraft"
    )


def _session(work: WorkDir) -> SparkSession:
    return (
        SparkSession.builder.master("local[2]")
        .appName("flights")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"{_SHORT_LIVED} -Djava.io.tmpdir={work.scratch}")
        .config("spark.local.dir", str(work.scratch))
        .config("spark.log.level", "ERROR")
        .config("spark.shuffle.reduceLocality.enabled", "false")  # subtasks stay where they are
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


def _report_while_active(backend: StateBackend, query: StreamingQuery, path: Path) -> None:
    """Write down how each subtask got its state back, as soon as it is known."""
    written = -1
    while True:
        ended = query.awaitTermination(1)  # raises what the query failed with
        restores = backend.restores()
        if len(restores) != written:
            written = len(restores)
            draft = path.with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(restores))
            draft.replace(path)
        if ended:
            return


def _end_with_the_parent() -> None:
    """The parent holds the other end of our stdin: when it is gone, so are we."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
