"""Waits for a store that is down while a commit is to be written."""

from __future__ import annotations

import logging
from collections.abc import Callable

from statebackend.errors import StateBackendError

__all__ = ["StorePatience"]

_log = logging.getLogger("statebackend.coordinator")


class StorePatience:
    """Waits for a store that cannot be reached, longer each time, and says so.

    Args:
        timeout_s: after so long it is given up, and the outcome is unknown.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        now_s: Callable[[], float],
        sleep_s: Callable[[float], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._now_s, self._sleep_s = now_s, sleep_s
        self._since_s = 0.0

    def wait(self, attempt: int, error: StateBackendError) -> bool:
        """See :class:`snapshot.protocol.tenure.Patience`."""
        now_s = self._now_s()
        if attempt == 1:
            self._since_s = now_s
        waited_s = now_s - self._since_s
        pause_s = min(10.0, 0.1 * 2 ** min(attempt, 10))
        if waited_s + pause_s > self._timeout_s:
            return False
        _log.error(
            "the commit waits for its store, %.0f s so far, at most %.0f s: %s",
            waited_s,
            self._timeout_s,
            error,
        )
        self._sleep_s(pause_s)
        return True
