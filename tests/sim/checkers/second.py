"""A query's second operator: its rows count once, too."""

from __future__ import annotations

from snapshot.formats.record import Record
from tests.sim.checkers.exactly_once import ExactlyOnce
from tests.sim.location import Committed
from tests.sim.second import UID

__all__ = ["SecondOnce"]


class SecondOnce(ExactlyOnce):
    """Compares its states with the plain model."""

    name = "second operator"
    uid = UID

    def record(self, sequence: int, record: Record) -> None:
        """Replay its own; a claim may come while the log has more epochs of the one operator."""
        super().record(sequence, record)
        first, second = (max(one.durable, default=-1) for one in (self.world.once, self))
        if record.manifest.kind != "claim" or first == second:
            return
        ahead = "first" if first > second else "second"
        self.world.sched.note(f"claimed with the {ahead} operator ahead", str(sequence))

    def own(self, committed: Committed) -> Committed | None:
        """What a batch made of it."""
        return committed.second
