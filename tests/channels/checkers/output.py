"""What is committed is what the completed cut says: nothing early, nothing lost, nothing twice."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.channels.checkers.base import Checker
from tests.channels.checkers.cut import expected
from tests.channels.plan import mix, truth

if TYPE_CHECKING:
    from tests.channels.driver import Record

__all__ = ["Output"]


class Output(Checker):
    """Called whenever sinks were committed, and at the end."""

    name = "output"

    def committed(self, record: Record) -> None:
        """All that is visible is the output up to this cut, exactly."""
        if self.world.config.mode != "exactly_once":
            return
        inputs, _ = expected(self, record)
        for vertex in self.world.config.vertices:
            if vertex.kind == "sink":
                rows = self._visible(vertex.name)
                have = (len(rows), sum(map(mix, rows)))
                wanted = inputs[vertex.number]
                self.must(
                    have == wanted,
                    f"epoch {record.epoch}: {vertex.name} shows {have[0]} rows of {wanted[0]}",
                )

    def at_the_end(self) -> None:
        config = self.world.config
        gives = truth(config)
        for vertex in config.vertices:
            if vertex.kind != "sink":
                continue
            have, wanted = Counter(self._visible(vertex.name)), gives[vertex.number]
            if config.mode == "exactly_once":
                self.must(
                    have == wanted, f"{vertex.name}: {have - wanted} over, {wanted - have} lost"
                )
            else:  # the operators' own rows count what came twice
                lost = [r for r, n in wanted.items() if not r >> 100 and have[r] < n]
                self.must(not lost, f"{vertex.name}: {lost} lost")

    def _visible(self, vertex: str) -> list[int]:
        visible = self.world.visible
        return [row for name, rows in visible.items() if name[2].vertex == vertex for row in rows]
