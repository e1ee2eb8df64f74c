"""Where the filters and indexes of a map's files lie: beside the block cache while they are small.

A map's entry is read alone, and each file is asked by its filter first. A filter that is one block
in the table's reader answers sooner than parts of it that lie in the cache (a get of a store of
five million entries: 2.2 us instead of 2.8). But readers' memory has no bound, and one block of the
cache for all of a large file would drive out others. So a store begins with whole ones; when they
take more than its share, files have them in parts from then on. A file beside RocksDB's says so: a
hint, on which only speed and memory depend. What was written before keeps whole ones until RocksDB
merges it: that is no more than what outgrew the share.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Final

__all__ = ["WholeFilters", "are_in_parts", "went_over"]

_NOTE: Final = "FILTERS-IN-PARTS"  # RocksDB leaves files alone whose names say nothing to it
_CACHE_SHARE: Final = 8  # all stores of the process may have so large a part of it besides
_STORES_MIN: Final = 2
_log = logging.getLogger("statebackend.rocks")
_lock = threading.Lock()
_open: weakref.WeakSet[WholeFilters] = weakref.WeakSet()  # as a store may be only let go of
_gone_over: set[str] = set()


def are_in_parts(path: str) -> bool:
    """Whether the store at ``path`` has gone over to parts."""
    return os.path.exists(os.path.join(path, _NOTE))


def went_over(path: str) -> bool:
    """Whether this process closed the store at ``path`` for that; True once."""
    with _lock:
        found = path in _gone_over
        _gone_over.discard(path)
    return found


class WholeFilters:
    """Those of one open database."""

    def __init__(self, path: str, cache_bytes: int) -> None:
        self._path, self._cache_bytes = path, cache_bytes
        with _lock:
            _open.add(self)

    def give_up(self, held_bytes: int) -> bool:
        """Whether ``held_bytes`` are too much: then the store has them in parts when next opened.

        Once only: where it cannot be noted, the store stays as it is.
        """
        with _lock:
            if self not in _open:
                return False
            if held_bytes <= self._cache_bytes // _CACHE_SHARE // max(_STORES_MIN, len(_open)):
                return False
            _open.discard(self)
        try:
            with open(os.path.join(self._path, _NOTE), "wb"):
                pass
        except OSError as error:
            _log.warning("%s keeps whole filters of %d bytes (%s)", self._path, held_bytes, error)
            return False
        with _lock:
            _gone_over.add(self._path)
        return True

    def close(self) -> None:
        """The database is closed."""
        with _lock:
            _open.discard(self)
