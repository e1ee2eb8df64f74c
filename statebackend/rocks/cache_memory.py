"""How much of a host's memory the block cache of a worker may take, where nobody said."""

from __future__ import annotations

import functools
from typing import Final

from statebackend import system

__all__ = ["CACHE_MAX_BYTES", "CACHE_MIN_BYTES", "cache_bytes"]

CACHE_MIN_BYTES: Final = 64 << 20
CACHE_MAX_BYTES: Final = 256 << 20
_SHARE: Final = 8  # of the host's memory: one part for the caches of all workers
_LIMITED_SHARE: Final = 4  # of what a worker itself is limited to


@functools.cache
def cache_bytes(workers: int, limit_bytes: int) -> int:
    """The size of this process's cache: an eighth of the host's memory, over all its workers.

    A container's limit counts as the host's memory. The cache takes only what is read into it.

    Args:
        workers: that the host has at least; there is one for each core besides.
        limit_bytes: that it must not be over, if it is over 64 MiB.
    """
    size = system.memory_bytes() // _SHARE // max(1, workers, system.cores())
    own = system.own_memory_limit_bytes()
    if own is not None:
        size = min(size, own // _LIMITED_SHARE)
    return max(CACHE_MIN_BYTES, min(size, limit_bytes, CACHE_MAX_BYTES))
