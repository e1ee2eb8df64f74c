"""A driver program for the cluster tests: counts per key, over files, until they are used up.

Run as a process of its own, so that a test can kill it. Everything it is told comes as JSON. There
are two kinds of job: "tally" counts, "windows" has event time, timers and an initial state as well.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from recovery.drill.cluster.local_cluster import SHORT_LIVED
from statebackend import KeyedProcessor, StateBackend

WINDOW_MS = 10_000


DAWDLE_S = 2000.0
"""Longer than any test waits for what has to happen meanwhile, so that none is a race."""


def dawdle_in(told: str) -> None:
    """The first attempt only: whoever makes the file waits in it until it is removed."""
    path = Path(told)
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return
    until_s = time.monotonic() + DAWDLE_S
    while path.exists() and time.monotonic() < until_s:
        time.sleep(0.05)


def lose_half(folder: str) -> None:
    """Of the first subtasks that get here one waits, one goes on, and one ends its executor.

    With two executors of one core each that is the other one's second subtask: its first has been
    acked, and what the stage before left on that executor is lost.
    """
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    executor = int(stat.rpartition(")")[2].split()[1])  # the parent of the workers' daemon
    lost = Path(folder) / "lost"
    for number in range(3):
        try:
            (Path(folder) / f"subtask-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        until_s = time.monotonic() + DAWDLE_S
        if number == 2:
            lost.touch()
            os.kill(executor, signal.SIGKILL)
        while number != 1 and (number == 2 or not lost.exists()) and time.monotonic() < until_s:
            time.sleep(0.05)
        return


def redrawn(frames):
    """Rows under other keys in every evaluation."""
    for frame in frames:
        yield frame.assign(k=[random.randrange(40) for _ in range(len(frame))])


class Tally(StatefulProcessor):
    """Count, sum and last sequence per key; can be told to dawdle in one attempt.

    Args:
        lost: a folder for :func:`lose_half`.
    """

    def __init__(self, dawdle: str = "", lost: str = "") -> None:
        self.dawdle, self.lost = dawdle, lost

    def init(self, handle):
        self.tally = handle.getValueState("tally", "n bigint, total bigint, note string")
        self.seen = handle.getMapState("seen", "file int", "n int")

    def handleInputRows(self, key, rows, timerValues):
        n, total, note = self.tally.get() or (0, 0, "")
        if self.lost:
            lose_half(self.lost)
            self.lost = ""
        for row in rows:
            if self.dawdle and row.flag:
                dawdle_in(self.dawdle)
            n, total = n + 1, total + row.v
            before = self.seen.getValue((row.file,))
            self.seen.updateValue((row.file,), ((before[0] if before else 0) + 1,))
        note = f"{key[0]}:{n}"
        self.tally.update((n, total, note))
        files = sum(1 for _ in self.seen.keys())  # noqa: SIM118 - a MapState is no dict
        yield Row(k=key[0], n=n, total=total, files=files)

    def close(self):
        pass


class Windows(KeyedProcessor):
    """Counts per key and window, told when the window is over; a total that begins with another.

    Args:
        dawdle: a file. dawdle_at_ms: dawdle in this timer, and not in the row with the flag.
    """

    def __init__(self, dawdle: str = "", dawdle_at_ms: int = 0) -> None:
        self.dawdle, self.dawdle_at_ms = dawdle, dawdle_at_ms

    def open(self, ctx):
        self.total = ctx.reducing_state("total", "v bigint", lambda a, b: (a[0] + b[0],))
        self.counts = ctx.map_state("counts", "at_ms bigint", "n bigint")

    def on_initial(self, key, rows, ctx):
        for row in rows:
            self.total.add((row.v,))
            self.counts.update_value((row.at_ms,), (0,))
            ctx.timers.register(row.at_ms)

    def process(self, key, rows, ctx):
        n, files = 0, set()
        for row in rows:
            if self.dawdle and row.flag and not self.dawdle_at_ms:
                dawdle_in(self.dawdle)
            self.total.add((row.v,))
            at_ms = round(row.at.timestamp()) * 1000 // WINDOW_MS * WINDOW_MS + WINDOW_MS
            (before,) = self.counts.get_value((at_ms,)) or (0,)
            self.counts.update_value((at_ms,), (before + 1,))
            ctx.timers.register(at_ms)
            n += 1
            files.add(row.file)
        yield ctx.epoch, "rows", *key, 0, n, self.total.get()[0], sorted(files)

    def on_timer(self, key, at_ms, ctx):
        if self.dawdle and at_ms == self.dawdle_at_ms:
            dawdle_in(self.dawdle)
        (n,) = self.counts.get_value((at_ms,))  # None if it fired before: that would fail here
        self.counts.remove_key((at_ms,))
        yield ctx.epoch, "timer", *key, at_ms, n, self.total.get()[0], []


def keep(folder: Path, batch, number: int) -> None:
    """One file per batch; a repeated batch writes its file again."""
    folder.mkdir(exist_ok=True)
    draft = folder / f".{number}"
    draft.write_text(json.dumps([row.asDict() for row in batch.collect()]))
    draft.rename(folder / f"{number}.json")


def rows_in(spark, told: dict, schema: str):
    """The stream of input files, one in each batch."""
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", told.get("files", 1))
    return reader.json(str(Path(told["root"]) / "in"))


def tally(spark, backend, told: dict):
    """The frame of the job that counts."""
    df = rows_in(spark, told, "k bigint, v bigint, file int, flag boolean")
    if told.get("lost"):
        df = df.mapInPandas(redrawn, df.schema)
    return backend.transform_with_state(
        df,
        keys="k",
        processor=Tally(told.get("dawdle", ""), told.get("lost", "")),
        output_schema="k bigint, n bigint, total bigint, files int",
        uid="tally",
    )


def windows(spark, backend, told: dict):
    """The frame of the job with time."""
    initial = spark.read.schema("k bigint, v bigint, at_ms bigint")
    return backend.process(
        rows_in(spark, told, "k bigint, v bigint, file int, flag boolean, at timestamp"),
        keys="k",
        processor=Windows(told.get("dawdle", ""), told.get("dawdle_at_ms", 0)),
        output_schema="epoch bigint, kind string, k bigint, at_ms bigint, n bigint, total bigint, "
        "files array<int>",
        uid="windows",
        time_mode="event",
        event_time="at",
        watermark_delay=f"{told['windows']['delay_ms']} milliseconds",
        initial_state=initial.json(told["windows"]["initial"]),
    )


def session(told: dict) -> SparkSession:
    builder = SparkSession.builder.master(told["master"]).appName("cluster-test")
    conf = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.shuffle.reduceLocality.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.sql.session.timeZone": "UTC",
        "spark.executor.cores": "1",
        # Subtasks go where executors are when the frame is made: both must be there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "600s",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
        "spark.executor.extraJavaOptions": SHORT_LIVED,
        **told.get("conf", {}),
    }
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    return spark


def main() -> None:
    told = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    spark = session(told)
    root = Path(told["root"])
    backend = StateBackend(
        spark,
        uri=told.get("uri", (root / "store").as_uri()),
        job="default",
        local_dir=told.get("local_dir", str(root / "local")),
        parallelism=4,
        commit=told.get("commit", "sync"),
        settings=told.get("settings", {}),
    )
    frame = windows(spark, backend, told) if told.get("windows") else tally(spark, backend, told)
    writer = frame.writeStream.option("checkpointLocation", str(root / "checkpoint"))
    if told.get("sink") == "batches":
        function = backend.checked(lambda batch, number: keep(root / "out", batch, number))
        writer = writer.foreachBatch(function)
    else:
        writer = writer.format("parquet").option("path", str(root / "out"))
    query = backend.start(writer.trigger(availableNow=True))
    failed = ""
    try:
        query.awaitTermination()
    except Exception as error:
        failed = str(error)
    if not failed:
        backend.wait_durable()
    reports = [
        {name: getattr(report, name) for name in report.__struct_fields__}
        for report in backend.restores()
    ]
    rebalance = backend.progress().last_rebalance
    result = {
        "failed": failed,
        "restores": reports,
        "failure": str(backend.failure or ""),
        "rebalance": rebalance and {n: getattr(rebalance, n) for n in rebalance.__struct_fields__},
    }
    (root / f"result-{told['name']}.json").write_text(json.dumps(result))
    spark.stop()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
