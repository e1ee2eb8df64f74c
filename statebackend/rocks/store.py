"""One RocksDB per subtask, in raw mode with one column family.

What is handled here so that nobody else has to know it (each was reproduced on rocksdict 0.3.29):

* every RocksDB error is a plain ``Exception``: :func:`classify` types it by its prefix;
* iterators swallow corruption and keep the lock: see :mod:`statebackend.rocks.rocksdb_reads`;
* of a store that is there, the options of its family are read from its files, without cache and
  filters, unless the family is named: it always is;
* any open rewrites ``rocksdict-config.json``: options are always passed, never loaded;
* ``repair`` loses whole files: it is never called, a damaged store is thrown away and restored;
* a process that ever opened a database must not fork: open in the worker, never in Spark's daemon.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from rocksdict import Checkpoint, Rdict, WriteBatch, WriteOptions

from statebackend.errors import LocalCopyError
from statebackend.rocks.clipping import (
    LAST_GROUP,
    Compaction,
    GroupRange,
    bytes_of,
    group_key,
    is_clipped,
    note_clipped,
    outside,
)
from statebackend.rocks.filter_placement import WholeFilters, are_in_parts, went_over
from statebackend.rocks.load_compaction import (
    LoadCompaction,
    flush_rows,
    hold_up_writes,
    level0_files,
)
from statebackend.rocks.rocksdb_errors import classify, close_at_once
from statebackend.rocks.rocksdb_options import (
    LEVEL0_FULL_FILES,
    LEVEL0_STOP_FILES,
    RocksSettings,
    level0_files_max,
    store_options,
)
from statebackend.rocks.rocksdb_reads import META_PREFIX, RocksReads
from statebackend.rocks.store_figures import store_figures

__all__ = [
    "META_PREFIX",
    "Marker",
    "RocksSettings",
    "RocksStore",
    "Rows",
    "StoreSlice",
    "classify",
]

_MARKER_KEY: Final = META_PREFIX + b"marker"

_BATCH_ROWS: Final = 50_000
_KEPT: Final = ("CURRENT", "MANIFEST-")  # options are always passed, never read from a file
_NEARLY_FULL: Final = 3  # the file of a flush, and those that come beside it
_NEVER: Final = 1 << 20
_CUT_FILES_MAX: Final = 4

Rows = tuple[Sequence[bytes], Sequence[bytes | None]]


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What a store holds: the state of one subtask after ``epoch``.

    ``chain`` is the lineage digest (hex): equal digests mean equal content. ``applying`` is the
    digest of the epoch that a crash may have left half applied on top: such a store is good for
    that epoch only, never again for ``epoch`` itself. ``applying_epoch``: which epoch that is where
    it is not the one after ``epoch`` (see :class:`~statebackend.rocks.parted.PartedStore`): the
    store is good for that epoch and later ones, by all the deltas since ``epoch``.
    """

    job_id: str
    operator: str
    key_group_start: int
    key_group_end: int
    epoch: int
    chain: str
    applying: str = ""
    applying_epoch: int = 0


