"""Polls until something shows, or the time runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from statebackend.errors import DrillError
from statebackend.system import SYSTEM, System

__all__ = ["POLL_S", "until"]

POLL_S: Final = 0.05


def until(
    condition: Callable[[], Any],
    what: str,
    timeout_s: float,
    *,
    tend: Callable[[], object] | None = None,
    system: System = SYSTEM,
) -> Any:
    """Poll until `condition` gives something true, and give that.

    Args:
        what: is waited for, as the error says it.
        tend: is called between the polls; what it raises ends the wait.

    Raises:
        DrillError: the time ran out.
    """
    deadline_s = system.monotonic_s() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if tend is not None:
            tend()
        if system.monotonic_s() >= deadline_s:
            raise DrillError(
                f"Waited {timeout_s:g} s in vain for {what}.",
                todo="Look at the logs in the drill's folder.",
            )
        system.sleep_s(POLL_S)
