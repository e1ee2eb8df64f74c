"""Temporary files that killed writers left: told from those that somebody still writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["mark_used", "sweep"]

OLD_NS: Final = 24 * 3600 * 10**9


def mark_used(handle: int) -> None:
    """Say that an open temporary file is in use, for as long as it stays open.

    A file system without locks says nothing; then nobody sweeps there either.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sweep(folder: Path, now_ns: int) -> int:
    """Remove the files of a folder that are a day old and that nobody has open; how many.

    A writer that sleeps for longer keeps its file, by its lock. What cannot be removed stays.

    Args:
        folder: of temporary files only.
        now_ns: by the clock of that file system: when a file in it was just written.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as scan:
        return sum(_removed(entry, now_ns) for entry in scan)
    return 0


def _removed(entry: os.DirEntry[str], now_ns: int) -> bool:
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or now_ns - found.st_mtime_ns < OLD_NS:
            return False
        # For writing, though nothing is written: NFS locks no file that is only read.
        handle = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)
            return True
        finally:
            os.close(handle)
    return False
