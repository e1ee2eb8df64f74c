"""How many rows that wait are given to an operator at once. Pure.

A call has fixed costs, so a subtask that is behind takes all that waits, as far as its operator
gets through it in a moment: for so long barriers that may overtake, timers and the mailbox wait.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Gathering"]

_TARGET_S: Final = 0.02
_WEIGHT: Final = 0.25  # of the newest call


class Gathering:
    """Learns how quick an operator is.

    Args:
        target_s: what a call should take at most.
    """

    def __init__(self, target_s: float = _TARGET_S) -> None:
        self._target_s = target_s
        self._s_per_byte: float | None = None

    def more_bytes(self, taken_bytes: int) -> int:
        """How many bytes may be taken beside so many; 0 until there is a figure."""
        if not self._s_per_byte:
            return 0
        return max(0, int(self._target_s / self._s_per_byte) - taken_bytes)

    def took(self, size_bytes: int, seconds: float) -> None:
        """A call with so many bytes has taken so long."""
        now = seconds / max(1, size_bytes)
        before = self._s_per_byte
        # Slower than it was: believed at once.
        if before is None or now > before:
            self._s_per_byte = now
        else:
            self._s_per_byte = before + _WEIGHT * (now - before)
