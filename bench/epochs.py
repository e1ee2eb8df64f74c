"""What an epoch costs by itself: `python -m bench epochs`.

*Empty*: batches without rows through our operator, whose store holds all keys, and through an
otherwise identical stateless query (same source, same shuffle, an operator in Python that passes
rows on). Sides take turns; the difference of the medians is the fixed cost of an epoch.

*Changed*: from a task's last input row to its ack, with 50,000 changed keys in each subtask. The
records say it: a task reads its whole input first, so that is everything after ``read``.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.layers import summarise
from bench.runner import batch_stats, check_output, run_side
from bench.sizes import Sizes
from bench.works import WORKS, Shape

__all__ = ["epochs", "epochs_text"]

_TIMEOUT_S = 1200.0
_PARTITIONS = 2


def epochs(sizes: Sizes, *, work: Path, progress: Any) -> dict[str, Any]:
    """Both figures; ``progress`` is called with a line when a run has ended."""
    keys = sizes.changed_keys * _PARTITIONS
    full = sizes.warm_batches + sizes.counted_batches
    empty = sizes.empty_warm_batches + sizes.empty_counted_batches
    shape = Shape(keys, keys, sizes.warm_batches, sizes.counted_batches)
    prepared = WORKS["counter"].prepare(work / "input-epochs", shape, empty=empty)
    first_empty = full + sizes.empty_warm_batches
    rounds = []
    for number in range(sizes.empty_rounds):
        runs: dict[str, Any] = {}
        for side in ("stateless", "ours"):
            report = run_side(
                side,
                work=work,
                source=prepared.folder,
                partitions=_PARTITIONS,
                timeout_s=_TIMEOUT_S,
            )
            check_output(report, prepared.expected)
            stats = batch_stats(report, first_empty, full + empty - 1, rows=0)
            if "layers" in report:
                stats["empty"] = summarise(report["layers"], range(first_empty, full + empty))
                stats["changed"] = summarise(report["layers"], range(sizes.warm_batches, full))
            runs[side] = stats
            progress(
                f"epochs, round {number + 1}/{sizes.empty_rounds}, {side}: an empty batch "
                f"{stats['batch_median_s'] * 1000:.0f} ms (busy before: {stats['busy_before']:.0%})"
            )
        for name in ("batch_median_s", "total_s"):
            scale = 1000 / (1 if name == "batch_median_s" else runs["ours"]["batches"])
            runs[f"extra_ms_by_{name}"] = round(
                (runs["ours"][name] - runs["stateless"][name]) * scale, 1
            )
        rounds.append(runs)
    return {
        "keys": keys,
        "partitions": _PARTITIONS,
        "empty_batches_counted": sizes.empty_counted_batches,
        "rounds": rounds,
        "empty_batch_ms": {
            side: round(statistics.median(r[side]["batch_median_s"] for r in rounds) * 1000, 1)
            for side in ("stateless", "ours")
        },
        "extra_ms": statistics.median(r["extra_ms_by_batch_median_s"] for r in rounds),
        "extra_ms_by_total": statistics.median(r["extra_ms_by_total_s"] for r in rounds),
        "changed_keys_a_subtask": rounds[0]["ours"]["changed"].get("changed_keys"),
        "last_input_to_ack_ms": _over(rounds, "after_input_ms"),
        "last_processed_to_ack_ms": _over(rounds, "after_output_ms"),
    }


def _over(rounds: list[dict[str, Any]], name: str) -> float | None:
    values = [r["ours"]["changed"][name] for r in rounds if r["ours"].get("changed")]
    return round(statistics.median(values), 1) if values else None


def epochs_text(found: dict[str, Any]) -> str:
    """The figures as a table to read."""
    last = found["rounds"][-1]["ours"]
    lines = [
        f"Epochs: {found['keys']:,} keys in {found['partitions']} subtasks",
        f"  an epoch without data: {found['empty_batch_ms']['ours']:.0f} ms, of a stateless query "
        f"{found['empty_batch_ms']['stateless']:.0f} ms; beyond it {found['extra_ms']:.0f} ms "
        f"(by total wall time {found['extra_ms_by_total']:.0f} ms) "
        f"[{', '.join(str(r['extra_ms_by_batch_median_s']) for r in found['rounds'])}]",
        f"  {found['changed_keys_a_subtask']:,.0f} changed keys in a subtask: last input row to "
        f"ack {found['last_input_to_ack_ms']:.0f} ms; last processed row to ack "
        f"{found['last_processed_to_ack_ms']:.0f} ms",
        "",
        f"{'phase of a task, ms':<24}{'empty':>9}{'changed':>9}",
    ]
    for name, took_ms in last["changed"]["phases_ms"].items():
        idle_ms = last["empty"]["phases_ms"].get(name, 0.0)
        lines.append(f"{name:<24}{idle_ms:>9.2f}{took_ms:>9.2f}")
    return "\n".join(lines)
