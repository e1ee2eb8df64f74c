"""What is compared: the works, their input, and what a processor must say about it.

The truth is counted here with numpy from the very rows that are written, batch by batch; it shares
no code with the processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.data import shuffled, write_batch
from bench.sizes import Sizes

__all__ = ["AGGREGATES", "ENTRIES", "START_MS", "WORKS", "Prepared", "Shape", "Work"]

ENTRIES: Final = 100
"""Entries of a key's map."""
START_MS: Final = 1_700_000_000_000
"""Event time of the value 0."""
_SEED = 42
_BATCH_MS = 10_000

Numbers = Any  # an array of int64
Truth = dict[str, int]


@dataclass(frozen=True)
class Shape:
    """How much of a work a side runs. ``rows``: a batch; a multiple of ``keys``, or a divisor."""

    keys: int
    rows: int
    warm: int
    counted: int

    @property
    def full(self) -> int:
        return self.warm + self.counted


@dataclass(frozen=True)
class Prepared:
    """Input that was written, and what must be seen of each batch, those without rows included."""

    folder: Path
    expected: list[Truth]


@dataclass(frozen=True)
class Work:
    """One work; its processor is in `bench.processor`, but for those of flavour ``aggregate``.

    ``wanted``: how many times as fast as Spark's operator the issue wants it. ``keys_per_row``: of
    an aggregate, its keys as a multiple of a batch's rows. ``rows_per_key``: of a function with
    state, in each batch.
    """

    name: str
    says: str
    wanted: float
    make: Callable[[Shape], Iterator[tuple[Numbers, Numbers, Truth]]]
    flavour: str = "rows"
    event_time: bool = False
    fills: bool = False
    keys_per_row: float = 0.0
    rows_per_key: int = 1

    def shape(self, sizes: Sizes, side: str) -> Shape:
        """How much ``side`` runs of it."""
        keys, rows = sizes.keys, sizes.rows
        warm, counted = sizes.warm_batches, sizes.counted_batches
        if side != "spark":
            warm, counted = sizes.quick_side_batches
        if self.flavour == "aggregate":
            rows = sizes.aggregate_rows
            return Shape(round(self.keys_per_row * rows), rows, *sizes.aggregate_batches)
        if self.flavour == "pandas":
            keys = rows = sizes.pandas_rows
            if side == "spark":
                warm, counted = sizes.pandas_spark_batches
        if self.flavour == "function":
            rows = sizes.pandas_rows
            keys = rows // self.rows_per_key
            if side == "spark" and self.rows_per_key == 1:
                warm, counted = sizes.pandas_spark_batches
        if self.fills:
            keys, warm = sizes.map_keys, warm + 1
        return Shape(keys, rows, warm, counted)

    def prepare(self, folder: Path, shape: Shape, *, empty: int = 0) -> Prepared:
        """Write its input, then ``empty`` batches without rows."""
        folder.mkdir(parents=True)
        expected, none = [], np.empty(0, dtype=np.int64)
        for number, (keys, values, truth) in enumerate(self.make(shape)):
            if number < shape.full + empty:
                write_batch(folder, number, keys, values)
            expected.append(truth)
        for number in range(len(expected), shape.full + empty):
            write_batch(folder, number, none, none)
        return Prepared(folder, expected)


def _truth(taken: Numbers, k: Numbers, n: Numbers) -> Truth:
    return {
        "input_rows": len(taken),
        "output_rows": len(k),
        "output_total": int(n.sum()),
        "output_weighted": int((k * n).sum()),
    }


def _counts(shape: Shape) -> Iterator[tuple[Numbers, Numbers, Truth]]:
    random = np.random.default_rng(_SEED)
    seen = np.zeros(shape.keys, dtype=np.int64)
    for batch in range(shape.full):
        keys = shuffled(random, shape.keys, shape.rows)
        seen += np.bincount(keys, minlength=shape.keys)
        touched = np.unique(keys)
        values = np.arange(len(keys), dtype=np.int64) + batch
        yield keys, values, _truth(keys, touched, seen[touched])


def _sums(shape: Shape) -> Iterator[tuple[Numbers, Numbers, Truth]]:
    random = np.random.default_rng(_SEED)
    sums = np.zeros(shape.keys, dtype=np.int64)
    for _ in range(shape.full):
        keys = shuffled(random, shape.keys, shape.rows)
        values = random.integers(0, 1_000, len(keys), dtype=np.int64)
        np.add.at(sums, keys, values)
        yield keys, values, _truth(keys, np.arange(shape.keys), sums)


