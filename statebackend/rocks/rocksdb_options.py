"""How a store is opened: memory, files, blocks and filters."""

from __future__ import annotations

import contextlib
import functools
import resource
from dataclasses import dataclass
from typing import Any, Final

from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    Options,
    WriteBufferManager,
)

from statebackend.rocks.cache_memory import CACHE_MAX_BYTES, CACHE_MIN_BYTES, cache_bytes

__all__ = [
    "LEVEL0_FULL_FILES",
    "LEVEL0_STOP_FILES",
    "RocksSettings",
    "level0_files_max",
    "store_options",
]

LEVEL0_FULL_FILES: Final = 20
"""Level 0 is full with so many files: closing a store waits for a merge before it adds another."""

LEVEL0_STOP_FILES: Final = 36
"""With so many files in level 0 writing waits, too."""

_OPEN_FILES_MAX: Final = 256
_BUFFERS_PER_PROCESS: Final = 4
_MAP_BLOCK_BYTES: Final = 16 << 10
_MAP_BUFFER_FILTER: Final = 0.02  # of the write buffer's size
_FILTER_PART_BYTES: Final = 16 << 10
_LEVEL0_FILES: Final = 4
_MAP_LEVEL0_FILES: Final = 8


@dataclass(frozen=True)
class RocksSettings:
    """Memory in bytes: the cache of all stores of a process, the write buffer of each.

    A cache of 0 bytes is as large as :func:`~statebackend.rocks.cache_memory.cache_bytes` says,
    with ``workers`` and ``cache_max_bytes``. ``for_maps``: entries are mostly read one by one,
    in key order, and those of a key lie together. ``whole_filters``: as long as they are small,
    see :mod:`statebackend.rocks.filter_placement`; for who opens a store anew that has outgrown
    them. ``read_once``: it is read to its end and thrown away, so that RocksDB need not merge
    its files.
    """

    block_cache_bytes: int = CACHE_MIN_BYTES
    write_buffer_bytes: int = 32 << 20
    for_maps: bool = False
    whole_filters: bool = False
    workers: int = 1
    cache_max_bytes: int = CACHE_MAX_BYTES
    read_once: bool = False

    @property
    def cache_bytes(self) -> int:
        """The size of the cache in this process."""
        return self.block_cache_bytes or cache_bytes(self.workers, self.cache_max_bytes)


@functools.cache
def _buffers(size_bytes: int) -> Any:
    """Bounds the write buffers of all stores of the process; over it the largest is flushed."""
    return WriteBufferManager(size_bytes, False)


@functools.cache
def _open_files() -> int:
    """Table files that one store may keep open: a worker has many stores, and one limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(16, min(_OPEN_FILES_MAX, soft // 64))


@functools.cache
def _cache(size_bytes: int) -> Any:
    """One for all stores of the process: a worker may keep many open."""
    # Without locks and in few shards: 5 to 10% of a get less than the LRU cache. The second
    # argument: it finds out by itself how large an entry is.
    return Cache.new_hyper_clock_cache(size_bytes, 0)


def level0_files_max(settings: RocksSettings) -> int:
    """How many files of level 0 begin a merge."""
    # A merge of maps rewrites all of them, since each epoch touches keys all over: half as many of
    # them are worth more than the files in between cost.
    return _MAP_LEVEL0_FILES if settings.for_maps else _LEVEL0_FILES


def store_options(settings: RocksSettings, *, whole_filters: bool = False) -> Any:
    """What a store is opened with: always all of it, never what lies beside the files.

    Args:
        whole_filters: a file's filter and index are one block each, beside the cache.
    """
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(settings.write_buffer_bytes)
    options.set_write_buffer_manager(_buffers(_BUFFERS_PER_PROCESS * settings.write_buffer_bytes))
    options.set_compression_type(DBCompressionType.lz4())
    # A store is opened and closed often: few, small side files.
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_level_zero_file_num_compaction_trigger(level0_files_max(settings))
    options.set_level_zero_slowdown_writes_trigger(LEVEL0_FULL_FILES)
    options.set_level_zero_stop_writes_trigger(LEVEL0_STOP_FILES)
    options.set_max_background_jobs(2)
    options.set_skip_stats_update_on_db_open(True)
    options.set_max_open_files(_open_files())
    table = BlockBasedOptions()
    table.set_bloom_filter(10, False)
    if settings.for_maps:
        # A block serves the next key too: a get takes 1 us less. Scattered reads of small values
        # take a tenth more, which is why this is not for all.
        table.set_block_size(_MAP_BLOCK_BYTES)
        options.set_memtable_prefix_bloom_ratio(_MAP_BUFFER_FILTER)
        options.set_memtable_whole_key_filtering(True)
    table.set_block_cache(_cache(settings.cache_bytes))
    if whole_filters:
        table.set_cache_index_and_filter_blocks(False)
    else:
        _filters_in_cache(table)
    options.set_block_based_table_factory(table)
    return options


def _filters_in_cache(table: Any) -> None:
    table.set_cache_index_and_filter_blocks(True)
    # In parts: the filter of a million entries does not fit a shard of the cache, and was read anew
    # for each get (62 us instead of 4).
    table.set_index_type(BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    table.set_pin_top_level_index_and_filter(True)
    # Fewer, larger parts: 4 to 15% of a get less than at 4 KB, and not more where they do not fit.
    table.set_metadata_block_size(_FILTER_PART_BYTES)
