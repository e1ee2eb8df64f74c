"""List state whose elements expire one by one; the layout is said in ``statebackend.state.ttl``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from statebackend.state.cells import ListCell
from statebackend.state.expiry import (
    INDEX_BYTES,
    LIST,
    TIME_BYTES,
    ListHead,
    TtlCell,
    index_key,
    list_items,
)

__all__ = ["TtlListCell"]

Row = tuple[Any, ...]
_LOOK_AT: Final = 24  # in a head


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
