"""Reading one RocksDB: by keys, by prefixes, by ranges.

High-level iterators swallow corruption, so that scans use ``RdictIter`` and ask its status at the
end; the upper bound of ``ReadOptions`` is a use-after-free, so that scans compare keys themselves;
``close()`` keeps the lock while an iterator lives, so that iterators never leave this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from statebackend.errors import StateBackendError
from statebackend.rocks.rocksdb_errors import classify

__all__ = ["META_PREFIX", "KeyRange", "RocksReads"]

# Key groups end at 32767, so a first byte of 0xff never belongs to a state.
META_PREFIX: Final = b"\xff\xff"

# Pieces of a scan by ranges: short at first, because often the first key is all that is wanted.
_FIRST_KEYS: Final = 16
_KEYS_MAX: Final = 8192
_ENTRIES_MAX: Final = 1024
_PREFIX_BYTES: Final = 4  # key group and state
_NO_KEY: Final = META_PREFIX  # above every key of a state

KeyRange = tuple[bytes, bytes, bytes]


class RocksReads:
    """What is read of one database."""

    def __init__(self, db: Any, path: str) -> None:
        self._db = db
        self.path = path

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
        return self.merge_some(keys, entries_max)[0]

    def merge_some(self, keys: Sequence[bytes], entries_max: int) -> tuple[list[bytes | None], int]:
        """As :meth:`merge_get`; also how many entries more might have been passed."""
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
                        return values, left
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
        return values, left

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

    def cursor(self) -> Any:
        """A view of this moment, for :meth:`between`; the store closes only once it is gone."""
        return self._db.iter()

    def between(self, cursor: Any, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries with ``start <= key < end``, in key order."""
        try:
            cursor.seek(start)
            while cursor.valid():
                key: bytes = cursor.key()
                if key >= end:
                    break
                yield key, cursor.value()
                cursor.next()
            cursor.status()
        except StateBackendError:
            raise
        except Exception as error:
            raise classify(error, self.path) from error

    def scan_ranges(
        self, ranges: Iterable[tuple[bytes, bytes]]
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """The entries of ranges [start, end) that ascend, in pieces of keys and of their values."""
        iterator = self._db.iter()
        current, value_of, advance = iterator.key, iterator.value, iterator.next
        keys: list[bytes] = []
        values: list[bytes] = []
        add_key, add_value = keys.append, values.append
        try:
            for start, end in ranges:
                iterator.seek(start)
                while (at := current()) is not None and at < end:
                    add_key(at)
                    add_value(value_of())
                    advance()
                    if len(keys) >= _ENTRIES_MAX:
                        yield keys[:], values[:]
                        keys.clear()
                        values.clear()
            iterator.status()
        except StateBackendError:
            raise
        except Exception as error:
            raise classify(error, self.path) from error
        finally:
            del iterator, current, value_of, advance
        if keys:
            yield keys, values

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
