"""Waiting for what another thread, process or database is about to do."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until it holds, or fail after ``timeout_s``."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to that")
