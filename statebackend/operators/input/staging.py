"""An epoch's input, in memory or (over a budget) on disk, and back in parts that fit.

Rows stay in memory as they come until they are over the budget. Then they go to local disk, parted
by key group, and so does all that follows. They come back part by part, in ascending, disjoint
ranges of key groups. A part that is too large is parted again: by its key groups, then (one group)
by a second hash of the key columns, with a key that fills much of it kept apart.

A part of one key cannot be parted: its rows are then read by the slice while the user's code runs
through them (:class:`StagedRows`). What does not work within the budget: two keys with the same
32-bit hash that are both over it, and a row that is over it alone. Such parts are read whole.

Rows of one key keep the order in which they arrived, whichever way they went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.key_hashing import hash_columns, murmur_mix
from statebackend.keygroups import MAX_PARALLELISM
from statebackend.state.blocks import BlockFile, SpillFolder

__all__ = ["ROW_BYTES", "InputStage", "Part", "StagedRows"]

# What grouping takes for a row beside its bytes: encoded keys, their dictionary, orders.
ROW_BYTES: Final = 64
_FAN_OUT: Final = 64
_BLOCK_BYTES: Final = 1 << 20
_LEVELS_MAX: Final = 6
_GROUP_COLUMN: Final = "__statebackend_key_group"
# A key with one row in so many of a sample is kept apart from the others.
_HEAVY_SHARE: Final = 8

Groups = NDArray[np.uint16]


class StagedRows:
    """Rows that stay on disk: the part of :class:`pyarrow.Table` that an operator uses."""

    def __init__(self, file: BlockFile, schema: pa.Schema) -> None:
        file.hold()
        self._file = file
        self._schema = schema
        self._ends = np.cumsum([file.block_rows(i) for i in range(len(file))])
        self.num_rows = file.rows
        self.nbytes = file.message_bytes

    def slice(self, offset: int, length: int) -> pa.Table:
        """``length`` rows from ``offset`` on, in memory."""
        batches, end = [], offset + length
        block = int(np.searchsorted(self._ends, offset, side="right"))
        while block < len(self._ends):
            start = int(self._ends[block]) - self._file.block_rows(block)
            if start >= end:
                break
            batch = _without_group(self._file.read(block), self._schema)
            low = max(0, offset - start)
            batches.append(batch.slice(low, end - start - low))
            block += 1
        return pa.Table.from_batches(batches, schema=self._schema)


@dataclass(frozen=True)
class Part:
    """Some of the input: all rows of its keys.

    ``key_groups``: uint16, one per row. ``rows`` may be :class:`StagedRows`; then it may hold one
    key only (``key_groups`` holds one item then), and the whole has to be looked through for that.
    """

    rows: pa.Table | StagedRows
    key_groups: Groups

    def whole(self) -> Part:
        """The same in memory."""
        if not isinstance(self.rows, StagedRows):
            return self
        rows = self.rows.slice(0, self.rows.num_rows)
        return Part(rows, np.full(rows.num_rows, self.key_groups[0], np.uint16))


class InputStage:
    """Takes in an epoch's rows and gives them back in parts.

    Args:
        schema: of the rows.
        key_positions: where the key columns stand in it.
        budget_bytes: how much to keep in memory, and how large a part may be. None: everything.
        folder: names a folder of our own; made when it is needed, removed by :meth:`close`.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        key_positions: tuple[int, ...],
        budget_bytes: int | None = None,
        folder: Callable[[], Path] | None = None,
    ) -> None:
        self.schema = schema
        self._key_positions = key_positions
        self._budget_bytes = budget_bytes
        self._folder = SpillFolder(folder, "rows")
        self._batches: list[pa.RecordBatch] = []
        self._key_groups: list[Groups] = []
        self._held_bytes = 0
        self._buckets: _Buckets | None = None
        self.staged_bytes = 0  # on disk, as they lie there
        self.rows = 0

    @property
    def spilled(self) -> bool:
        """Whether rows went to disk."""
        return self._buckets is not None

    def add(
        self, batch: pa.RecordBatch, key_groups: Groups, pinned_bytes: int | None = None
    ) -> None:
        """Take in rows.

        Args:
            batch: of the stage's schema.
            key_groups: uint16, one per row.
            pinned_bytes: what stays in memory with the batch, if that is more than the batch.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        self._batches.append(batch)
        self._key_groups.append(key_groups)
        self.rows += batch.num_rows
        if self._budget_bytes is None:
            return
        size_bytes = batch.get_total_buffer_size() if pinned_bytes is None else pinned_bytes
        self._held_bytes += size_bytes + batch.num_rows * ROW_BYTES
        if self._held_bytes > self._budget_bytes:
            self._spill()

    def parts(self) -> Iterator[Part]:
        """Everything, once, in ascending and disjoint ranges of key groups; may be called once.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        if self._buckets is None:
            part = self.held()
            self._batches, self._key_groups = [], []
            yield part
            return
        if self._batches:
            self._spill()
        for bucket in self._buckets.take():
            yield from self._parts_of(bucket, 0)

    def held(self) -> Part:
        """What is in memory now; all rows, as long as none went to disk."""
        groups = self._key_groups or [np.empty(0, dtype=np.uint16)]
        rows = pa.Table.from_batches(self._batches, schema=self.schema)
        return Part(rows, np.concatenate(groups))

    def close(self) -> None:
        """Forget the rows and remove the folder; may be called twice."""
        self._batches, self._key_groups = [], []
        self._folder.remove()

    # --- to disk

    def _spill(self) -> None:
        if self._buckets is None:
            found = np.unique(np.concatenate(self._key_groups))
            edges = found[:: max(1, -(-len(found) // _FAN_OUT))][1:]
            self._buckets = _Buckets(self, _ByGroup(edges))
        batches, self._batches = self._batches, []
        groups, self._key_groups = self._key_groups, []
        self._held_bytes = 0
        # Let go one by one: the parted copies take their place in memory.
        batches.reverse()
        groups.reverse()
        while batches:
            self._buckets.add(_with_group(batches.pop(), groups.pop()))
        self._buckets.flush()

    def new_file(self) -> BlockFile:
        """A new file in the folder."""
        return self._folder.new_file(self.schema.append(pa.field(_GROUP_COLUMN, pa.uint16())))

    # --- and back

    def _parts_of(self, file: BlockFile, level: int) -> Iterator[Part]:
        assert self._budget_bytes is not None
        if _weight(file) <= self._budget_bytes:
            yield self._loaded(file)
            return
        rule = self._rule(file, level)
        if rule is None:
            rows = StagedRows(file, self.schema)
            group = file.read(0).column(len(self.schema))[0].as_py()
            file.remove()
            yield Part(rows, np.array([group], np.uint16))
            return
        buckets = _Buckets(self, rule)
        for index in range(len(file)):
            buckets.add(file.read(index))
            if buckets.held_bytes > self._budget_bytes // 2:
                buckets.flush()
        buckets.flush()
        file.remove()
        del file
        for bucket in buckets.take():
            yield from self._parts_of(bucket, level + 1)

    def _loaded(self, file: BlockFile) -> Part:
        batches = [file.read(index) for index in range(len(file))]
        file.remove()
        groups = [batch.column(len(self.schema)).to_numpy() for batch in batches]
        rows = [_without_group(batch, self.schema) for batch in batches]
        return Part(pa.Table.from_batches(rows, schema=self.schema), np.concatenate(groups))

    def _rule(self, file: BlockFile, level: int) -> _ByGroup | _ByHash | None:
        """How to part a file that is too large; None if nothing parts it."""
        assert self._budget_bytes is not None
        rows = np.zeros(MAX_PARALLELISM, np.int64)
        for index in range(len(file)):
            groups = file.read(index).column(len(self.schema)).to_numpy()
            rows += np.bincount(groups, minlength=MAX_PARALLELISM)
        present = np.flatnonzero(rows)
        if len(present) > 1:
            weights = rows[present] * (_weight(file) / file.rows)
            return _ByGroup(present[_edges(weights, self._budget_bytes)].astype(np.uint16))
        sample = self._codes(file.read(len(file) // 2))
        codes, counts = np.unique(sample, return_counts=True)
        if level >= _LEVELS_MAX or (len(codes) == 1 and self._one_code(file, codes[0])):
            return None
        heavy = codes[counts * _HEAVY_SHARE >= len(sample)]
        wanted = 2 * -(-_weight(file) // self._budget_bytes)
        return _ByHash(self._codes, heavy, min(_FAN_OUT, wanted), level)

    def _codes(self, batch: pa.RecordBatch) -> NDArray[np.int32]:
        return hash_columns([batch.column(i) for i in self._key_positions])

    def _one_code(self, file: BlockFile, code: np.int32) -> bool:
        return all(
            bool(np.all(self._codes(file.read(index)) == code)) for index in range(len(file))
        )


def _weight(file: BlockFile) -> int:
    return file.message_bytes + file.rows * ROW_BYTES


def _edges(weights: NDArray[Any], budget: float) -> list[int]:
    """Where new buckets begin, so that neighbours fill a bucket but do not overfill it."""
    edges, filled = [], 0.0
    for index, weight in enumerate(weights.tolist()):
        if filled and filled + weight > budget:
            edges.append(index)
            filled = 0.0
        filled += weight
    return edges[: _FAN_OUT - 1]


def _with_group(batch: pa.RecordBatch, key_groups: Groups) -> pa.RecordBatch:
    return batch.append_column(_GROUP_COLUMN, pa.array(key_groups, pa.uint16()))


def _without_group(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns[: len(schema)], schema=schema)


@dataclass(frozen=True)
class _ByGroup:
    """Ranges of key groups; ``edges`` (ascending): where each but the first begins."""

    edges: Groups

    @property
    def buckets(self) -> int:
        return len(self.edges) + 1

    def __call__(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        groups = batch.column(batch.num_columns - 1).to_numpy()
        buckets: NDArray[np.int64] = np.searchsorted(self.edges, groups, side="right")
        return buckets


@dataclass(frozen=True)
class _ByHash:
    """Hash codes, mixed anew at each level; those of ``heavy`` (ascending) on their own."""

    codes: Callable[[pa.RecordBatch], NDArray[np.int32]]
    heavy: NDArray[np.int32]
    others: int
    level: int

    @property
    def buckets(self) -> int:
        return len(self.heavy) + self.others

    def __call__(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        codes = self.codes(batch)
        mixed = murmur_mix(codes ^ np.int32(0x5BD1E995 * (self.level + 1) & 0x7FFFFFFF))
        buckets: NDArray[np.int64] = (mixed % self.others + len(self.heavy)).astype(np.int64)
        for index, code in enumerate(self.heavy.tolist()):
            buckets[codes == code] = index
        return buckets


class _Buckets:
    """Files that rows are dealt to, each with what is not yet written to it."""

    def __init__(self, stage: InputStage, rule: _ByGroup | _ByHash) -> None:
        self._stage = stage
        self._rule = rule
        self._files: list[BlockFile | None] = [None] * rule.buckets
        self._pending: list[list[pa.RecordBatch]] = [[] for _ in range(rule.buckets)]
        self.held_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Deal out the rows of a batch (with its column of key groups), keeping their order."""
        buckets = self._rule(batch)
        dealt = batch.take(pa.array(np.argsort(buckets, kind="stable")))
        self.held_bytes += dealt.nbytes
        ends = np.cumsum(np.bincount(buckets, minlength=self._rule.buckets)).tolist()
        start = 0
        for index, end in enumerate(ends):
            if end > start:
                self._pending[index].append(dealt.slice(start, end - start))
            start = end

    def flush(self) -> None:
        """Write what is pending."""
        for index, slices in enumerate(self._pending):
            if not slices:
                continue
            file = self._files[index]
            if file is None:
                file = self._files[index] = self._stage.new_file()
            before = file.size_bytes
            for block in _blocks(slices):
                file.append(block)
            self._stage.staged_bytes += file.size_bytes - before
            self._pending[index] = []
        self.held_bytes = 0

    def take(self) -> Iterator[BlockFile]:
        """The files in the order of their buckets, each forgotten here when it is given."""
        for index, file in enumerate(self._files):
            self._files[index] = None
            if file is not None:
                yield file


def _blocks(slices: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about a bounded size."""
    pending: list[pa.RecordBatch] = []
    size_bytes = 0
    for one in slices:
        pieces = max(1, -(-one.nbytes // _BLOCK_BYTES))
        rows = -(-one.num_rows // pieces)
        for start in range(0, one.num_rows, rows):
            piece = one.slice(start, rows)
            if pending and size_bytes + piece.nbytes > _BLOCK_BYTES:
                yield pa.concat_batches(pending)
                pending, size_bytes = [], 0
            pending.append(piece)
            size_bytes += piece.nbytes
    yield pa.concat_batches(pending)
