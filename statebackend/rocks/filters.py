"""Where the filters and indexes of a map's files lie: beside the block cache while they are small.

A map's entry is read alone, and each file is asked by its filter first. A filter that is one block
in the table's reader answers in half of the time that parts of it take that lie in the cache (a get
of a store of five million entries: 2.2 us instead of 2.8). But readers' memory has no bound, and
one block of the cache for all of a large file would drive out others. So a store begins with whole
ones, and when they have taken a share of what the cache may, it goes over to parts for good. A file
beside RocksDB's says so; it is a hint, of which nothing but speed and memory depends.
"""

from __future__ import annotations

import logging
import os
from typing import Final

__all__ = ["are_in_parts", "note_parts", "room_bytes"]

_NOTE: Final = "FILTERS-IN-PARTS"  # RocksDB leaves files alone whose names say nothing to it
_CACHE_SHARE: Final = 16
_log = logging.getLogger("statebackend.rocks")


def room_bytes(cache_bytes: int) -> int:
    """What one store's may take beside a cache of this size."""
    return cache_bytes // _CACHE_SHARE


def are_in_parts(path: str) -> bool:
    """Whether the store at ``path`` has gone over to parts."""
    return os.path.exists(os.path.join(path, _NOTE))


def note_parts(path: str) -> bool:
    """From its next opening on the store has them in parts; whether that could be written."""
    try:
        with open(os.path.join(path, _NOTE), "wb"):
            return True
    except OSError as error:
        _log.warning("%s: %s", path, error)
        return False
