"""Operators of two inputs: by key on both sides, and rules for every subtask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.errors import SchemaError, SettingError
from tests.continuous.runtime.jobs import (
    KEYS,
    OUTPUT,
    Counting,
    Numbers,
    Paired,
    Scaled,
    check_counts,
    truth,
)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from tests.continuous.runtime.world import World

SIDES = "key BIGINT, side INT, n BIGINT, total BIGINT"
SCALED = f"{OUTPUT}, rules BIGINT"


def goes_on(world: World, query: ContinuousQuery, *, fails: bool) -> None:
    if fails:
        soon(lambda: (query.epoch or 0) >= 2)
        world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))
    world.go_on()
    assert query.await_termination(60.0)
    assert query.restarts == int(fails)


@pytest.mark.parametrize("fails", [False, True])
def test_both_sides_of_a_key_meet_in_one_state(world: World, fails: bool) -> None:
    sink = CollectSink()
    left = world.source(Numbers(3000, rows_per_s=2500, clock=world.held(0.5)), "left").key_by("key")
    right = world.source(Numbers(2000, rows_per_s=2500, splits=3), "right").key_by("key")
    left.connect(right).process(Paired(), uid="pairs", output_schema=SIDES).sink(sink)
    query = world.start(2, restart=FixedDelay(1, 0.0))
    goes_on(world, query, fails=fails)
    for side, rows in ((0, 3000), (1, 2000)):
        check_counts([row for row in sink.rows() if row["side"] == side], truth(rows))


@pytest.mark.parametrize("fails", [False, True])
def test_every_subtask_sees_all_rules_in_one_order(world: World, fails: bool) -> None:
    """Their broadcast states are compared at each checkpoint; the order decides what they are."""
    sink = CollectSink()
    rules = world.source(Numbers(700, rows_per_s=1000, splits=3), "rules")
    data = world.source(Numbers(4000, rows_per_s=2500, clock=world.held(0.5)), "data").key_by("key")
    data.connect_broadcast(rules).process(Scaled(), uid="scaled", output_schema=SCALED).sink(sink)
    query = world.start(3, restart=FixedDelay(1, 0.0))
    goes_on(world, query, fails=fails)
    check_counts(sink.rows(), truth(4000))
    newest = {i * 7 % KEYS: i for i in range(700)}
    assert max(row["rules"] for row in sink.rows()) <= sum(newest.values())


def test_what_cannot_be_connected_is_refused(world: World) -> None:
    left = world.source(Numbers(10), "left")
    right = world.source(Numbers(10), "right")
    with pytest.raises(SchemaError, match="differ"):
        left.key_by("key").connect(right.key_by("at")).process(
            Paired(), uid="pairs", output_schema=SIDES
        )
    counted = left.key_by("key").process(Counting(), uid="count", output_schema=OUTPUT)
    with pytest.raises(SettingError, match="source"):
        right.key_by("key").connect_broadcast(counted)
    keyed = left.key_by("key").connect_broadcast(right)
    keyed.process(Scaled(), uid="scaled", output_schema=SCALED).sink(CollectSink())
    with pytest.raises(SettingError, match="at_least_once"):
        world.start(2, mode="at_least_once")
    other = type(world)(world.folder / "other")
    with pytest.raises(SettingError, match="two backends"):
        left.key_by("key").connect(other.source(Numbers(10)).key_by("key"))
    other.close()
