"""Local sockets between the processes of one user; any other user's are refused."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from statebackend.threads import Event

__all__ = ["Listener", "connect", "of_this_user", "peer_uid", "socket_address"]

_log = logging.getLogger("statebackend.recovery")
_ADDRESS_BYTES: Final = 104  # of a local socket, on every system

_UCRED: Final = struct.Struct("3i")  # Linux: process, user, group
# macOS: version, user, number of groups, and sixteen of them.
_XUCRED: Final = struct.Struct("IIh2x16I")
_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1


def peer_uid(connection: socket.socket) -> int | None:
    """The user of the process at the other end; None if the kernel does not tell.

    It is the user at the time when that process connected, or began to listen.

    Raises:
        OSError: the socket is not connected.
    """
    if hasattr(socket, "SO_PEERCRED"):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(found)[1])
    if sys.platform == "darwin":
        found = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
        return int(_XUCRED.unpack(found)[1])
    return None


def of_this_user(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end.

    If the kernel does not tell, it is: no other user can enter the socket's folder.
    """
    uid = peer_uid(connection)
    return uid is None or uid == os.geteuid()


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A local socket's address: 107 bytes at most; a longer path goes by way of its open folder."""
    if len(os.fsencode(path)) < _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(connection: socket.socket, path: Path) -> bool:
    """Connect to the process that listens at a path; False: it is another user's.

    Raises:
        OSError: nobody listens there. ValueError: it is no path.
    """
    with socket_address(path) as address:
        connection.connect(address)
    if of_this_user(connection):
        return True
    _log.warning("a process of another user listens at %s, and is told nothing", path)
    return False


class Listener:
    """A local socket at which other processes of this user ask for something.

    Args:
        asks: what they do, for the log: "asked for ...".
        tick_s: how long `accept` waits.
        closed: set before it is closed.
    """

    def __init__(self, path: Path, asks: str, *, tick_s: float, closed: Event) -> None:
        self._asks, self._tick_s, self._closed = asks, tick_s, closed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(path) as address:
            self._socket.bind(address)
        self._socket.listen(64)
        self._socket.settimeout(tick_s)

    def accept(self) -> socket.socket | None:
        """The next process that asks; None: there was none, or it was refused."""
        try:
            asker, _ = self._socket.accept()
        except TimeoutError:
            return None
        except OSError as error:
            # Too many open files, for one: it passes, and the socket must not stay closed.
            if not self._closed.is_set():
                _log.warning("a process that %s was missed (%s)", self._asks, error)
                self._closed.wait(self._tick_s)
            return None
        with contextlib.suppress(OSError):  # it is gone again
            if of_this_user(asker):
                return asker
            _log.warning("refused a process of another user that %s", self._asks)
        asker.close()
        return None

    def wake(self) -> None:
        """Have who waits in `accept` return."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, when nobody is in `accept` any more."""
        self._socket.close()
