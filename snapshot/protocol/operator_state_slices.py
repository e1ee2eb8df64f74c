"""States that belong to no key, between one epoch and the next: whose they are and where. Pure.

Each subtask's lists are one slice of kind ``operator``, an operator's broadcast maps one of kind
``broadcast``, which subtask 0 sends for all. Each record holds all of them whole: nothing is put
together from earlier records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from snapshot.protocol.lineage import EpochEntry, SliceRef
from snapshot.protocol.messages import AckRequest, SlicePart
from statebackend.errors import BroadcastDivergedError, ProtocolError

__all__ = ["NO_BLOBS", "OperatorBlobs", "Source", "check_agreement", "check_sent"]

Source: TypeAlias = SlicePart | SliceRef
"""Where a blob is: in an ack (or in an object that it names), or in a record."""


@dataclass(frozen=True)
class OperatorBlobs:
    """An operator's states that belong to no key, after an epoch.

    Attributes:
        parallelism: at which they were made; 0: nothing is known of any.
        lists: by subtask; those that have none are left out.
        broadcast: the one copy.
    """

    parallelism: int = 0
    lists: Mapping[int, Source] = field(default_factory=dict)
    broadcast: Source | None = None

    @classmethod
    def of_record(cls, entry: EpochEntry | None) -> OperatorBlobs:
        """As an epoch's record has them; of no epoch there are none."""
        if entry is None:
            return cls()
        return cls(entry.parallelism, entry.lists, entry.broadcast)

    @classmethod
    def of_acks(cls, acks: Mapping[int, AckRequest]) -> OperatorBlobs:
        """As every subtask acked them."""
        lists = {
            subtask: ack.operator_state
            for subtask, ack in acks.items()
            if ack.operator_state is not None
        }
        return cls(len(acks), lists, acks[0].broadcast if acks else None)


NO_BLOBS: Final = OperatorBlobs()


def check_sent(ack: AckRequest) -> None:
    """Refuse an ack of subtask 0 without the broadcast state that it speaks of.

    Raises:
        ProtocolError: the record would be without it.
    """
    sent = ack.broadcast.digest if ack.broadcast is not None else ""
    if ack.subtask == 0 and sent != ack.broadcast_digest:
        raise ProtocolError(
            f"The ack of operator {ack.operator!r}, subtask 0, for epoch {ack.epoch} carries "
            f"another broadcast state than it speaks of.",
            todo="Report this: driver and executors may run different releases.",
        )


def diverged_after_record(operator: str, epoch: int, subtask: int) -> BroadcastDivergedError:
    """A subtask ran again when the epoch was recorded, and came to another broadcast state."""
    return BroadcastDivergedError(
        f"Subtask {subtask} of operator {operator!r} ran again in epoch {epoch}, which is "
        f"recorded, and came to another broadcast state than before.",
        todo="Start the query again: it repeats the batch. process_broadcast() must go by its rows "
        "and the broadcast state alone, and Spark must read the same rows again.",
    )


def check_agreement(operator: str, epoch: int, acks: Mapping[int, AckRequest]) -> None:
    """Refuse different broadcast states that came of the same rows.

    Args:
        acks: of one stage run. Another one may have had other rows.

    Raises:
        BroadcastDivergedError: naming subtasks on both sides.
    """
    sides: dict[str, list[int]] = {}
    for subtask, ack in sorted(acks.items()):
        sides.setdefault(ack.broadcast_digest, []).append(subtask)
    if len(sides) < 2:
        return
    few, many = sorted(sides.values(), key=len)[:: len(sides) - 1]
    raise BroadcastDivergedError(
        f"The subtasks of operator {operator!r} came to different broadcast states in epoch "
        f"{epoch}: subtask {few[0]} to another than subtask {many[0]} ({len(sides)} states among "
        f"{len(acks)} subtasks).",
        todo="process_broadcast() must go by its rows and the broadcast state alone: not by random "
        "numbers, the clock, the host or what is of one subtask. Nothing of this epoch was kept.",
    )
