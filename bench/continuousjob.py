"""The job of `python -m bench continuous`: its source, its processor, and the sink that measures.

Row ``i`` has a key made from ``i`` alone (`keys_of`, and the same arithmetic in
`FlinkContinuous.java`) and the time at which it is due. Each row gives (key, the key's count so
far, when it was due).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend import ArrowContext, ArrowProcessor
from statebackend.continuous.sinks.sink import Committer, NoCommitter, Sink, SinkContext, SinkWriter
from statebackend.continuous.sources.generated_source import GeneratedSource
from statebackend.keygroups import default_max_parallelism, subtask_of

__all__ = [
    "OUTPUT_SCHEMA",
    "Counts",
    "DueRows",
    "Measured",
    "Measuring",
    "Slow",
    "Start",
    "expected",
    "keys_of",
    "merged",
    "percentiles_ms",
]

OUTPUT_SCHEMA = "k bigint, n bigint, due_us bigint"
_ARROW = pa.schema([("k", pa.int64()), ("due_us", pa.int64())])
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_HALF, _POSITIVE = np.uint64(32), np.uint64(33)
_NOTED_S = 0.02
_PERCENTILES = (50, 90, 99, 99.9)


def keys_of(numbers: NDArray[np.int64], keys: int) -> NDArray[np.int64]:
    """The keys of rows by their numbers: 0 to ``keys`` - 1, as good as at random."""
    mixed = numbers.astype(np.uint64) * _FIRST
    mixed ^= mixed >> _HALF
    mixed *= _SECOND
    mixed >>= _POSITIVE
    mixed %= np.uint64(keys)
    return mixed.view(np.int64)


class Start:
    """The moment when the first row is due, in microseconds: a file that is there once all run."""

    def __init__(self, path: str) -> None:
        self._path, self._us = Path(path), 0

    def set(self, us: int) -> None:
        """In one step."""
        whole = self._path.with_suffix(".new")
        whole.write_text(str(us), encoding="ascii")
        whole.rename(self._path)

    @property
    def us(self) -> int:
        """0: nothing is due yet."""
        if not self._us and self._path.exists():
            self._us = int(self._path.read_text(encoding="ascii"))
        return self._us


class DueRows(GeneratedSource):
    """Rows that are due one after the other.

    Args:
        rows, splits, rows_per_s: as for `GeneratedSource`. keys: how many there are.
        start: when the first row is due; None where there is no rate.
    """

    def __init__(
        self, rows: int, *, splits: int, keys: int, rows_per_s: float | None, start: Start | None
    ) -> None:
        super().__init__(
            "k bigint, due_us bigint",
            rows=rows,
            splits=splits,
            rows_per_s=rows_per_s,
            clock=time.time,
        )
        self._keys, self._start = keys, start
        self._us = 0.0 if rows_per_s is None else 1e6 / rows_per_s

    def _pace(self, index: int) -> Callable[[int], int] | None:
        """By when rows are due, not by when the split was opened."""
        start = self._start
        if start is None:
            return None

        def due(given: int) -> int:
            if not start.us:
                return 0
            since_us = time.time() * 1e6 - start.us - index * self._us
            return max(0, int(since_us / (self._us * self.splits)) + 1)

        return due

    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        """Keys, and when they are due."""
        due_us = (numbers * self._us).astype(np.int64) + (self._start.us if self._start else 0)
        columns = [pa.array(keys_of(numbers, self._keys)), pa.array(due_us)]
        return pa.RecordBatch.from_arrays(columns, schema=_ARROW)


class Counts(ArrowProcessor):
    """Each row with its key's count so far."""

    def open(self, ctx: ArrowContext) -> None:
        self._count = ctx.value_state("count", "n bigint")

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        starts = ctx.keys.starts
        each = np.diff(starts)
        before = self._count.get(ctx.keys).column(0).fill_null(0).to_numpy()
        self._count.put(ctx.keys, {"n": before + each})
        so_far = np.repeat(before - starts[:-1], each) + np.arange(1, batch.num_rows + 1)
        return pa.RecordBatch.from_arrays(
            [batch.column(0), pa.array(so_far), batch.column(1)], names=["k", "n", "due_us"]
        )


class Slow(ArrowProcessor):
    """Passes rows on, all subtasks but the first so slowly that each takes ``row_s``."""

    def __init__(self, row_s: float, parallelism: int) -> None:
        self._row_s, self._parallelism = row_s, parallelism

    def open(self, ctx: ArrowContext) -> None:
        pass

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        group = int.from_bytes(ctx.keys.full[0].as_py()[:2], "big")
        groups = default_max_parallelism(self._parallelism)
        if int(subtask_of(np.array([group]), self._parallelism, groups)[0]) > 0:
            time.sleep(self._row_s * batch.num_rows)
        return batch