class RocksStore(RocksReads):
    """A subtask's confirmed state on local disk.

    Durability: :meth:`apply` is atomic towards a crash of the process (the marker is in the last
    batch, and memtables are flushed in order); it reaches the disk when the store is closed or
    flushed. A delta that was applied but not flushed is simply applied again: deltas hold absolute
    values. No write-ahead log is kept, because the delta itself is one.
    """

    _settling: LoadCompaction | None = None
    _filters: WholeFilters | None = None

    def __init__(self, db: Any, path: str) -> None:
        super().__init__(db, path)
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign,assignment] # wrong stub
        self._compaction: Compaction | None = None
        self._beside_merges_now, self._triggers = 0, threading.Lock()

    @classmethod
    def open(
        cls,
        path: str,
        settings: RocksSettings | None = None,
        *,
        compacting: bool = True,
        make: bool = True,
    ) -> RocksStore:
        """Open or make the store at ``path``.

        Args:
            make: make it where there is none. Not where one was made a moment ago: it may have
                been taken away since, and an empty one is another state.
            compacting: whether RocksDB may begin to by itself; never of a store from which
                something was cut off, see :meth:`compact_clipped`.

        Raises:
            StoreBusyError: another process has it open.
            LocalCopyError: it is damaged (RocksDB checks names and sizes against its MANIFEST).
        """
        settings = settings or RocksSettings()
        whole_filters = settings.whole_filters and not are_in_parts(path)
        options = store_options(settings, whole_filters=whole_filters)
        options.create_if_missing(make)
        compacting = compacting and not settings.read_once and not is_clipped(path)
        options.set_disable_auto_compactions(not compacting)
        try:
            store = cls(Rdict(path, options, column_families={"default": options}), path)
        except Exception as error:
            raise classify(error, path) from error
        trigger = level0_files_max(settings)
        store._settling = LoadCompaction(store._db, trigger, due=went_over(path))
        if whole_filters:
            store._filters = WholeFilters(path, settings.cache_bytes)
        return store

    def marker(self) -> Marker | None:
        """What the store holds; None for a new or unreadable marker."""
        raw = self.get(_MARKER_KEY)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Marker)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise LocalCopyError(
                f"The marker of the local store {self.path} does not parse ({error}).",
                todo="The store is set aside and the state is restored from the next good copy.",
            ) from error

    def apply(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], marker: Marker | None
    ) -> None:
        """Write a confirmed delta (None deletes), ending in the batch that sets ``marker``.

        Without a marker: rows of a store that is being put together, and stands nowhere yet.
        """
        last = max(0, (len(keys) - 1) // _BATCH_ROWS)
        if last or marker is None:
            self.write_before(marker)
        for batch in range(last + 1):
            rows = slice(batch * _BATCH_ROWS, (batch + 1) * _BATCH_ROWS)
            self._write_checked(keys[rows], values[rows], marker if batch == last else None)

    def apply_batches(
        self,
        batches: Iterable[Rows],
        marker: Marker | None,
    ) -> None:
        """As :meth:`apply`, for a delta that comes in pieces (keys, values), in order.

        Two pieces are in memory at a time. What the iterator raises is passed on; the store is then
        good for ``marker``'s epoch only.
        """
        pieces = iter(batches)
        pending = next(pieces, ((), ()))
        if marker is None:
            self.write_before(marker)
        for number, piece in enumerate(pieces):
            if not number:
                self.write_before(marker)
            self._write_checked(*pending, None)
            pending = piece
        self._write_checked(*pending, marker)

    def write_before(self, marker: Marker | None) -> None:
        """What must be written before rows that are not in the batch of their marker."""
        before = self.marker()
        if before is None:
            return
        if marker is None:
            raise AssertionError("a store that stands at an epoch takes no rows without a marker")
        half = msgspec.structs.replace(before, applying=marker.chain)
        self._write_checked((), (), half)

    def _write_checked(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], marker: Marker | None
    ) -> None:
        """One batch, whole or not at all."""
        try:
            self._write(keys, values, marker)
        except Exception as error:
            raise classify(error, self.path) from error
        if self._settling is not None:
            if marker is not None and marker.applying:
                self._settling.begins()
            else:
                self._settling.wrote(len(keys), whole=marker is not None)

    def _write(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], marker: Marker | None
    ) -> None:
        batch = WriteBatch(raw_mode=True)
        if None in values:
            put, delete = batch.put, batch.delete
            for key, value in zip(keys, values, strict=True):
                if value is None:
                    delete(key)
                else:
                    put(key, value)
        else:
            deque(map(batch.put, keys, values), maxlen=0)
        if marker is not None:
            batch.put(_MARKER_KEY, msgspec.json.encode(marker))
        self._db.write(batch, self._unlogged)

    def level0_files(self) -> int:
        """Files that every point read may have to look into."""
        return level0_files(self._db)

    def figures(self) -> dict[str, int]:
        """See `store_figures`."""
        return store_figures(self._db, self.live_bytes())

    def give_up_whole_filters(self) -> bool:
        """Note that they take too much room beside the cache, if so.

        Whoever hears True closes the store: it has them in parts when it is opened anew.
        """
        if self._filters is None:
            return False
        held = self._db.property_int_value("rocksdb.estimate-table-readers-mem") or 0
        return self._filters.give_up(int(held))

    def live_bytes(self) -> int:
        """About how large the live data is on disk; unflushed writes are not in it.

        What was cut off counts until it is freed.
        """
        if self.clipped:
            # The estimate leaves out all files that lie under a range that was deleted.
            return sum(file["size"] for file in self._db.live_files())
        return int(self._db.property_int_value("rocksdb.estimate-live-data-size") or 0)

    def stored_bytes(self) -> int:
        """At most about how large the data is: :meth:`live_bytes` and what is not flushed yet."""
        unflushed = self._db.property_int_value("rocksdb.cur-size-all-mem-tables") or 0
        return self.live_bytes() + int(unflushed)

    def flush(self) -> None:
        """Bring everything that was applied to disk; the interpreter is free meanwhile.

        Unlike RocksDB's own, it does not wait for the merge of a level 0 that is full.
        """
        try:
            with self._beside_merges():
                flush_rows(self._db)
        except Exception as error:
            raise classify(error, self.path) from error

    @contextlib.contextmanager
    def _beside_merges(self) -> Iterator[None]:
        """No flush or checkpoint inside waits for the merge of a full level 0."""
        if self.level0_files() + _NEARLY_FULL < LEVEL0_FULL_FILES:
            yield
            return
        with self._triggers:
            self._beside_merges_now += 1
        try:
            with self._triggers:  # what fails here may hold all the same
                hold_up_writes(self._db, _NEVER, _NEVER)
            yield
        finally:
            with self._triggers:
                self._beside_merges_now -= 1
                if not self._beside_merges_now:  # an upload's copy may go on beside a flush
                    hold_up_writes(self._db, LEVEL0_FULL_FILES, LEVEL0_STOP_FILES)

    def checkpoint(self, path: str) -> list[str]:
        """Hard-link a consistent copy of the store to ``path``, which must not exist yet.

        Returns:
            the names of the files that make it up: table files, MANIFEST and CURRENT.
        """
        try:
            with self._beside_merges():
                flush_rows(self._db)  # with the interpreter free: the checkpoint itself holds it
                maker = Checkpoint(self._db)
                try:
                    maker.create_checkpoint(path)
                finally:
                    del maker  # while it lives, close() does not release the lock
        except Exception as error:
            raise classify(error, self.path) from error
        return sorted(
            name for name in os.listdir(path) if name.startswith(_KEPT) or name.endswith(".sst")
        )

    def slices(self, first_group: int, last_group: int) -> list[StoreSlice]:
        """What of this store holds these key groups, to be branched."""
        marker = self.marker()
        span = (marker.key_group_start, marker.key_group_end) if marker else (0, LAST_GROUP)
        whole = first_group <= span[0] and span[1] <= last_group
        return [StoreSlice(self, ((first_group, last_group),), (span,), whole)]

    def bytes_of(self, ranges: Sequence[GroupRange], held: Sequence[GroupRange]) -> int:
        """About how large key groups are on disk; unflushed writes are not in it.

        Args:
            held: all that this database has.
        """
        return bytes_of(self._db.live_files(), ranges, held)

    def branch(
        self,
        path: str,
        ranges: Sequence[GroupRange],
        settings: RocksSettings,
        *,
        whole: bool = False,
    ) -> None:
        """Make a store of some key groups at ``path``, which must not exist yet; nothing is copied.

        It has no marker, and stands nowhere until it is given one. While it is being made it may
        have this store's: it is made where nobody looks for a store.

        Args:
            ranges: of key groups, ascending.
            whole: there are no others in this store.
        """
        self.checkpoint(path)
        made = RocksStore.open(path, settings, compacting=False, make=False)
        try:
            made.clip(ranges, free=self.clipped or not whole)
        finally:
            made.close()

    def clip(self, ranges: Sequence[GroupRange], *, free: bool = True) -> None:
        """Delete all that lies outside of these key groups, and the marker, at once.

        Args:
            free: note that the room that it took is to be freed, see :meth:`compact_clipped`.
        """
        try:
            if free:
                note_clipped(self.path, ranges)
            cut = list(outside(ranges))
            # Each in a file of its own: one file over all of them would span what is kept too, and
            # be compacted with it. But many files at level 0 would hold up writes.
            step = 1 if len(cut) <= _CUT_FILES_MAX else len(cut)
            for at in range(0, len(cut), step):
                batch = WriteBatch(raw_mode=True)
                for start, end in cut[at : at + step]:
                    batch.delete_range(start, end)
                if at + step >= len(cut):
                    batch.delete(_MARKER_KEY)
                self._db.write(batch, self._unlogged)
                self._db.flush()
        except Exception as error:
            raise classify(error, self.path) from error

    @property
    def clipped(self) -> bool:
        """Whether what a branch cut off still takes room."""
        return is_clipped(self.path)

    def compact_clipped(self, after_s: float = 5.0) -> None:
        """Begin to free what a branch cut off, in a thread that :meth:`close` stops.

        Returns at once. What was freed stays so; the rest is freed after the next opening. To be
        called whenever the store was opened: until it is done, RocksDB compacts nothing by itself.

        Args:
            after_s: seconds until it begins, for who has just been given the store.
        """
        if self._compaction is None and self.clipped:
            self._compaction = Compaction(self._db, self.path, after_s)

    def settle_compaction(self) -> None:
        """Wait for what :meth:`compact_clipped` began."""
        if self._compaction is not None:
            self._compaction.wait()

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._db is None:
            return
        db, self._db, self._settling = self._db, None, None
        if self._filters is not None:
            self._filters.close()
        compaction, self._compaction = self._compaction, None
        try:
            try:
                flush_rows(db)  # waits if level 0 is full, which would grow without end
            finally:
                if compaction is not None:
                    compaction.stop()
                # At once: an ordinary close would wait until what was cut off is freed, or level 0
                # is merged. Closing at once refuses a flush of its own, but there is nothing left
                # to flush.
                close_at_once(db)
        except Exception as error:
            raise classify(error, self.path) from error


@dataclass(frozen=True)
class StoreSlice:
    """Key groups of a store that lie in one database.

    Attributes:
        ranges: which they are.
        held: all that the database has.
        whole: it holds no others than ``ranges``.
    """

    store: RocksStore
    ranges: tuple[GroupRange, ...]
    held: tuple[GroupRange, ...]
    whole: bool

    @property
    def size_bytes(self) -> int:
        """About how large they are on disk; unflushed writes are not in it."""
        return self.store.bytes_of(self.ranges, self.held)

    def branch(self, path: str, settings: RocksSettings) -> None:
        """As :meth:`RocksStore.branch`."""
        self.store.branch(path, self.ranges, settings, whole=self.whole)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """All of them, in key order."""
        view = self.store.cursor()
        for first, last in self.ranges:
            yield from self.store.between(view, group_key(first), group_key(last + 1))
