"""What the small examples share: a session, generated files as a stream, and a run to their end."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from statebackend import StateBackend
from statebackend.environment import require_java

_FIRST_FILE_S = 1_700_000_000


def session() -> SparkSession:
    """Two slots on this machine."""
    require_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers run this very interpreter
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.shuffle.reduceLocality.enabled", "false")  # subtasks stay where they are
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


def write_files(folder: Path, tables: Iterable[pa.Table], first: int = 0) -> None:
    """Parquet files, one a minute: Spark's file source takes the oldest first."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables, start=first):
        draft = folder / f".{number}.draft"
        pq.write_table(table, draft)
        os.utime(draft, (_FIRST_FILE_S + 60 * number, _FIRST_FILE_S + 60 * number))
        draft.rename(folder / f"{number:04}.parquet")


def stream(spark: SparkSession, folder: Path, schema: str) -> DataFrame:
    """One file in each batch."""
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder))


class Run:
    """A session and a backend in a directory that goes when the block is left.

    Example::

        with Run("totals") as run:
            payments = run.stream("payments", "account string, amount bigint", tables)
            run.show(build(run.backend, payments), "account")
    """

    def __init__(self, job: str) -> None:
        self._job = job

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix=f"{self._job}-")
        self._root = Path(self._folder.name)
        self._spark = session()
        self.backend = StateBackend(
            self._spark,
            uri=(self._root / "store").as_uri(),
            job=self._job,
            local_dir=str(self._root / "local"),
            parallelism=2,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self._spark.stop()
        self._folder.cleanup()

    def stream(self, name: str, schema: str, tables: Iterable[pa.Table]) -> DataFrame:
        """A stream of generated tables, one in each batch."""
        write_files(self._root / name, tables)
        return stream(self._spark, self._root / name, schema)

    def show(self, frame: DataFrame, *order: str, rows: int = 20) -> None:
        """Run until all files are taken in, and print some of the output."""
        query = (
            self.backend.write_stream(frame)
            .option("checkpointLocation", str(self._root / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self._root / "out"), "parquet")
        )
        query.awaitTermination()
        out = self._spark.read.parquet(str(self._root / "out"))
        print(f"{out.count()} rows; the first {rows} by {', '.join(order)}:")
        out.orderBy(*order).show(rows, truncate=60)
