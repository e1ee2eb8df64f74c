"""A channel's rows come in their order, each once; none is late; what is blocked is blocked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapshot.barriers.channel_watermarks import END_MS
from tests.channels.checkers.base import Checker

if TYPE_CHECKING:
    from tests.channels.tasks import Channel, Row, Task
    from tests.channels.world import World

__all__ = ["Order"]


class Order(Checker):
    """Called at every row that is taken out of a channel."""

    name = "order"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # What an idle source sends when it is back may be late, and so may what is repeated.
        self.none_late = not world.config.idle and world.config.mode == "exactly_once"

    def row(self, task: Task, channel: Channel, row: Row) -> None:
        expected = task.received[channel.id]
        if row.seq != expected:
            self.must(False, f"{task.me}: row {row.seq} of {channel.id}, not {expected}")
        if self.none_late and row.at_ms < task.watermarks.at_ms:
            self.must(False, f"{task.me}: {row} is behind {task.watermarks.at_ms}")

    def blocked(self, task: Task) -> None:
        self.must(task.blocked == task.alignment.blocked, f"{task.me}: {task.blocked} are blocked")

    def ended(self, task: Task) -> None:
        if task.inputs:
            self.must(task.watermarks.at_ms == END_MS, f"{task.me} ended before the end of time")
