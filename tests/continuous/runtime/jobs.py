"""Sources, processors and truths of the tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend.api.arrow import ArrowProcessor
from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.continuous.sources.generated_source import ENDLESS, GeneratedSource
from statebackend.schema.types import arrow_schema
from statebackend.system import monotonic_s

KEYS = 37
FIRST_MS = 1_000_000
OUTPUT = "key BIGINT, n BIGINT, total BIGINT"


class HeldClock:
    """Stands still a while after the first look at it, until a file is there.

    What a source has by then is not all of it, however slow the machine: what a test does to the
    job meanwhile comes before its end.
    """

    def __init__(self, go_on: Path, after_s: float) -> None:
        self._go_on, self._after_s = go_on, after_s
        self._first_s: float | None = None

    def __call__(self) -> float:
        now_s = monotonic_s()
        if self._first_s is None:
            self._first_s = now_s
        return now_s if self._go_on.exists() else min(now_s, self._first_s + self._after_s)


class Numbers(GeneratedSource):
    """Row ``i``: key ``i * 7 mod KEYS``, value ``i``, at ``FIRST_MS + i``."""

    def __init__(
        self,
        rows: int | None,
        *,
        splits: int = 2,
        rows_per_s: float | None = None,
        clock: Callable[[], float] = monotonic_s,
        **more: Any,
    ) -> None:
        super().__init__(
            "key BIGINT, value BIGINT, at TIMESTAMP",
            rows=rows,
            splits=splits,
            rows_per_s=rows_per_s,
            clock=clock,
            **more,
        )

    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        columns = [
            pa.array(numbers * 7 % KEYS),
            pa.array(numbers),
            pa.array((FIRST_MS + numbers) * 1000).cast(pa.timestamp("us", "UTC")),
        ]
        schema = arrow_schema(self.schema)
        return pa.RecordBatch.from_arrays(
            [c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
        )


class HeldBack(Numbers):
    """Keeps its last rows until a file is there, after restarts as well.

    A clock that stands still would leave a restarted job without any row.
    """

    def __init__(self, rows: int, go_on: Path, last: int, **more: Any) -> None:
        super().__init__(rows, **more)
        self._go_on, self._first = go_on, rows - last

    def _pace(self, index: int) -> Callable[[int], int]:
        pace, first = super()._pace(index), len(range(index, self._first, self.splits))

        def due(given: int) -> int:
            rows = pace(given) if pace else ENDLESS
            return rows if self._go_on.exists() else min(rows, first)

        return due


def truth(rows: int) -> dict[int, tuple[int, int]]:
    """By key: how many rows, and the sum of their values."""
    counts: Counter[int] = Counter()
    totals: Counter[int] = Counter()
    for i in range(rows):
        counts[i * 7 % KEYS] += 1
        totals[i * 7 % KEYS] += i
    return {key: (counts[key], totals[key]) for key in counts}


class Counting(KeyedProcessor):
    """After each call: how many rows a key has had, and their sum."""

    def open(self, ctx: Any) -> None:
        self._state = ctx.value_state("counts", "n BIGINT, total BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[int, int, int]]:
        n, total = self._state.get() or (0, 0)
        for row in rows:
            n, total = n + 1, total + row.value
        self._state.update((n, total))
        yield key[0], n, total


class Unclosed(Counting):
    """As `Counting`; it cannot be closed."""

    def close(self) -> None:
        raise ValueError("the connection is gone")


class ArrowCounting(ArrowProcessor):
    """As `Counting`, in columns."""

    def open(self, ctx: Any) -> None:
        self._state = ctx.value_state("counts", "n BIGINT, total BIGINT")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        first = ctx.keys.starts[:-1]
        known = self._state.get(ctx.keys)
        n = np.diff(ctx.keys.starts) + known.column("n").fill_null(0).to_numpy()
        values = batch.column("value").to_numpy()
        total = np.add.reduceat(values, first) + known.column("total").fill_null(0).to_numpy()
        self._state.put(ctx.keys, {"n": n, "total": total})
        out = ctx.keys.columns.append_column("n", pa.array(n))
        yield out.append_column("total", pa.array(total))


class PandasCounting(StatefulProcessor):
    """As `Counting`, in Spark's form, with DataFrames."""

    def init(self, handle: Any) -> None:
        self._state = handle.getValueState("counts", "n BIGINT, total BIGINT")

    def handleInputRows(
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,
    ) -> Iterator[pd.DataFrame]:
        n, total = self._state.get() or (0, 0)
        for frame in rows:
            n, total = n + len(frame), total + int(frame["value"].sum())
        self._state.update((n, total))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})

    def close(self) -> None:
        pass


