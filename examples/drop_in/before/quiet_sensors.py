"""Which sensors have gone quiet: transformWithState with event-time timers, into Parquet files.

    python quiet_sensors.py FOLDER

Each run adds a file of readings to the folder, takes it in, and prints all that was found so far.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

MINUTE_MS = 60_000
QUIET_MS = 5 * MINUTE_MS


class QuietSensors(StatefulProcessor):
    """A timer for each sensor, moved on by each of its readings."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", "ms bigint, readings bigint")

    def handleInputRows(
        self, key: tuple[str], rows: Iterator[Row], timerValues: Any
    ) -> Iterator[Row]:
        last_ms, readings = self.last.get() or (0, 0)
        if readings:
            self.handle.deleteTimer(last_ms + QUIET_MS)
        for row in rows:
            last_ms, readings = max(last_ms, row.ms), readings + 1
        self.last.update((last_ms, readings))
        self.handle.registerTimer(last_ms + QUIET_MS)
        return iter(())

    def handleExpiredTimer(
        self, key: tuple[str], timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        last_ms, readings = self.last.get()
        self.last.clear()
        yield Row(sensor=key[0], quiet_since_ms=last_ms, readings=readings)

    def close(self) -> None:
        pass


def add_readings(folder: Path) -> None:
    """The next half an hour: sensor s sends every s minutes, and s5 stops after the first run."""
    folder.mkdir(parents=True, exist_ok=True)
    run = len(list(folder.iterdir()))
    rows = [
        {"sensor": f"s{sensor}", "ms": (run * 30 + minute) * MINUTE_MS}
        for minute in range(30)
        for sensor in (1, 3, 5, 11)
        if minute % sensor == 0 and not (sensor == 5 and run)
    ]
    (folder / f"{run}.json").write_text("\n".join(map(json.dumps, rows)))


def main(spark: SparkSession, folder: str) -> list[Row]:
    add_readings(Path(folder, "readings"))
    readings = spark.readStream.schema("sensor string, ms bigint").json(f"{folder}/readings")
    quiet = (
        readings.withColumn("at", F.timestamp_millis("ms"))
        .withWatermark("at", "1 minute")
        .groupBy("sensor")
        .transformWithState(
            statefulProcessor=QuietSensors(),
            outputStructType="sensor string, quiet_since_ms bigint, readings bigint",
            outputMode="Append",
            timeMode="EventTime",
        )
    )
    query = (
        quiet.writeStream.format("parquet")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start(f"{folder}/quiet")
    )
    query.awaitTermination()
    return spark.read.parquet(f"{folder}/quiet").orderBy("quiet_since_ms", "sensor").collect()


if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.shuffle.reduceLocality.enabled", "false")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .getOrCreate()
    )
    print(*main(session, sys.argv[1]), sep="\n")
