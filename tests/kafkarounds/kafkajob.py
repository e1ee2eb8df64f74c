"""A driver of its own: a job from a topic to a topic, until a file says that it is over.

Each row of the input gives one row: its key's count and sum by then. Rows of a key are in one
partition, so what comes out does not depend on batches, nor on what was killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import SparkSession

from recovery.decide.restart_strategy import FixedDelay
from recovery.drill.cluster.local_cluster import LOCAL_DIR, SHORT_LIVED
from statebackend.api.processors import KeyedProcessor
from statebackend.backend import StateBackend
from statebackend.continuous.sinks.delta_sink import DeltaSink
from statebackend.continuous.sinks.iceberg_sink import IcebergSink
from statebackend.continuous.sinks.kafka_sink import KafkaSink
from statebackend.continuous.sinks.sink import Sink
from statebackend.continuous.sinks.table_files import TableSink
from statebackend.continuous.sources.kafka_source import KafkaSource
from statebackend.system import sleep_s

OUTPUT = "key BIGINT, value BIGINT, n BIGINT, total BIGINT"


class Given(msgspec.Struct):
    """What a driver is told."""

    mode: str  # continuous, sync, async
    sink: str  # exactly-once, at-least-once, foreach-batch, delta, iceberg
    servers: str
    source: str
    target: str
    master: str
    folder: str
    jars: str = ""


class PerRow(KeyedProcessor):
    """Each row, with its key's count and sum by then."""

    def open(self, ctx: Any) -> None:
        self._state = ctx.value_state("counts", "n BIGINT, total BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[int, ...]]:
        n, total = self._state.get() or (0, 0)
        for row in rows:
            n, total = n + 1, total + row.value
            yield key[0], row.value, n, total
        self._state.update((n, total))


def session(given: Given) -> SparkSession:
    builder = (
        SparkSession.builder.master(given.master)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .config("spark.executor.extraJavaOptions", SHORT_LIVED)
        .config("spark.executor.memory", "512m")
        .config("spark.driver.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.task.maxFailures", "20")
    )
    if given.jars:
        builder = builder.config("spark.jars", given.jars)
    return builder.getOrCreate()


def lake_sink(given: Given) -> TableSink | None:
    """The table that rows go to; None: they go to a topic."""
    where = f"{given.folder}/lake"
    if given.sink == "delta":
        return DeltaSink(f"{where}/t")
    if given.sink == "iceberg":
        return IcebergSink("lake.t", catalog_properties=lambda: catalog_of(where))
    return None


def kafka_sink(given: Given) -> KafkaSink:
    """The topic that rows go to."""
    return KafkaSink(
        given.target,
        bootstrap_servers=given.servers,
        key="key",
        exactly_once=given.sink == "exactly-once",
    )


def catalog_of(folder: str) -> dict[str, str]:
    """An Iceberg catalog in a file."""
    Path(folder).mkdir(exist_ok=True)
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": folder}


def continuous(backend: StateBackend, given: Given) -> Any:
    source = KafkaSource(
        given.source, bootstrap_servers=given.servers, value="json: key bigint, value bigint"
    )
    sink: Sink = lake_sink(given) or kafka_sink(given)
    rows = backend.continuous(source, name="rows").key_by("key")
    counted = rows.process(PerRow(), uid="count", output_schema=OUTPUT)
    restart = FixedDelay(1000, 0.5)
    started = counted.sink(sink, uid="out")
    return started.start(parallelism=2, checkpoint_interval=0.5, restart=restart)


def micro(spark: SparkSession, backend: StateBackend, given: Given) -> Any:
    from pyspark.sql import functions as F

    read = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", given.servers)
        .option("subscribe", given.source)
        .option("startingOffsets", "earliest")
        .load()
    )
    value = F.from_json(F.col("value").cast("string"), "key bigint, value bigint")
    rows = read.select(value.alias("v")).select("v.*")
    counted = backend.process(
        rows, keys="key", processor=PerRow(), output_schema=OUTPUT, uid="count"
    )
    if given.sink in ("delta", "iceberg", "exactly-once"):
        sink = lake_sink(given) or kafka_sink(given)
        writer = counted.writeStream.foreachBatch(backend.once(sink))
    elif given.sink == "foreach-batch":

        def write(batch: Any, number: int) -> None:
            _as_records(batch).write.format("kafka").options(**options).save()

        options = {"kafka.bootstrap.servers": given.servers, "topic": given.target}
        writer = counted.writeStream.foreachBatch(backend.checked(write))
    else:
        writer = _as_records(counted).writeStream.format("kafka")
        writer = writer.option("kafka.bootstrap.servers", given.servers)
        writer = writer.option("topic", given.target)
    writer = writer.option("checkpointLocation", f"{given.folder}/checkpoint")
    return backend.start(writer)


def _as_records(frame: Any) -> Any:
    from pyspark.sql import functions as F

    return frame.select(
        F.col("key").cast("string").alias("key"), F.to_json(F.struct("*")).alias("value")
    )


def main(given: Given) -> None:
    register_pickle_by_value(sys.modules[__name__])
    spark, folder = session(given), Path(given.folder)
    backend = StateBackend(
        spark,
        uri=f"file://{folder}/state",
        job="kafka-rounds",
        local_dir=LOCAL_DIR,
        **({} if given.mode == "continuous" else {"commit": given.mode}),
    )
    of = continuous if given.mode == "continuous" else None
    query = of(backend, given) if of else micro(spark, backend, given)
    while not (folder / "over").exists():
        sleep_s(0.2)
        if not query.isActive:
            print(f"ended: {query.exception()}", flush=True)
            os._exit(3)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Given))
