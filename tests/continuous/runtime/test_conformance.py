"""End to end with injected failure, as reference/conformance.md has it, in one process."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend import system
from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.conformance import OUTPUT, FailingOnce, Sums, exact
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from tests.continuous.runtime.world import World

QUICK: dict[str, dict[str, Any]] = {"as it is": {}, "inline limit 16": {"inline_limit_bytes": 16}}
SLOW: dict[str, dict[str, Any]] = {
    "max parallelism 4": {"max_parallelism": 4},
    "max parallelism 32768": {"max_parallelism": 32768},
}


def started(world: World, sink: CollectSink, rows_per_s: float | None = None) -> ContinuousQuery:
    keyed = world.source(FailingOnce(world.folder, rows_per_s)).key_by("key")
    sums = keyed.process(
        Sums(), uid="sums", output_schema=OUTPUT, time_mode="event", event_time="at"
    )
    sums.sink(sink)
    restart = FixedDelay(20, 0.0)
    return world.start(4, restart=restart, checkpoint_interval_s=0.2, batch_rows=2000)


def run(world: World, settings: dict[str, Any], *, local: bool) -> None:
    world.renew(**settings)
    sink = CollectSink()
    query = started(world, sink)
    soon(lambda: (query.epoch or 0) >= 1)  # two complete checkpoints
    assert sorted(one.subtask for one in query.restores()) == [0, 1, 2, 3], "while it runs"
    if not local:
        world.cluster.keeps_workers = False
        shutil.rmtree(world.folder / "local", ignore_errors=True)
    (world.folder / "may-fail").touch()
    assert query.await_termination(200.0)
    assert query.restarts == 1
    assert len(query.restores()) == 8
    exact(sink.rows())


@pytest.mark.parametrize("variant", QUICK)
def test_a_failure_after_a_third_changes_no_sum(world: World, variant: str) -> None:
    run(world, QUICK[variant], local=True)


@pytest.mark.slow
@pytest.mark.parametrize("variant", SLOW)
def test_a_failure_after_a_third_changes_no_sum_at_any_parallelism(
    world: World, variant: str
) -> None:
    run(world, SLOW[variant], local=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_failures_at_random_points_change_no_sum(world: World, seed: int) -> None:
    drawn = random.Random(seed)
    world.renew(inline_limit_bytes=drawn.choice([16, 1 << 16]))
    (world.folder / "may-fail").touch()
    sink = CollectSink()
    query = started(world, sink, rows_per_s=40_000)
    failures, next_s = 0, 0.0
    while not query.await_termination(0.02):
        now_s = system.monotonic_s()
        if not query.is_running:
            next_s = now_s + drawn.uniform(0.1, 1.5)
        elif now_s > next_s and failures < 6:
            drawn.choice(world.cluster.slots[-4:])._link.broken("drawn", 0, RuntimeError("drawn"))
            failures += 1
    assert query.restarts >= 2
    exact(sink.rows())
