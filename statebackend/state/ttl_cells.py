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

from statebackend.state.cells import ListCell, MapCell, ValueCell
from statebackend.state.expiry_index import (
    INDEX_BYTES,
    LIST,
    STAMP_BYTES,
    TIME_BYTES,
    TTL,
    ExpiryIndex,
    ListHead,
    TtlCell,
    index_key,
    list_items,
)

__all__ = ["TTL", "ExpiryIndex", "TtlListCell", "TtlMapCell", "TtlValueCell"]

Row = tuple[Any, ...]
_LOOK_AT: Final = 24  # in a list's head


class TtlValueCell(TtlCell, ValueCell):
    """One row per key that expires."""

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


class TtlMapCell(TtlCell, MapCell):
    """A map per key whose entries expire one by one."""

    def _refresh(self, prefix: bytes, full: bytes, data: bytes) -> None:
        stamp = self._stamped(full, data, len(prefix))
        self._put(prefix, full, stamp + data[STAMP_BYTES:])

    def _remove(self, prefix: bytes, full: bytes, data: bytes) -> None:
        super()._remove(prefix, full, data)
        self._unlist(full, data, len(prefix))

    def _live(self) -> list[tuple[bytes, bytes]]:
        return [entry for entry in super()._live() if self._shown(entry[1])]

    def _read(self) -> list[tuple[bytes, bytes]]:
        live = self._live()
        if self._refreshes:
            prefix = self._key()
            for full, data in live:
                if self._read_refreshes(data):
                    self._refresh(prefix, full, data)
        return [(full, data[STAMP_BYTES:]) for full, data in live]

    def get_value(self, key: Row) -> Row | None:
        """The row under ``key``, or None."""
        index = self._cursor.index
        data = self._look_up(index, key)
        if data is None or data[:TIME_BYTES] <= self._hidden:
            return None
        if self._refreshes and self._read_refreshes(data):
            self._refresh(self._keys[index], self._last_full, data)
        return self._decode(data[STAMP_BYTES:])

    def contains_key(self, key: Row) -> bool:
        """Whether there is an entry under ``key``."""
        return self._shown(self._look_up(self._cursor.index, key))

    def update_value(self, key: Row, value: Row) -> None:
        """Set the row under ``key``.

        Raises:
            ValueMismatchError: key or row does not fit its schema.
        """
        index = self._cursor.index
        old = self._look_up(index, key)
        row = self._encode(value)
        prefix, full = self._keys[index], self._last_full
        self._put(prefix, full, self._stamped(full, old, len(prefix)) + row)


class TtlListCell(TtlCell, ListCell):
    """Rows per key that expire one by one. Appends take constant time."""

    def _head(self) -> ListHead | None:
        data = self._heads[self._cursor.index]
        return None if data is None else ListHead.decode(data)

    def _set_head(self, key: bytes, head: ListHead | None) -> None:
        data = None if head is None else head.encode()
        self._heads[self._cursor.index] = data
        self._table.put(key, data)

    def exists(self) -> bool:
        """Whether the current key has at least one row."""
        self._key()
        head = self._head()
        return head is not None and head.latest > self._hidden

    def get(self) -> Iterator[Row]:
        """The current key's rows; later changes do not show in the iterator."""
        key, head = self._key(), self._head()
        if head is None or head.latest <= self._hidden:
            return iter(())
        live = [
            item
            for item in list_items(self._table, key, head)
            if item[1][:TIME_BYTES] > self._hidden
        ]
        if self._refreshes:
            self._refresh(key, head, live)
        return iter([self._decode(data[TIME_BYTES:]) for _, data in live])

    def _refresh(self, key: bytes, head: ListHead, live: list[tuple[bytes, bytes]]) -> None:
        due = [item for item in live if self._read_refreshes(item[1])]
        for item, data in due:
            self._table.put(item, self._expiry + data[TIME_BYTES:])
        if due:
            self._set_head(key, head.later(self._expiry))

    def put(self, newState: list[Row]) -> None:
        """Replace the current key's rows.

        Raises:
            ValueMismatchError: a row does not fit the schema, or there is none (use ``clear``).
        """
        rows = self._encoded(newState)
        key, head = self._key(), self._head()
        if head is not None:
            for item, _ in list_items(self._table, key, head):
                self._table.put(item, None)
            head = ListHead(0, 0, self._expiry, head.next_look)
        self._add(key, head, rows)

    def append(self, newState: Row) -> None:
        """Add one row at the end."""
        index = self._index()
        key, data, row = self._keys[index], self._heads[index], self._encode(newState)
        if data is None or data[_LOOK_AT:] > self._time or data[16:_LOOK_AT] > self._expiry:
            self._add(key, self._head(), [row])
            return
        # As _add does it, on the bytes: the usual case, and several times as quick.
        entries, expiry, place = self._table.entries, self._expiry, data[8:16]
        following = (int.from_bytes(place, "big") + 1).to_bytes(INDEX_BYTES, "big")
        entries[key + place] = expiry + row
        self._heads[index] = entries[key] = data[:8] + following + expiry + data[_LOOK_AT:]

    def extend(self, newState: list[Row]) -> None:
        """Add rows at the end."""
        rows = self._encoded(newState)
        self._add(self._key(), self._head(), rows)

    def _add(self, key: bytes, head: ListHead | None, rows: list[bytes]) -> None:
        if head is None:
            head = ListHead(0, 0, self._expiry, self._time)
            self._table.put(index_key(key, self._time, LIST), b"")
        elif head.next_look > self._time:  # the TTL was longer
            self._table.put(index_key(key, head.next_look, LIST), None)
            head = head._replace(next_look=self._time)
            self._table.put(index_key(key, self._time, LIST), b"")
        for place, row in enumerate(rows, start=head.following):
            item = key + place.to_bytes(INDEX_BYTES, "big")
            self._table.put(item, self._expiry + row)
        self._set_head(key, head.added(len(rows)).later(self._expiry))

    def clear(self) -> None:
        """Remove the current key's rows."""
        key, head = self._key(), self._head()
        if head is None:
            return
        for item, _ in list_items(self._table, key, head):
            self._table.put(item, None)
        self._set_head(key, None)
        self._table.entries[index_key(key, head.next_look, LIST)] = None
