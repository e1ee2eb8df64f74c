"""Our side, until it is ended: `python -m bench.kafka.ours_side TASK.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.side import session
from statebackend import (
    ArrowContext,
    ArrowProcessor,
    KafkaSink,
    KafkaSource,
    NoRestart,
    StateBackend,
)

__all__ = ["KeyedCount", "run"]


class KeyedCount(ArrowProcessor):
    """Each row with its key's count so far."""

    def open(self, ctx: ArrowContext) -> None:
        self._count = ctx.value_state("count", "n bigint")

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        starts = ctx.keys.starts
        each = np.diff(starts)
        before = self._count.get(ctx.keys).column(0).fill_null(0).to_numpy()
        self._count.put(ctx.keys, {"n": before + each})
        so_far = np.repeat(before - starts[:-1], each) + np.arange(1, batch.num_rows + 1)
        return pa.RecordBatch.from_arrays([batch.column(0), pa.array(so_far)], names=["k", "n"])


def run(task: dict[str, Any]) -> None:
    """The job; it does not end by itself."""
    backend = StateBackend(
        session(task), uri=task["store"], job="bench", local_dir=f"{task['work']}/local"
    )
    servers = task["servers"]
    source = KafkaSource(task["source"], bootstrap_servers=servers, value="json: k bigint")
    sink = KafkaSink(
        task["target"], bootstrap_servers=servers, key="k", exactly_once=task["exactly_once"]
    )
    query = (
        backend.continuous(source, name="rows")
        .key_by("k")
        .process(KeyedCount(), uid="count", output_schema="k bigint, n bigint")
        .sink(sink, uid="out")
        .start(
            parallelism=task["partitions"],
            checkpoint_interval=task["checkpoint_s"],
            restart=NoRestart(),
            **task.get("options", {}),
        )
    )
    query.await_termination()
    raise SystemExit(f"the job ended: {query.exception()}")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
