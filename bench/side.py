"""One side of a comparison in a process of its own: `python -m bench.side TASK.json`.

It runs one query over prepared files to their end, with a fresh JVM, and writes what it saw to the
file that the task names. Sides differ in the operator and in nothing else: same source, session,
partitions, sink, and the same observation of the output, which is checked. Which processor it is,
and what else a work needs, is in `bench.works`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from bench.cpu import CpuSampler
from bench.data import FILES_PER_BATCH, INPUT_SCHEMA
from bench.layers import task_layers, watch_session
from bench.processor import OUTPUT_SCHEMA, PROCESSORS, summed
from bench.works import START_MS, WORKS
from snapshot.storage.store_options import StoreOptions

__all__ = ["SIDES", "run"]

SIDES = ("spark", "ours", "stateless", "anchored")
_FUNCTION = (summed, OUTPUT_SCHEMA, "n bigint", "update", "NoTimeout")


def session(task: dict[str, Any]) -> SparkSession:
    """The same session for every side: two slots, Spark's RocksDB with its changelog."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    store = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    state = "spark.sql.streaming.stateStore"
    spark = (
        SparkSession.builder.master("local[2]")
        .appName(f"bench-{task['side']}")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.local.dir", f"{task['work']}/spark-local")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.shuffle.reduceLocality.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", str(task["partitions"]))
        .config("spark.sql.streaming.numRecentProgressUpdates", "10000")
        .config(f"{state}.providerClass", store)
        .config(f"{state}.rocksdb.changelogCheckpointing.enabled", "true")
        .config("spark.sql.warehouse.dir", f"{task['work']}/warehouse")
    )
    for key, value in task.get("conf", {}).items():
        spark = spark.config(key, value)
    return spark.getOrCreate()


def _passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What a stateless operator in Python costs at the least: rows in, rows out."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays(batch.columns[:2], names=["k", "n"])


def _spark_side(frame: DataFrame, task: dict[str, Any]) -> tuple[DataFrame, Any]:
    work, grouped = WORKS[task["name"]], frame.groupBy("k")
    if work.flavour == "aggregate":
        return grouped.count().withColumnRenamed("count", "n"), None
    if work.flavour == "function":
        return grouped.applyInPandasWithState(*_FUNCTION), None
    pandas = work.flavour == "pandas"
    operator = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
    result = operator(
        statefulProcessor=PROCESSORS[work.name](),
        outputStructType=OUTPUT_SCHEMA,
        outputMode="update",
        timeMode="EventTime" if work.event_time else "none",
    )
    return result, None


def _our_side(frame: DataFrame, task: dict[str, Any]) -> tuple[DataFrame, Any]:
    from statebackend import StateBackend

    work = WORKS[task["name"]]
    backend = StateBackend(
        frame.sparkSession,
        uri=task["store"],
        job="bench",
        local_dir=f"{task['work']}/local",
        parallelism=task["partitions"],
        settings=task.get("settings"),
    )
    if work.flavour == "aggregate":
        counts = {"n": "count"}
        return backend.aggregate(frame, keys="k", aggregations=counts, uid=work.name), backend
    if work.flavour == "function":
        grouped = frame.groupBy("k")
        return backend.apply_in_pandas_with_state(grouped, *_FUNCTION, uid=work.name), backend
    result = backend.transform_with_state(
        frame,
        keys="k",
        processor=PROCESSORS[work.name](),
        output_schema=OUTPUT_SCHEMA,
        uid=work.name,
        flavour=work.flavour,
        time_mode="event" if work.event_time else "none",
    )
    return result, backend


def _stateless_side(frame: DataFrame, task: dict[str, Any]) -> tuple[DataFrame, Any]:
    shuffled = frame.repartition(task["partitions"], "k")
    return shuffled.mapInArrow(_passed_on, OUTPUT_SCHEMA), None


def _anchored_side(frame: DataFrame, task: dict[str, Any]) -> tuple[DataFrame, Any]:
    """Our plan without our operator: what routing, identity and barrier cost."""
    from statebackend.keygroups import default_max_parallelism
    from statebackend.spark.frames.anchor import Anchor, anchored

    spark, partitions = frame.sparkSession, task["partitions"]
    # A join of this kind with a static frame is what the backend lifts the check for.
    spark.conf.set("spark.sql.streaming.unsupportedOperationCheck", "false")
    groups = default_max_parallelism(partitions)
    joined = anchored(frame, ["k"], Anchor(spark, partitions), groups)
    return joined.mapInArrow(_data_passed_on, OUTPUT_SCHEMA), None


