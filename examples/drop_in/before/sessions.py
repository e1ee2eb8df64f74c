"""Sessions of clicks: applyInPandasWithState with an event-time timeout, into a table.

    python sessions.py FOLDER

Each run adds a file of clicks to the folder, takes it in, and prints all sessions that have ended.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

MINUTE_MS = 60_000
GAP_MS = 20 * MINUTE_MS


def sessions(
    key: tuple[str], clicks: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """A user's session, once no click has come for the length of the gap."""
    if state.hasTimedOut:
        count, first_ms, last_ms = state.get
        state.remove()
        found = {"user": [key[0]], "clicks": [count], "minutes": [(last_ms - first_ms) // 60_000]}
        yield pd.DataFrame(found)
        return
    count, first_ms, last_ms = state.get if state.exists else (0, None, 0)
    for frame in clicks:
        count += len(frame)
        first_ms = int(min(frame.ms.min(), frame.ms.min() if first_ms is None else first_ms))
        last_ms = int(max(frame.ms.max(), last_ms))
    state.update((count, first_ms, last_ms))
    state.setTimeoutTimestamp(last_ms + GAP_MS)


def add_clicks(folder: Path) -> None:
    """The next hour: ann clicks all the time, the others for as many minutes as they have left."""
    folder.mkdir(parents=True, exist_ok=True)
    run = len(list(folder.iterdir()))
    rows = [
        {"user": user, "ms": (run * 60 + minute) * MINUTE_MS}
        for user, minutes in (("ann", 60), ("bob", 12 + run), ("eve", 30 + run))
        for minute in range(0, minutes, 3)
    ]
    (folder / f"{run}.json").write_text("\n".join(map(json.dumps, rows)))


def main(spark: SparkSession, folder: str) -> list[Row]:
    add_clicks(Path(folder, "clicks"))
    clicks = spark.readStream.schema("user string, ms bigint").json(f"{folder}/clicks")
    ended = (
        clicks.withColumn("at", F.timestamp_millis("ms"))
        .withWatermark("at", "1 minute")
        .groupBy("user")
        .applyInPandasWithState(
            sessions,
            "user string, clicks bigint, minutes bigint",
            "clicks bigint, first_ms bigint, last_ms bigint",
            "append",
            GroupStateTimeout.EventTimeTimeout,
        )
    )
    query = (
        ended.writeStream.option("checkpointLocation", f"{folder}/checkpoint")
        .option("path", f"{folder}/sessions")
        .trigger(availableNow=True)
        .toTable("ended_sessions")
    )
    query.awaitTermination()
    return spark.table("ended_sessions").orderBy("user", "clicks").collect()


if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.shuffle.reduceLocality.enabled", "false")
        .getOrCreate()
    )
    print(*main(session, sys.argv[1]), sep="\n")
