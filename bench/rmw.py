"""Read, add, write: one double per key, against RocksDB alone: `python -m bench rmw`.

Ours is an ``ArrowProcessor`` in the product's own task without Spark (`bench.inproc`), from the
rows as Spark gives them to the ack: grouping, state, output, the delta, its local copy, the commit
record, and applying the delta to RocksDB (which the next epoch does first).

The floor is rocksdict from Arrow to Arrow, and nothing else: full keys that are there as an Arrow
array, multi-get, numpy's addition, an Arrow array of sums, a write batch. It has the same settings,
and the same keys in the same order. *sorted* gets the keys in the order of the store, for nothing.

Every key is touched once in each epoch. All take turns; medians count. Sums are checked in the end.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import DoubleType, LongType, StructField, StructType
from rocksdict import WriteBatch

from bench.inproc import MAX_PARALLELISM, Harness, spark_batches
from statebackend import ArrowProcessor
from statebackend.key_hashing import key_groups
from statebackend.rocks.store import RocksStore
from statebackend.schema.keys.key_codec import KeyCodec

__all__ = ["rmw", "rmw_text"]

_WANTED = 1.5
_CHUNK = 1_000  # keys of a multi-get: more are slower (`bench.scan`)
_WARM_EPOCHS = 3
_LARGE_KEYS, _LARGE_REPEATS = 500_000, 5
_KEY = StructType([StructField("k", LongType())])
_INPUT = StructType([StructField("k", LongType()), StructField("v", DoubleType())])
_OUTPUT = StructType([StructField("k", LongType()), StructField("x", DoubleType())])
_STATE = StructType([StructField("x", DoubleType())])


class AddUp(ArrowProcessor):
    """The sum of a key's values."""

    def open(self, ctx: Any) -> None:
        self._sum = ctx.value_state("count", "x double")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> pa.RecordBatch:
        keys = ctx.keys
        old = self._sum.get(keys).column(0).fill_null(0.0).to_numpy()
        new = old + np.add.reduceat(batch.column("v").to_numpy(), keys.starts[:-1])
        self._sum.put(keys, [new])
        return pa.RecordBatch.from_arrays([keys.columns.column(0), pa.array(new)], ["k", "x"])


class _Ours:
    def __init__(self, folder: Path, keys: int) -> None:
        folder.mkdir()
        self._harness = Harness(
            folder,
            keys=keys,
            processor=AddUp(),
            state=_STATE,
            flavour="arrow",
            columns=_INPUT,
            output=_OUTPUT,
        )
        self.phases: list[dict[str, float]] = []

    def prepare(self, keys: Any, values: Any) -> Callable[[], None]:
        batches = spark_batches(keys, self._harness.epoch, values=values)
        self.out: list[pa.RecordBatch] = []
        return lambda: self._run(batches)

    def _run(self, batches: list[pa.RecordBatch]) -> None:
        self._harness.run(batches, take=self.out.append)
        self.phases.append(self._harness.timings_ms())

    def sums(self) -> tuple[Any, Any]:
        table = pa.Table.from_batches(self.out)
        return table.column("k").to_numpy(), table.column("x").to_numpy()

    def close(self) -> None:
        self._harness.close()


class _Floor:
    def __init__(self, folder: Path, ordered: bool) -> None:
        self._store = RocksStore.open(str(folder))
        self._codec = KeyCodec(_KEY)
        self._ordered = ordered

    def prepare(self, keys: Any, values: Any) -> Callable[[], None]:
        """Arrow arrays; that they are made, and put in order, is not counted."""
        column = pa.array(keys)
        groups = key_groups([column], MAX_PARALLELISM).astype(">u2")
        encoded = self._codec.encode_arrow([column]).to_pylist()
        pairs = zip(groups, encoded, strict=True)
        full = np.array([group.tobytes() + b"\0\1" + key for group, key in pairs], object)
        if self._ordered:
            order = np.argsort(full)
            full, keys, values = full[order], keys[order], values[order]
        self._keys = keys
        arrow, added = pa.array(full.tolist(), pa.binary()), pa.array(values)
        return lambda: self._run(arrow, added)

    def _run(self, full: pa.Array, added: pa.Array) -> None:
        db = self._store._db
        keys = full.to_pylist()
        found: list[Any] = []
        for start in range(0, len(keys), _CHUNK):
            found += db.get(keys[start : start + _CHUNK])
        if None in found:
            found = [b"\0" * 8 if one is None else one for one in found]
        new = np.frombuffer(b"".join(found), np.float64) + added.to_numpy()
        raw = new.tobytes()
        batch = WriteBatch(raw_mode=True)
        values = [raw[at : at + 8] for at in range(0, len(raw), 8)]
        deque(map(batch.put, keys, values), maxlen=0)
        db.write(batch, self._store._unlogged)
        self.out = pa.array(new)

    def sums(self) -> tuple[Any, Any]:
        return self._keys, self.out.to_numpy()

    def close(self) -> None:
        self._store.close()


