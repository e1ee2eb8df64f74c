"""The switches of a running proxy, and its connections to the server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from recovery.drill.proxy.fault_plan import FaultPlan
from recovery.drill.proxy.http import Wire

__all__ = ["Controls", "CutError", "StoppedError", "Upstream"]

UPSTREAM_TIMEOUT_S = 60.0


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


class Upstream:
    """A connection to the server, opened when needed and kept while it lasts."""

    def __init__(self, address: tuple[str, int], opened: Callable[[Wire], None]) -> None:
        """Prepare; `opened` is told of every connection."""
        self._address = address
        self._opened = opened
        self._wire: Wire | None = None

    def wire(self) -> Wire:
        """The kept connection if it is still good, else a new one. Raises OSError."""
        if self._wire is not None and self._wire.is_stale():
            self.close()
        if self._wire is None:
            self._wire = self.another()
        return self._wire

    def another(self) -> Wire:
        """A connection of its own, which the caller closes. Raises OSError."""
        sock = socket.create_connection(self._address, UPSTREAM_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(sock)
        self._opened(wire)
        return wire

    def close(self) -> None:
        """End the kept connection in order."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def reset(self) -> None:
        """End it abruptly, so that the server cannot take a part for the whole."""
        if self._wire is not None:
            self._wire.reset()
            self._wire = None
