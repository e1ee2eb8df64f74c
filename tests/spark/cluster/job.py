"""A driver program for the cluster tests: counts per key, over files, until they are used up.

Run as a process of its own, so that a test can kill it. Everything it is told comes as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from statebackend import StateBackend


class Tally(StatefulProcessor):
    """Count, sum and last sequence per key; can be told to dawdle in one attempt."""

    def __init__(self, dawdle: str = "") -> None:
        self.dawdle = dawdle

    def init(self, handle):
        self.tally = handle.getValueState("tally", "n bigint, total bigint, note string")
        self.seen = handle.getMapState("seen", "file int", "n int")

    def handleInputRows(self, key, rows, timerValues):
        n, total, note = self.tally.get() or (0, 0, "")
        for row in rows:
            if self.dawdle and row.flag:
                self._dawdle()
            n, total = n + 1, total + row.v
            before = self.seen.getValue((row.file,))
            self.seen.updateValue((row.file,), ((before[0] if before else 0) + 1,))
        note = f"{key[0]}:{n}"
        self.tally.update((n, total, note))
        files = sum(1 for _ in self.seen.keys())  # noqa: SIM118 - a MapState is no dict
        yield Row(k=key[0], n=n, total=total, files=files)

    def _dawdle(self):
        # The first attempt only: whoever makes the file waits in it until it is removed.
        path = Path(self.dawdle)
        try:
            with path.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        for _ in range(1200):
            if not path.exists():
                return
            time.sleep(0.05)

    def close(self):
        pass


def keep(folder: Path, batch, number: int) -> None:
    """One file per batch; a repeated batch writes its file again."""
    folder.mkdir(exist_ok=True)
    draft = folder / f".{number}"
    draft.write_text(json.dumps([row.asDict() for row in batch.collect()]))
    draft.rename(folder / f"{number}.json")


def main() -> None:
    told = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    builder = SparkSession.builder.master(told["master"]).appName("cluster-test")
    conf = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.shuffle.reduceLocality.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        # Subtasks go where executors are when the frame is made: both must be there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        **told.get("conf", {}),
    }
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    root = Path(told["root"])
    stream = (
        spark.readStream.schema("k bigint, v bigint, file int, flag boolean")
        .option("maxFilesPerTrigger", 1)
        .json(str(root / "in"))
    )
    backend = StateBackend(
        spark,
        uri=told.get("uri", (root / "store").as_uri()),
        local_dir=told.get("local_dir", str(root / "local")),
        parallelism=4,
        commit=told.get("commit", "sync"),
        settings=told.get("settings", {}),
    )
    frame = backend.transform_with_state(
        stream,
        keys="k",
        processor=Tally(told.get("dawdle", "")),
        output_schema="k bigint, n bigint, total bigint, files int",
        uid="tally",
    )
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
    result = {"failed": failed, "restores": reports, "failure": str(backend.failure or "")}
    (root / f"result-{told['name']}.json").write_text(json.dumps(result))
    spark.stop()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
