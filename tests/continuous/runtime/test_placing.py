"""Subtasks go to the slots that see copies of their state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.driver.slot_assignment import placed
from statebackend.continuous.job.slot_messages import Copy
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.keygroups import key_group_range
from tests.continuous.runtime.jobs import OUTPUT, ArrowCounting, Counting, Numbers
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs and moves

P, GROUPS = 4, 128


def of(subtask: int, epoch: int = 10, *, operator: str = "count", parallelism: int = P) -> Copy:
    """A copy of one subtask's state."""
    groups = key_group_range(subtask, parallelism, GROUPS)
    return Copy(
        operator=operator, key_group_start=groups.start, key_group_end=groups.end, epoch=epoch
    )


def where(seen: Mapping[int, list[Copy]]) -> dict[int, int]:
    return placed({slot: seen.get(slot, []) for slot in range(P)}, P, GROUPS)


def test_where_nobody_sees_anything_all_have_their_own_number() -> None:
    assert where({}) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_each_subtask_goes_to_its_copy() -> None:
    seen = {slot: [of((slot + 1) % P)] for slot in range(P)}
    assert where(seen) == {0: 1, 1: 2, 2: 3, 3: 0}


def test_slots_of_one_host_share_what_they_see() -> None:
    here, there = [of(1), of(3)], [of(0), of(2)]
    found = where({0: here, 1: here, 2: there, 3: there})
    assert {found[0], found[1]} == {1, 3}
    assert {found[2], found[3]} == {0, 2}


def test_where_all_see_all_they_have_their_own_number() -> None:
    everything = [of(subtask) for subtask in range(P)]
    assert where(dict.fromkeys(range(P), everything)) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_the_newest_copy_counts() -> None:
    assert where({0: [of(2, 10)], 3: [of(2, 4)]}) == {0: 2, 1: 1, 2: 0, 3: 3}
    assert where({0: [of(2, 4)], 3: [of(2, 10)]}) == {0: 0, 1: 1, 2: 3, 3: 2}
    assert where({0: [of(2, -1)]})[0] == 2  # better than nothing


def test_more_operators_count_more() -> None:
    both = [of(1), of(1, operator="other")]
    assert where({0: [of(1)], 3: both})[3] == 1


def test_a_slot_that_sees_two_leaves_the_one_that_another_sees() -> None:
    assert where({0: [of(1), of(2)], 3: [of(1)]}) == {0: 2, 1: 0, 2: 3, 3: 1}


def test_after_a_change_of_parallelism_parts_count() -> None:
    halves = {0: [of(1, parallelism=2)], 2: [of(0, parallelism=2)]}
    found = where(halves)
    assert found[0] in (2, 3)
    assert found[2] in (0, 1)


@given(
    st.dictionaries(
        st.integers(0, P - 1),
        st.lists(
            st.builds(
                Copy,
                operator=st.sampled_from("ab"),
                key_group_start=st.integers(0, 60),
                key_group_end=st.integers(0, 200),
                epoch=st.integers(-1, 30),
            ),
            max_size=6,
        ),
    )
)
def test_whatever_is_seen_every_subtask_has_one_slot(seen: dict[int, list[Copy]]) -> None:
    found = where(seen)
    assert sorted(found) == sorted(found.values()) == list(range(P))


@pytest.mark.parametrize("hosts", [3, 2])
def test_a_restart_in_other_slots_finds_every_local_copy(world: World, hosts: int) -> None:
    """Spark numbers its tasks anew: what was slot 0 may be on the other host now."""
    parallelism = 3
    world.cluster.host_of = lambda slot: f"host{slot % hosts}"
    sink = CollectSink()
    keyed = world.source(Numbers(None, splits=3, rows_per_s=600)).key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    keyed.process(ArrowCounting(), uid="arrow", output_schema=OUTPUT).sink(CollectSink())
    query = world.start(parallelism, restart=FixedDelay(2, 0.0))
    for restarts in (1, 2):
        epoch = query.epoch or 0
        soon(lambda epoch=epoch: query.is_running and (query.epoch or 0) > epoch)
        before = len(query.restores())
        now_at = [world.cluster.host_of(slot) for slot in (1, 2, 0)]
        world.cluster.host_of = now_at.__getitem__
        world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))
        soon(lambda before=before: len(query.restores()) >= before + 2 * parallelism)
        found = query.restores()[before:]
        assert query.restarts == restarts
        assert [one.source for one in found] == ["local"] * (2 * parallelism), found
        assert [one.durable_reads for one in found] == [0] * len(found)
    assert query.checkpoint() is not None
    assert query.stop()
    seen = [(row["key"], row["n"]) for row in sink.rows()]
    assert len(seen) == len(set(seen))
