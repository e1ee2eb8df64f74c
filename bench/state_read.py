"""Reading state as Arrow tables: `python -m bench state-read`.

One job of one subtask with a value state: a key of 16 characters, and a value of two numbers and a
text. Measured is `statebackend.read_state` in one process, files fetched and rows decoded, and the
most memory that it took beyond what the process had. The store is a folder. Then Spark reads the
same state, by our source and by its own (see `bench.state_read_spark`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from bench.inproc import Harness, spark_batches
from bench.state_read_spark import read_in_spark
from statebackend.api.arrow import ArrowProcessor
from statebackend.tables.read_state import read_state

__all__ = ["state_read", "state_read_text"]

_FILL_ROWS = 250_000  # of an epoch that fills the state
_INPUT = StructType([StructField("k", StringType()), StructField("v", LongType())])
_OUTPUT = StructType([StructField("k", StringType())])
_STATE = StructType(
    [
        StructField("n", LongType()),
        StructField("share", DoubleType()),
        StructField("page", StringType()),
    ]
)


class Pages(ArrowProcessor):
    """Writes a row for each key."""

    def open(self, ctx: Any) -> None:
        """See the class."""
        self.rows = ctx.value_state("count", "n bigint, share double, page string")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        """Nothing comes out."""
        n = pc.cast(batch.column("v"), pa.int64())
        share = pc.divide(pc.cast(n, pa.float64()), 7.0)
        page = pc.binary_join_element_wise("/page/", pc.cast(n, pa.string()), "")
        self.rows.put(ctx.keys, [n, share, page])
        return iter(())


def state_read(*, keys: int, work: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """Entries a second, and memory, of reading all of a state, and of reading some keys."""
    harness = Harness(
        work,
        keys=1,
        processor=Pages(),
        state=_STATE,
        flavour="arrow",
        columns=_INPUT,
        output=_OUTPUT,
    )
    for start in range(0, keys, _FILL_ROWS):
        numbers = np.arange(start, min(start + _FILL_ROWS, keys), dtype=np.int64)
        harness.run(spark_batches(_names(numbers), harness.epoch, values=numbers))
    harness.close()
    harness.session.cleaner.drain(60.0)
    # The harness's job lies at the URI itself: the folder above has it under the folder's name.
    (work / "bench").symlink_to(work / "store")
    progress("the state is there")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    reader = read_state(f"file://{work}", "bench", "counter", "count")
    fetched_s, fetched_cpu_s = time.perf_counter(), time.process_time()
    rows, total, most_bytes = 0, 0, 0
    for batch in reader:
        rows += batch.num_rows
        total += pc.sum(batch.column("value").field("n")).as_py()
        most_bytes = max(most_bytes, batch.nbytes)
    ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    if (rows, total) != (keys, keys * (keys - 1) // 2):
        raise AssertionError(f"{rows} rows with the sum {total} were read")
    after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    some = [name.as_py() for name in _names(np.arange(0, keys, max(1, keys // 100)))]
    at_s = time.perf_counter()
    found = read_state(f"file://{work}", "bench", "counter", "count", keys=some).read_all()
    keys_s = time.perf_counter() - at_s
    if found.num_rows != len(some):
        raise AssertionError(f"{found.num_rows} of {len(some)} keys were found")
    return {
        "keys": keys,
        "fetch_s": round(fetched_s - started_s, 3),
        "decode_s": round(ended_s - fetched_s, 3),
        "entries_per_s": round(keys / (ended_s - started_s)),
        "decoded_per_s": round(keys / (ended_s - fetched_s)),
        "entries_per_cpu_s": round(keys / (ended_cpu_s - started_cpu_s)),
        "decoded_per_cpu_s": round(keys / (ended_cpu_s - fetched_cpu_s)),
        "largest_batch_bytes": most_bytes,
        "memory_growth_bytes": (after_kb - before_kb) * 1024,
        "some_keys": len(some),
        "some_keys_s": round(keys_s, 3),
        "in_spark": read_in_spark(keys=keys, uri=f"file://{work}", work=work, progress=progress),
    }


def state_read_text(found: dict[str, Any]) -> str:
    """As a person reads it."""
    ours, theirs = (found["in_spark"][name] for name in ("statebackend", "statestore"))
    return (
        f"state-read: {found['keys']:,} entries\n"
        f"  fetched in {found['fetch_s']} s, scanned and decoded in {found['decode_s']} s: "
        f"{found['entries_per_s']:,} entries/s in all, {found['decoded_per_s']:,} without the "
        f"fetch\n"
        f"  by the second of a core: {found['entries_per_cpu_s']:,} in all, "
        f"{found['decoded_per_cpu_s']:,} without the fetch\n"
        f"  largest batch {found['largest_batch_bytes'] / 2**20:.1f} MiB, the process grew by "
        f"{found['memory_growth_bytes'] / 2**20:.0f} MiB\n"
        f"  {found['some_keys']} keys: {found['some_keys_s']} s\n"
        f"  in Spark, one core: {ours['entries_per_s']:,} entries/s by our source, "
        f"{theirs['entries_per_s']:,} by Spark's statestore"
    )


def _names(numbers: np.ndarray) -> pa.Array:
    """A text of 16 characters for each number."""
    digits = pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), 16, "0")
    return digits.combine_chunks() if isinstance(digits, pa.ChunkedArray) else digits
