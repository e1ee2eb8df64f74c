"""Stamps tell one batch's frame from another's: they are part of the batch's plan.

A stamp is the batch's logged time and a *nonce*, a number that Spark draws for each plan of a batch
and each subtask in it. Every evaluation of one frame has the same nonce. The plan of another batch
has another, and so has that of the same batch after a restart. The time alone would not do: a wall
clock that steps back gives batches the times of earlier ones.

A frame can be kept only within its process. So the log is not asked: a run hands what it saw to the
next run in the same process.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final

__all__ = ["Stamps"]

# How much is remembered: days of batches of a few subtasks, in 64 MB at most.
_EPOCHS_KEPT: Final = 65_536
_NONCES_KEPT: Final = 1 << 23


class Stamps:
    """The running epoch's stamp, and those that were seen in epochs that are over.

    Args:
        before: those of the run before this one, in the same process.
    """

    def __init__(self, before: Stamps | None = None) -> None:
        self.current: int | None = None
        # For the running epoch, the hashes of (operator, subtask, nonce).
        self._seen: set[int] = set()
        # In the order of their epochs; a frame may be kept for as long as the process runs.
        self._order: deque[tuple[int, array[int]]] = deque()
        self._older: dict[int, list[array[int]]] = {}
        self._kept = 0
        if before is not None:
            for stamp_ms, seen in before._order:
                self._keep(stamp_ms, seen)
            self.current, self._seen = before.current, set(before._seen)

    def bind(self, stamp_ms: int, *of: str | int) -> bool:
        """Give the next epoch the stamp of the first attempt that begins; False if it is not new.

        Args:
            of: operator, subtask and nonce of that attempt.
        """
        seen = hash(of)
        ended = stamp_ms == self.current and seen in self._seen
        if ended or self._is_older(stamp_ms, seen):
            return False
        if self.current is not None:
            self._keep(self.current, array("q", self._seen))
        self.current, self._seen = stamp_ms, {seen}
        return True

    def admit(self, stamp_ms: int, *of: str | int) -> bool:
        """Whether an attempt that begins is of the running epoch's frame; remembers its nonce."""
        seen = hash(of)
        if stamp_ms != self.current or self._is_older(stamp_ms, seen):
            return False
        self._seen.add(seen)
        return True

    def _is_older(self, stamp_ms: int, seen: int) -> bool:
        return any(seen in epoch for epoch in self._older.get(stamp_ms, ()))

    def _keep(self, stamp_ms: int, seen: array[int]) -> None:
        self._order.append((stamp_ms, seen))
        self._older.setdefault(stamp_ms, []).append(seen)
        self._kept += len(seen)
        while len(self._order) > 1 and (
            len(self._order) > _EPOCHS_KEPT or self._kept > _NONCES_KEPT
        ):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        stamp_ms, seen = self._order.popleft()
        self._kept -= len(seen)
        same = self._older[stamp_ms]
        same.pop(0)
        if not same:
            del self._older[stamp_ms]
