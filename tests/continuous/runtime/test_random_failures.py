"""Slots that fail at random moments, over and over: the result is that of a quiet run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.jobs import (
    OUTPUT,
    PerClass,
    Windows,
    WithClass,
    check_counts,
    truth,
    windows_truth,
)

if TYPE_CHECKING:
    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs, whatever fails

ROWS = 4000


@pytest.mark.parametrize("seed", range(3))
def test_the_result_is_exact_whatever_fails_and_when(world: World, seed: int) -> None:
    drawn = random.Random(seed)
    counts, windows = CollectSink(), CollectSink()
    timed = {"event_time": "at", "watermark_delay": "5 ms"}
    source = world.held_back(ROWS, splits=3, rows_per_s=2000, **timed)
    keyed = world.source(source).key_by("key")
    keyed.process(
        Windows(100),
        uid="windows",
        output_schema="key BIGINT, start BIGINT, n BIGINT, total BIGINT",
        time_mode="event",
        event_time="at",
    ).sink(windows)
    counted = keyed.process(WithClass(), uid="count", output_schema=f"class BIGINT, {OUTPUT}")
    counted.sink(counts)
    classes = counted.key_by("class")
    schema = "class BIGINT, n BIGINT"
    classes.process(PerClass(), uid="classes", output_schema=schema).sink(CollectSink())
    query = world.start(3, restart=FixedDelay(None, 0.0), checkpoint_interval_s=0.05)
    world.run_with_failures(query, drawn, slots=3, most=6, after_s=(0.2, 0.8))
    assert query.restarts >= 2
    check_counts(counts.rows(), truth(ROWS))
    found = [tuple(row.values()) for row in windows.rows()]
    assert len(found) == len(set(found))
    assert set(found) == windows_truth(ROWS, 100)
