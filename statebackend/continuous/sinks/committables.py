"""Committables: what writers have prepared and nobody has committed yet, and their stored form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from statebackend.errors import CorruptionError, UnsupportedFormatError

__all__ = ["Prepared", "decode_committable"]

_S = TypeVar("_S", bound=msgspec.Struct)


class Prepared:
    """A subtask's committables that are not known to be committed. Pure.

    Each checkpoint holds all of them, so whichever completes first commits them all, and one that
    completes later commits some again, which changes nothing.
    """

    def __init__(self) -> None:
        self._by_checkpoint: dict[int, tuple[bytes, ...]] = {}

    def prepared(self, checkpoint: int, committables: Sequence[bytes]) -> list[bytes]:
        """Take what `SinkWriter.prepare` gave; all that the checkpoint is to hold."""
        self._by_checkpoint[checkpoint] = tuple(committables)
        return [one for of in self._by_checkpoint.values() for one in of]

    def completed(self, checkpoint: int) -> None:
        """The checkpoint is complete and its committables are committed. Missing calls do no harm.

        An aborted checkpoint is not told: the next one holds what it held.
        """
        for number in [number for number in self._by_checkpoint if number <= checkpoint]:
            del self._by_checkpoint[number]


class _Head(msgspec.Struct, frozen=True):
    v: int


def decode_committable(data: bytes, kind: type[_S], version: int) -> _S:
    """A committable in MessagePack, whose field ``v`` is the version of its format.

    Raises:
        CorruptionError: it is not of this kind.
        UnsupportedFormatError: of another version.
    """
    try:
        found = msgspec.msgpack.decode(data, type=_Head).v
        if found == version:
            return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptionError(
            f"A committable of a sink is not what the sink writes: {error}.",
            todo="Restore from an older checkpoint, or name the sink by another uid.",
        ) from error
    raise UnsupportedFormatError(
        f"A committable of a sink has format {found}.",
        todo=f"This release reads format {version}: use the one that wrote it.",
    )