class Measuring(Sink):
    """Checks the counts, and notes when rows came: one file for each subtask, in ``folder``.

    Args:
        start: when the first row is due; None: there is no rate.
        warm_s: latencies count of rows that are due from then on.
    """

    def __init__(self, folder: str, *, keys: int, start: Start | None, warm_s: float) -> None:
        self._folder, self._keys, self._start, self._warm_s = folder, keys, start, warm_s

    def open(self, context: SinkContext) -> SinkWriter:
        path = Path(self._folder) / f"sink-{context.subtask}.npz"
        return _Writer(path, self._keys, self._start, self._warm_s)

    def committer(self, job: str, uid: str) -> Committer:
        return NoCommitter()


class _Writer(SinkWriter):
    def __init__(self, path: Path, keys: int, start: Start | None, warm_s: float) -> None:
        self._path, self._start, self._warm_us = path, start, warm_s * 1e6
        self._last = np.zeros(keys, np.int64)  # the newest count of each key
        self._total = self._weighted = np.int64(0)
        self._rows = self._batches = 0
        self._noted: list[tuple[float, int]] = []  # when there were how many rows
        self._took_us: list[NDArray[np.int64]] = []
        self._closed = False

    def write(self, batch: pa.RecordBatch) -> None:
        now_s = time.time()
        keys, counts, due_us = (column.to_numpy() for column in batch.columns)
        self._last[keys] = counts
        with np.errstate(over="ignore"):  # modulo 2**64, as Java adds
            self._total += counts.sum()
            self._weighted += (keys * counts).sum()
        self._rows += len(keys)
        self._batches += 1
        if not self._noted or now_s - self._noted[-1][0] >= _NOTED_S:
            self._noted.append((now_s, self._rows))
        if self._start is not None:
            took_us = int(now_s * 1e6) - due_us
            self._took_us.append(took_us[due_us >= self._start.us + self._warm_us])

    def prepare(self, checkpoint: int) -> list[bytes]:
        return []

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._noted.append((time.time(), self._rows))
        np.savez(
            self._path,
            last=self._last,
            sums=np.array([self._total, self._weighted]),
            counts=np.array([self._rows, self._batches]),
            noted=np.array(self._noted),
            took_us=np.concatenate(self._took_us or [np.zeros(0, np.int64)]),
        )


class Measured:
    """What the sinks of all subtasks saw."""

    def __init__(self, folder: Path) -> None:
        files = [np.load(path) for path in sorted(folder.glob("sink-*.npz"))]
        self.last = np.sum([file["last"] for file in files], axis=0)
        self.rows, self.batches = (int(n) for n in np.sum([f["counts"] for f in files], axis=0))
        with np.errstate(over="ignore"):
            self.total, self.weighted = (int(n) for n in np.sum([f["sums"] for f in files], axis=0))
        self.took_us = np.concatenate([file["took_us"] for file in files])
        self._noted = [file["noted"] for file in files]

    def reached_s(self, rows: int) -> float:
        """When so many rows had come, of all subtasks together."""
        times = np.unique(np.concatenate([noted[:, 0] for noted in self._noted]))
        together = merged(times, self._noted)
        return float(np.interp(rows, together, times))

    @property
    def ended_s(self) -> float:
        """When the last row came."""
        return max(_last_change(noted) for noted in self._noted)


def merged(times: NDArray[Any], noted: list[NDArray[Any]]) -> NDArray[Any]:
    """How many rows there were at each of ``times``, of (time, rows so far) of each subtask."""
    return np.sum([np.interp(times, of[:, 0], of[:, 1], left=0) for of in noted], axis=0)


def _last_change(noted: NDArray[Any]) -> float:
    """When its last rows came; the end itself is noted again when the sink is closed."""
    return float(noted[np.flatnonzero(noted[:, 1] < noted[-1, 1])[-1] + 1, 0])


def percentiles_ms(took_us: NDArray[Any]) -> dict[str, float]:
    """Of latencies."""
    found = np.percentile(took_us, _PERCENTILES) / 1000
    said = {f"p{p:g}_ms": round(float(ms), 2) for p, ms in zip(_PERCENTILES, found, strict=True)}
    return said | {"max_ms": round(float(took_us.max()) / 1000, 2)}


def expected(rows: int, keys: int) -> tuple[NDArray[np.int64], dict[str, int]]:
    """How often each key comes, and what the sinks must have added up, counted with numpy alone."""
    seen = np.zeros(keys, np.int64)
    for start in range(0, rows, 1 << 20):
        numbers = np.arange(start, min(rows, start + (1 << 20)), dtype=np.int64)
        seen += np.bincount(keys_of(numbers, keys), minlength=keys)
    said = seen * (seen + 1) // 2
    weighted = int((np.arange(keys) * said).sum())
    return seen, {"rows": rows, "total": int(said.sum()), "weighted": weighted}


def dumped(found: dict[str, Any], path: str) -> None:
    """Leave a side's result where its starter looks for it."""
    Path(path).write_text(json.dumps(found), encoding="utf-8")