def _picks(shape: Shape) -> Iterator[tuple[Numbers, Numbers, Truth]]:
    """First each key once (at least), then any key at random."""
    random = np.random.default_rng(_SEED)
    order = shuffled(random, shape.keys, max(shape.keys, shape.rows))
    filling = order.reshape(-1, shape.rows)
    seen = np.zeros(shape.keys, dtype=np.int64)
    for batch in range(shape.full):
        if batch < len(filling):
            keys = filling[batch]
        else:
            keys = random.integers(0, shape.keys, shape.rows, dtype=np.int64)
        touches = np.bincount(keys, minlength=shape.keys)
        seen += touches
        touched = np.flatnonzero(touches)
        values = np.arange(len(keys), dtype=np.int64)
        yield keys, values, _truth(keys, touched, seen[touched])


def _tallies(shape: Shape) -> Iterator[tuple[Numbers, Numbers, Truth]]:
    """The first batch has one row a key, which fills its map."""
    random = np.random.default_rng(_SEED)
    first = shuffled(random, shape.keys, shape.keys)
    yield first, np.full(len(first), -1, dtype=np.int64), _truth(first, first, 0 * first)
    seen = np.zeros(shape.keys * ENTRIES, dtype=np.int64)
    for _ in range(1, shape.full):
        keys = shuffled(random, shape.keys, shape.rows)
        values = random.integers(0, 1 << 40, len(keys), dtype=np.int64)
        touches = np.bincount(keys * ENTRIES + values % ENTRIES, minlength=len(seen))
        # Of an entry that had c and is touched m times the outputs are c + 1 ... c + m.
        said = touches * seen + touches * (touches + 1) // 2
        by_key = said.reshape(shape.keys, ENTRIES).sum(axis=1)
        truth = _truth(keys, np.arange(shape.keys), by_key)
        seen += touches
        yield keys, values, truth | {"output_rows": len(keys)}


def _alarms(shape: Shape) -> Iterator[tuple[Numbers, Numbers, Truth]]:
    """Each batch lies 10 s after the one before; what it sets is due in the next one.

    The last one's timers are due in a batch without rows, which each side must run by itself.
    """
    random = np.random.default_rng(_SEED)
    due = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    for batch in range(shape.full):
        keys = shuffled(random, shape.keys, shape.rows)
        values = np.arange(len(keys), dtype=np.int64) % _BATCH_MS + (batch + 1) * _BATCH_MS
        yield keys, values, _truth(keys, *due)
        due = keys, values
    none = np.empty(0, dtype=np.int64)
    yield none, none, _truth(none, *due)


def _named(works: Sequence[Work]) -> dict[str, Work]:
    return {work.name: work for work in works}


WORKS: Final = _named(
    [
        Work("counter", "keyed counter, row processor", 15, _counts),
        Work("pandas", "keyed counter, pandas processor", 20, _counts, flavour="pandas"),
        *(
            Work(
                f"function-{rows}",
                f"applyInPandasWithState, {rows} rows a key, the sum of a column",
                wanted,
                _sums,
                flavour="function",
                rows_per_key=rows,
            )
            for rows, wanted in ((1, 10), (10, 5), (1000, 1))
        ),
        Work(
            "map",
            f"map state, {ENTRIES} entries a key, one read and written a row; the first batch "
            f"fills the maps",
            15,
            _tallies,
            fills=True,
        ),
        Work(
            "timers",
            "event-time timers: each row sets one, each fires in the next batch and gives a row",
            10,
            _alarms,
            event_time=True,
        ),
        Work(
            "count",
            "count by key, a tenth as many keys as a batch has rows",
            1.5,
            _picks,
            flavour="aggregate",
            keys_per_row=0.1,
        ),
        Work(
            "count-1m",
            "count by key, as many keys as a batch has rows",
            1.5,
            _picks,
            flavour="aggregate",
            keys_per_row=1.0,
        ),
    ]
)
AGGREGATES: Final = tuple(name for name, work in WORKS.items() if work.flavour == "aggregate")
"""Works of `bench.aggregate`; the others are of `bench.throughput`."""
