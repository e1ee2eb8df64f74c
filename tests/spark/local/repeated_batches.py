"""A query whose ``foreachBatch`` function fails after it has written, and what must be there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException

import statebackend
from statebackend import BatchOnce

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from tests.spark.local.world import World

__all__ = ["check_rows", "run_with_repeats"]


def run_with_repeats(
    world: World, commit: str, write: Callable[[DataFrame, BatchOnce], None]
) -> None:
    """Four batches; the function fails after it has written batches 0 and 2, once each."""
    calls: list[int] = []
    failures: list[str] = []

    def failing(frame: DataFrame, batch: int, once: BatchOnce) -> None:
        write(frame, once)
        calls.append(batch)
        if calls.count(batch) == 1 and batch in (0, 2):
            raise RuntimeError("the driver is tired")

    world.input.add_batches(4)
    for _ in range(3):
        backend = world.backend(commit=commit)
        query = backend.write_stream(world.ledger(backend)).foreachBatch(statebackend.once(failing))
        query = query.option("checkpointLocation", str(world.location)).trigger(availableNow=True)
        try:
            query.start().awaitTermination()
        except StreamingQueryException as error:
            failures.append(str(error))
    backend.wait_durable()
    # Nothing else may fail: batch 0 and batch 2 once each, and then the last two go through.
    assert ["is tired" in text for text in failures] == [True, True], failures
    assert world.committed()[-1] == 3, (world.committed(), calls)
    assert {calls.count(0), calls.count(2)} == {2}


def check_rows(world: World, rows: list[Any]) -> None:
    """Each id of the input once, and the sums with it."""
    seen: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda row: row["n"]):
        seen[row["k"]] = sorted(seen.get(row["k"], []) + row["ids"])
        assert row["total"] == sum(seen[row["k"]])
    assert seen == {k: sorted(ids) for k, ids in world.input.ids().items()}
