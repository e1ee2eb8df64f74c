"""Aggregations: `python -m bench aggregate`, and as work grows: `python -m bench growth`.

*aggregate*: a count by key through Spark's own `groupBy().count()` (in the JVM, RocksDB with
changelog), ours, and Flink's. They take turns, each in processes of its own, over the same keys in
the same order; each first sees every key once, so that the counted batches find them all. What
Spark and ours said is checked batch by batch against a count made with numpy from the input alone,
what Flink said over the whole run. A round has a ratio against each of the others.

*growth*: the same work with ever more keys, batches of the same size.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.flink import VERSION, Flink
from bench.sizes import Sizes
from bench.throughput import Comparison
from bench.works import AGGREGATES, WORKS

__all__ = ["SIDES", "aggregate", "aggregate_text", "growth", "growth_text", "plot"]

SIDES = ("spark", "ours", "flink")
_NAMES = {"spark": "Spark", "ours": "this", "flink": f"Flink {VERSION}"}


def aggregate(
    sizes: Sizes,
    *,
    sides: Sequence[str] = SIDES,
    works: Sequence[str] = AGGREGATES,
    flink: str | None,
    work: Path,
    progress: Any,
) -> dict[str, Any]:
    """All works, all numbers of partitions, all rounds.

    Args:
        flink: the folder of Flink's jars; None leaves Flink out.
        work: a folder for everything. progress: called with a line when a run has ended.
    """
    job = Flink(flink, work / "flink") if "flink" in sides else None
    skipped = {}
    if job is not None and job.skipped:
        skipped["flink"] = job.skipped
        progress(f"Flink is left out: {job.skipped}")
    run = [side for side in sides if side not in skipped]
    found: dict[str, Any] = {"works": {}, "skipped": skipped}
    for name in works:
        one = Comparison(WORKS[name], sizes, work / name, False)
        found["works"][name] = {
            "what": one.what(["spark"]),
            "wanted": one.work.wanted,
            "configurations": [_rounds(one, run, n, job, progress) for n in sizes.partitions],
        }
        shutil.rmtree(work / name, ignore_errors=True)
    return found


def _rounds(
    one: Comparison, sides: Sequence[str], partitions: int, job: Flink | None, progress: Any
) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    for number in range(one.sizes.rounds):
        runs: dict[str, Any] = {}
        for side in sides:
            runs[side] = _run(one, side, partitions, job)
            progress(
                f"{one.work.name}, {one.shape(side).keys:,} keys, partitions {partitions}, round "
                f"{number + 1}/{one.sizes.rounds}, {side}: {runs[side]['rows_per_s']:,.0f} rows/s "
                f"(busy before: {runs[side]['busy_before']:.0%})"
            )
        ours = runs.get("ours", {}).get("rows_per_s")
        others = [side for side in sides if side != "ours" and ours]
        ratios = {side: round(ours / runs[side]["rows_per_s"], 2) for side in others}
        rounds.append({"runs": runs, "ratios": ratios})
    rates = {side: [r["runs"][side]["rows_per_s"] for r in rounds] for side in sides}
    return {
        "partitions": partitions,
        "rounds": rounds,
        "rows_per_s": {side: statistics.median(of) for side, of in rates.items()},
        "ratios": {
            side: statistics.median(r["ratios"][side] for r in rounds)
            for side in rounds[0]["ratios"]
        },
    }


def _run(one: Comparison, side: str, partitions: int, job: Flink | None) -> dict[str, Any]:
    if side != "flink":
        return one.run(side, partitions)
    if job is None:
        raise ValueError("no job was made for Flink")
    return job.run(one.work, one.shape(side), partitions)


def growth(
    sizes: Sizes, *, sides: Sequence[str] = ("spark", "ours"), work: Path, progress: Any
) -> dict[str, Any]:
    """Rows per second of ``sides`` for ever more keys, one run each."""
    points = []
    sizes = replace(sizes, aggregate_batches=sizes.growth_batches)
    for ratio in sizes.growth_keys_per_row:
        grown = replace(WORKS["count"], keys_per_row=ratio)
        folder = work / f"keys-{ratio:g}"
        one = Comparison(grown, sizes, folder, False)
        runs = {}
        for side in sides:
            runs[side] = one.run(side, sizes.partitions[0])
            progress(
                f"growth, {one.shape(side).keys:,} keys, {side}: "
                f"{runs[side]['rows_per_s']:,.0f} rows/s"
            )
        points.append({"keys": one.shape("ours").keys, "runs": runs})
        shutil.rmtree(folder, ignore_errors=True)
    return {"rows": sizes.aggregate_rows, "points": points, "partitions": sizes.partitions[0]}


def plot(found: dict[str, Any], path: Path) -> None:
    """The curve as a PNG.

    Raises:
        ImportError: matplotlib (extra ``bench``) is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    keys = [point["keys"] for point in found["points"]]
    for side in found["points"][0]["runs"]:
        rates = [point["runs"][side]["rows_per_s"] / 1000 for point in found["points"]]
        axes.plot(keys, rates, marker="o", label=_NAMES[side])
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("keys")
    axes.set_ylabel("thousand rows per second")
    axes.set_title(f"Count by key, batches of {found['rows']:,} rows")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


