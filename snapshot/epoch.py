"""One epoch of one operator: which attempts acked, and whether all of it is durable.

Newest attempt wins, until the next epoch begins: Spark may run a task again after its first attempt
had acked (an indeterminate stage, a lost executor, a second action on the frame), and then uses the
output of the newest (SPARK-54556).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from snapshot.messages import AckRequest

__all__ = ["Acked", "EpochState"]


class Acked(enum.Enum):
    """What an ack did to its epoch."""

    PARTIAL = "partial"  # others are still missing: return at once
    COMPLETE = "complete"  # all are here: return when the record is durable
    STALE = "stale"  # a newer attempt has acked


@dataclass
class EpochState:
    """Acks of one operator in one epoch of one run."""

    parallelism: int
    acks: dict[int, AckRequest] = field(default_factory=dict)
    durable: dict[int, AckRequest] = field(default_factory=dict)
    _taken: dict[int, AckRequest] = field(default_factory=dict)

    def take(self, ack: AckRequest) -> Acked:
        """Take in an ack."""
        known = self.acks.get(ack.subtask)
        if known is not None and ack.attempt < known.attempt:
            return Acked.STALE
        self.acks[ack.subtask] = ack
        return Acked.COMPLETE if len(self.acks) == self.parallelism else Acked.PARTIAL

    def take_due(self) -> dict[int, AckRequest] | None:
        """The acks that a record must be written for now; None if that was done, or too early."""
        if not self.acked or _same(self.acks, self._taken):
            return None
        self._taken = dict(self.acks)
        return self._taken

    @property
    def recorded(self) -> dict[int, AckRequest]:
        """The acks of the newest record, durable or on its way; empty where there is none."""
        return self._taken

    def made_durable(self, acks: dict[int, AckRequest]) -> None:
        """A record with ``acks`` is durable."""
        self.durable = acks

    def on_its_way(self) -> dict[int, AckRequest] | None:
        """The acks of a record that is being written; None where there is none."""
        # Not by content: a third attempt may have made what the first had, a second between them.
        return None if self._taken is self.durable else self._taken

    @property
    def acked(self) -> bool:
        """Whether every subtask has acked."""
        return len(self.acks) == self.parallelism

    @property
    def scheduled(self) -> bool:
        """Whether a record with every subtask is durable or being written."""
        return bool(self._taken)

    @property
    def complete(self) -> bool:
        """Whether a record with every subtask is durable."""
        return len(self.durable) == self.parallelism

    def missing(self) -> list[int]:
        """Subtasks without an ack."""
        return [s for s in range(self.parallelism) if s not in self.acks]


def _same(acks: dict[int, AckRequest], others: dict[int, AckRequest]) -> bool:
    """Whether a record of the one would be a record of the other.

    Late rows move the operator's largest event time and change no state.
    """
    return acks.keys() == others.keys() and all(
        _recorded(ack) == _recorded(others[subtask]) for subtask, ack in acks.items()
    )


def _recorded(ack: AckRequest) -> tuple[str | int | None, ...]:
    times = ack.max_event_ms, ack.second_event_ms, ack.next_timer_ms
    lists = ack.operator_state.digest if ack.operator_state is not None else None
    return ack.chain, *times, lists, ack.broadcast_digest