class FailingOnce(Counting):
    """Fails at a row, while a file is not there; then it makes the file."""

    def __init__(self, marker: str, at: int) -> None:
        self._marker, self._at = marker, at

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[int, int, int]]:
        kept = list(rows)
        if any(row.value >= self._at for row in kept) and not os.path.exists(self._marker):
            open(self._marker, "x").close()
            raise ValueError("the row that fails")
        return super().process(key, iter(kept), ctx)


class Windows(KeyedProcessor):
    """The sum of each key's values in each window of so many milliseconds, once it is over."""

    def __init__(self, size_ms: int) -> None:
        self._size_ms = size_ms

    def open(self, ctx: Any) -> None:
        self._sums = ctx.map_state("sums", "start BIGINT", "n BIGINT, total BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> None:
        for row in rows:
            start = int(row.at.timestamp() * 1000) // self._size_ms * self._size_ms
            n, total = self._sums.get_value((start,)) or (0, 0)
            if not n:
                ctx.timers.register(start + self._size_ms - 1)
            self._sums.update_value((start,), (n + 1, total + row.value))

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Iterator[tuple[int, int, int, int]]:
        start = at_ms + 1 - self._size_ms
        n, total = self._sums.get_value((start,))
        self._sums.remove_key((start,))
        yield key[0], start, n, total


def windows_truth(rows: int, size_ms: int) -> set[tuple[int, int, int, int]]:
    """(key, start, rows, sum) of every window."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for i in range(rows):
        at = (i * 7 % KEYS, (FIRST_MS + i) // size_ms * size_ms)
        n, total = found.get(at, (0, 0))
        found[at] = n + 1, total + i
    return {(*at, *sums) for at, sums in found.items()}


class PerClass(KeyedProcessor):
    """Of counts by key: how many came by key modulo 5."""

    def open(self, ctx: Any) -> None:
        self._seen = ctx.map_state("newest", "key BIGINT", "n BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[int, int]]:
        for row in rows:
            before = self._seen.get_value((row.key,)) or (0,)
            self._seen.update_value((row.key,), (max(row.n, before[0]),))
        yield key[0], sum(n for _, (n,) in self._seen.iterator())


class WithClass(Counting):
    """As `Counting`; its rows have the key's class too."""

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        for k, n, total in super().process(key, rows, ctx):
            yield k % 5, k, n, total


def check_counts(rows: list[dict[str, Any]], wanted: dict[int, tuple[int, int]]) -> None:
    """Every key ends with its truth, and no state of a key was seen twice on the way."""
    seen = [(row["key"], row["n"]) for row in rows]
    assert len(seen) == len(set(seen))
    last: dict[int, tuple[int, int]] = {}
    for row in rows:
        last[row["key"]] = max(last.get(row["key"], (0, 0)), (row["n"], row["total"]))
    assert last == wanted


class Paired(CoProcessor):
    """For each row of the left side: its value, and how many came on the right by then."""

    def open(self, ctx: Any) -> None:
        self._right = ctx.value_state("right", "n BIGINT, total BIGINT")
        self._left = ctx.value_state("left", "n BIGINT, total BIGINT")

    def _add(self, state: Any, rows: Iterator[Any]) -> tuple[int, int]:
        n, total = state.get() or (0, 0)
        for row in rows:
            n, total = n + 1, total + row.value
        state.update((n, total))
        return n, total

    def process_left(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        yield (key[0], 0, *self._add(self._left, rows))

    def process_right(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        yield (key[0], 1, *self._add(self._right, rows))


class Scaled(BroadcastProcessor):
    """Counts, and how many rules there are by then; all subtasks must end with the same."""

    def open(self, ctx: Any) -> None:
        self._counts = ctx.value_state("counts", "n BIGINT, total BIGINT")
        self._rules = ctx.broadcast_state("rules", "key BIGINT", "value BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        n, total = self._counts.get() or (0, 0)
        for row in rows:
            n, total = n + 1, total + row.value
        self._counts.update((n, total))
        yield key[0], n, total, sum(value for _, (value,) in self._rules.items())

    def process_broadcast(self, rows: Iterator[Any], ctx: Any) -> None:
        for row in rows:  # the last one counts: it depends on their order
            self._rules.put((row.key,), (row.value,))
