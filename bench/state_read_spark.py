"""Reading a state in Spark: by our source, and the same state in Spark's store by its own.

One core each (`local[1]`, one partition). Spark keeps the state of an aggregate over the same rows
in RocksDB: a key of 16 characters, two numbers and a text. Each source is read twice to the end,
counted and summed in Spark; the second time counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.query import run_to_end

__all__ = ["read_in_spark"]

_BATCH_ROWS = 500_000
_STATE = "spark.sql.streaming.stateStore"
_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def read_in_spark(
    *, keys: int, uri: str, work: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Entries a second of both sources, over a job named ``bench`` under ``uri``."""
    import statebackend

    spark = _session(work)
    try:
        statebackend.register(spark)
        started_s = time.perf_counter()
        checkpoint = _filled(spark, keys, work)
        filled_s = time.perf_counter() - started_s
        progress("Spark's state is there")
        options = {"job": "bench", "operator": "counter", "stateVarName": "count"}
        ours = spark.read.format("statebackend").options(**options).load(uri)
        theirs = spark.read.format("statestore").load(checkpoint)
        return {
            "spark": spark.version,
            "fill_s": round(filled_s, 1),
            "statebackend": _read(ours, keys),
            "statestore": _read(theirs, keys),
        }
    finally:
        spark.stop()


def _session(work: Path) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        SparkSession.builder.master("local[1]")
        .appName("bench-state-read")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.local.dir", f"{work}/spark-local")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "1")
        .config(f"{_STATE}.providerClass", _PROVIDER)
        .config(f"{_STATE}.rocksdb.changelogCheckpointing.enabled", "true")
        .config("spark.sql.warehouse.dir", f"{work}/warehouse")
        .getOrCreate()
    )


def _filled(spark: SparkSession, keys: int, work: Path) -> str:
    """A checkpoint location of Spark's with a row for each key."""
    source, checkpoint = f"{work}/spark-in", f"{work}/spark-checkpoint"
    rows = spark.range(0, keys, 1, max(1, keys // _BATCH_ROWS)).select(
        F.lpad(F.col("id").cast("string"), 16, "0").alias("k"),
        F.col("id").alias("n"),
        (F.col("id") / 7.0).alias("share"),
        F.concat(F.lit("/page/"), "id").alias("page"),
    )
    rows.write.parquet(source)
    stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1).parquet(source)
    # Each of another function: Spark names the fields of its state after them.
    grouped = stream.groupBy("k").agg(F.max("n"), F.min("share"), F.first("page"))
    writer = grouped.writeStream.format("noop").outputMode("update")
    run_to_end(writer.option("checkpointLocation", checkpoint).trigger(availableNow=True))
    return checkpoint


def _read(frame: DataFrame, keys: int) -> dict[str, Any]:
    first = frame.select("value.*").columns[0]  # the sum's, whatever Spark calls it
    column, seconds = F.col("value").getField(first), []
    for _ in range(2):
        started_s = time.perf_counter()
        row = frame.select(F.count(F.lit(1)).alias("rows"), F.sum(column).alias("sum")).first()
        seconds.append(time.perf_counter() - started_s)
        assert row is not None
        if (row["rows"], row["sum"]) != (keys, keys * (keys - 1) // 2):
            raise AssertionError(f"{row['rows']} rows with the sum {row['sum']} were read")
    return {"seconds": round(seconds[-1], 3), "entries_per_s": round(keys / seconds[-1])}
