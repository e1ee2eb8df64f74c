"""Whoever reads an error does what it says, as far as it says it exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recovery.decide.start_batch import LocationProgress, LogProgress, decide_start
from statebackend.errors import RewindError
from tests.sim.config import Config
from tests.sim.kernel import Scheduler
from tests.sim.location import Committed, Plan, Shared
from tests.sim.revival import take_way_out
from tests.sim.world import simulate


def _world(kept: int) -> Any:
    config = Config(batches_kept=kept)
    shared = Shared(config=config)
    for batch in range(4):
        plan = shared.offsets[batch] = Plan(batch, batch, batch, 0)
        shared.purge(batch)
        shared.commits[batch] = Committed(plan, 0, {}, {})
    shared.offsets[4] = Plan(4, 4, 4, 0)  # the next one is planned
    shared.purge(4)
    return SimpleNamespace(config=config, shared=shared, sched=Scheduler(0))


def _refusal(shared: Shared) -> RewindError:
    """Of a start that must repeat the last batch."""
    location = LocationProgress(
        "/location",
        "query",
        last_offset=max(shared.offsets),
        last_commit=max(shared.commits),
        offsets=frozenset(shared.offsets),
        commits=frozenset(shared.commits),
    )
    log = LogProgress("sim://", "job", "query", {"op": max(shared.commits) - 1})
    with pytest.raises(RewindError) as refused:
        decide_start(location, log)
    return refused.value


def test_files_that_spark_removed_are_put_back_as_the_refusal_names_them() -> None:
    world = _world(kept=1)
    assert (world.shared.offsets.keys(), world.shared.commits.keys()) == ({3, 4}, {3})
    take_way_out(world, _refusal(world.shared))
    assert world.config.batches_kept == 2
    assert (world.shared.offsets.keys(), world.shared.commits.keys()) == ({2, 3, 4}, {2, 3})


def test_an_error_without_a_way_out_changes_nothing() -> None:
    world = _world(kept=1)
    before = dict(world.shared.offsets), dict(world.shared.commits)
    take_way_out(world, RewindError("The location lacks files."))
    assert (world.shared.offsets, world.shared.commits) == before
    assert (world.config.batches_kept, world.shared.go_back_to) == (1, None)


def test_the_newest_epoch_that_is_offered_is_taken_once() -> None:
    world = _world(kept=10)
    offered = "go_back_to= can give up what came after epoch 7, 6: see docs/howto/repair.md."
    take_way_out(world, RewindError("Far behind.", todo=offered))
    assert world.shared.go_back_to == 7
    again = "The job was told to go back to epoch 7 before, and has gone on since."
    take_way_out(world, RewindError(again, todo=offered))
    assert world.shared.go_back_to == 6


def test_a_job_with_one_batch_kept_and_asynchronous_commits_is_started_in_the_calm() -> None:
    config = Config(batches_kept=1, asynchronous=True)
    result = simulate(2, events=300, config=config)
    assert not result.violations
    assert result.counts["query failed SB1013"]
    assert result.counts["keeps more batches as an error said"] == 1
    assert result.counts["started anew in the calm"] == 1
    assert result.epochs >= 4
