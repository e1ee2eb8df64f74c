"""The same counter through Spark's `transformWithState` and ours: `python -m bench throughput`.

Sides take turns (Spark, ours, Spark, ours, ...), each in a process and JVM of its own. A round is
one run of each, and has a ratio: rows per second of ours over Spark's, from the start of the first
counted batch to the commit file of the last. The ratio of processor time is for comparison: what
else the machine does moves it less, and waiting is not in it.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.data import write_batches
from bench.layers import summarise
from bench.runner import batch_stats, check_output, run_side
from bench.sizes import Sizes

__all__ = ["throughput", "throughput_text"]

_TIMEOUT_S = 1800.0
_FLOOR = ("stateless", "anchored")


def throughput(sizes: Sizes, *, work: Path, floor: bool = False, progress: Any) -> dict[str, Any]:
    """All configurations, all rounds.

    Args:
        floor: also what lies beneath: a stateless operator in Python over the same input and
            shuffle, and the same under our plan.
        progress: called with a line when a run has ended.
    """
    full = sizes.warm_batches + sizes.counted_batches
    source = write_batches(work / "input", keys=sizes.keys, rows=sizes.rows, full=full)
    sides = ("spark", "ours", *_FLOOR) if floor else ("spark", "ours")
    found: dict[str, Any] = {"what": _what(sizes), "configurations": []}
    for partitions in sizes.partitions:
        rounds: list[dict[str, Any]] = []
        for number in range(sizes.rounds):
            runs = {}
            for side in sides:
                runs[side] = _one(side, sizes, work, source, partitions, full)
                stats = runs[side]
                progress(
                    f"partitions {partitions}, round {number + 1}/{sizes.rounds}, {side}: "
                    f"{stats['rows_per_s']:,.0f} rows/s, batch {stats['batch_median_s']:.2f} s "
                    f"(busy before: {stats['busy_before']:.0%})"
                )
            runs["ratio"] = round(runs["ours"]["rows_per_s"] / runs["spark"]["rows_per_s"], 2)
            used_s = {side: sum(runs[side]["cpu_s_per_batch"].values()) for side in sides}
            runs["cpu_ratio"] = round(used_s["spark"] / used_s["ours"], 2)
            rounds.append(runs)
        found["configurations"].append(_configuration(partitions, sides, rounds))
    return found


def _what(sizes: Sizes) -> str:
    return (
        f"counter, {sizes.keys:,} keys, batches of {sizes.rows:,} rows, local[2], noop sink; "
        f"{sizes.warm_batches} batches of warm-up, {sizes.counted_batches} counted; wall time from "
        f"the first counted batch's start to the last one's commit file"
    )


def _one(
    side: str, sizes: Sizes, work: Path, source: Path, partitions: int, full: int
) -> dict[str, Any]:
    report = run_side(side, work=work, source=source, partitions=partitions, timeout_s=_TIMEOUT_S)
    check_output(report, keys=sizes.keys, rows=sizes.rows, full=full)
    stats = batch_stats(report, sizes.warm_batches, full - 1, sizes.rows)
    stats["java"] = report["java"]
    if "layers" in report:
        stats["layers"] = summarise(report["layers"], range(sizes.warm_batches, full))
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


def throughput_text(found: dict[str, Any], *, layers: bool = False) -> str:
    """The comparison as a table to read; ``layers``: and where our tasks' time goes."""
    lines = [f"Throughput: {found['what']}", ""]
    lines.append(
        f"{'partitions':<12}{'side':<11}{'rows/s':>10}{'batch s':>9}{'cpu s: jvm':>12}"
        f"{'python':>8}  rounds' rows/s"
    )
    for configuration in found["configurations"]:
        for side, rate in configuration["rows_per_s"].items():
            each = ", ".join(f"{r[side]['rows_per_s']:,.0f}" for r in configuration["rounds"])
            cpu_s = configuration["cpu_s_per_batch"][side]
            lines.append(
                f"{configuration['partitions']:<12}{side:<11}{rate:>10,.0f}"
                f"{configuration['batch_median_s'][side]:>9.2f}{cpu_s['jvm']:>12.2f}"
                f"{cpu_s['python']:>8.2f}  {each}"
            )
        for label, key, middle in (
            ("ratio", "ratio", configuration["ratio_median"]),
            ("cpu ratio", "cpu_ratio", configuration["cpu_ratio_median"]),
        ):
            each = ", ".join(f"{r[key]:.1f}" for r in configuration["rounds"])
            lines.append(f"{'':<12}{label:<11}{middle:>10.1f}{'':>29}  {each}")
    if layers:
        for configuration in found["configurations"]:
            lines += ["", *_layer_lines(configuration)]
    return "\n".join(lines)


def _layer_lines(configuration: dict[str, Any]) -> list[str]:
    run = configuration["rounds"][-1]["ours"]
    layers, phases = run.get("layers") or {}, run["phases_ms"]
    if not layers:
        return [f"partitions {configuration['partitions']}: the records hold no timings"]
    keys = layers["changed_keys"] or 1
    lines = [
        f"Our tasks, partitions {configuration['partitions']}, last round, median of "
        f"{layers['subtasks_counted']} tasks ({keys:,.0f} changed keys each):",
        f"{'phase':<24}{'ms':>9}{'ns/row':>9}",
    ]
    for name, took_ms in layers["phases_ms"].items():
        lines.append(f"{name:<24}{took_ms:>9.1f}{took_ms * 1e6 / keys:>9.0f}")
    for label, name in (
        ("whole task", "task_ms"),
        ("last input row to ack", "after_input_ms"),
        ("last processed row to ack", "after_output_ms"),
    ):
        lines.append(f"{label:<24}{layers[name]:>9.1f}{layers[name] * 1e6 / keys:>9.0f}")
    lines.append(f"the driver's answers, median ms: {_pairs(run['driver_ms'])}")
    lines.append(f"Spark's phases, median ms: {_pairs(phases)}")
    for side in ("spark", *_FLOOR):
        if side in configuration["rounds"][-1]:
            other = configuration["rounds"][-1][side]["phases_ms"]
            lines.append(f"  the same, side {side}: {_pairs(other)}")
    return lines


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
