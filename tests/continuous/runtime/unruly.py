"""A job that counts, a source that a test can disturb, and a slot that breaks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from statebackend.continuous.sources.source import Discovery
    from tests.continuous.runtime.world import World


class Scripted(Numbers):
    """Calls something before it looks for splits, with the number of the look."""

    def __init__(
        self, rows: int | None, looked: Callable[[int], None], *, goes_on: bool = False
    ) -> None:
        super().__init__(rows, rows_per_s=1000)
        self._looked, self._goes_on = looked, goes_on
        self._looks = itertools.count(1)

    def discover(self, state: Any) -> Discovery:
        self._looked(next(self._looks))
        return replace(super().discover(state), done=not self._goes_on)


def count(world: World, source: Numbers, sink: CollectSink | None = None) -> CollectSink:
    sink = sink or CollectSink()
    keyed = world.source(source).key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    return sink


def break_slot(world: World) -> None:
    world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))
