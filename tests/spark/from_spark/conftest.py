"""Checkpoint locations of Spark's own operators, for tests that look at them or change copies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

import statebackend
from tests.spark.from_spark import program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from statebackend.drop_in import Installed


TOO_BUSY = ("failed to connect back", "CANNOT_OPEN_SOCKET")
"""Spark and its Python wait some seconds for each other, which is not long on a busy host."""


@pytest.fixture(scope="session")
def program_by_value() -> Iterator[None]:
    register_pickle_by_value(program)
    yield
    unregister_pickle_by_value(program)


@pytest.fixture(scope="session")
def whole(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, program_by_value: None
) -> Path:
    """Of a function, in Spark's provider for HDFS; the query has ended."""
    root = tmp_path_factory.mktemp("whole")
    program.write_input(root / "in", files=1)
    program.start(
        spark, "plain", root, lambda frame, batch: frame.collect() and None
    ).awaitTermination()
    return root / "spark" / "plain"


@pytest.fixture(scope="session")
def of_processor(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, program_by_value: None
) -> Path:
    """Of a processor, in RocksDB; its key is named by the call."""
    root = tmp_path_factory.mktemp("processor")
    program.write_input(root / "in", files=1)
    run_to_its_end(named_by_the_call(program.read(spark, root / "in")), root / "spark")
    return root / "spark"


@pytest.fixture(scope="session")
def with_null_keys(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, program_by_value: None
) -> Path:
    """Of a function with timeouts; one of its keys is null."""
    root = tmp_path_factory.mktemp("nulls")
    program.write_input(root / "in", files=1)
    rows = program.read(spark, root / "in").withColumn("k", F.expr("nullif(k, 'k0')"))
    function = (program.tally, program.OUTPUT, "n bigint, last string", "append")
    frame = rows.groupBy("k").applyInPandasWithState(*function, "ProcessingTimeTimeout")
    run_to_its_end(frame, root / "spark", once=True)
    return root / "spark"


def named_by_the_call(rows: DataFrame) -> DataFrame:
    """A processor whose key Spark calls `K`, as the call does, and the frame `k`."""
    mode = "Append", "EventTime"
    return rows.groupBy("K").transformWithState(program.Session(), program.OUTPUT, *mode)


def state_kept_here(spark: SparkSession, root: Path, savepoint: str) -> Installed:
    """A session whose next query begins with a savepoint, and keeps its state under ``root``."""
    return statebackend.install(
        spark,
        uri=(root / "store").as_uri(),
        local_dir=str(root / "local"),
        parallelism=2,
        savepoint=savepoint,
    )


def run_to_its_end(
    frame: DataFrame,
    location: Path,
    sink: Callable[[DataFrame, int], None] = lambda frame, batch: frame.collect() and None,
    *,
    once: bool = False,
) -> None:
    """Run a query over all of its input.

    Args:
        once: in one batch, where there is no end to batches in processing time.
    """
    tries = 3
    while tries:
        with in_rocksdb(frame.sparkSession):
            writer = frame.writeStream.foreachBatch(sink)
            writer = writer.option("checkpointLocation", str(location))
            trigger = writer.trigger(once=True) if once else writer.trigger(availableNow=True)
            query = trigger.start()
        try:
            query.awaitTermination()
            return
        except StreamingQueryException as error:
            tries -= 1
            if not tries or not any(text in str(error) for text in TOO_BUSY):
                raise


@contextlib.contextmanager
def in_rocksdb(spark: SparkSession) -> Iterator[None]:
    """Have queries that start in a block keep Spark's own state in RocksDB, in one partition."""
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", program.ROCKS)
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    yield
    spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set("spark.sql.shuffle.partitions", before)
