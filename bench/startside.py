"""One start of a counter, in a process of its own: `python -m bench.startside TASK.json`.

It notes when it got where, as lines of a file, and takes batches in until it is killed or its input
ends. The program is the same on both sides but for `statebackend.install`.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from py4j.java_gateway import GatewayClient
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession

from bench.data import FILES_PER_BATCH, INPUT_SCHEMA
from bench.processor import OUTPUT_SCHEMA, Counter
from bench.side import session

__all__ = ["note"]

_LINES = 25  # of a profile
_SETTLE_S = 0.2
_in_jvm_s = [0.0]  # that this thread waited for the JVM's answers


def note(path: str, name: str, **said: Any) -> None:
    """Append when this was; one write, so that lines of several processes stay whole."""
    line = json.dumps({"name": name, "at_s": time.time(), **said}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


class NotingCounter(Counter):
    """The counter; its first call in a task, and its first row, are noted."""

    def __init__(self, path: str) -> None:
        self._path, self._seen = path, False

    def init(self, handle: Any) -> None:
        if TaskContext.get() is not None:  # elsewhere its states are only looked at
            note(self._path, "task")
        super().init(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if not self._seen:
            self._seen = True
            note(self._path, "row")
        return super().handleInputRows(key, rows, timerValues)


def _counts(spark: SparkSession, task: dict[str, Any]) -> DataFrame:
    grouped = (
        spark.readStream.schema(INPUT_SCHEMA)
        .option("maxFilesPerTrigger", FILES_PER_BATCH)
        .parquet(task["input"])
        .groupBy("k")
    )
    note(task["notes"], "source", in_jvm_s=_in_jvm_s[0])
    return grouped.transformWithState(
        statefulProcessor=NotingCounter(task["notes"]),
        outputStructType=OUTPUT_SCHEMA,
        outputMode="update",
        timeMode="none",
    )


def _install(spark: SparkSession, task: dict[str, Any]) -> Any:
    import statebackend

    found = statebackend.install(
        spark, local_dir=f"{task['work']}/local", parallelism=task["partitions"]
    )
    return found.backend


def _count_calls() -> None:
    """Have the time that calls into the JVM take counted, those of this thread alone."""
    plain, this = GatewayClient.send_command, threading.get_ident()

    def send_command(*given: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return plain(*given, **named)
        finally:
            if threading.get_ident() == this:
                _in_jvm_s[0] += time.perf_counter() - began_s

    GatewayClient.send_command = send_command


def _timed(notes: str) -> None:
    """Note what Spark's own part of ``start()`` took."""
    from statebackend.spark.start.stateful_writer import WriterCalls

    plain: Callable[..., Any] = WriterCalls.spark_start

    def start(writer: Any) -> Any:
        began_s, before_s = time.perf_counter(), _in_jvm_s[0]
        query = plain(writer)
        seconds, in_jvm_s = time.perf_counter() - began_s, _in_jvm_s[0] - before_s
        note(notes, "sparks_start", seconds=seconds, in_jvm_s=in_jvm_s)
        return query

    WriterCalls.spark_start = staticmethod(start)


def _profiled(profile: cProfile.Profile) -> str:
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("cumulative").print_stats(_LINES)
    return out.getvalue()


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    notes = task["notes"]
    note(notes, "program")
    spark = session(task)
    _count_calls()
    note(notes, "session", in_jvm_s=0.0)
    backend, profile = None, cProfile.Profile()
    if task["profile"]:
        profile.enable()
    if task["side"] == "ours":
        backend = _install(spark, task)
        _timed(notes)
    note(notes, "installed", in_jvm_s=_in_jvm_s[0])

    def write(frame: DataFrame, batch: int) -> None:
        counts = {row.k: row.n for row in frame.collect()}
        said: dict[str, Any] = {}
        if backend is not None:
            found = backend.restores()
            said["restores"] = [[one.source, one.seconds] for one in found]
        wrong = [k for k, n in counts.items() if n != batch + 1]
        note(notes, "output", batch=batch, keys=len(counts), wrong=len(wrong), **said)

    frame = _counts(spark, task)
    note(notes, "frame", in_jvm_s=_in_jvm_s[0])
    writer = frame.writeStream.outputMode("update").foreachBatch(write)
    query = writer.option("checkpointLocation", f"{task['work']}/checkpoint").start()
    profile.disable()
    said = {"profile": _profiled(profile)} if task["profile"] else {}
    note(notes, "started", in_jvm_s=_in_jvm_s[0], **said)
    query.awaitTermination(task["timeout_s"])
    time.sleep(_SETTLE_S)


if __name__ == "__main__":
    main()
