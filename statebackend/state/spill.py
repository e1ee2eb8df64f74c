"""Changes that left the overlay: sorted runs on disk or in memory, and their merge.

When the overlay grows over its limit, it is written as a run: sorted entries in blocks, with the
first and last key of each block in memory. A run is read by the block. The changes of an epoch that
is not confirmed yet (a *layer*) are a run too. Nothing here ever goes into RocksDB before its epoch
is confirmed.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.state.binary_columns import EMPTY, newest
from statebackend.state.blocks import ABSENT, BlockFile, SortedRows, SpillFolder, binary_array
from statebackend.threads import THREADS, Threads

__all__ = ["ArrowRows", "OverlaySpill", "Run", "count_merged", "merge"]

_SCHEMA: Final = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
_BLOCK_ROWS: Final = 4096
_BLOCK_BYTES: Final = 256 << 10
_CACHED_BLOCKS: Final = 16
_HELD_SHARE: Final = 4  # of the limit: a layer that is larger goes to disk
_HELD_ROWS: Final = 16_384  # of a block that stays in memory
# Of an entry of an overlay beside its bytes: two bytes objects and a slot of the dict.
_ENTRY_BYTES: Final = 33 + 33 + 100
_LISTED_BYTES: Final = 100  # of its place in a set of keys under one prefix
_SAMPLED: Final = 8


class ArrowRows(Protocol):
    """Sorted entries as they are decoded from a delta."""

    @property
    def keys(self) -> pa.BinaryArray:
        """Binary, ascending."""

    @property
    def values(self) -> pa.BinaryArray:
        """Binary, one for each key; null: deleted."""


class Run:
    """Sorted entries, in blocks that follow each other.

    Args:
        load: reads a block.
        file: what is removed with the run, if it lies on disk.
    """

    def __init__(self, load: Callable[[int], SortedRows], file: BlockFile | None = None) -> None:
        self.load = load
        self._held: list[ArrowRows] = []  # of one in memory: what it was made of
        self.first: list[bytes] = []
        self.last: list[bytes] = []
        self.rows: list[int] = []
        self._file = file

    @classmethod
    def in_memory(cls, blocks: Iterable[ArrowRows]) -> Run:
        """A run of decoded rows that stay in memory."""
        given = list(blocks)
        held = [
            SortedRows(block.keys.slice(at, _HELD_ROWS), block.values.slice(at, _HELD_ROWS))
            for block in given
            for at in range(0, len(block.keys), _HELD_ROWS)
        ]
        last = 0

        def load(block: int) -> SortedRows:
            nonlocal last
            if block != last:
                held[last].rest()
                last = block
            return held[block]

        run = cls(load)
        for block in held:
            run.add(block)
        run._held = given
        return run

    @property
    def on_disk(self) -> bool:
        """Whether reading it reads a file."""
        return self._file is not None

    @functools.cached_property
    def columns(self) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """Keys and values of a run in memory."""
        if not self._held:
            return EMPTY, EMPTY
        if len(self._held) != 1:
            keys = [block.keys for block in self._held]
            values = [block.values for block in self._held]
            self._held = [SortedRows(pa.concat_arrays(keys), pa.concat_arrays(values))]
        return self._held[0].keys, self._held[0].values

    def near(self, keys: pa.BinaryArray) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """Of a run in memory, the rows from the lowest to the highest of ``keys``."""
        low, high = (bound.as_py() for bound in pc.min_max(keys).values())
        return self.between(low, high + b"\0")

    def between(self, start: bytes, end: bytes) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """Of a run in memory, the rows of ``start <= key < end``, deletions included."""
        rows = SortedRows(*self.columns)
        low = rows.lower(start)
        length = rows.lower(end, low) - low
        return rows.keys.slice(low, length), rows.values.slice(low, length)

    def add(self, block: SortedRows) -> None:
        """Note a block that follows all before it."""
        self.first.append(block.key(0))
        self.last.append(block.key(len(block) - 1))
        self.rows.append(len(block))

    def __len__(self) -> int:
        return sum(self.rows)

    def get(self, key: bytes) -> Any:
        """The value of ``key``, None if it was deleted, ABSENT if it is not here."""
        block = self._block_of(key)
        return ABSENT if block < 0 else self.load(block).get(key)

    def touches(self, low: bytes, high: bytes) -> bool:
        """Whether a key from ``low`` to ``high`` (inclusive) may be here; reads nothing."""
        block = bisect_left(self.last, low)
        return block < len(self.last) and self.first[block] <= high

    def get_many(
        self, keys: Sequence[bytes], wanted: list[int], values: list[Any], ends: tuple[bytes, bytes]
    ) -> list[int]:
        """Fill ``values`` at those places of ``wanted`` whose key is here; the other places.

        Args:
            ends: no key is below the first or above the second.
        """
        missing: list[int] = []
        only = bisect_left(self.last, ends[0])
        if only == bisect_left(self.last, ends[1]) < len(self.last):
            blocks = {only: wanted}
        else:
            blocks = self._by_block(keys, wanted, missing)
        for block, places in blocks.items():
            found = self.load(block).get_many([keys[place] for place in places])
            for place, value in zip(places, found, strict=True):
                if value is ABSENT:
                    missing.append(place)
                else:
                    values[place] = value
        return missing

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes | None]]:
        """The entries of ``start <= key < end``, deletions included, in key order."""
        for block in range(bisect_left(self.last, start), len(self.last)):
            if self.first[block] >= end:
                return
            rows = self.load(block)
            for row in range(rows.lower(start), len(rows)):
                key = rows.key(row)
                if key >= end:
                    return
                yield key, rows.value(row)

    def remove(self) -> None:
        """Remove its file; reads fail afterwards."""
        if self._file is not None:
            self._file.remove()

    def _by_block(
        self, keys: Sequence[bytes], wanted: list[int], missing: list[int]
    ) -> dict[int, list[int]]:
        blocks: dict[int, list[int]] = {}
        for place in wanted:
            block = self._block_of(keys[place])
            if block < 0:
                missing.append(place)
            else:
                blocks.setdefault(block, []).append(place)
        return blocks

    def _block_of(self, key: bytes) -> int:
        block = bisect_left(self.last, key)
        return block if block < len(self.last) and self.first[block] <= key else -1


class OverlaySpill:
    """Where an overlay goes that is over its limit.

    Args:
        limit_bytes: about how much memory an overlay may take.
        folder: names a folder of our own; made when it is needed, removed by :meth:`close`.

    Attributes:
        written_bytes: of all runs on disk so far.
    """

    def __init__(
        self, *, limit_bytes: int, folder: Callable[[], Path], threads: Threads = THREADS
    ) -> None:
        self.limit_bytes, self.written_bytes = limit_bytes, 0
        self._folder = SpillFolder(folder, "run")
        self._cache: OrderedDict[tuple[BlockFile, int], SortedRows] = OrderedDict()
        self._cache_lock = threads.lock()  # a snapshot may be read while its owner goes on

    def write(self, entries: dict[bytes, bytes | None]) -> Run:
        """Write changes as a run.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        keys = sorted(entries)
        return self.write_rows(
            SortedRows(binary_array(k), binary_array(v))
            for k, v in _cut(keys, list(map(entries.__getitem__, keys)))
        )

    def keep(self, blocks: Iterable[ArrowRows]) -> Run:
        """Sorted rows as a run: in memory if they are few, else on disk.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        source, held, held_bytes = iter(blocks), list[ArrowRows](), 0
        for block in source:
            held.append(block)
            held_bytes += block.keys.nbytes + block.values.nbytes
            if held_bytes > self.limit_bytes // _HELD_SHARE:
                return self.write_rows(chain(held, source))
        return Run.in_memory(held)

    def write_rows(self, blocks: Iterable[ArrowRows]) -> Run:
        """Write sorted rows, block for block, as a run."""
        file = self._folder.new_file(_SCHEMA)
        run = Run(lambda block: self._load(file, block), file)
        try:
            for rows in blocks:
                for keys, values in _pieces(rows):
                    file.append(pa.RecordBatch.from_arrays([keys, values], schema=_SCHEMA))
                    run.add(SortedRows(keys, values))
                    self.written_bytes += keys.nbytes + values.nbytes
        except BaseException:
            file.remove()
            raise
        return run

    def close(self) -> None:
        """Remove the folder and all runs in it; may be called twice."""
        self._cache.clear()
        self._folder.remove()

    def _load(self, file: BlockFile, block: int) -> SortedRows:
        where = (file, block)
        with self._cache_lock:
            found = self._cache.get(where)
            if found is not None:
                self._cache.move_to_end(where)
                return found
        batch = file.read(block)
        found = SortedRows(batch.column(0), batch.column(1))
        with self._cache_lock:
            self._cache[where] = found
            if len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        return found


class OverlayGauge:
    """About how large an overlay is, from a sample of its new entries."""

    __slots__ = ("_entries", "size_bytes")

    def __init__(self) -> None:
        self._entries = 0
        self.size_bytes = 0.0

    def look(self, entries: dict[bytes, bytes | None], listed: bool) -> float:
        """Take in what was added since the last look; the size in bytes.

        Args:
            listed: whether the keys stand in sets beside the dict, too.
        """
        added = len(entries) - self._entries
        if added > 0:
            values = list(islice(reversed(entries.values()), 0, added, _SAMPLED))
            keys = list(islice(reversed(entries), 0, added, _SAMPLED))
            sampled = sum(map(len, filter(None, values))) + sum(map(len, keys))
            self.size_bytes += added * (sampled / len(keys) + _ENTRY_BYTES + listed * _LISTED_BYTES)
            self._entries += added
        return self.size_bytes


def _cut(
    keys: list[bytes], values: list[bytes | None]
) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
    """Blocks of a bounded number of rows and, unless one row is larger, of bytes."""
    sizes = np.fromiter(map(len, keys), np.int64, len(keys))
    sizes += np.fromiter((len(value) if value else 0 for value in values), np.int64, len(keys))
    for start, end in cut_places(sizes, _BLOCK_ROWS, _BLOCK_BYTES):
        yield keys[start:end], values[start:end]


def _pieces(rows: ArrowRows) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
    """A block in pieces of about the size of a run's; none if it is empty."""
    length = len(rows.keys)
    step = max(1, length * _BLOCK_BYTES // max(1, rows.keys.nbytes + rows.values.nbytes))
    step = max(1, min(step, _BLOCK_ROWS))
    if length <= step * 2:  # blocks of our own are cut already, give or take their offsets
        step = max(1, length)
    for start in range(0, length, step):
        yield rows.keys.slice(start, step), rows.values.slice(start, step)


def cut_places(sizes: Any, max_rows: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Where to cut rows of these sizes (int64, bytes), from the first on: (start, end) pairs.

    Each piece is as long as it may be; a row that is over the limit alone is a piece.
    """
    ends, start, before = np.cumsum(sizes), 0, 0
    while start < len(ends):
        fits = int(np.searchsorted(ends, before + max_bytes, side="right"))
        end = max(start + 1, min(start + max_rows, fits))
        yield start, end
        start, before = end, int(ends[end - 1])


# --- merging -----------------------------------------------------------------------------------


class _Head:
    """How far a merge has come in one run; reads a block only when its rows are wanted."""

    __slots__ = ("_at", "_block", "_loaded", "run", "start")

    def __init__(self, run: Run) -> None:
        self.run = run
        self._block = 0
        self._at = 0
        self._loaded: SortedRows | None = None
        self.start = run.first[0]

    @property
    def last(self) -> bytes:
        """The last key of the current block."""
        return self.run.last[self._block]

    def rest_rows(self) -> int:
        """Rows left in the current block."""
        return self.run.rows[self._block] - self._at

    def up_to(self, bound: bytes) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """The rows of the current block up to ``bound``, which are done with then."""
        rows = self._loaded or self.run.load(self._block)
        end = len(rows) if bound >= self.last else rows.upper(bound, self._at)
        start, self._at = self._at, end
        if end == len(rows):
            self.skip()
        else:
            self._loaded, self.start = rows, rows.key(end)
        return rows.keys.slice(start, end - start), rows.values.slice(start, end - start)

    def skip(self) -> None:
        """Done with the current block."""
        self._block, self._at, self._loaded = self._block + 1, 0, None
        if not self.done:
            self.start = self.run.first[self._block]

    @property
    def done(self) -> bool:
        return self._block == len(self.run.rows)


def _windows(runs: Sequence[Run]) -> Iterator[tuple[bytes, list[_Head]]]:
    """Ranges of keys, ascending: up to which key, and the runs that hold some, oldest first.

    A range ends with the block that ends first, so each of these runs has its part in one block.
    """
    heads = [_Head(run) for run in runs if run.rows]
    while heads:
        bound = min(head.last for head in heads)
        yield bound, [head for head in heads if head.start <= bound]
        heads = [head for head in heads if not head.done]


def merge(runs: Sequence[Run]) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
    """All entries of ``runs`` (oldest first) in key order; the newest of a key wins.

    Where runs do not overlap their blocks pass as they are.
    """
    for bound, heads in _windows(runs):
        yield newest([head.up_to(bound) for head in heads])


def count_merged(runs: Sequence[Run]) -> int:
    """How many entries :meth:`merge` gives; reads only where runs overlap."""
    rows = 0
    for bound, heads in _windows(runs):
        if len(heads) == 1:
            rows += heads[0].rest_rows()
            heads[0].skip()
        else:
            rows += pc.count_distinct(pa.concat_arrays([h.up_to(bound)[0] for h in heads])).as_py()
    return rows
