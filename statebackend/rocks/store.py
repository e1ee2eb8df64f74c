"""One RocksDB per subtask, in raw mode with one column family.

What is handled here so that nobody else has to know it (each was reproduced on rocksdict 0.3.29):

* every RocksDB error is a plain ``Exception``: :func:`classify` types it by its prefix;
* high-level iterators swallow corruption: scans use ``RdictIter`` and ask its status at the end;
* the upper bound of ``ReadOptions`` is a use-after-free: scans compare keys themselves;
* any open rewrites ``rocksdict-config.json``: options are always passed, never loaded;
* ``close()`` keeps the lock while an iterator lives: iterators never leave this module;
* ``repair`` loses whole files: it is never called, a damaged store is thrown away and restored;
* a process that ever opened a database must not fork: open in the worker, never in Spark's daemon.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from rocksdict import Checkpoint, Rdict, WriteBatch, WriteOptions

from statebackend.errors import (
    LocalCopyError,
    LocalDirError,
    StateBackendError,
    StoreBusyError,
)
from statebackend.rocks.options import RocksSettings, store_options

__all__ = ["Marker", "RocksSettings", "RocksStore"]

# Key groups end at 32767, so a first byte of 0xff never belongs to a state.
_MARKER_KEY: Final = b"\xff\xffmarker"
META_PREFIX: Final = b"\xff\xff"

_NOT_WRITABLE: Final = ("No space left", "Read-only file system", "Permission denied")
# Of the process, not of the store: a copy that cannot be opened for it is a good copy.
_NO_ROOM: Final = ("Too many open files", "Cannot allocate memory")
_BATCH_ROWS: Final = 50_000
_KEPT: Final = ("CURRENT", "MANIFEST-")  # options are always passed, never read from a file
# Pieces of a scan by ranges: short at first, because often the first key is all that is wanted.
_FIRST_KEYS: Final = 16
_KEYS_MAX: Final = 8192
_PREFIX_BYTES: Final = 4  # key group and state
_NO_KEY: Final = META_PREFIX  # above every key of a state
_L0_FILES_BEFORE_COMPACTION: Final = 8


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What a store holds: the state of one subtask after ``epoch``.

    ``chain`` is the lineage digest (hex): equal digests mean equal content. ``applying`` is the
    digest of the epoch that a crash may have left half applied on top: such a store is good for
    that epoch only, never again for ``epoch`` itself.
    """

    job_id: str
    operator: str
    key_group_start: int
    key_group_end: int
    epoch: int
    chain: str
    applying: str = ""


