"""Breaking a connection that pyarrow's Flight server cannot break itself.

A call of the server's ends only with its peer, and the server waits for its calls, at the end of
the interpreter too. A process that stands still (frozen, or a host that is cut off) would hold them
for as long as it likes.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import unquote

__all__ = ["sever"]

_OPEN_FILES = "/dev/fd"


def sever(peer: str, port: int) -> int:
    """Shut this process's connections with a peer, both ways.

    Args:
        peer: as a Flight call's context names it: ``ipv4:127.0.0.1:4711``, ``ipv6:%5B::1%5D:4711``.
        port: of this process, that it has called. Calls of two ports may come from one of the
            peer's, and are two connections.

    Returns:
        How many there were; 0 also where a process cannot look at its open files.
    """
    kind, _, address = unquote(peer).partition(":")
    host, _, own = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not own.isdigit():
        return 0
    sought = (host.strip("[]").partition("%")[0], int(own), port)
    try:
        numbers = [int(name) for name in os.listdir(_OPEN_FILES)]
    except (OSError, ValueError):
        return 0
    return sum(_shut(number, sought) for number in numbers)


def _shut(number: int, sought: tuple[str, int, int]) -> bool:
    try:
        # A duplicate: the number may be another file's by the time it is used.
        copy = os.dup(number)
    except OSError:
        return False  # closed meanwhile
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False  # no socket
    with one:
        try:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            host, port = one.getpeername()[:2]
            # A socket for both families has its IPv4 peers as ::ffff:a.b.c.d.
            host = host.removeprefix("::ffff:").partition("%")[0]
            if (host, port, one.getsockname()[1]) != sought:
                return False
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # not connected (any more)
    return True
