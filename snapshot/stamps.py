"""Stamps: the batch's logged time, baked into its plan, tells one batch's frame from another's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["Stamps"]

# Stamps of past epochs that are known again: days of batches, in a few megabytes.
_STAMPS_KEPT: Final = 65_536


class Stamps:
    """Which stamp belongs to the running epoch, and which belonged to epochs that are over."""

    def __init__(self, older: Iterable[int]) -> None:
        self.current: int | None = None
        # In the order of their epochs; a frame may be kept for as long as the query runs.
        self._older = dict.fromkeys(older)

    def forget(self, stamps: Iterable[int]) -> None:
        """These epochs are repeated, or given up: their stamps are not older ones."""
        for stamp_ms in stamps:
            self._older.pop(stamp_ms, None)

    def bind(self, stamp_ms: int) -> bool:
        """Give the next epoch its stamp; False where that one belongs to another."""
        if stamp_ms in self._older or stamp_ms == self.current:
            return False
        if self.current is not None:
            self._older[self.current] = None
            if len(self._older) > _STAMPS_KEPT:
                del self._older[next(iter(self._older))]
        self.current = stamp_ms
        return True
