"""`StateBackend.lookup`: the newest confirmed value, from the stores that workers have open."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from statebackend.errors import SettingError, UsageError
from statebackend.tables import state_lookup as lookup
from tests.spark.local.world import World, until

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from statebackend.backend import StateBackend


def started(world: World, sink: Any = None) -> tuple[StateBackend, StreamingQuery]:
    """A query that goes on as files come."""
    backend = world.backend()
    writer = world.writer(world.ledger(backend), sink).trigger(processingTime="0 seconds")
    return backend, backend.start(writer)


def truth(world: World) -> dict[str, tuple[int, int]]:
    return {key: (len(ids), sum(ids)) for key, ids in world.input.ids().items()}


def read_durable() -> Any:
    """Counts what is fetched from the durable copy."""
    return mock.patch.object(lookup, "fetch_subtask", wraps=lookup.fetch_subtask)


def settled(world: World, backend: StateBackend, batches: int) -> None:
    until(lambda: len(world.committed()) >= batches, "the batches are committed")


@pytest.mark.promise
def test_open_stores_answer_with_what_the_last_batch_made(world: World) -> None:
    world.input.add_batches(1)
    backend, _ = started(world)
    settled(world, backend, 1)
    with read_durable() as fetched:
        assert backend.lookup("ledger", "acc", "k1") == truth(world)["k1"]
        assert fetched.call_count == 1  # workers hear with the next batch that there are lookups
    world.input.add_batches(1)
    settled(world, backend, 2)
    keys = [f"k{n}" for n in range(8)]

    def from_workers() -> bool:
        with read_durable() as fetched:
            found = backend.lookup_all("ledger", "acc", keys)
            assert found == [*(truth(world)[key] for key in keys[:7]), None]
            return not fetched.call_count

    until(from_workers, "the workers answer")
    assert backend.lookup("ledger", "acc", ("k3",)).total == truth(world)["k3"][1]


def test_a_batch_that_spark_has_not_committed_is_not_told(world: World) -> None:
    world.input.add_batches(1)
    reached, go_on = threading.Event(), threading.Event()

    def held(frame: Any, batch: int) -> None:
        world.sink(frame, batch)
        if batch == 1:
            reached.set()
            go_on.wait(60)

    backend, query = started(world, held)
    settled(world, backend, 1)
    before = truth(world)
    world.input.add_batches(1)
    assert reached.wait(60)
    assert query.isActive
    for _ in range(3):  # all of its state is durable, and its output may still fail
        assert backend.lookup_all("ledger", "acc", sorted(before)) == [
            before[key] for key in sorted(before)
        ]
    go_on.set()
    settled(world, backend, 2)
    assert backend.lookup("ledger", "acc", "k1") == truth(world)["k1"]


def test_what_no_worker_has_open_is_read_once_for_an_epoch(world: World) -> None:
    world.input.add_batches(2)
    backend = world.run_ledger()
    keys = sorted(truth(world))
    with (
        mock.patch.object(lookup, "_ANSWER_S", 0.0),
        read_durable() as fetched,
    ):
        for _ in range(2):
            assert backend.lookup_all("ledger", "acc", keys) == [truth(world)[k] for k in keys]
        assert fetched.call_count == 2  # of each subtask once


def test_a_wrong_question_is_refused_by_name(world: World) -> None:
    world.input.add_batches(1)
    backend = world.run_ledger()
    with pytest.raises(SettingError, match="no operator 'other'"):
        backend.lookup("other", "acc", "k1")
    with pytest.raises(SettingError, match="no state 'other'"):
        backend.lookup("ledger", "other", "k1")
    with pytest.raises(UsageError, match="key column 'k'"):
        backend.lookup("ledger", "acc", 7)
    assert backend.lookup("ledger", "acc", "nobody") is None
