"""Jobs without micro-batches: `python -m bench continuous`.

*keyed count*: rows with one of so many keys go to the subtask that owns the key, and each gives its
key's count so far; RocksDB, checkpoints every 2 s. First as fast as rows are taken, then at half of
the rate that came out of that, each side at its own; then a row counts as late as it comes after it
was *due*, whether the source was in time or not. Sides take turns, each in processes of its own.
What the sinks saw is checked against counts made with numpy from the rows' numbers alone.

*skew*: one of two subtasks in the middle takes so long for a row that what lies in its channels is
2 s of work. How long checkpoints take then, aligned, and with a timeout for the alignment.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.continuousjob import expected
from bench.flink import VERSION, Flink
from bench.machine import busy_share
from bench.runner import run_task

__all__ = ["continuous", "continuous_text", "plot", "skew", "skew_text"]

_KEYS = 100_000
_PARALLELISM = 2
_CHECKPOINT_S = 2.0
_DEFAULT, _SHORT = "100 ms", "10 ms"  # how long Flink's rows wait for others; ours: 10 ms
_TIMEOUTS_S = (None, 0.1)
# All, and those at first that do not count: some 10 s of each.
_ROWS = {"ours": (40_000_000, 15_000_000), "flink": (10_000_000, 5_000_000)}
_QUICK_ROWS = {"ours": (400_000, 200_000), "flink": (400_000, 200_000)}
_SIDES = {"ours": "this", "flink": f"Flink {VERSION}"}
_TIMEOUT_S = 300.0


def continuous(
    *, quick: bool, rounds: int, sides: Sequence[str], flink: str | None, work: Path, progress: Any
) -> dict[str, Any]:
    """All rounds.

    Args:
        flink: the folder of Flink's jars; None leaves Flink out.
        work: a folder for everything. progress: called with a line when a run has ended.
    """
    job = Flink(flink, work / "flink", "FlinkContinuous") if "flink" in sides else None
    skipped = {"flink": job.skipped} if job is not None and job.skipped else {}
    for why in skipped.values():
        progress(f"Flink is left out: {why}")
    run = [side for side in sides if side in _SIDES and side not in skipped]
    bench = _Bench(quick, job, work, progress)
    return {
        "keys": _KEYS,
        "parallelism": _PARALLELISM,
        "checkpoint_s": _CHECKPOINT_S,
        "skipped": skipped,
        "rounds": [bench.round(run) for _ in range(rounds)],
    }


class _Bench:
    def __init__(self, quick: bool, job: Flink | None, work: Path, progress: Any) -> None:
        self._rows = _QUICK_ROWS if quick else _ROWS
        self._seconds, self._warm_s = (4.0, 2.0) if quick else (20.0, 8.0)
        self._job, self._work, self._progress = job, work, progress

    def round(self, sides: Sequence[str]) -> dict[str, Any]:
        most = {side: self._most(side) for side in sides}
        for side, found in most.items():
            self._progress(f"continuous, {side}: {found['rows_per_s']:,.0f} rows/s")
        half: list[dict[str, Any]] = []
        for side in sides:
            # Ours also at half of the other's rate.
            rates = {of: round(found["rows_per_s"] / 2) for of, found in most.items()}
            for of in rates if side == "ours" else (side,):
                for wait in (_SHORT, _DEFAULT) if side == "flink" else (_SHORT,):
                    found = self._half(side, rates[of], wait)
                    half.append({"side": side, "rate": rates[of], "wait": wait, **found})
                    self._progress(
                        f"continuous, {side}, {rates[of]:,} rows/s, buffers {wait}: p50 "
                        f"{found['p50_ms']} ms, p99 {found['p99_ms']} ms"
                    )
        ratio = None
        if "ours" in most and "flink" in most:
            ratio = round(most["ours"]["rows_per_s"] / most["flink"]["rows_per_s"], 2)
        return {"most": most, "half": half, "ratio": ratio}

    def _most(self, side: str) -> dict[str, Any]:
        if side == "ours":
            return self._ours(*self._rows[side], None)
        rows, warm_rows = self._rows[side]
        return self._flink(rows, 0, warm_rows, _DEFAULT)

    def _half(self, side: str, rate: int, wait: str) -> dict[str, Any]:
        rows = round(rate * (self._seconds + self._warm_s))
        if side == "ours":
            return self._ours(rows, round(rate * self._warm_s), rate)
        return self._flink(rows, rate, round(self._warm_s * 1000), wait)

    def _ours(self, rows: int, warm_rows: int, rate: int | None) -> dict[str, Any]:
        task = {
            "side": "ours",
            "name": "keyed count",
            "keys": _KEYS,
            "rows": rows,
            "rate": rate,
            "partitions": _PARALLELISM,
            "checkpoint_s": _CHECKPOINT_S,
            "warm_rows": warm_rows,
            "warm_s": self._warm_s,
            "timeout_s": _TIMEOUT_S,
        }
        return run_task("bench.continuousside", task, self._work / "ours")

    def _flink(self, rows: int, rate: int, warm: int, wait: str) -> dict[str, Any]:
        if self._job is None:
            raise ValueError("no job was made for Flink")
        _, wanted = expected(rows, _KEYS)
        busy, before = busy_share(), resource.getrusage(resource.RUSAGE_CHILDREN)
        found = self._job.execute([rows, _KEYS, rate, warm, _PARALLELISM, wait], wanted)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        warm_rows = round(rate * warm / 1000) if rate else warm
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return found | {
            "rows_per_s": round((rows - warm_rows) / found["counted_s"], 1),
            "whole_cpu_s": round(used_s, 2),
            "busy_before": busy,
        }


def continuous_text(found: dict[str, Any]) -> str:
    """Tables."""
    lines = [
        f"Keyed count, {found['keys']:,} keys, {found['parallelism']} subtasks, a checkpoint each "
        f"{found['checkpoint_s']:g} s; every side's output was checked",
        *(f"  {_SIDES[side]} is left out: {why}" for side, why in found["skipped"].items()),
    ]
    for number, one in enumerate(found["rounds"], start=1):
        lines += ["", f"round {number}", f"{'side':<14}{'rows/s':>12}{'this is':>10}{'busy':>7}"]
        for side, run in one["most"].items():
            times = f"{one['ratio']:.2f} x" if side != "ours" and one["ratio"] else ""
            busy = f"{run['busy_before']:.0%}"
            lines.append(f"{_SIDES[side]:<14}{run['rows_per_s']:>12,.0f}{times:>10}{busy:>7}")
        lines += [
            "",
            f"{'at half':<14}{'rows/s':>11}{'buffers':>9}{'p50 ms':>9}{'p90':>8}{'p99':>8}",
        ]
        for run in one["half"]:
            said = "".join(f"{run[f'{p}_ms']:>8.1f}" for p in ("p50", "p90", "p99"))
            lines.append(f"{_SIDES[run['side']]:<14}{run['rate']:>11,}{run['wait']:>9} {said}")
    return "\n".join(lines)


# --- one slow subtask --------------------------------------------------------------------------


def skew(*, quick: bool, work: Path, progress: Any) -> dict[str, Any]:
    """How long checkpoints take, and what of it is alignment, by timeout."""
    runs = []
    for timeout_s in _TIMEOUTS_S:
        task = {
            "side": "skew",
            "name": f"timeout {timeout_s}",
            "partitions": _PARALLELISM,
            "alignment_timeout_s": timeout_s,
            "checkpoints": 3 if quick else 8,
            "checkpoint_s": 4.0,
            "delay_s": 2.0,
            "timeout_s": _TIMEOUT_S,
        }
        found = run_task("bench.continuousside", task, work / "skew")
        runs.append(found | {"alignment_timeout_s": timeout_s})
        middle = statistics.median(one["took_ms"] for one in found["checkpoints"])
        progress(f"skew, alignment_timeout_s={timeout_s}: median {middle:,.0f} ms")
    return {"delay_s": 2.0, "runs": runs}


def skew_text(found: dict[str, Any]) -> str:
    """A table."""
    lines = [
        f"One slow subtask, {found['delay_s']:g} s of work in its channels: checkpoints, ms",
        f"{'alignment_timeout_s':<22}{'median':>9}{'most':>9}{'aligning':>10}{'kept KiB':>10}",
    ]
    for run in found["runs"]:
        took = [one["took_ms"] for one in run["checkpoints"]]
        aligned = statistics.median(one["alignment_ms"] for one in run["checkpoints"])
        kept = statistics.median(one["inflight_bytes"] for one in run["checkpoints"]) / 1024
        lines.append(
            f"{run['alignment_timeout_s']!s:<22}{statistics.median(took):>9,.0f}{max(took):>9,.0f}"
            f"{aligned:>10,.0f}{kept:>10,.0f}"
        )
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Each checkpoint's duration as a PNG.

    Raises:
        ImportError: matplotlib (extra ``bench``) is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for run in found["runs"]:
        timeout_s = run["alignment_timeout_s"]
        label = "aligned" if timeout_s is None else f"alignment_timeout_s={timeout_s:g}"
        took_s = [one["took_ms"] / 1000 for one in run["checkpoints"]]
        axes.plot(range(1, len(took_s) + 1), took_s, marker="o", label=label)
    axes.axhline(found["delay_s"], linestyle="--", color="grey", label="delay of the slow channel")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("checkpoint")
    axes.set_ylabel("seconds from trigger to commit")
    axes.set_title(f"Checkpoints with one channel delayed by {found['delay_s']:g} s")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
