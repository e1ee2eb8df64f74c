"""State that expires: value, list and map cells with a time to live.

Time is the processing time of the epoch, the same in each repetition of it. An entry is expired
when ``expiry <= now``. Layout under ``p = key group | state id | user key``, times as timers have
them (8 bytes, big-endian, sign bit flipped):

* value: ``p`` -> expiry (8) | width (1) | row; map: ``p | map key`` -> the same
* list: ``p | index (8)`` -> expiry (8) | row, each element with its own; indexes ascend and have
  gaps where elements went. ``p`` -> first index (8) | next index (8) | latest expiry (8) |
  next look (8)

Expired entries that nobody touches are found by an index: ``key group | FFFD | time | kind (1) |
state id | user key [| map key]`` -> empty. Each stored value (kind 0) and map entry (kind 2, then
4 bytes: how long its map's ``p`` is) has one entry there: at its expiry, rounded up to a multiple
of ``2 ** width`` ms, an eighth to a quarter of its TTL. So what is updated again and again moves
in the index 4 to 8 times per TTL, not each time, and is removed at most a quarter of its TTL late.
Each list (kind 1) has one entry: when to look through it next. ``width`` stands in the value
because a TTL may change from run to run.

With ``update="read"`` a read that finds less than a hundredth of the TTL gone writes nothing, so an
entry may expire that much too early. Reading is: ``get``, ``get_value``, ``iterator``, ``values``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from statebackend.state.cells import KeyCodecLike, KeyCursor, RowCodecLike
from statebackend.state.expiry import STAMP_BYTES, TIME_BYTES, TTL, ExpiryIndex, TtlCell
from statebackend.state.table import StateTable
from statebackend.state.ttllist import TtlListCell

__all__ = ["TTL", "ExpiryIndex", "TtlListCell", "TtlMapCell", "TtlValueCell"]

Row = tuple[Any, ...]

_SAMPLED_KEYS: Final = 16


class TtlValueCell(TtlCell):
    """One row per key that expires; the face of ``ValueCell``."""

    _current: list[bytes | None]  # of the chunk that is loaded

    def _load(self) -> None:
        super()._load()
        self._current = self._table.multi_get(self._keys)
        sample = self._current[::_SAMPLED_KEYS]
        self._cursor.loaded_bytes += _SAMPLED_KEYS * sum(map(len, filter(None, sample)))

    def exists(self) -> bool:
        """Whether the current key has a value."""
        return self._shown(self._current[self._index()])

    def get(self) -> Row | None:
        """The current key's row, or None."""
        index = self._index()
        data = self._current[index]
        if data is None or data[:TIME_BYTES] <= self._hidden:
            return None
        if self._refreshes and self._read_refreshes(data):
            self._write(index, data[STAMP_BYTES:])
        return self._decode(data[STAMP_BYTES:])

    def update(self, newValue: Row) -> None:
        """Set the current key's row.

        Raises:
            ValueMismatchError: it does not fit the schema.
        """
        self._write(self._index(), self._encode(newValue))

    def _write(self, index: int, row: bytes) -> None:
        key = self._keys[index]
        data = self._stamped(key, self._current[index]) + row
        self._current[index] = data
        self._table.entries[key] = data

    def clear(self) -> None:
        """Remove the current key's row."""
        index = self._index()
        old = self._current[index]
        if old is not None:
            key = self._keys[index]
            self._current[index] = None
            self._table.entries[key] = None
            self._unlist(key, old)


class TtlMapCell(TtlCell):
    """A map per key whose entries expire one by one; the face of ``MapCell``."""

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        name: str,
        state_id: int,
        key_codec: KeyCodecLike,
        codec: RowCodecLike,
        *,
        ttl: TTL,
        now_ms: int,
    ) -> None:
        super().__init__(cursor, table, name, state_id, codec, ttl, now_ms)
        self._encode_key, self._decode_key = key_codec.encode, key_codec.decode
        # The last entry read: it is often written next, and a write must know what is there.
        self._last: tuple[bytes, bytes | None] = (b"", None)

    def _load(self) -> None:
        super()._load()
        self._last = (b"", None)

    def _entry(self, full: bytes) -> bytes | None:
        if self._last[0] == full:
            return self._last[1]
        data = self._table.get(full)
        self._last = (full, data)
        return data

    def _put(self, prefix: bytes, full: bytes, data: bytes | None) -> None:
        self._table.put_under(prefix, full, data)
        self._last = (full, data)

    def _refresh(self, prefix: bytes, full: bytes, data: bytes) -> None:
        stamp = self._stamped(full, data, len(prefix))
        self._put(prefix, full, stamp + data[STAMP_BYTES:])

    def _live(self) -> list[tuple[bytes, bytes]]:
        return [entry for entry in self._table.scan(self._key()) if self._shown(entry[1])]

    def _read(self) -> list[tuple[bytes, bytes]]:
        live = self._live()
        if self._refreshes:
            prefix = self._key()
            for full, data in live:
                if self._read_refreshes(data):
                    self._refresh(prefix, full, data)
        return live

    def exists(self) -> bool:
        """Whether the current key's map has an entry."""
        return bool(self._live())

    def get_value(self, key: Row) -> Row | None:
        """The row under ``key``, or None."""
        prefix = self._key()
        full = prefix + self._encode_key(key)
        data = self._entry(full)
        if data is None or data[:TIME_BYTES] <= self._hidden:
            return None
        if self._refreshes and self._read_refreshes(data):
            self._refresh(prefix, full, data)
        return self._decode(data[STAMP_BYTES:])

    def contains_key(self, key: Row) -> bool:
        """Whether there is an entry under ``key``."""
        return self._shown(self._entry(self._key() + self._encode_key(key)))

    def update_value(self, key: Row, value: Row) -> None:
        """Set the row under ``key``.

        Raises:
            ValueMismatchError: key or row does not fit its schema.
        """
        prefix = self._key()
        full, row = prefix + self._encode_key(key), self._encode(value)
        stamp = self._stamped(full, self._entry(full), len(prefix))
        self._put(prefix, full, stamp + row)

    def iterator(self) -> Iterator[tuple[Row, Row]]:
        """(map key, row) of each entry, in the order of the encoded map keys."""
        skip, decode_key, decode = len(self._key()), self._decode_key, self._decode
        return iter(
            [(decode_key(full, skip)[0], decode(data[STAMP_BYTES:])) for full, data in self._read()]
        )

    def keys(self) -> Iterator[Row]:
        """The map keys."""
        skip = len(self._key())
        return iter([self._decode_key(full, skip)[0] for full, _ in self._live()])

    def values(self) -> Iterator[Row]:
        """The rows."""
        return iter([self._decode(data[STAMP_BYTES:]) for _, data in self._read()])

    def remove_key(self, key: Row) -> None:
        """Remove the entry under ``key``, if there is one."""
        prefix = self._key()
        full = prefix + self._encode_key(key)
        old = self._entry(full)
        if old is not None:
            self._put(prefix, full, None)
            self._unlist(full, old, len(prefix))

    def clear(self) -> None:
        """Remove every entry of the current key's map."""
        prefix = self._key()
        for full, old in self._table.scan(prefix):
            self._put(prefix, full, None)
            self._unlist(full, old, len(prefix))