def _data_passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        # Three columns of ours come last: the first of them is null in a barrier.
        columns = batch.filter(batch.column(batch.num_columns - 3).is_valid()).columns[:2]
        yield pa.RecordBatch.from_arrays(columns, names=["k", "n"])


_MAKERS: dict[str, Callable[[DataFrame, dict[str, Any]], tuple[DataFrame, Any]]] = {
    "spark": _spark_side,
    "ours": _our_side,
    "stateless": _stateless_side,
    "anchored": _anchored_side,
}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Run the query to the end of its input; times and observations by batch."""
    spark = session(task)
    cpu = CpuSampler()
    cpu.start()
    result, backend = _MAKERS[task["side"]](_input(spark, task), task)
    sums = {"total": F.sum("n"), "weighted": F.sum(F.col("k") * F.col("n"))}
    observed = result.observe(
        "output",
        F.count(F.lit(1)).alias("rows"),
        *[F.coalesce(found, F.lit(0)).alias(name) for name, found in sums.items()],
    )
    checkpoint = f"{task['work']}/checkpoint"
    writer: DataStreamWriter = (
        observed.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
    )
    started_s = time.time()
    calls: dict[str, list[float]] = {}
    if backend is None:
        query = writer.start()
    else:
        with watch_session() as calls:
            query = backend.start(writer)
    finished = query.awaitTermination(task["timeout_s"])
    if not finished:
        query.stop()
        raise TimeoutError(f"side {task['side']!r} took over {task['timeout_s']} s")
    if query.exception() is not None:
        raise query.exception()  # type: ignore[misc]
    time.sleep(0.5)  # the last progress event comes after the query has ended
    cpu.stop()
    report = {
        "side": task["side"],
        "java": spark._jvm.java.lang.System.getProperty("java.runtime.version"),  # type: ignore[union-attr]
        "spark": spark.version,
        "seconds": round(time.time() - started_s, 3),
        "compilations": _compilations(spark),
        "batches": _batches(query, Path(checkpoint), cpu),
    }
    if backend is not None:
        report["layers"] = task_layers(f"{task['store']}/bench", "bench", _reached(task))
        report["driver_ms"] = calls
        backend.close()
    spark.stop()
    return report


def _input(spark: SparkSession, task: dict[str, Any]) -> DataFrame:
    """The prepared batches in order; a work in event time has its column, and Spark's watermark."""
    reader = spark.readStream.schema(INPUT_SCHEMA).option("maxFilesPerTrigger", FILES_PER_BATCH)
    frame = reader.parquet(task["input"])
    if not WORKS[task["name"]].event_time:
        return frame
    at = F.timestamp_millis(F.col("v") + F.lit(START_MS))
    return frame.withColumn("at", at).withWatermark("at", "0 seconds")


def _reached(task: dict[str, Any]) -> StoreOptions:
    given = task.get("settings", {})
    return StoreOptions(
        endpoint_url=given.get("s3_endpoint", ""), region=given.get("s3_region", "")
    )


def _compilations(spark: SparkSession) -> int:
    """How often Spark compiled generated code: once per shape of plan, if all is well."""
    metrics: Any = spark._jvm.org.apache.spark.metrics.source.CodegenMetrics  # type: ignore[union-attr]
    return int(metrics.METRIC_COMPILATION_TIME().getCount())


def _batches(query: Any, checkpoint: Path, cpu: CpuSampler) -> list[dict[str, Any]]:
    """Per batch: when it started, when its commit file was there, what Spark says it did."""
    found = []
    for progress in query.recentProgress:
        commit = checkpoint / "commits" / str(progress["batchId"])
        if not progress["durationMs"].get("addBatch") or not commit.exists():
            continue
        start_s, committed_s = _epoch_s(progress["timestamp"]), commit.stat().st_mtime
        output = (progress.get("observedMetrics") or {}).get("output")
        found.append(
            {
                "batch": progress["batchId"],
                "start_s": start_s,
                "committed_s": committed_s,
                "cpu_s": cpu.between(start_s, committed_s),
                "input_rows": progress["numInputRows"],
                **{
                    f"output_{name}": None if output is None else int(output[name])
                    for name in ("rows", "total", "weighted")
                },
                "duration_ms": dict(progress["durationMs"]),
            }
        )
    return sorted(found, key=lambda batch: int(batch["batch"]))


def _epoch_s(timestamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    report = run(task)
    Path(task["result"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
