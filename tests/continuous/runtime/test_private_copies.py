"""What the slots of a continuous job leave on their hosts is for their user alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.jobs import OUTPUT, ArrowCounting, Numbers, check_counts, truth
from tests.continuous.runtime.world import World, soon
from tests.support.exposed import exposed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    before = os.umask(0)
    made = World(tmp_path)
    yield made
    made.close()
    os.umask(before)


def test_no_other_user_can_read_what_slots_keep(world: World) -> None:
    sink = CollectSink()
    keyed = world.source(Numbers(4000, rows_per_s=2000, clock=world.held(1.0))).key_by("key")
    keyed.process(ArrowCounting(), uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(2)
    local = world.folder / "local"
    soon(lambda: list(local.rglob("deltas/*")))
    assert exposed(local) == []
    assert local.stat().st_mode & 0o777 == 0o700
    world.go_on()
    assert query.await_termination(60.0)
    assert exposed(local) == []
    check_counts(sink.rows(), truth(4000))
