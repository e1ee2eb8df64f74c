"""How many checkpoints of a continuous job may fail in a row before the job fails."""

from __future__ import annotations

from snapshot.barriers.pending_checkpoints import Reason

__all__ = ["Failures"]


class Failures:
    """Counts checkpoints that failed one after the other.

    Args:
        tolerable: so many are borne; with the next one the job fails. 0: with the first.
    """

    def __init__(self, tolerable: int = 0) -> None:
        self.tolerable = tolerable
        self._failed: set[int] = set()
        self._succeeded = 0

    @property
    def count(self) -> int:
        """How many failed since one succeeded."""
        return len(self._failed)

    def succeeded(self, checkpoint: int) -> None:
        """A checkpoint is complete."""
        self._succeeded = max(self._succeeded, checkpoint)
        self._failed = {number for number in self._failed if number > checkpoint}

    def failed(self, checkpoint: int, reason: Reason) -> bool:
        """A checkpoint has failed. Whether the job must fail: told once, then counted anew.

        Not counted: what is not the checkpoint's own failure (`Reason.counts`), the same one again,
        and one that is older than one that has succeeded.
        """
        if not reason.counts or checkpoint <= self._succeeded:
            return False
        self._failed.add(checkpoint)
        if len(self._failed) <= self.tolerable:
            return False
        self._succeeded = max(self._failed)
        self._failed = set()
        return True
