"""A split and how far it was read, and the form in which that lies in a subtask's list state."""

from __future__ import annotations

from typing import Final

import msgspec

from statebackend.continuous.sources.source import Json, Split
from statebackend.errors import CorruptionError, UnsupportedFormatError

__all__ = ["Assignment", "decode_assignment", "encode_assignment"]

ASSIGNMENT_FORMAT: Final = 1


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A split and how far it was read; None: not at all.

    As an element of list operator state (mode ``split``) it is the pair that `encode_assignment`
    gives, under the schema ``id STRING, state STRING``.
    """

    split: Split
    position: Json | None = None


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    v: int
    data: Json
    position: Json | None


def encode_assignment(assignment: Assignment) -> tuple[str, str]:
    """As it lies in operator state: the split's id, and JSON of the rest."""
    split = assignment.split
    stored = _Stored(v=ASSIGNMENT_FORMAT, data=split.data, position=assignment.position)
    return split.id, msgspec.json.encode(stored).decode()


def decode_assignment(id: str, state: str) -> Assignment:
    """What `encode_assignment` made.

    Raises:
        CorruptionError: it is nothing of the kind.
        UnsupportedFormatError: a later release wrote it.
    """
    try:
        stored = msgspec.json.decode(state, type=_Stored)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptionError(
            f"The state of split {id!r} is not what a source writes: {error}.",
            todo="Restore from an older checkpoint.",
        ) from error
    if stored.v != ASSIGNMENT_FORMAT:
        raise UnsupportedFormatError(
            f"The state of split {id!r} has format {stored.v}.",
            todo=f"This release reads format {ASSIGNMENT_FORMAT}: use the one that wrote it.",
        )
    return Assignment(split=Split(id=id, data=stored.data), position=stored.position)
