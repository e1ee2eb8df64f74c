"""What a driver and its workers say to each other for lookups, over calls that workers make.

A worker asks what it is to look up, waits at the driver for a while, and brings the answers with
its next call. So nothing listens on a worker, and the driver need not reach its hosts.
"""

from __future__ import annotations

from typing import Final

import msgspec

from statebackend.rpc.envelope import Decoder

__all__ = ["LOOKUP", "Answer", "LookupPoll", "Question", "decode_poll", "decode_questions"]

LOOKUP: Final = "lookup"
"""The kind of the call."""
_LIMIT_BYTES: Final = 64 << 20


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Entries of a subtask's store, as they were after a confirmed epoch.

    Attributes:
        epoch: the confirmed one.
        chains: the lineage digest after this and some earlier epochs.
        deltas: the digests of the deltas of these epochs.
        ranges: where the entries lie; from (included) and to (excluded).
    """

    id: int
    local_name: str
    operator: str
    key_groups: tuple[int, int]
    epoch: int
    chains: dict[int, str]
    deltas: dict[int, str]
    ranges: list[tuple[bytes, bytes]]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """``held``: whether the worker has the store open, at the epoch or with what leads to it."""

    id: int
    held: bool
    keys: list[bytes] = []
    values: list[bytes] = []


class LookupPoll(msgspec.Struct, frozen=True, array_like=True):
    """A worker brings answers, and asks for questions. ``worker``: names its process."""

    worker: str
    answers: list[Answer] = []


decode_poll: Final = Decoder[LookupPoll](LookupPoll, limit_bytes=_LIMIT_BYTES)
decode_questions: Final = Decoder[list[Question]](list[Question])
