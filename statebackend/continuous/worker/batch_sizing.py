"""How many rows that wait are given to an operator at once. Pure.

A call has fixed costs, so a subtask that is behind takes all that waits, as far as its operator
gets through it in a moment: for so long barriers that may overtake, timers and the mailbox wait.

A call may take long because the machine was busy. If one such call were believed, a subtask would
work off what has piled up meanwhile in small calls, and rows would wait for several times as long.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

__all__ = ["Gathering"]

_TARGET_S: Final = 0.02
_CALLS: Final = 5  # the middle one of so many is believed
_FAR_TOO_SLOW: Final = 25  # and a call that takes so many times what it should, at once


class Gathering:
    """Learns how quick an operator is.

    Args:
        target_s: what a call should take at most.
    """

    def __init__(self, target_s: float = _TARGET_S) -> None:
        self._target_s = target_s
        self._s_per_byte: deque[float] = deque(maxlen=_CALLS)

    def more_bytes(self, taken_bytes: int) -> int:
        """How many bytes may be taken beside so many; 0 until there is a figure."""
        if not self._s_per_byte:
            return 0
        s_per_byte = median(self._s_per_byte)
        return max(0, int(self._target_s / s_per_byte) - taken_bytes) if s_per_byte else 0

    def took(self, size_bytes: int, seconds: float) -> None:
        """A call with so many bytes has taken so long."""
        if seconds > _FAR_TOO_SLOW * self._target_s:
            self._s_per_byte.clear()
        self._s_per_byte.append(seconds / max(1, size_bytes))
