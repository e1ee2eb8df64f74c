"""Attempts' numbers rise and are never used twice in a run; epochs have no gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.channels.checkers.base import Checker

if TYPE_CHECKING:
    from tests.channels.driver import Record
    from tests.channels.world import World

__all__ = ["Numbers"]


class Numbers(Checker):
    """Called when an attempt begins, and when a record is durable."""

    name = "numbers"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.highest = 0

    def restored(self) -> None:
        """A run's numbers go on from the record that it is restored from, at least."""
        self.highest = self.world.log[-1].checkpoint if self.world.log else 0

    def begun(self, checkpoint: int, epoch: int) -> None:
        self.must(checkpoint > self.highest, f"attempt {checkpoint} after {self.highest}")
        self.highest = checkpoint
        last = self.world.log[-1].epoch if self.world.log else 0
        self.must(epoch > last, f"attempt {checkpoint} is of epoch {epoch}, which is complete")

    def appended(self, record: Record) -> None:
        log = self.world.log
        before = log[-1] if log else None
        epoch = before.epoch if before else 0
        self.must(record.epoch == epoch + 1, f"epoch {record.epoch} follows {epoch}")
        highest = before.checkpoint if before else 0
        self.must(
            record.checkpoint > highest,
            f"attempt {record.checkpoint} was committed after {highest}",
        )
