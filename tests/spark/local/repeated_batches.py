"""A query whose ``foreachBatch`` function fails after it has written, and what must be there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PythonException, StreamingQueryException

import statebackend
from statebackend import BatchOnce
from statebackend.errors import OutputLostError, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame

    from statebackend.continuous.sinks.sink import BatchSink
    from tests.spark.local.world import World

__all__ = ["check_refusals", "check_rows", "run_beside_a_clone", "run_with_repeats"]


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


def run_beside_a_clone(world: World, sink: BatchSink) -> None:
    """Four batches; then a query that begins after the second one, and has the others as well."""

    def run(**given: Any) -> Any:
        backend = world.backend(**given)
        world.run(backend, world.ledger(backend), backend.once(sink))
        return backend

    world.input.add_batches(2)
    savepoint = run().savepoint()
    world.input.add_batches(2)
    run()
    world.location, world.local = world.root / "location-2", world.root / "local-2"
    run(job="clone", savepoint=savepoint)
    assert world.committed()[-1] == 3


def _failing(batches: Iterable[Any]) -> Iterator[Any]:
    raise RuntimeError("the first try")
    yield from batches


def check_refusals(frame: DataFrame, sink: BatchSink) -> None:
    """A query that was taken back, and a frame that would be taken for another one."""

    def once(batch: int, query: str = "q") -> BatchOnce:
        return BatchOnce("j", query, batch, lambda: "n")

    once(5).append(frame, sink)
    once(5).append(frame, sink)
    with pytest.raises(OutputLostError, match="has batch 5"):
        once(4).append(frame, sink)
    other = once(4, "r")
    with pytest.raises(PythonException):
        other.append(frame.mapInArrow(_failing, frame.schema), sink)
    other.append(frame, sink)
    with pytest.raises(SettingError, match="twice"):
        other.append(frame, sink)
    other.append(frame, sink, part="late")
