"""Spark's sides, until they are ended: `python -m bench.kafka.spark_side TASK.json`.

Its own count in the JVM, in RocksDB, by micro-batches one right after the other, or in real-time
mode. That mode wants slots for all stages at once, and version 2 of the checkpoint's format.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from bench.side import session

__all__ = ["run"]


def run(task: dict[str, Any]) -> None:
    """The query; it does not end by itself."""
    spark = session(task)
    server = {"kafka.bootstrap.servers": task["servers"]}
    reader = spark.readStream.format("kafka").options(**server).option("subscribe", task["source"])
    if task.get("rows_per_batch"):
        reader = reader.option("maxOffsetsPerTrigger", task["rows_per_batch"])
    value = F.from_json(F.col("value").cast("string"), "k bigint")
    rows = reader.option("startingOffsets", "earliest").load().select(value.alias("v"))
    counted = rows.groupBy(F.col("v.k").alias("k")).agg(F.count(F.lit(1)).alias("n"))
    records = counted.select(
        F.col("k").cast("string").alias("key"), F.to_json(F.struct("k", "n")).alias("value")
    )
    writer = (
        records.writeStream.format("kafka")
        .options(**server)
        .option("topic", task["target"])
        .option("checkpointLocation", f"{task['work']}/checkpoint")
        .outputMode("update")
    )
    if task["side"] == "spark-realtime":
        writer = writer.trigger(realTime=f"{task['checkpoint_s']:g} seconds")
    query = writer.start()
    query.awaitTermination()
    raise SystemExit(f"the query ended: {query.exception()}")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
