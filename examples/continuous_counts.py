"""Counts by key in a job without micro-batches: bids per auction, seconds after they were made.

`python -m examples.continuous_counts` runs it for a while on generated bids, kills a worker in
between, and compares what came out with the bids themselves.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.local import session
from statebackend import (
    ArrowContext,
    ArrowProcessor,
    ContinuousQuery,
    FileSink,
    FixedDelay,
    NexmarkSource,
    StateBackend,
)

OUTPUT = "auction bigint, bids bigint"


class Bids(ArrowProcessor):
    """How many bids each auction has had, whenever there are new ones."""

    def open(self, ctx: ArrowContext) -> None:
        self.bids = ctx.value_state("bids", "bids bigint")

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        known = self.bids.get(ctx.keys).column("bids").fill_null(0).to_numpy()
        bids = known + np.diff(ctx.keys.starts)
        self.bids.put(ctx.keys, {"bids": bids})
        return ctx.keys.columns.append_column("bids", pa.array(bids))


def source(rows: int, rows_per_s: float | None = None) -> NexmarkSource:
    """So many bids, in two splits: each can be read by a subtask of its own."""
    columns = ["auction", "price"]
    return NexmarkSource("bid", rows=rows, splits=2, rows_per_s=rows_per_s, columns=columns)


def start(backend: StateBackend, bids: NexmarkSource, out: Path) -> ContinuousQuery:
    """Files of counts; what is in one is there for good, and once."""
    counts = backend.continuous(bids, name="bids").key_by("auction")
    stream = counts.process(Bids(), uid="bids-by-auction", output_schema=OUTPUT)
    query: ContinuousQuery = stream.sink(FileSink(out)).start(
        parallelism=2, checkpoint_interval="1 second", restart=FixedDelay(3, 0.5)
    )
    return query


def truth(rows: int) -> Counter[int]:
    """The same from the bids, without any state."""
    found: Counter[int] = Counter()
    bids = source(rows)
    for split in bids.discover(None).splits:
        reader = bids.open(split, None)
        while not reader.ended:
            batch = reader.read(10_000)
            if batch is not None:
                found.update(batch.column("auction").to_pylist())
    return found


def written(out: Path) -> Iterator[tuple[int, int]]:
    """What the sink's readers see."""
    for file in sorted(out.glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            yield row["auction"], row["bids"]


def main() -> None:
    rows = 30_000
    with tempfile.TemporaryDirectory(prefix="continuous-counts-") as folder:
        root = Path(folder)
        backend = StateBackend(
            session(),
            uri=(root / "store").as_uri(),
            job="continuous-counts",
            local_dir=str(root / "local"),
        )
        query = start(backend, source(rows, rows_per_s=3_000), root / "out")
        while query.is_active and (query.epoch or 0) < 2:
            query.await_termination(0.1)
        os.kill(query.slots()[1].pid, signal.SIGKILL)
        query.await_termination()
        newest: dict[int, int] = {}
        for auction, bids in written(root / "out"):
            newest[auction] = max(newest.get(auction, 0), bids)
        print(f"{len(newest)} auctions after {query.restarts} restart(s)")
        print("exact" if newest == truth(rows) else "NOT exact")
        backend.spark.stop()


if __name__ == "__main__":
    main()
