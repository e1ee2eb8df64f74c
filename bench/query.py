"""Queries of this process for the benchmarks that look at several of them in one session."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from bench.data import FILES_PER_BATCH, INPUT_SCHEMA
from bench.processor import OUTPUT_SCHEMA, Counter
from bench.s3 import REGION

__all__ = ["Job", "files_below", "run_to_end", "stream"]

_TIMEOUT_S = 900


def stream(spark: SparkSession, source: Path) -> DataFrame:
    """Prepared batches, in order."""
    reader = spark.readStream.schema(INPUT_SCHEMA).option("maxFilesPerTrigger", FILES_PER_BATCH)
    return reader.parquet(str(source))


def run_to_end(writer: Any, start: Callable[[Any], Any] | None = None) -> Any:
    """Start a query, wait until all input is taken in, and give it back ended."""
    query = start(writer) if start else writer.start()
    if not query.awaitTermination(_TIMEOUT_S):
        query.stop()
        raise TimeoutError(f"the query took over {_TIMEOUT_S} s")
    if query.exception() is not None:
        raise query.exception()
    return query


def files_below(folder: Path) -> dict[str, int]:
    """How many files lie below each folder of a checkpoint location, checksums (.crc) apart."""
    found: dict[str, int] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            top = path.relative_to(folder).parts[0]
            top = f"{top} .crc" if path.name.endswith(".crc") else top
            found[top] = found.get(top, 0) + 1
    return found


@dataclass
class Job:
    """The counter as one job on S3.

    Args:
        work: for its checkpoint location and local copies. source: prepared batches.
        endpoint: of the server or its proxy.
    """

    spark: SparkSession
    work: Path
    source: Path
    uri: str
    endpoint: str
    partitions: int
    settings: dict[str, Any] = field(default_factory=dict)
    commit: str = "sync"

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint"

    @property
    def local(self) -> Path:
        return self.work / "local"

    def run(self, after_batch: Callable[[int], None] = lambda batch: None) -> tuple[Any, Any]:
        """All batches that are there; the backend and the query, which has ended."""
        from statebackend import StateBackend

        backend = StateBackend(
            self.spark,
            uri=self.uri,
            job="bench",
            local_dir=str(self.local),
            parallelism=self.partitions,
            commit=self.commit,
            settings={"s3_endpoint": self.endpoint, "s3_region": REGION, **self.settings},
        )
        frame = backend.transform_with_state(
            stream(self.spark, self.source),
            keys="k",
            processor=Counter(),
            output_schema=OUTPUT_SCHEMA,
            uid="counter",
        )

        def sink(batch: DataFrame, number: int) -> None:
            batch.write.format("noop").mode("overwrite").save()
            after_batch(number)

        writer = frame.writeStream.outputMode("update").foreachBatch(backend.checked(sink))
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        query = run_to_end(writer.trigger(availableNow=True), backend.start)
        backend.wait_durable()
        time.sleep(0.3)  # the last progress event comes after the query has ended
        backend.close()
        return backend, query
