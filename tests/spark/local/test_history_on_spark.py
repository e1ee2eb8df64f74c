"""The history of a query on Spark, read without its driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recovery.inspect.history_reader import read_checkpoint, read_history
from tests.spark.local.world import job_store

if TYPE_CHECKING:
    from tests.spark.local.world import World

pytestmark = pytest.mark.full


def test_each_batch_is_told_with_its_figures_and_its_restores(world: World) -> None:
    world.input.add_batches(3)
    world.run_ledger()
    world.input.add_batches(2)
    backend = world.run_ledger()
    found = read_history(job_store(backend), backend.job)
    assert [one.epoch for one in found.checkpoints] == [4, 3, 2, 1, 0]
    assert {one.status for one in found.checkpoints} == {"complete"}
    assert found.mode == "micro-batch"
    for one in found.checkpoints:
        assert one.rows
        assert one.started_ms is not None
        assert {"read", "process", "snapshot", "acks"} <= one.phases_ms.keys()
    # Each start restores; so does a subtask that another Python worker takes over in between.
    restored = {one.epoch: sum(one.by_source.values()) for one in found.restores}
    assert restored.keys() >= {3, 0}
    assert restored == {one.epoch: one.restores for one in found.checkpoints if one.restores}
    detail = read_checkpoint(job_store(backend), backend.job, 3)
    assert detail is not None
    (operator,) = detail.operators
    assert all(one.executor and one.host and one.persist_ms for one in operator.by_subtask)
    assert sum(one.rows or 0 for one in operator.by_subtask) == detail.rows
