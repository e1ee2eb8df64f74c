"""What the alignment of barriers has a subtask do: see `snapshot.barriers.alignment`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from snapshot.barriers.barrier import Barrier, Cancel

__all__ = [
    "Abort",
    "Action",
    "Block",
    "Captured",
    "Figures",
    "Forward",
    "Keep",
    "Overtake",
    "Snapshot",
    "Unblock",
    "Why",
]


class Why(enum.Enum):
    """Why a subtask gives an attempt up."""

    NEWER = "newer"  # a newer barrier came where its own was awaited
    CANCELLED = "cancelled"  # it was told so, in the channel or by the coordinator


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What an alignment took.

    Attributes:
        start_delay_s: from the trigger to the first barrier seen here; by two clocks, 0 at least.
        duration_s: from the first barrier seen to the last one needed.
        bytes_processed: taken out of the channels in that time.
        bytes_persisted: overtaken and kept; 0 for an aligned snapshot.
    """

    start_delay_s: float
    duration_s: float
    bytes_processed: int
    bytes_persisted: int = 0


@dataclass(frozen=True)
class Block:
    """Take nothing out of the channel."""

    channel: int


@dataclass(frozen=True)
class Unblock:
    """Take out of the channel again."""

    channel: int


@dataclass(frozen=True)
class Snapshot:
    """Freeze the state now. If it is unaligned, ack only after `Captured`, whose figures count."""

    checkpoint: int
    barrier: Barrier
    unaligned: bool
    figures: Figures


@dataclass(frozen=True)
class Overtake:
    """Copy the rows that lie ahead of the attempt's barrier, or of the channel's end."""

    checkpoint: int
    channels: tuple[int, ...]


@dataclass(frozen=True)
class Keep:
    """Copy the row or batch just taken out of the channel."""

    checkpoint: int
    channel: int


@dataclass(frozen=True)
class Captured:
    """All that the barrier has overtaken is copied: the unaligned snapshot is whole."""

    checkpoint: int
    figures: Figures


@dataclass(frozen=True)
class Abort:
    """The attempt is given up here: decline it, forget what was captured for it."""

    checkpoint: int
    why: Why


@dataclass(frozen=True)
class Forward:
    """Send to every output, behind all that was emitted; not if the end was already sent."""

    event: Barrier | Cancel


Action: TypeAlias = Block | Unblock | Snapshot | Overtake | Keep | Captured | Abort | Forward
