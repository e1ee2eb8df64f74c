"""Our side of `python -m bench continuous` in processes of its own: `... continuousside TASK.json`.

One continuous job over `DueRows`, with a fresh JVM: to their end, or (`skew`) until there were
enough checkpoints.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.continuousjob import (
    OUTPUT_SCHEMA,
    Counts,
    DueRows,
    Measured,
    Measuring,
    Slow,
    Start,
    dumped,
    expected,
    percentiles_ms,
)
from bench.cpu import CpuSampler
from bench.side import session
from statebackend import CallbackSink, NoRestart, StateBackend
from statebackend.continuous.exchange.elements import ELEMENT_BYTES
from statebackend.continuous.sinks.sink import SinkContext

__all__ = ["run", "skew"]

_AHEAD_S = 1.0  # from when all subtasks run to the first row that is due


def run(task: dict[str, Any]) -> dict[str, Any]:
    """The job of one task.

    Raises:
        ValueError: it counted wrong.
    """
    spark = session(task)
    cpu = CpuSampler()
    cpu.start()
    keys, rows, rate, parallelism = (task[x] for x in ("keys", "rows", "rate", "partitions"))
    start = Start(f"{task['work']}/start") if rate else None
    backend = StateBackend(spark, uri=task["store"], job="bench", local_dir=f"{task['work']}/local")
    source = DueRows(rows, splits=parallelism, keys=keys, rows_per_s=rate, start=start)
    sink = Measuring(task["work"], keys=keys, start=start, warm_s=task["warm_s"])
    query = (
        backend.continuous(source, name="rows")
        .key_by("k")
        .process(Counts(), uid="count", output_schema=OUTPUT_SCHEMA)
        .sink(sink)
        .start(
            parallelism=parallelism,
            checkpoint_interval=task["checkpoint_s"],
            restart=NoRestart(),
            **task.get("options", {}),
        )
    )
    while start is not None and not start.us and query.is_active:
        if query.is_running:
            start.set(int((time.time() + _AHEAD_S) * 1e6))
        time.sleep(0.1)
    if not query.await_termination(task["timeout_s"]):
        query.stop()
        raise TimeoutError(f"the job took over {task['timeout_s']} s")
    cpu.stop()
    saw = Measured(Path(task["work"]))
    seen, sums = expected(rows, keys)
    found = {name: getattr(saw, name) for name in sums}
    if found != sums or (saw.last != seen).any():
        raise ValueError(f"the sinks saw {found}, not {sums}, or wrong last counts")
    warm_s = saw.reached_s(task["warm_rows"])
    counted_s = saw.ended_s - warm_s
    done = [one for one in query.checkpoints() if not one.aborted]
    report: dict[str, Any] = {
        "side": "ours",
        "spark": spark.version,
        "rows_per_s": round((rows - task["warm_rows"]) / counted_s, 1),
        "counted_s": round(counted_s, 3),
        "rows_a_batch": round(saw.rows / saw.batches, 1),
        "cpu_s": cpu.between(warm_s, saw.ended_s),
        "checkpoints": len(done),
        "checkpoint_ms": sorted(one.took_ms for one in done),
        "subtasks": done[len(done) // 2].subtasks if done else {},
    }
    if rate:
        report |= percentiles_ms(saw.took_us)
    backend.close()
    spark.stop()
    return report


_ROW_BYTES, _BATCH_ROWS = 16, 256
_BUFFER_BYTES = _BATCH_ROWS // 2 * _ROW_BYTES  # a message: what one receiver gets of a batch
_CHANNEL_BYTES = 64 << 10


def skew(task: dict[str, Any]) -> dict[str, Any]:
    """A job in which what lies in the channels of one subtask is ``delay_s`` of work."""
    spark, parallelism = session(task), task["partitions"]
    backend = StateBackend(spark, uri=task["store"], job="bench", local_dir=f"{task['work']}/local")
    a_channel = _CHANNEL_BYTES // (_BUFFER_BYTES + ELEMENT_BYTES) * _BATCH_ROWS // 2
    row_s = task["delay_s"] / (a_channel * parallelism)
    source = DueRows(1 << 40, splits=parallelism, keys=10_000, rows_per_s=None, start=None)
    query = (
        backend.continuous(source, name="rows")
        .key_by("k")
        .process(Slow(row_s, parallelism), uid="slow", output_schema="k bigint, due_us bigint")
        .key_by("k")
        .process(Counts(), uid="count", output_schema=OUTPUT_SCHEMA)
        .sink(CallbackSink(_nothing))
        .start(
            parallelism=parallelism,
            checkpoint_interval=task["checkpoint_s"],
            restart=NoRestart(),
            alignment_timeout_s=task["alignment_timeout_s"],
            buffer_bytes=_BUFFER_BYTES,
            channel_bytes=_CHANNEL_BYTES,
            batch_rows=_BATCH_ROWS,
        )
    )
    until_s = time.monotonic() + task["timeout_s"]
    # The first one begins before the channels are full.
    while len(query.checkpoints()) < task["checkpoints"] + 1 and query.is_active:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{len(query.checkpoints())} checkpoints in {task['timeout_s']} s")
        query.await_termination(0.2)
    done = [one for one in query.checkpoints() if not one.aborted][1:]
    query.stop()
    if query.exception() is not None:
        raise query.exception()
    report = {
        "side": "skew",
        "checkpoints": [
            {
                "took_ms": one.took_ms,
                "alignment_ms": max(of["alignment_ms"] for of in one.subtasks.values()),
                "inflight_bytes": sum(of.get("inflight_bytes", 0) for of in one.subtasks.values()),
                "subtasks": one.subtasks,
            }
            for one in done
        ],
    }
    backend.close()
    spark.stop()
    return report


def _nothing(batch: pa.RecordBatch, context: SinkContext) -> None:
    """Takes rows."""


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dumped(skew(task) if task["side"] == "skew" else run(task), task["result"])


if __name__ == "__main__":
    main()
