"""Windows that operators count by event time, and a simulation of them in plain Python.

The truth is the simulation: batch n is the n-th file of each input, its watermark follows from
the files before it, and after the last file come batches until nothing moves.
"""

from __future__ import annotations

import datetime
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value

from statebackend import KeyedProcessor
from tests.spark.local.world import Input

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from statebackend import ProcessorContext, StateBackend
    from tests.spark.local.world import World

__all__ = ["world"]

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module

SCHEMA = "k string, id bigint, at timestamp"
BASE_S = 1_767_225_600  # 2026-01-01 00:00:00
WINDOW_S = 10
COUNTS = "k string, until_s bigint, n bigint"
Files = list[list[tuple[str, int, int]]]  # (key, id, second after the base)


def _at(second: int) -> str:
    return str(datetime.datetime.fromtimestamp(BASE_S + second, datetime.UTC).replace(tzinfo=None))


def _fill(target: Input, files: Files) -> None:
    for rows in files:
        target.add([{"k": k, "id": i, "at": _at(second)} for k, i, second in rows])


def _files(batches: int, *, step_s: int = 7, keys: int = 5, shift: int = 0) -> Files:
    """Event time goes on by ``step_s`` a file; every file has rows that come too late, too."""
    found = []
    for batch in range(batches):
        rows = [
            (f"k{(i + batch) % keys}", 100 * batch + i, shift + batch * step_s + i)
            for i in range(8)
        ]
        rows += [(f"k{i}", 100 * batch + 50 + i, max(0, (batch - 3) * step_s)) for i in range(2)]
        found.append(rows)
    return found


def _watermarks(inputs: list[tuple[Files, int]]) -> list[int]:
    """W(0), W(1), .. in seconds after the base (-BASE_S: none), up to the last that moves."""
    marks = [-BASE_S]
    for n in range(max(len(files) for files, _ in inputs)):
        candidates = []
        for files, delay in inputs:
            seen = [second for rows in files[: n + 1] for _, _, second in rows]
            candidates.append(max(seen) - delay if seen else -BASE_S)
        marks.append(max(marks[-1], min(candidates)))
    return marks


def _on_time(files: Files, marks: list[int]) -> Files:
    """The rows that are not late: after the watermark of the batch before."""
    late = [-BASE_S, *marks]
    return [[row for row in rows if row[2] > late[n]] for n, rows in enumerate(files)]


def _end(second: int) -> int:
    return second // WINDOW_S * WINDOW_S + WINDOW_S


def _windows(
    files: Files, marks: list[int], *, by_sparks_rule: bool = False
) -> Counter[tuple[str, int, int]]:
    """(key, end of the window, rows) of the windows that the last watermark has closed.

    By Spark's rule a row is late for an aggregation when its window is closed, not before.
    """
    late, n = [-BASE_S, *marks], Counter[tuple[str, int]]()
    for batch, rows in enumerate(files):
        for k, _, second in rows:
            if (_end(second) if by_sparks_rule else second) > late[batch]:
                n[k, _end(second)] += 1
    return Counter({(k, BASE_S + end, c): 1 for (k, end), c in n.items() if end <= marks[-1]})


class Windows(KeyedProcessor):
    """Counts per key and tumbling window; told when the watermark has passed its end."""

    def open(self, ctx: ProcessorContext) -> None:
        self.counts = ctx.map_state("counts", "until_s bigint", "n bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            until_s = _end(int(row.at.timestamp()))
            (n,) = self.counts.get_value((until_s,)) or (0,)
            self.counts.update_value((until_s,), (n + 1,))
            ctx.timers.register(until_s * 1000)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        (n,) = self.counts.get_value((at_ms // 1000,))
        self.counts.remove_key((at_ms // 1000,))
        yield (*key, at_ms // 1000, n)


class Sorted(KeyedProcessor):
    """Holds rows until the watermark has reached them, and gives them out in order."""

    def open(self, ctx: ProcessorContext) -> None:
        self.held = ctx.map_state("held", "at_ms bigint, id bigint", "at timestamp")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            at_ms = round(row.at.timestamp() * 1000)
            self.held.update_value((at_ms, row.id), (row.at,))
            ctx.timers.register(at_ms)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
        for found in [k for k in self.held.keys() if k[0] == at_ms]:  # noqa: SIM118 - no dict
            self.held.remove_key(found)
            yield (*key, found[1], moment)


def _given(world: World, **wanted: Any) -> Counter[tuple[str, int, int]]:
    rows = [r for r in world.sink.rows() if all(r[k] == v for k, v in wanted.items())]
    return Counter((row["k"], row["until_s"], row["n"]) for row in rows)


@pytest.fixture
def world(make_world: Any) -> World:
    return make_world(schema=SCHEMA)


class Passing(KeyedProcessor):
    """Passes rows on and numbers them per key, with reducing and aggregating state."""

    def open(self, ctx: ProcessorContext) -> None:
        self.largest = ctx.reducing_state("largest", "id bigint", max)
        self.mean = ctx.aggregating_state(
            "mean",
            "n bigint, total bigint",
            create=lambda: (0, 0),
            add=lambda so_far, number: (so_far[0] + 1, so_far[1] + number),
            result=lambda so_far: so_far[1] / so_far[0],
        )

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[Any]:
        for row in rows:
            self.largest.add((row.id,))
            self.mean.add(row.id)
            yield (*key, row.id, row.at, self.largest.get()[0], self.mean.get())


def _passing(world: World, backend: StateBackend, **time: Any) -> DataFrame:
    return backend.process(
        world.input.stream(world.spark),
        keys="k",
        processor=Passing(),
        output_schema=f"{SCHEMA}, largest bigint, mean double",
        uid="passing",
        **time,
    )
