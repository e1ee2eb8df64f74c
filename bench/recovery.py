"""A driver and a worker that come back where the files are: `python -m bench recovery`.

One subtask with about a gigabyte of state. Its driver and its worker end; a new driver takes the
job over, and a new attempt begins the next epoch, through the product's own task. Measured is the
time from the attempt's `begin` to the first row that reaches the user's code, and every request to
the object store is counted: those of the driver's start (which reads what the log needs), and those
from `begin` on. The same over a growing log shows what they depend on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from bench.inproc import Harness, spark_batches
from statebackend.api.arrow import ArrowProcessor

__all__ = ["recovery", "recovery_text"]

_VALUE_BYTES = 256
_FILL_ROWS = 250_000  # of an epoch that fills the state
_TOUCHED = 1_000  # keys of an epoch afterwards
_STATE = StructType([StructField("v", BinaryType())])
_OUTPUT = StructType([StructField("k", LongType())])
_first_row_s: list[float] = []


class Blobs(ArrowProcessor):
    """A value of random bytes for each key."""

    def open(self, ctx: Any) -> None:
        """See the class."""
        self.blob = ctx.value_state("count", "v binary")
        self.random = np.random.default_rng(3)

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        """A value for each key, not compressible."""
        _first_row_s.append(time.perf_counter())
        keys = ctx.keys.columns.column(0)
        self.blob.get(ctx.keys)
        data = pa.py_buffer(self.random.bytes(len(keys) * _VALUE_BYTES))
        offsets = pa.py_buffer(
            np.arange(0, (len(keys) + 1) * _VALUE_BYTES, _VALUE_BYTES, dtype=np.int32)
        )
        values = pa.BinaryArray.from_buffers(pa.binary(), len(keys), [None, offsets, data])
        self.blob.put(ctx.keys, [values])
        yield pa.RecordBatch.from_arrays([keys], ["k"])


def recovery(*, state_bytes: int, repeats: int, work: Path) -> dict[str, Any]:
    """Milliseconds from begin to the first row, and requests, for several ages of the log."""
    harness = Harness(
        work,
        keys=1,
        processor=Blobs(),
        state=_STATE,
        flavour="arrow",
        output=_OUTPUT,
        # The base of a gigabyte is uploaded once; nothing else is at work while it is measured.
        overrides={"base_bytes_per_s": 0},
    )
    keys = state_bytes // _VALUE_BYTES
    for start in range(0, keys, _FILL_ROWS):
        harness.run(spark_batches(np.arange(start, start + _FILL_ROWS), harness.epoch))
    _settled(harness)
    found: dict[str, Any] = {
        "state_bytes": sum(f.stat().st_size for f in (work / "local").rglob("*.sst")),
        "keys": keys,
    }
    cases = []
    for epochs in (1, 20, 60):
        _touch(harness, epochs, keys)
        cases.append(_case(harness, repeats, keys))
    found["cases"] = cases
    harness.close()
    return found


def _settled(harness: Harness) -> None:
    harness.close()
    harness.session.cleaner.drain(60.0)


def _touch(harness: Harness, epochs: int, keys: int) -> None:
    random = np.random.default_rng(harness.epoch)
    for _ in range(epochs):
        some = random.choice(keys, _TOUCHED, replace=False)
        harness.run(spark_batches(np.sort(some), harness.epoch))


def _case(harness: Harness, repeats: int, keys: int) -> dict[str, Any]:
    took_ms, start_reads, worker_reads, sources, live = [], [], [], set(), 0
    for _ in range(repeats):
        _settled(harness)  # the worker's processes have ended
        before = _reads(harness)
        harness.restart()
        start_reads.append(_reads(harness) - before)
        live = len(harness.log.live())
        before = _reads(harness)
        begun_s: list[float] = []
        real_begin = harness.session.begin

        def begin(request: Any, real: Any = real_begin, begun: list[float] = begun_s) -> Any:
            begun.append(time.perf_counter())
            return real(request)

        harness.session.begin = begin  # type: ignore[method-assign]
        _first_row_s.clear()
        _touch(harness, 1, keys)
        took_ms.append((_first_row_s[0] - begun_s[0]) * 1000)
        (report,) = harness.session.restores
        sources.add(report.source)
        worker = harness.session.progress.summary(None).subtasks[-1].requests
        reads = sum(worker.get(verb, (0, 0))[0] for verb in ("get", "get_range", "get_tail"))
        worker_reads.append(reads + _reads(harness) - before)
        if report.durable_bytes:
            raise AssertionError("state was read from the object store")
    return {
        "epochs": harness.epoch,
        "live_records": live,
        "begin_to_first_row_ms": round(statistics.median(took_ms), 2),
        "longest_ms": round(max(took_ms), 2),
        "reads_at_driver_start": max(start_reads),
        "reads_from_begin_on": max(worker_reads),
        "sources": sorted(sources),
    }


def _reads(harness: Harness) -> int:
    counts = harness.driver_store.counts
    verbs = ("get", "get_range", "get_tail", "list")
    return sum(counts[verb].requests for verb in verbs if verb in counts)


def recovery_text(found: dict[str, Any]) -> str:
    """The figures to read."""
    lines = [
        f"Recovery of one subtask with {found['state_bytes'] / 1e9:.2f} GB of table files "
        f"({found['keys']:,} keys) on its host; driver and worker are new:"
    ]
    lines += [
        (
            f"  after {one['epochs']} epochs: {one['begin_to_first_row_ms']:.1f} ms from begin to "
            f"the first row (longest {one['longest_ms']:.1f}), from the {'/'.join(one['sources'])} "
            f"copy; reads of the object store: {one['reads_from_begin_on']} from begin on, "
            f"{one['reads_at_driver_start']} at the driver's start ({one['live_records']} records)"
        )
        for one in found["cases"]
    ]
    return "\n".join(lines)
