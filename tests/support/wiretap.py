"""Somebody on the network between two processes, who reads what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class Wiretap:
    """A TCP proxy before a server of Flight's that keeps all bytes, of both directions."""

    def __init__(self, location: str) -> None:
        target = urlsplit(location)
        self._target = target.hostname or "", target.port or 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.location = f"{target.scheme}://127.0.0.1:{self._listening.getsockname()[1]}"
        self._lock = threading.Lock()
        self._kept: dict[str, bytearray] = {"to": bytearray(), "from": bytearray()}
        self._sockets = [self._listening]
        threading.Thread(target=self._accept, name="wiretap", daemon=True).start()

    def heard(self) -> bytes:
        """All that passed so far: what went to the server, then what came from it."""
        with self._lock:
            return bytes(self._kept["to"] + self._kept["from"])

    def close(self) -> None:
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
                with self._lock:
                    self._sockets += [client, server]
                for ends in ((client, server, "to"), (server, client, "from")):
                    threading.Thread(
                        target=self._pass_on, args=ends, name="wiretap", daemon=True
                    ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self._kept[way] += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def tapped(location: str) -> Iterator[Wiretap]:
    """A tap before a server, closed in the end."""
    tap = Wiretap(location)
    try:
        yield tap
    finally:
        tap.close()
