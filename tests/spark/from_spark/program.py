"""A user's program with Spark's own operators, which knows nothing of this package.

Run as a script it is a driver that stays in the midst of a batch of each of its queries until it
is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql.streaming.query import StreamingQuery

FILES = 5
CUT = 2
"""The batch in which the driver is killed."""
OUTPUT = "k string, what string, n bigint, text string"
ROCKS = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
NAMES = ["k", "what", "n", "text"]
HOUR_MS = 3_600_000
START_MS = 1_704_067_200_000


def write_input(folder: Path, files: int = FILES) -> None:
    """A file a batch; ten seconds of event time each, and rows that are late or nearly so."""
    folder.mkdir(parents=True)
    for number in range(files):
        rows = [(f"k{i % 3}", number * 10 + i) for i in range(10)]
        if number == CUT:
            rows += [("k0", 12), ("k1", 5)]  # late by the watermark of one batch, and of all
        text = "".join(
            json.dumps({"k": k, "id": s, "ts": f"2024-01-01T00:00:{s:02}Z"}) + "\n" for k, s in rows
        )
        path = folder / f"{number:03}.json"
        path.write_text(text)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


class Session(StatefulProcessor):
    """Value, list, map and timers of event time, row by row."""

    ttl_ms: int | None = None

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.n = handle.getValueState("n", "n bigint", self.ttl_ms)
        self.ids = handle.getListState("ids", "id bigint, at timestamp", self.ttl_ms)
        self.tags = handle.getMapState("tags", "tag string", "n bigint", self.ttl_ms)

    def taken(self, key: Any, found: list[tuple[int, Any]], timer_ms: int) -> tuple[Any, ...]:
        """Apply rows; what is put out for them."""
        n = (self.n.get()[0] if self.n.exists() else 0) + len(found)
        self.n.update((n,))
        for row in found:
            self.ids.appendValue(row)
            tag = (f"t{row[0] % 2}",)
            before = self.tags.getValue(tag)[0] if self.tags.containsKey(tag) else 0
            self.tags.updateValue(tag, (before + 1,))
        self.handle.registerTimer(timer_ms)
        ids = [row[0] for row in self.ids.get()]
        tags = sorted((tag[0], row[0]) for tag, row in self.tags.iterator())
        return key[0], "rows", n, json.dumps([ids, tags])

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        found = sorted((row.id, row.ts) for row in rows)
        if found:
            yield _row(self.taken(key, found, _ms(found) + 5000))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        at_ms = expiredTimerInfo.getExpiryTimeInMs()
        yield _row((key[0], "timer", self.n.get()[0], str(at_ms)))

    def close(self) -> None:
        pass


class PandasSession(Session):
    """The same with frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        frames = list(rows)
        pairs = [
            (int(i), t.to_pydatetime()) for f in frames for i, t in zip(f.id, f.ts, strict=True)
        ]
        if pairs:
            found = sorted(pairs)
            yield _frame(self.taken(key, found, self.due_ms(found, timerValues)))

    def due_ms(self, found: list[tuple[int, Any]], times: Any) -> int:
        return _ms(found) + 5000

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        at_ms = expiredTimerInfo.getExpiryTimeInMs()
        yield _frame((key[0], "timer", self.n.get()[0], str(at_ms)))


class Fading(PandasSession):
    """With a TTL, and timers of processing time."""

    ttl_ms = HOUR_MS

    def due_ms(self, found: list[tuple[int, Any]], times: Any) -> int:
        due: int = times.getCurrentProcessingTimeInMs() + HOUR_MS // 2
        return due


