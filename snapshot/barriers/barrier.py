"""What travels between rows in a channel of a continuous job.

A barrier separates what belongs to a checkpoint from what comes after it, in every channel (Chandy
and Lamport 1985; the form without markers for empty channels: Carbone and others 2015). Events keep
their place among the rows; only a barrier whose alignment took too long may overtake rows
(FLIP-76), and then those rows are a part of the snapshot.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["Barrier", "Cancel", "EndOfInput", "Event", "Idle", "Watermark", "decode", "encode"]


class Barrier(msgspec.Struct, frozen=True, kw_only=True, tag="barrier"):
    """Rows before it belong to the checkpoint.

    Attributes:
        checkpoint: numbers the attempt, never used twice in a run.
        stamp_ms: when the coordinator triggered it, by its clock.
        kind: ``checkpoint``; ``savepoint``: never unaligned; ``last``: after it the job ends.
        alignment_timeout_ms: after so long an alignment it may overtake rows; None: never.
    """

    checkpoint: int
    stamp_ms: int
    kind: str = "checkpoint"
    alignment_timeout_ms: int | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The checkpoint is given up; its barrier will not come where it has not come yet."""

    checkpoint: int


class Watermark(msgspec.Struct, frozen=True, kw_only=True, tag="watermark"):
    """No row with an event time before it is expected; at ``at_ms`` itself there may be."""

    at_ms: int


class Idle(msgspec.Struct, frozen=True, kw_only=True, tag="idle"):
    """The channel holds the watermark back no longer (True), or does again (False)."""

    idle: bool


class EndOfInput(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Nothing comes after it."""


Event = Barrier | Cancel | Watermark | Idle | EndOfInput

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Event)


def encode(event: Event) -> bytes:
    """As it goes beside rows on the wire."""
    return _ENCODER.encode(event)


def decode(data: bytes) -> Event:
    """What `encode` made.

    Raises:
        msgspec.MsgspecError: it is nothing of the kind.
    """
    event: Event = _DECODER.decode(data)
    return event
