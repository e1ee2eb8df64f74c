"""Finds what other users of the host can read or change in a folder, by its modes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["exposed"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def exposed(folder: Path) -> list[str]:
    """Whatever lies in a folder, at any depth, and is not closed to others by itself or above.

    Those who are in one group with the user count as others. The folder itself need not be closed.
    """
    found: list[str] = []
    waiting = [folder]
    while waiting:
        for entry in os.scandir(waiting.pop()):
            info = entry.stat(follow_symlinks=False)
            if not info.st_mode & _OTHERS:
                continue
            found.append(f"{stat.filemode(info.st_mode)} {entry.path}")
            if stat.S_ISDIR(info.st_mode):
                waiting.append(Path(entry.path))
    return found
