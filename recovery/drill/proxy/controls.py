"""The switches of a running proxy, which hold, cut and stop what passes through it."""

from __future__ import annotations

import threading

from recovery.drill.proxy.fault_plan import FaultPlan

__all__ = ["Controls", "CutError", "StoppedError"]


class CutError(Exception):
    """The client's connection ends here, on purpose. `orderly`: what was sent still arrives."""

    def __init__(self, *, orderly: bool = False) -> None:
        super().__init__("cut by a fault")
        self.orderly = orderly


class StoppedError(Exception):
    """The proxy is stopping; nobody waits any more."""


class Controls:
    """The switches of a running proxy, which every exchange looks at."""

    def __init__(self, plan: FaultPlan, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self.down = False
        self.latency_s = 0.0
        self.bytes_per_s = 0  # 0: no limit
        self.stopping = threading.Event()
        self._holds = threading.Condition()
        self._held: dict[object, int] = {}  # numbers alone begin anew when the counts are reset

    def pause(self, seconds: float) -> None:
        """Let time pass. Raises `StoppedError` if the proxy stops meanwhile."""
        if seconds > 0 and self.stopping.wait(seconds):
            raise StoppedError

    def hold(self, number: int) -> None:
        """Wait for this request's release. Raises `StoppedError`."""
        token = object()
        with self._holds:
            self._held[token] = number
            self._holds.notify_all()
            self._holds.wait_for(lambda: token not in self._held or self.stopping.is_set())
        if self.stopping.is_set():
            raise StoppedError

    def held(self) -> list[int]:
        """The numbers of the requests that are held, oldest first."""
        with self._holds:
            return list(self._held.values())

    def wait_held(self, count: int, timeout_s: float) -> bool:
        """Wait until this many are held; False if the time ran out."""
        with self._holds:
            return self._holds.wait_for(lambda: len(self._held) >= count, timeout_s)

    def release(self, number: int | None = None) -> int:
        """Let one request go, or all; how many that was."""
        with self._holds:
            released = [t for t, held in self._held.items() if number in (None, held)]
            for token in released:
                del self._held[token]
            self._holds.notify_all()
            return len(released)

    def stop(self) -> None:
        """Wake everyone who waits."""
        self.stopping.set()
        self.release()
