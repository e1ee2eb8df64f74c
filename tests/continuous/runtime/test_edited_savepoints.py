"""Continuous jobs that begin with a savepoint that was given other key groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.tables.edit_savepoint import edit_savepoint
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers, truth
from tests.continuous.runtime.test_savepoints import PER_S, ROWS, some_epochs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs and their clones


def counting(world: World, uid: str, per_s: float | None = PER_S) -> CollectSink:
    sink = CollectSink()
    numbers = Numbers(ROWS, splits=4, rows_per_s=per_s, clock=world.held(1.0))
    keyed = world.source(numbers).key_by("key")
    keyed.process(Counting(), uid=uid, output_schema=OUTPUT).sink(sink)
    return sink


@pytest.mark.parametrize("given", [None, 256])
@pytest.mark.parametrize("uid", ["count", "z-count"])  # before and behind the source's
def test_every_start_counts_with_the_groups_of_the_operators_with_a_key(
    world: World, tmp_path: Path, uid: str, given: int | None
) -> None:
    counting(world, uid)
    query = world.start(2)
    some_epochs(query)
    made = query.stop_with_savepoint()
    to = (tmp_path / "edited").as_uri()
    edit_savepoint(made.uri, to, max_parallelism=256)
    more = {} if given is None else {"max_parallelism": given}
    world.renew(job="clone", savepoint=to, **more)
    counting(world, uid)
    clone = world.start(2)
    some_epochs(clone, made.epoch + 2)
    clone.stop()
    world.renew(job="clone", savepoint=to, **more)
    rest = counting(world, uid, None)
    clone = world.start(3)
    assert clone.await_termination(60.0)
    last = {row["key"]: (row["n"], row["total"]) for row in rest.rows()}
    wanted = truth(ROWS)
    assert last
    assert all(wanted[key] == found for key, found in last.items())
