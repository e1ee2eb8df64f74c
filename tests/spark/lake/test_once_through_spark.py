"""Writes through a table format's own Spark package count once, however often a batch repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from statebackend import BatchOnce, DeltaSink
from tests.spark.local.repeated_batches import check_rows, run_with_repeats

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from tests.spark.local.world import World

pytestmark = pytest.mark.lake


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_what_is_appended_is_there_once(
    world: World, tmp_path: Path, format_name: str, commit: str
) -> None:
    path, table = str(tmp_path / "t"), f"lake.db.t{commit}"

    def append(frame: DataFrame, once: BatchOnce) -> None:
        if format_name == "delta":
            frame.write.format("delta").options(**once.delta()).mode("append").save(path)
        elif not frame.sparkSession.catalog.tableExists(table):
            frame.writeTo(table).options(**once.iceberg()).create()
        elif not once.in_iceberg(frame, table):
            frame.writeTo(table).options(**once.iceberg()).append()

    run_with_repeats(world, commit, append)
    read = world.spark.read.format("delta").load(path) if format_name == "delta" else None
    check_rows(world, (world.spark.table(table) if read is None else read).collect())


def test_a_merge_is_applied_once(world: World, tmp_path: Path, format_name: str) -> None:
    path, table = tmp_path / "t", "lake.db.merged"
    where = f"delta.`{path}`" if format_name == "delta" else table
    using = "delta" if format_name == "delta" else "iceberg"
    world.spark.sql(f"CREATE TABLE {where} (k string, merged bigint, total bigint) USING {using}")

    def merge(frame: DataFrame, once: BatchOnce) -> None:
        if using == "iceberg" and once.in_iceberg(frame, table):
            return
        frame.createOrReplaceTempView("batch")
        spark = frame.sparkSession
        for key, value in once.iceberg().items():
            spark.conf.set(f"spark.sql.iceberg.{key}", value)
        with once.delta_session(frame):
            spark.sql(
                f"MERGE INTO {where} t USING batch b ON t.k <=> b.k "
                "WHEN MATCHED THEN UPDATE SET merged = merged + size(b.ids), total = b.total "
                "WHEN NOT MATCHED THEN INSERT (k, merged, total) VALUES (k, size(ids), total)"
            )

    run_with_repeats(world, "sync", merge)
    found = {row["k"]: (row["merged"], row["total"]) for row in world.spark.table(where).collect()}
    assert found == {k: (len(ids), sum(ids)) for k, ids in world.input.ids().items()}


def test_spark_reads_what_the_sink_writes(world: World, tmp_path: Path, format_name: str) -> None:
    if format_name != "delta":
        pytest.skip("pyiceberg and Spark share no catalog without a server")
    world.input.add_batches(3)
    backend = world.backend()
    sink = DeltaSink(tmp_path / "t", partition_by=["k"])
    world.run(backend, world.ledger(backend), backend.once(sink))
    check_rows(world, world.spark.read.format("delta").load(str(tmp_path / "t")).collect())
