"""What RocksDB's messages mean: every error of rocksdict is a plain ``Exception``."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from statebackend.errors import LocalCopyError, LocalDirError, StateBackendError, StoreBusyError
from statebackend.rocks.load_compaction import hold_up_writes, level0_files
from statebackend.rocks.rocksdb_options import LEVEL0_FULL_FILES, LEVEL0_STOP_FILES

__all__ = ["classify", "close_at_once"]

_NOT_WRITABLE: Final = ("No space left", "Read-only file system", "Permission denied")
# Of the process, not of the store: a copy that cannot be opened for it is a good copy.
_NO_ROOM: Final = ("Too many open files", "Cannot allocate memory")


def classify(error: Exception, path: str) -> StateBackendError:
    """The typed error that stands behind a RocksDB message."""
    text = str(error)
    if "lock hold" in text or "While lock file" in text:
        return StoreBusyError(
            f"The local store {path} is open in another process ({text}).",
            todo="It is not waited for: a new store directory is made beside it.",
        )
    if any(said in text for said in _NO_ROOM):
        return LocalDirError(
            f"The local store {path} cannot be opened for want of room in the process ({text}).",
            todo="Raise the limit on open files (ulimit -n) or the executor's memory, or lower "
            "spark.statebackend.openStores.",
        )
    if any(said in text for said in _NOT_WRITABLE):
        return LocalDirError(
            f"The local store {path} cannot be written ({text}).",
            todo="Give local_dir= a directory on a local disk with room, writable by the executor.",
        )
    if text.startswith(("Corruption", "Invalid argument", "Not found", "Result incomplete")):
        return LocalCopyError(
            f"The local store {path} is damaged ({text}).",
            todo="It is set aside and the state is restored from the next good copy.",
        )
    return LocalCopyError(
        f"The local store {path} failed ({text}).",
        todo="Check the disk behind local_dir (space, permissions, errors in the kernel log).",
    )


def close_at_once(db: Any) -> None:
    """Call off what it does in the background, and close it; its rows are flushed."""
    # Where rows were written since the opening RocksDB flushes once more, although there is nothing
    # left to flush, and would wait until a full level 0 is merged. It waits only where writes would
    # stop: who flushes and closes time and again calls off every merge, and level 0 would grow
    # without end.
    with contextlib.suppress(Exception):  # the triggers could not be noted: they hold all the same
        if level0_files(db) + 1 >= LEVEL0_FULL_FILES:
            hold_up_writes(db, LEVEL0_STOP_FILES, LEVEL0_STOP_FILES)
    db.cancel_all_background(True)
    try:
        db.close()
    except Exception as error:
        if "Shutdown in progress" not in str(error):  # said of what it was just called off
            raise
