"""What the tests of the small examples share: random feeds, and both ways to run them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from examples.local import stream, write_files
from statebackend import ProcessorTester, StateBackend

Rows = list[dict[str, Any]]
UTC = pa.timestamp("us", "UTC")
FAR_US = 4_000_000_000 * 1_000_000
OLD_US = 1_600_000_000 * 1_000_000
BOUND_S = 120


def rows_of(tables: Sequence[pa.Table]) -> Rows:
    """All rows in the order of their arrival, times in microseconds."""
    rows: Rows = []
    for table in tables:
        if "at" in table.column_names:
            place = table.schema.get_field_index("at")
            table = table.set_column(place, "at", table.column("at").cast(pa.int64()))
        rows += table.to_pylist()
    return rows


def with_late(tables: Sequence[pa.Table], keys: int = 40) -> list[pa.Table]:
    """From the fourth table on, also rows that come years too late."""
    found = list(tables)
    for number, table in enumerate(tables):
        if number >= 3:
            old = table.slice(0, keys)
            at = pa.array(OLD_US + np.arange(len(old)) * 1_000_000).cast(UTC)
            old = old.set_column(table.schema.get_field_index("at"), "at", at)
            found[number] = pa.concat_tables([old, table])
    return found


def flush(table: pa.Table, key: str) -> pa.Table:
    """One row, of a key of its own, far ahead: the watermark passes all that was before."""
    last = table.slice(0, 1)
    for name, value in ((key, pa.array(["flush"])), ("at", pa.array([FAR_US]).cast(UTC))):
        last = last.set_column(table.schema.get_field_index(name), name, value)
    return last


def through_tester(
    tester: ProcessorTester, tables: Sequence[pa.Table], delay_us: int
) -> tuple[Rows, Rows]:
    """Through the tester, the watermark moving as in a query; restarted and rescaled on the way.

    Returns:
        all output, and the rows that were not late.
    """
    out, kept, watermark_ms = [], Rows(), 0
    for number, table in enumerate(tables):
        out.append(tester.testBatch(table))
        at = table.column("at").cast(pa.int64())
        kept += rows_of([table.filter(pc.greater(at, watermark_ms * 1000))])
        next_ms = (pc.max(at).as_py() - delay_us) // 1000
        if next_ms > watermark_ms:
            watermark_ms = next_ms
            out.append(tester.setWatermark(next_ms))
        if number % 2:
            tester.restart()
        if number == 2:
            tester.rescale(3)
    out.append(tester.setWatermark(FAR_US // 1000))
    return rows_of([_plain(table) for table in out]), kept


def _plain(table: pa.Table) -> pa.Table:
    """Timestamps as numbers."""
    arrays = [
        column.cast(UTC).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in table.columns
    ]
    return pa.table(arrays, names=table.column_names)


class Query:
    """A query that is stopped in the middle and comes back on a host without local copies."""

    def __init__(
        self, spark: SparkSession, root: Path, build: Callable[..., DataFrame], **schemas: str
    ) -> None:
        self._spark, self._root, self._build, self._schemas = spark, root, build, schemas

    def __call__(self, *feeds: Sequence[pa.Table]) -> Rows:
        """All output of the tables of each input, one of each in a batch; times as numbers."""
        half = len(feeds[0]) // 2
        self._run([feed[:half] for feed in feeds], 0)
        shutil.rmtree(self._root / "local")
        self._run([feed[half:] for feed in feeds], half)
        out = self._spark.read.parquet(str(self._root / "out"))
        return rows_of([_plain(out.toArrow())])

    def _run(self, feeds: Sequence[Sequence[pa.Table]], first: int) -> None:
        root, frames = self._root, []
        for (name, schema), feed in zip(self._schemas.items(), feeds, strict=True):
            write_files(root / name, feed, first)
            frames.append(stream(self._spark, root / name, schema))
        backend = StateBackend(
            self._spark,
            uri=(root / "store").as_uri(),
            local_dir=str(root / "local"),
            parallelism=2,
        )
        writer = (
            self._build(backend, *frames)
            .writeStream.format("parquet")
            .option("path", str(root / "out"))
            .option("checkpointLocation", str(root / "checkpoint"))
            .trigger(availableNow=True)
        )
        query = backend.start(writer)
        try:
            assert query.awaitTermination(BOUND_S), "the query did not end"
        finally:
            query.stop()
            backend.close()
