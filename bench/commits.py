"""When Spark may commit, and stores that stay open: `python -m bench commits`.

*sync and async*: the same query, its store 100 ms away (a proxy waits before each request), with
synchronous and with asynchronous commits in turn. *open stores*: the same query on a near store,
with stores that workers keep open between batches, and without, for 2 and for 8 subtasks.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.data import write_batches
from bench.layers import summarise
from bench.query import Job
from bench.s3 import place
from bench.side import session
from recovery.drill.proxy.fault_proxy import FaultProxy

__all__ = ["commits", "commits_text"]

_LATENCY_S = 0.1
_KEYS = 20_000
_WARM = 3


def commits(*, batches: int, rounds: int, work: Path, progress: Any) -> dict[str, Any]:
    """Both comparisons; ``progress`` is called with a line when a run has ended."""
    source = write_batches(work / "in", keys=_KEYS, rows=_KEYS, full=batches)
    spark = session({"side": "commits", "work": str(work), "partitions": 2})
    found: dict[str, Any] = {"keys": _KEYS, "batches": batches, "latency_s": _LATENCY_S}
    try:
        with place(work / "s3") as server, FaultProxy(server.address) as proxy:
            runs = _Runs(spark, work, source, server, proxy, progress)
            runs.one("warm up", 2, {})
            proxy.set_pace(latency_s=_LATENCY_S)
            found["commit"] = runs.paired(
                rounds, 2, {"sync": {"commit": "sync"}, "async": {"commit": "async"}}
            )
            proxy.set_pace()
            for partitions in (2, 8):
                found[f"open stores, {partitions} subtasks"] = runs.paired(
                    rounds, partitions, {"kept open": {}, "closed": {"open_stores": 0}}
                )
    finally:
        spark.stop()
    return found


class _Runs:
    """Runs of the query, each in places of its own."""

    def __init__(
        self, spark: Any, work: Path, source: Path, server: Any, proxy: FaultProxy, progress: Any
    ) -> None:
        self._spark, self._work, self._source = spark, work, source
        self._server, self._proxy, self._progress = server, proxy, progress
        self._number = 0

    def paired(
        self, rounds: int, partitions: int, sides: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """All sides in turn, going first in turn; the difference is by round."""
        first, second = sides
        pairs = []
        for number in range(rounds):
            order = list(sides.items())[:: 1 if number % 2 else -1]
            pairs.append({name: self.one(name, partitions, given) for name, given in order})
        medians = {
            name: statistics.median(pair[name]["batch_ms"] for pair in pairs) for name in sides
        }
        saved = [pair[first]["batch_ms"] - pair[second]["batch_ms"] for pair in pairs]
        return {
            "rounds": pairs,
            "batch_ms": medians,
            "difference_ms": [round(one, 1) for one in saved],
            "difference_ms_median": round(statistics.median(saved), 1),
        }

    def one(self, name: str, partitions: int, given: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        settings = dict(given)
        commit = settings.pop("commit", "sync")
        folder = self._work / f"run-{self._number}"
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        job = Job(
            self._spark,
            folder,
            self._source,
            self._server.uri(folder.name),
            self._proxy.url,
            partitions,
            settings,
            commit,
        )
        backend, query = job.run()
        durations = [
            p["durationMs"]["triggerExecution"]
            for p in query.recentProgress
            if p["batchId"] >= _WARM and p["numInputRows"]
        ]
        newest = backend.progress()
        layers = [
            {
                "epoch": one.epoch,
                "rows": one.delta_rows,
                "size_bytes": one.delta_bytes,
                "timings_ms": one.timings_ms,
            }
            for one in newest.subtasks
        ]
        epochs = range(_WARM, len(newest.epochs))
        found = {
            "batch_ms": statistics.median(durations),
            "batches": len(durations),
            "commit_ms": round(
                statistics.median(e.commit_ms for e in newest.epochs if e.epoch in epochs), 1
            ),
            "phases_ms": summarise(layers, epochs)["phases_ms"],
        }
        self._progress(f"commits, {name}, {partitions} subtasks: {found}")
        return found


def commits_text(found: dict[str, Any]) -> str:
    """The figures to read."""
    lines = [
        f"Commits: counter, {found['keys']:,} keys, all changed in each of {found['batches']} "
        f"batches, {_WARM} of them warm-up; store {found['latency_s'] * 1000:.0f} ms away for the "
        f"first comparison"
    ]
    for name, one in found.items():
        if isinstance(one, dict):
            sides = ", ".join(f"{side} {ms:.0f} ms" for side, ms in one["batch_ms"].items())
            lines.append(
                f"  {name}: a batch {sides}; by round {one['difference_ms']}, median "
                f"{one['difference_ms_median']:.0f} ms"
            )
            last = one["rounds"][-1]
            for side, run in last.items():
                lines.append(f"    {side}: commit {run['commit_ms']} ms, {run['phases_ms']}")
    return "\n".join(lines)
