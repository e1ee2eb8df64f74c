"""Listings that lag: a store shows what lay in it a while ago, and reads what lies there now.

The product refuses such a store where it finds out (SB2003). Where it does not, it must be right.
"""

from __future__ import annotations

from collections import deque
from random import Random

from snapshot.storage.object_store import Listing, ObjectInfo
from tests.sim.kernel import Scheduler

__all__ = ["LONGEST_S", "Listings"]

LONGEST_S = 2.0  # that a listing may lag


class Listings:
    """What has changed of late, and listings as they were before. Its chances are its own."""

    def __init__(self, sched: Scheduler) -> None:
        self._sched = sched
        self._random = Random(f"listings {sched.digest}")
        # When, which name, and what had been there.
        self._changes: deque[tuple[float, str, ObjectInfo | None]] = deque()

    def changing(self, name: str, before: ObjectInfo | None) -> None:
        """An object is about to be written or deleted."""
        now_s = self._sched.now_s
        self._changes.append((now_s, name, before))
        while self._changes[0][0] < now_s - LONGEST_S:
            self._changes.popleft()

    def late(self, listed: Listing, prefix: str, lag_s: float) -> Listing:
        """A listing as it was some time ago, at most ``lag_s``."""
        since_s = self._sched.now_s - lag_s * self._random.random()
        found = {info.name: info for info in listed}
        for at_s, name, before in reversed(self._changes):
            if at_s < since_s:
                break
            if name.startswith(prefix):
                found.pop(name, None)
                if before is not None:
                    found[name] = before
        return [found[name] for name in sorted(found)]