def classify(error: Exception, path: str) -> StateBackendError:
    """The typed error that stands behind a RocksDB message."""
    text = str(error)
    if "lock hold" in text or "While lock file" in text:
        return StoreBusyError(
            f"The local store {path} is open in another process ({text}).",
            todo="It is not waited for: a new incarnation is made beside it.",
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


class RocksStore:
    """A subtask's confirmed state on local disk.

    Durability: :meth:`apply` is atomic towards a crash of the process (the marker is in the last
    batch, and memtables are flushed in order); it reaches the disk when the store is closed or
    flushed. A delta that was applied but not flushed is simply applied again: deltas hold absolute
    values. No write-ahead log is kept, because the delta itself is one.
    """

    def __init__(self, db: Any, path: str) -> None:
        self._db = db
        self.path = path
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign,assignment] # wrong stub

    @classmethod
    def open(cls, path: str, settings: RocksSettings | None = None) -> RocksStore:
        """Open or make the store at ``path``.

        Raises:
            StoreBusyError: another process has it open.
            LocalCopyError: it is damaged (RocksDB checks names and sizes against its MANIFEST).
        """
        try:
            return cls(Rdict(path, store_options(settings or RocksSettings())), path)
        except Exception as error:
            raise classify(error, path) from error

    def marker(self) -> Marker | None:
        """What the store holds; None for a new or unreadable marker."""
        raw = self.get(_MARKER_KEY)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Marker)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LocalCopyError(
                f"The marker of the local store {self.path} does not parse ({error}).",
                todo="The store is set aside and the state is restored from the next good copy.",
            ) from error

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise classify(error, self.path) from error
        return value

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, None where absent. Sorted keys are quicker."""
        try:
            values: list[bytes | None] = self._db.get(list(keys))
        except Exception as error:
            raise classify(error, self.path) from error
        return values

    def merge_get(self, keys: Sequence[bytes], entries_max: int) -> list[bytes | None]:
        """As :meth:`multi_get` of ascending keys, by one scan over the range in which they lie.

        Quicker where a good part of the range's entries is wanted. The scan stops when it has
        passed ``entries_max`` entries: then there are values for the first keys only.
        """
        iterator = self._db.iter()
        current, value, advance = iterator.key, iterator.value, iterator.next
        values: list[bytes | None] = []
        append, left = values.append, entries_max
        try:
            iterator.seek(keys[0]) if keys else None
            at = current()
            for key in keys:
                while at is not None and at < key:
                    left -= 1
                    if left < 0:
                        return values
                    # Another state or key group lies between: go over it.
                    if at[:_PREFIX_BYTES] == key[:_PREFIX_BYTES]:
                        advance()
                    else:
                        iterator.seek(key)
                    at = current()
                if at == key:
                    append(value())
                    advance()
                    at = current()
                else:
                    append(None)
            iterator.status()
        except Exception as error:
            raise classify(error, self.path) from error
        finally:
            del iterator, current, value, advance
        return values

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All entries whose key starts with ``prefix``, in key order, without the marker."""
        iterator = self._db.iter()
        try:
            iterator.seek(prefix)
            while iterator.valid():
                key: bytes = iterator.key()
                if not key.startswith(prefix) or key.startswith(META_PREFIX):
                    break
                yield key, iterator.value()
                iterator.next()
            iterator.status()
        except StateBackendError:
            raise
        except Exception as error:
            raise classify(error, self.path) from error
        finally:
            del iterator

    def scan_keys(self, ranges: Iterable[tuple[bytes, bytes, bytes]]) -> Iterator[list[bytes]]:
        """The keys of ranges that ascend and do not overlap, in pieces, in key order.

        Of a range (start, end, stop): all keys from ``start`` below ``end``, and the first one
        after them that is below ``stop``. What lies between the ranges is not read.
        """
        iterator = self._db.iter()
        valid, current, advance = iterator.valid, iterator.key, iterator.next
        found: list[bytes] = []
        limit, at = _FIRST_KEYS, b""
        try:
            for start, end, stop in ranges:
                if at < start:
                    iterator.seek(start)
                    at = current() if valid() else _NO_KEY
                while at < end:
                    found.append(at)
                    advance()
                    at = current() if valid() else _NO_KEY
                    if len(found) >= limit:
                        limit = min(2 * limit, _KEYS_MAX)
                        yield found
                        found = []
                if at < stop:
                    found.append(at)
                elif at == _NO_KEY:
                    break
            iterator.status()
        except Exception as error:
            if isinstance(error, StateBackendError):
                raise
            raise classify(error, self.path) from error
        finally:
            del iterator, valid, current, advance
        if found:
            yield found

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes | None], marker: Marker) -> None:
        """Write a confirmed delta (None deletes), ending in the batch that sets ``marker``."""
        last = max(0, (len(keys) - 1) // _BATCH_ROWS)
        before = self.marker() if last else None
        if before is not None:
            self._write_checked((), (), msgspec.structs.replace(before, applying=marker.chain))
        for batch in range(last + 1):
            rows = slice(batch * _BATCH_ROWS, (batch + 1) * _BATCH_ROWS)
            self._write_checked(keys[rows], values[rows], marker if batch == last else None)

    def apply_batches(
        self,
        batches: Iterable[tuple[Sequence[bytes], Sequence[bytes | None]]],
        marker: Marker,
    ) -> None:
        """As :meth:`apply`, for a delta that comes in pieces (keys, values), in order.

        Two pieces are in memory at a time. What the iterator raises is passed on; the store is then
        good for ``marker``'s epoch only.
        """
        pieces = iter(batches)
        pending = next(pieces, ((), ()))
        for number, piece in enumerate(pieces):
            before = None if number else self.marker()
            if before is not None:
                self._write_checked((), (), msgspec.structs.replace(before, applying=marker.chain))
            self._write_checked(*pending, None)
            pending = piece
        self._write_checked(*pending, marker)

    def _write_checked(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], marker: Marker | None
    ) -> None:
        try:
            self._write(keys, values, marker)
        except Exception as error:
            raise classify(error, self.path) from error

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
        return int(self._db.property_int_value("rocksdb.num-files-at-level0") or 0)

    def live_bytes(self) -> int:
        """About how large the live data is on disk; unflushed writes are not in it."""
        return int(self._db.property_int_value("rocksdb.estimate-live-data-size") or 0)

    def stored_bytes(self) -> int:
        """At most about how large the data is: :meth:`live_bytes` and what is not flushed yet."""
        unflushed = self._db.property_int_value("rocksdb.cur-size-all-mem-tables") or 0
        return self.live_bytes() + int(unflushed)

    def compact_if_due(self) -> bool:
        """Merge level 0 when it has grown; stores that are open shortly starve compaction."""
        if self.level0_files() < _L0_FILES_BEFORE_COMPACTION:
            return False
        try:
            self._db.compact_range(None, None)
        except Exception as error:
            raise classify(error, self.path) from error
        return True

    def flush(self) -> None:
        """Bring everything that was applied to disk; the interpreter is free meanwhile."""
        try:
            self._db.flush()
        except Exception as error:
            raise classify(error, self.path) from error

    def checkpoint(self, path: str) -> list[str]:
        """Hard-link a consistent copy of the store to ``path``, which must not exist yet.

        Returns:
            the names of the files that make it up: table files, MANIFEST and CURRENT.
        """
        self.flush()  # first, with the interpreter free: the checkpoint itself holds it
        try:
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

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._db is None:
            return
        db, self._db = self._db, None
        try:
            try:
                db.flush()
            finally:
                db.close()
        except Exception as error:
            raise classify(error, self.path) from error
