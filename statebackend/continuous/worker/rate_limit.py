"""Limits the rate of background work, so that rows are processed meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from statebackend.system import SYSTEM, System
from statebackend.threads import Event

__all__ = ["RateLimit"]

T = TypeVar("T")
_RESTS: Final = 4.0  # of each piece's own time
_RESTS_S: Final = 1.0  # of all pieces together: what is large is not held up for long


class RateLimit:
    """Pieces of one piece of work, with rests in between, until somebody waits for its end.

    RocksDB's binding keeps the interpreter while it writes. Without rests whoever has rows gets a
    turn only between two pieces, for as long as it lasts, and is behind when it is over.

    Args:
        hurry: set when somebody waits.
    """

    def __init__(self, system: System = SYSTEM, hurry: Event | None = None) -> None:
        self._system = system
        self._hurry = hurry or system.threads.event()
        self._left_s = _RESTS_S

    def hurry(self) -> None:
        """No rests from now on; from any thread."""
        self._hurry.set()

    def of(self, pieces: Iterable[T]) -> Iterator[T]:
        """The same pieces; a piece is done when the next one is asked for."""
        for piece in pieces:
            began_s = self._system.monotonic_s()
            yield piece
            rest_s = min(self._left_s, _RESTS * (self._system.monotonic_s() - began_s))
            if rest_s > 0 and not self._hurry.wait(rest_s):
                self._left_s -= rest_s
