"""How far something is that takes long: counted where it is done, shown by who asked to be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Progress", "WorkDone"]

Progress: TypeAlias = Callable[[int, int], None]
"""Told how much is done, and of how much in all; 0: that is not known."""


class WorkDone:
    """Counts what is done of what there is to do, and tells somebody each time.

    Threads that share one take turns: their own lock is held where they call it.

    Args:
        progress: is told; None: nobody is.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._done = self._total = 0

    def expect(self, more: int) -> None:
        """There is more to do than was known."""
        self._total += more
        self.add(0)

    def add(self, more: int = 1) -> None:
        """More is done."""
        self._done += more
        if self._progress is not None:
            self._progress(self._done, self._total)
