"""The proxy's connection to the server, for each connection of a client."""

from __future__ import annotations

import socket
from collections.abc import Callable

from recovery.drill.proxy.http import Wire

__all__ = ["Upstream"]

UPSTREAM_TIMEOUT_S = 60.0


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