def rmw(*, keys: Sequence[int], repeats: int, work: Path, progress: Any) -> dict[str, Any]:
    """All numbers of unique keys; ``repeats`` epochs of each side count."""
    cases = []
    for count in keys:
        cases.append(
            _case(count, min(repeats, _LARGE_REPEATS if count >= _LARGE_KEYS else repeats), work)
        )
        progress(_line(cases[-1]))
    return {"wanted": _WANTED, "cases": cases}


def _case(keys: int, repeats: int, work: Path) -> dict[str, Any]:
    folder = work / f"{keys}"
    folder.mkdir()
    sides = {
        "floor": _Floor(folder / "floor", ordered=False),
        "sorted": _Floor(folder / "sorted", ordered=True),
        "ours": _Ours(folder / "ours", keys),
    }
    random = np.random.default_rng(3)
    sums = np.zeros(keys)
    took_s: dict[str, list[float]] = {name: [] for name in sides}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    for epoch in range(_WARM_EPOCHS + repeats):
        order, values = random.permutation(keys), random.random(keys)
        sums[order] += values
        for name, side in list(sides.items())[:: 1 if epoch % 2 else -1]:
            call = side.prepare(order, values)
            gc.collect()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            call()
            if epoch >= _WARM_EPOCHS:
                took_s[name].append(time.perf_counter() - start_s)
                cpu_s[name].append(time.process_time() - start_cpu_s)
            _check(name, side.sums(), sums)
    phases = sides["ours"].phases[_WARM_EPOCHS:]  # type: ignore[union-attr]
    for side in sides.values():
        side.close()
    shutil.rmtree(folder)
    us = {name: statistics.median(of) * 1e6 / keys for name, of in took_s.items()}
    return {
        "keys": keys,
        "repeats": repeats,
        "us_per_key": {name: round(of, 3) for name, of in us.items()},
        "cpu_us_per_key": {
            name: round(statistics.median(of) * 1e6 / keys, 3) for name, of in cpu_s.items()
        },
        "ratio": round(us["ours"] / us["floor"], 2),
        "ratio_sorted": round(us["ours"] / us["sorted"], 2),
        "phases_ms": {
            name: round(statistics.median(one.get(name, 0.0) for one in phases), 2)
            for name in phases[-1]
        },
    }


def _check(name: str, found: tuple[Any, Any], sums: Any) -> None:
    keys, values = found
    if len(np.unique(keys)) != len(sums) or not np.allclose(values, sums[keys]):
        raise AssertionError(f"side {name!r} added up something else")


def rmw_text(found: dict[str, Any]) -> str:
    """A line for each number of keys."""
    lines = [
        "Read, add, write one double a key, every key once an epoch: us of wall time a unique key "
        f"(processor time); wanted: at most {found['wanted']} times the floor"
    ]
    for one in found["cases"]:
        lines.append(_line(one))
        phases = ", ".join(f"{name} {ms:g}" for name, ms in one["phases_ms"].items())
        lines.append(f"  our phases, ms: {phases}")
    return "\n".join(lines)


def _line(one: dict[str, Any]) -> str:
    us, cpu = one["us_per_key"], one["cpu_us_per_key"]
    each = ", ".join(f"{name} {us[name]:.2f} ({cpu[name]:.2f})" for name in us)
    return (
        f"{one['keys']:>10,} keys: {each}; ours is {one['ratio']:.2f} times the floor, "
        f"{one['ratio_sorted']:.2f} times the sorted one"
    )
