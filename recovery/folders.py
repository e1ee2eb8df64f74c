"""Folders and files of task-local copies: made, swept and refused in one way."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from statebackend.errors import LocalCopyError, LocalDirError

__all__ = ["in_use", "make_folder", "remove", "sweep_work", "unreadable", "unusable"]

_log = logging.getLogger("statebackend.recovery")


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Nobody sweeps a folder of an incarnation's ``work`` meanwhile; OSError if it is in use."""
    lease = os.open(folder / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lease)


def sweep_work(work: Path) -> None:
    """Remove what was left behind; an upload may outlive the store that it was taken from."""
    with contextlib.suppress(OSError):
        for folder in list(work.iterdir()):
            with contextlib.suppress(OSError), in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def make_folder(path: Path) -> Path:
    """A folder, with those above it but the incarnation's own: that is never made twice."""
    path.parent.mkdir(exist_ok=True)
    path.mkdir(exist_ok=True)
    return path


def remove(path: Path) -> None:
    """Remove a file that may be gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # it is only in the way: nobody takes it for what it is not
        _log.warning("%s could not be removed (%s)", path, error)


def unreadable(error: OSError) -> LocalCopyError:
    """The typed error for a file or folder of a local copy that is gone, or cannot be read."""
    gone = isinstance(error, FileNotFoundError)
    how = "is gone" if gone else f"cannot be read ({error.strerror or error})"
    return LocalCopyError(
        f"The local copy's file {error.filename} {how}.",
        todo="Nothing to do where the subtask has moved, or was restored anew. Where it is said "
        "again and again, look who deletes files in local_dir, and at the disk behind it.",
    )


def unusable(path: str, error: OSError) -> LocalDirError:
    """The typed error for a directory that cannot be used."""
    return LocalDirError(
        f"The directory for task-local copies, {path}, cannot be used ({error.strerror or error}).",
        todo="Give local_dir= (or spark.statebackend.localDir) a directory that every executor's "
        "user can write, on a local disk with room.",
    )
