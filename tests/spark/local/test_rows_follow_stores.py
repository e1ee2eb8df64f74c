"""Spark gives tasks to workers in any order; a subtask's rows go where its store is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.spark.local.processors import MovingLedger

if TYPE_CHECKING:
    import pytest

    from tests.spark.local.world import World

BATCHES = 24


def test_state_stays_where_it_is_though_tasks_change_workers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another environment gets workers of its own: no other test's find what the processor sets.
    monkeypatch.setitem(world.spark.sparkContext.environment, "STATEBACKEND_TEST", __name__)
    world.input.add_batches(BATCHES)
    backend = world.backend(settings={"follow_stores_bytes": 1})
    world.run(backend, world.ledger(backend, processor=MovingLedger()))
    rows = world.sink.rows()
    assert sorted(i for row in rows for i in row["ids"]) == sorted(
        row["id"] for row in world.input.rows
    )
    moves = max(row["n"] for row in rows)
    # Half of all batches, where stores follow the tasks; none, but for a worker that was given its
    # task when the other had ended.
    assert moves <= BATCHES // 4
