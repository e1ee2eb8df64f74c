"""The same processors through Spark's `transformWithState` and ours: `python -m bench throughput`.

Sides take turns (Spark, ours, Spark, ours, ...), each in a process and JVM of its own. A round is
one run of each, and has a ratio: rows per second of ours over Spark's, from the start of the first
counted batch to the commit file of the last. The ratio of processor time is for comparison: what
else the machine does moves it less, and waiting is not in it.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.layers import summarise
from bench.runner import batch_stats, check_output, run_side
from bench.sizes import Sizes
from bench.works import WORKS, Prepared, Shape, Work

__all__ = ["FLOOR", "Comparison", "throughput"]

_TIMEOUT_S = 3600.0
FLOOR = ("stateless", "anchored")


def throughput(
    sizes: Sizes,
    *,
    names: Sequence[str],
    work: Path,
    floor: bool = False,
    s3: bool = False,
    progress: Any,
) -> dict[str, Any]:
    """All works, all configurations, all rounds.

    Args:
        names: of the works. work: a folder for everything.
        floor: also what lies beneath: a stateless operator in Python over the same input and
            shuffle, and the same under our plan.
        s3: our side's store is an S3 server on loopback; Spark's checkpoint stays in a local
            folder.
        progress: called with a line when a run has ended.
    """
    sides = ("spark", "ours", *FLOOR) if floor else ("spark", "ours")
    found: dict[str, Any] = {"store": "s3" if s3 else "file", "works": {}}
    for name in names:
        one = Comparison(WORKS[name], sizes, work / name, s3)
        configurations = [_rounds(one, sides, n, progress) for n in sizes.partitions]
        found["works"][name] = {
            "what": one.what(sides),
            "wanted": one.work.wanted,
            "rows": one.shape("ours").rows,
            "configurations": configurations,
        }
    return found


@dataclass
class Comparison:
    """One work: its input, written once for each shape, and runs of it, each checked."""

    work: Work
    sizes: Sizes
    folder: Path
    s3: bool

    def __post_init__(self) -> None:
        self._prepared: dict[Shape, Prepared] = {}
        self._servers = itertools.count()

    def shape(self, side: str) -> Shape:
        return self.work.shape(self.sizes, side)

    def what(self, sides: Sequence[str]) -> str:
        shapes: dict[Shape, list[str]] = {}
        for side in sides:
            shapes.setdefault(self.shape(side), []).append(side)
        batches = "; ".join(
            f"{shape.warm} batches of warm-up, {shape.counted} counted"
            + (f" ({', '.join(of)})" if len(shapes) > 1 else "")
            for shape, of in shapes.items()
        )
        ours = self.shape("ours")
        return (
            f"{self.work.name}: {self.work.says}; {ours.keys:,} keys, batches of {ours.rows:,} "
            f"rows, local[2], noop sink; {batches}"
        )

    def run(self, side: str, partitions: int) -> dict[str, Any]:
        shape = self.shape(side)
        if shape not in self._prepared:
            folder = self.folder / f"input-{len(self._prepared)}"
            self._prepared[shape] = self.work.prepare(folder, shape)
        prepared = self._prepared[shape]
        with self._store(side) as (store, settings):
            report = run_side(
                side,
                name=self.work.name,
                work=self.folder,
                source=prepared.folder,
                partitions=partitions,
                timeout_s=_TIMEOUT_S,
                store=store,
                settings=settings,
            )
        check_output(report, prepared.expected)
        return _stats(report, shape)

    @contextlib.contextmanager
    def _store(self, side: str) -> Iterator[tuple[str | None, dict[str, Any]]]:
        if not self.s3 or side != "ours":
            yield None, {}
            return
        from bench.s3 import REGION, place

        with place(self.folder / f"s3-{next(self._servers)}") as server:
            yield server.uri("throughput"), {"s3_endpoint": server.url, "s3_region": REGION}


def _rounds(
    one: Comparison, sides: tuple[str, ...], partitions: int, progress: Any
) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    for number in range(one.sizes.rounds):
        runs: dict[str, Any] = {}
        for side in sides:
            stats = runs[side] = one.run(side, partitions)
            progress(
                f"{one.work.name}, partitions {partitions}, round {number + 1}/{one.sizes.rounds}, "
                f"{side}: {stats['rows_per_s']:,.0f} rows/s, batch {stats['batch_median_s']:.2f} s,"
                f" run {stats['run_s']:.0f} s (busy before: {stats['busy_before']:.0%})"
            )
        runs["ratio"] = round(runs["ours"]["rows_per_s"] / runs["spark"]["rows_per_s"], 2)
        used_s = {side: sum(runs[side]["cpu_s_per_batch"].values()) for side in sides}
        runs["cpu_ratio"] = round(used_s["spark"] / used_s["ours"], 2)
        rounds.append(runs)
    return _configuration(partitions, sides, rounds)


def _stats(report: dict[str, Any], shape: Shape) -> dict[str, Any]:
    stats = batch_stats(report, shape.warm, shape.full - 1, shape.rows)
    stats["run_s"], stats["java"] = report["seconds"], report["java"]
    if "layers" in report:
        stats["layers"] = summarise(report["layers"], range(shape.warm, shape.full))
        stats["driver_ms"] = {
            name: round(statistics.median(took), 3) for name, took in report["driver_ms"].items()
        }
    return stats


def _configuration(
    partitions: int, sides: tuple[str, ...], rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    ratios = [r["ratio"] for r in rounds]
    return {
        "partitions": partitions,
        "rounds": rounds,
        "rows_per_s": {
            side: statistics.median(r[side]["rows_per_s"] for r in rounds) for side in sides
        },
        "batch_median_s": {
            side: statistics.median(r[side]["batch_median_s"] for r in rounds) for side in sides
        },
        "cpu_s_per_batch": {side: _cpu_s(rounds, side) for side in sides},
        "ratio_median": statistics.median(ratios),
        "cpu_ratio_median": statistics.median(r["cpu_ratio"] for r in rounds),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _cpu_s(rounds: list[dict[str, Any]], side: str) -> dict[str, float]:
    return {
        kind: round(statistics.median(r[side]["cpu_s_per_batch"][kind] for r in rounds), 3)
        for kind in ("jvm", "python")
    }
