"""One state, in micro-batches, then in a continuous job, then in micro-batches again."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value
from pyspark.sql import functions as F

from statebackend.backend import StateBackend
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.errors import MaxParallelismChangedError, SettingError
from tests.continuous.runtime.jobs import KEYS, OUTPUT, Counting, Numbers, Windows, windows_truth
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from recovery.savepoints.savepoint import Savepoint

WINDOWS = "key BIGINT, start BIGINT, n BIGINT, total BIGINT"
ROWS = "key BIGINT, value BIGINT, at TIMESTAMP"
SIZE_MS = 200
DELAY = "5 milliseconds"


@pytest.fixture(scope="module", autouse=True)
def sources_travel_by_value() -> Iterator[None]:
    register_pickle_by_value(sys.modules[__name__])
    yield
    with contextlib.suppress(ValueError):
        unregister_pickle_by_value(sys.modules[__name__])


class From(Numbers):
    """`Numbers` from one of them on."""

    def __init__(self, first: int, **more: Any) -> None:
        self._first = first
        super().__init__(None, splits=1, **more)

    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        return super().batch(numbers + self._first)


def numbers(first: int, end: int) -> pa.RecordBatch:
    return Numbers(None).batch(np.arange(first, end, dtype=np.int64))


def written(folder: Path, batches: list[pa.RecordBatch]) -> Path:
    """One file for each; as files of a streaming query's input."""
    folder.mkdir()
    for i, batch in enumerate(batches):
        pq.write_table(pa.Table.from_batches([batch]), folder / f"{i}.parquet")
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.rglob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


class Stand:
    """Backends of one test, each of a job of its own."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def backend(self, job: str, **given: Any) -> StateBackend:
        return StateBackend(
            self.spark,
            uri=f"file://{self.folder}/state",
            job=job,
            local_dir=str(self.folder / "local"),
            **given,
        )

    def frame(self, backend: StateBackend, source: Path) -> DataFrame:
        """Counts and windows of one input: it is read by both."""
        df = self.spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1)
        stream = df.parquet(str(source))
        counts = backend.process(
            stream, keys="key", processor=Counting(), uid="count", output_schema=OUTPUT
        )
        windows = backend.process(
            stream,
            keys="key",
            processor=Windows(SIZE_MS),
            uid="windows",
            output_schema=WINDOWS,
            time_mode="event",
            event_time="at",
            watermark_delay=DELAY,
        )
        return windows.unionByName(counts.select("key", F.lit(-1).alias("start"), "n", "total"))

    def batches(self, job: str, source: Path, **given: Any) -> tuple[StateBackend, Path]:
        """A query over all of an input; its output."""
        backend, out = self.backend(job, **given), self.folder / f"out-{job}"
        frame = self.frame(backend, source)
        writer = (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(self.folder / f"location-{job}"))
            .option("path", str(out))
            .trigger(availableNow=True)
        )
        query = backend.start(writer)
        assert query.awaitTermination(300)
        return backend, out

    def stream(self, job: str, savepoint: Savepoint, first: int) -> tuple[Savepoint, Path]:
        """A continuous job, stopped with a savepoint once some windows came out; its output."""
        backend, out = self.backend(job, savepoint=savepoint), self.folder / f"out-{job}"
        source = From(first, rows_per_s=1500, event_time="at", watermark_delay="5 ms")
        rows = backend.continuous(source, name="numbers").sink(FileSink(out / "rows"), uid="rows")
        keyed = rows.key_by("key")
        counted = keyed.process(Counting(), uid="count", output_schema=OUTPUT)
        counted.sink(FileSink(out / "counts"))
        query = (
            keyed.process(
                Windows(SIZE_MS),
                uid="windows",
                output_schema=WINDOWS,
                time_mode="event",
                event_time="at",
            )
            .sink(FileSink(out / "windows"))
            .start(parallelism=1, checkpoint_interval=0.5)
        )
        try:
            soon(lambda: len(list((out / "windows").glob("*.parquet"))) > 1, 120.0)
            made = backend.savepoint()
            assert query.is_active
            assert made.epoch > savepoint.epoch
            return query.stop_with_savepoint(), out
        finally:
            query.stop()


@pytest.fixture
def stand(spark: SparkSession, tmp_path: Path) -> Stand:
    return Stand(spark, tmp_path)


@pytest.mark.timeout(580)
def test_a_state_goes_from_batches_to_a_stream_and_back(stand: Stand, tmp_path: Path) -> None:
    """Each number is read once in all; what read it is counted apart, from the files themselves."""
    first = written(tmp_path / "in-1", [numbers(0, 1500)])
    backend, out_1 = stand.batches("one", first, parallelism=2, max_parallelism=8)
    saved = backend.savepoint()
    other = stand.backend("two", savepoint=saved, max_parallelism=16)
    rows = other.continuous(From(1500), name="numbers").key_by("key")
    counted = rows.process(Counting(), uid="count", output_schema=OUTPUT)
    with pytest.raises(MaxParallelismChangedError):
        counted.sink(FileSink(tmp_path / "no")).start(parallelism=1)

    again, out_2 = stand.stream("two", saved, 1500)
    read = sorted(row["value"] for row in rows_of(out_2 / "rows"))
    assert read == list(range(1500, read[-1] + 1))
    there, end = read[-1] + 1, read[-1] + 1 + 1500

    far = numbers(end + 100_000, end + 100_001)  # by it, all windows before are over
    last = written(tmp_path / "in-3", [numbers(there, end), far])
    other = stand.backend("three", savepoint=again)
    stand.frame(other, last)
    starting = other.starting(checkpoint_location=str(tmp_path / "location-three"))
    with pytest.raises(SettingError, match="how many sources"), starting:
        pass
    _, out_3 = stand.batches("three", last, savepoint=again, parallelism=3)

    found = [*rows_of(out_1), *rows_of(out_3)]
    windows = [tuple(row.values()) for row in found if row["start"] >= 0]
    windows += [tuple(row.values()) for row in rows_of(out_2 / "windows")]
    assert len(windows) == len(set(windows))
    assert set(windows) == windows_truth(end, SIZE_MS)
    check_counts(found, rows_of(out_2 / "counts"), [*range(end), end + 100_000])


def check_counts(
    found: list[dict[str, Any]], streamed: list[dict[str, Any]], read: list[int]
) -> None:
    """How many numbers a key has had comes out at each step once, and all of them in the end."""
    counts = [row for row in found if row["start"] < 0] + streamed
    seen = Counter((row["key"], row["n"]) for row in counts)
    assert max(seen.values()) == 1
    last: dict[int, tuple[int, int]] = {}
    for row in counts:
        last[row["key"]] = max(last.get(row["key"], (0, 0)), (row["n"], row["total"]))
    wanted = {
        key: (len(mine), sum(mine))
        for key in range(KEYS)
        if (mine := [i for i in read if i * 7 % KEYS == key])
    }
    assert last == wanted
