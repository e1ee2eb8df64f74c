"""The comparison of `bench.throughput` as tables to read."""

from __future__ import annotations

from typing import Any

from bench.throughput import FLOOR

__all__ = ["throughput_text"]

_HOW = (
    "wall time from the first counted batch's start to the last one's commit file; ratios are "
    "medians over rounds; every batch's output was checked on both sides"
)
_STORES = {
    "file": "both sides keep their state in local folders",
    "s3": "our store is an S3 server on this machine, whose processor time is not counted as ours; "
    "Spark's checkpoint is in a local folder",
}


def throughput_text(found: dict[str, Any], *, layers: bool = False) -> str:
    """One table of all works; of a single work also its runs.

    Args:
        layers: and where our tasks' time goes.
    """
    works = found["works"]
    lines = [f"Throughput: {_HOW}; {_STORES[found['store']]}"]
    lines += [f"  {one['what']}" for one in works.values()]
    lines += ["", *_summary(works)]
    if len(works) == 1:
        lines += ["", *_runs(next(iter(works.values())))]
    if layers:
        for name, one in works.items():
            for configuration in one["configurations"]:
                lines += ["", *_layer_lines(name, one["rows"], configuration)]
    return "\n".join(lines)


def _summary(works: dict[str, Any]) -> list[str]:
    lines = [
        f"{'work':<14}{'partitions':>11}{'Spark rows/s':>14}{'ours rows/s':>13}{'ratio':>8}"
        f"{'cpu ratio':>11}{'wanted':>8}  ratio by round"
    ]
    for name, one in works.items():
        for configuration in one["configurations"]:
            rates = configuration["rows_per_s"]
            each = ", ".join(f"{r['ratio']:.1f}" for r in configuration["rounds"])
            lines.append(
                f"{name:<14}{configuration['partitions']:>11}{rates['spark']:>14,.0f}"
                f"{rates['ours']:>13,.0f}{configuration['ratio_median']:>8.1f}"
                f"{configuration['cpu_ratio_median']:>11.1f}{one['wanted']:>8g}  {each}"
            )
    return lines


def _runs(one: dict[str, Any]) -> list[str]:
    lines = [
        f"{'partitions':<12}{'side':<11}{'rows/s':>10}{'batch s':>9}{'cpu s: jvm':>12}"
        f"{'python':>8}  rounds' rows/s"
    ]
    for configuration in one["configurations"]:
        for side, rate in configuration["rows_per_s"].items():
            each = ", ".join(f"{r[side]['rows_per_s']:,.0f}" for r in configuration["rounds"])
            cpu_s = configuration["cpu_s_per_batch"][side]
            lines.append(
                f"{configuration['partitions']:<12}{side:<11}{rate:>10,.0f}"
                f"{configuration['batch_median_s'][side]:>9.2f}{cpu_s['jvm']:>12.2f}"
                f"{cpu_s['python']:>8.2f}  {each}"
            )
    return lines


def _layer_lines(name: str, rows: int, configuration: dict[str, Any]) -> list[str]:
    run = configuration["rounds"][-1]["ours"]
    layers, partitions = run.get("layers") or {}, configuration["partitions"]
    if not layers:
        return [f"{name}, partitions {partitions}: the records hold no timings"]
    each = rows / partitions
    lines = [
        f"Our tasks, {name}, partitions {partitions}, last round, median of "
        f"{layers['subtasks_counted']} tasks ({each:,.0f} rows and {layers['changed_keys']:,.0f} "
        f"changed entries of {layers['delta_bytes']:,.0f} bytes each):",
        f"{'phase':<26}{'ms':>9}{'ns/row':>9}",
    ]
    for phase, took_ms in layers["phases_ms"].items():
        lines.append(f"{phase:<26}{took_ms:>9.1f}{took_ms * 1e6 / each:>9.0f}")
    for label, key in (
        ("whole task", "task_ms"),
        ("last input row to ack", "after_input_ms"),
        ("last processed row to ack", "after_output_ms"),
    ):
        lines.append(f"{label:<26}{layers[key]:>9.1f}{layers[key] * 1e6 / each:>9.0f}")
    lines.append(f"the driver's answers, median ms: {_pairs(run['driver_ms'])}")
    lines.append(f"Spark's phases, median ms: {_pairs(run['phases_ms'])}")
    for side in ("spark", *FLOOR):
        if side in configuration["rounds"][-1]:
            other = configuration["rounds"][-1][side]["phases_ms"]
            lines.append(f"  the same, side {side}: {_pairs(other)}")
    return lines


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
