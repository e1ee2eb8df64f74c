"""Deduplication: of events with the same id the first one goes on, for a week.

`python -m examples.deduplication` runs it on generated files.

For sources that deliver at least once: retries of a producer, a topic that is read again. The id
is the key; that it was seen is all the state there is. The time to live bounds the state: a copy
that comes later than that goes through again. (Spark's own `dropDuplicates` keeps ids for ever;
`dropDuplicatesWithinWatermark` needs event time, and forgets by it.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from examples.local import Run
from statebackend import TTL, ArrowContext, ArrowProcessor, StateBackend

EVENTS = "id string, user string, what string"
HORIZON_MS = 7 * 24 * 60 * 60 * 1000


class FirstOfEachId(ArrowProcessor):
    """Passes on the first row of each key that was not seen within the horizon."""

    def open(self, ctx: ArrowContext) -> None:
        # The clock starts when an id is first seen: "create" says that later writes do not count.
        # The smallest row there is: what counts is that there is one.
        horizon = TTL(HORIZON_MS, update="create")
        self.seen = ctx.value_state("seen", "yes boolean", ttl=horizon)

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        new = pc.invert(self.seen.exists(ctx.keys))  # one boolean per key
        keys = ctx.keys.take(new)
        self.seen.put(keys, np.ones(len(keys), np.bool_))
        first = ctx.keys.starts[:-1]  # a key's first row: its copies in this batch come behind it
        return batch.take(pa.array(first).filter(new))


def build(backend: StateBackend, events: DataFrame) -> DataFrame:
    """The events without copies, in the columns that they have."""
    return backend.transform_arrow(
        events,
        keys="id",
        processor=FirstOfEachId(),
        output_schema=events.schema,
        uid="deduplication",
    )


def generated(files: int = 4, rows: int = 300) -> Iterator[pa.Table]:
    """Every event about twice: in the same file, or in a later one."""
    rng = np.random.default_rng(1)
    for number in range(files):
        events = rng.integers(0, (number + 1) * rows // 2, rows)
        yield pa.table(
            {
                "id": [f"event-{i:04}" for i in events],
                "user": [f"user-{i % 7}" for i in events],
                "what": rng.choice(["view", "click", "order"], rows),
            }
        )


def main() -> None:
    with Run("deduplication") as run:
        run.show(build(run.backend, run.stream("events", EVENTS, generated())), "id")


if __name__ == "__main__":
    main()