# --- text --------------------------------------------------------------------------------------


def aggregate_text(found: dict[str, Any], *, layers: bool = False) -> str:
    """A table of all works.

    Args:
        layers: and where our tasks' and Spark's time goes.
    """
    lines = [
        "Aggregate: wall time from the first counted batch's start to the last one's commit file; "
        "of Flink from the first counted row out to the last; every side's output was checked"
    ]
    lines += [f"  {one['what']}" for one in found["works"].values()]
    lines += [f"  {_NAMES[side]} is left out: {why}" for side, why in found["skipped"].items()]
    lines += [
        "",
        f"{'work':<10}{'partitions':>11}{'side':>14}{'rows/s':>12}{'this is':>9}{'wanted':>8}",
    ]
    for name, one in found["works"].items():
        for configuration in one["configurations"]:
            for side, rate in configuration["rows_per_s"].items():
                ratio = configuration["ratios"].get(side)
                times, wanted = (f"{ratio:.2f} x", one["wanted"]) if ratio else ("", "")
                each = [f"{r['runs'][side]['rows_per_s']:,.0f}" for r in configuration["rounds"]]
                lines.append(
                    f"{name:<10}{configuration['partitions']:>11}{_NAMES[side]:>14}{rate:>12,.0f}"
                    f"{times:>9}{wanted:>8}  {', '.join(each) if len(each) > 1 else ''}".rstrip()
                )
            if layers:
                lines += _layers(configuration["rounds"][-1]["runs"])
    return "\n".join(lines)


def _layers(runs: dict[str, Any]) -> list[str]:
    lines = []
    for side, run in runs.items():
        kinds = [k for k in ("phases_ms", "cpu_s_per_batch", "driver_ms") if k in run]
        lines += [f"  {side}, {kind}: {_pairs(run[kind])}" for kind in kinds]
        if run.get("layers"):
            lines.append(f"  {side}, a task's phases_ms: {_pairs(run['layers']['phases_ms'])}")
    return lines


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def growth_text(found: dict[str, Any]) -> str:
    """Rows per second by number of keys."""
    sides = list(found["points"][0]["runs"])
    head = "".join(f"{_NAMES[side]:>14}" for side in sides)
    lines = [
        f"Growth: count by key, batches of {found['rows']:,} rows, rows per second, one run each",
        f"{'keys':>12}{head}",
    ]
    for point in found["points"]:
        rates = "".join(f"{point['runs'][side]['rows_per_s']:>14,.0f}" for side in sides)
        lines.append(f"{point['keys']:>12,}{rates}")
    return "\n".join(lines)