def tally(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """A function with state; its keys time out in event time."""
    n, last = state.get if state.exists else (0, "")
    if state.hasTimedOut:
        state.remove()
        yield _frame((key[0], "timeout", n, last))
        return
    ids = sorted(int(i) for frame in frames for i in frame.id)
    state.update((n + len(ids), str(ids[-1])))
    if state._timeout_conf == "EventTimeTimeout":
        due_ms = START_MS + ids[-1] * 1000 + 4000
        state.setTimeoutTimestamp(max(due_ms, state.getCurrentWatermarkMs() + 1))
    elif state._timeout_conf == "ProcessingTimeTimeout":
        state.setTimeoutDuration(HOUR_MS)
    yield _frame((key[0], "rows", n + len(ids), str(ids)))


def _row(row: tuple[Any, ...]) -> Row:
    return Row(**dict(zip(NAMES, row, strict=True)))


def _frame(row: tuple[Any, ...]) -> pd.DataFrame:
    return pd.DataFrame([row], columns=NAMES)


def _ms(found: list[tuple[int, Any]]) -> int:
    """The event time of the last row, which its id says too."""
    return START_MS + found[-1][0] * 1000


def _processor(processor: StatefulProcessor, mode: str) -> Callable[[DataFrame], DataFrame]:
    return lambda df: df.groupBy("k").transformWithStateInPandas(processor, OUTPUT, "Append", mode)


def _function(timeout: str) -> Callable[[DataFrame], DataFrame]:
    schema = "n bigint, last string"
    return lambda df: df.groupBy("k").applyInPandasWithState(
        tally, OUTPUT, schema, "append", timeout
    )


# name: the frame, Spark's provider of state, the version of its checkpoints' format
QUERIES: dict[str, tuple[Callable[[DataFrame], DataFrame], str, str]] = {
    "rows": (
        lambda df: df.groupBy("k").transformWithState(Session(), OUTPUT, "Append", "EventTime"),
        ROCKS,
        "1",
    ),
    "pandas": (_processor(PandasSession(), "EventTime"), ROCKS, "2"),
    "fading": (_processor(Fading(), "ProcessingTime"), ROCKS, "1"),
    "event": (_function("EventTimeTimeout"), HDFS, "1"),
    "processing": (_function("ProcessingTimeTimeout"), ROCKS, "2"),
    "plain": (_function("NoTimeout"), HDFS, "1"),
}


def read(spark: SparkSession, folder: Path) -> DataFrame:
    """Its input, a file a batch."""
    rows = spark.readStream.schema("k string, id bigint, ts timestamp")
    files = rows.option("maxFilesPerTrigger", 1).json(str(folder))
    return files.withWatermark("ts", "2 seconds")


def start(
    spark: SparkSession,
    name: str,
    root: Path,
    sink: Callable[[DataFrame, int], None],
    *,
    at: str = "spark",
    stops: bool = True,
) -> StreamingQuery:
    """Start a query of the program at a checkpoint location of its own."""
    make, provider, version = QUERIES[name]
    spark.conf.set(_PROVIDER, provider)
    spark.conf.set(_FORMAT, version)
    df = read(spark, root / "in")
    writer = make(df).writeStream.outputMode("append").foreachBatch(sink).queryName(name)
    writer = writer.option("checkpointLocation", str(root / at / name))
    # In processing time Spark's availableNow asks for batch after batch without end.
    trigger: dict[str, Any] = {"availableNow": True} if stops else {"processingTime": "0 seconds"}
    started: StreamingQuery = writer.trigger(**trigger).start()
    spark.conf.unset(_PROVIDER)
    spark.conf.unset(_FORMAT)
    return started


def stays(folder: Path) -> Callable[[DataFrame, int], None]:
    """A sink that writes the cut batch, and never comes back from it."""
    folder.mkdir(parents=True)

    def sink(frame: DataFrame, batch: int) -> None:
        write(folder, frame.collect(), batch)
        if batch == CUT:
            threading.Event().wait()

    return sink


def write(folder: Path, rows: Iterable[Any], batch: int) -> None:
    """A batch's rows, in the place of what was there of it."""
    draft = folder / f".{batch}"
    draft.write_text(json.dumps([list(row) for row in rows]))
    draft.rename(folder / str(batch))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    made = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for key, value in json.loads(sys.argv[2]).items():
        made = made.config(key, value)
    session = made.getOrCreate()
    for one in QUERIES:
        # One after the other: Spark waits 10 s for the process that asks for a processor's states.
        query = start(session, one, place, stays(place / "out" / one))
        while query.isActive and not (place / "out" / one / str(CUT)).exists():
            time.sleep(0.1)
    session.streams.awaitAnyTermination()  # one that fails ends it
