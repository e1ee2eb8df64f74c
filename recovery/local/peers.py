"""Tells whose process is at the other end of a local socket: only this user's are answered."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final

__all__ = ["of_this_user", "peer_uid"]

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
