"""What cells with a TTL are made of: the TTL itself, stamps, the index of what expires, removal.

The layout is said in ``statebackend.state.ttl_cells``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, Literal, NamedTuple

from statebackend.errors import LocalCopyError, SettingError
from statebackend.state.cells import Cell
from statebackend.state.table import StateTable
from statebackend.state.time_ranges import clamped, pack_at, set_between

__all__ = [
    "BY_EXPIRY",
    "ENTRY",
    "INDEX_BYTES",
    "LIST",
    "MAP",
    "STAMP_BYTES",
    "TIME_BYTES",
    "TTL",
    "ExpiryIndex",
    "ListHead",
    "TtlCell",
    "expiry_stamp",
    "index_key",
    "list_items",
    "map_kind",
    "read_share_ms",
    "stamp_time",
]

BY_EXPIRY: Final = b"\xff\xfd"
ENTRY: Final = b"\0"
LIST: Final = b"\1"
MAP: Final = b"\2"
TIME_BYTES: Final = 8
STAMP_BYTES: Final = 9
INDEX_BYTES: Final = 8
_KIND_AT: Final = 12
_BATCH: Final = 512
_LOOKS_PER_TTL: Final = 8
_READ_SHARE: Final = 100
_KNOWN_STAMPS: Final = 1000
_LONGEST_MS: Final = (1 << 63) - 1  # Spark's; what expires beyond the last time never does
_LENGTH_BYTES: Final = 4
_LAST_TIME: Final = 2**64 - 1
_HEAD: Final = struct.Struct(">QQ8s8s")


def index_key(key: bytes, time: bytes, kind: bytes) -> bytes:
    """Where the index holds the entry (or list) of a full key."""
    return b"".join((key[:2], BY_EXPIRY, time, kind, key[2:]))


def map_kind(prefix_bytes: int) -> bytes:
    """The kind of a map entry: with the length of its map's prefix, under which it is scanned."""
    return MAP + prefix_bytes.to_bytes(_LENGTH_BYTES, "big")


def expiry_stamp(expiry: bytes, ttl_ms: int) -> bytes:
    """What stands before a row: when it expires, and how coarse the index is about it."""
    return expiry + max(0, (ttl_ms >> 2).bit_length() - 1).to_bytes(1, "big")


def stamp_time(data: bytes) -> bytes:
    """The time in the index for a stamped row: its expiry, rounded up."""
    width = data[TIME_BYTES]
    rounded = -(-int.from_bytes(data[:TIME_BYTES], "big") >> width) << width
    return min(rounded, _LAST_TIME).to_bytes(TIME_BYTES, "big")


def read_share_ms(ttl_ms: int) -> int:
    """So much of a TTL must be gone before a read moves the expiry."""
    return max(1, ttl_ms // _READ_SHARE)


Update = Literal["write", "create", "read"]
Expired = Literal["hide", "until_cleaned"]


@dataclass(frozen=True, slots=True)
class TTL:
    """How long a state's entries live. The clock is the batch's processing time.

    Args:
        ms: from the last update until it expires, in milliseconds.
        update: what counts as an update. "write": each write. "create": only the first, or the
            first after it expired. "read": each read, too.
        expired: "hide": what is expired is never seen. "until_cleaned": it is seen until it is
            removed, which may be soon or late.

    Raises:
        SettingError: not a time to live.
    """

    ms: int
    update: Update = "write"
    expired: Expired = "hide"

    def __post_init__(self) -> None:
        if isinstance(self.ms, bool) or not isinstance(self.ms, int):
            raise SettingError(
                f"A TTL was given as {self.ms!r}.", todo="Give whole milliseconds as an int."
            )
        if not 0 < self.ms <= _LONGEST_MS:
            raise SettingError(
                f"A TTL of {self.ms} ms is not between 1 ms and 2^63 - 1 ms.",
                todo="Leave the TTL out for state that never expires.",
            )
        if self.update not in ("write", "create", "read"):
            raise SettingError(
                f"A TTL has update={self.update!r}.", todo="Give 'write', 'create' or 'read'."
            )
        if self.expired not in ("hide", "until_cleaned"):
            raise SettingError(
                f"A TTL has expired={self.expired!r}.", todo="Give 'hide' or 'until_cleaned'."
            )


_PIECE_ROWS: Final = 1 << 16  # of a list, read at once


class ListHead(NamedTuple):
    """What stands at a list's own key.

    ``first``: no element has a lower index. ``following``: the next element's. ``latest``: when the
    last one expires. ``next_look``: where the list stands in the index. A list without elements has
    no head.
    """

    first: int
    following: int
    latest: bytes
    next_look: bytes

    @classmethod
    def decode(cls, data: bytes) -> ListHead:
        """From its bytes.

        Raises:
            LocalCopyError: they are no list's head.
        """
        if len(data) != _HEAD.size:
            raise LocalCopyError(
                f"The head of a list with a TTL has {len(data)} bytes.",
                todo="The local store is set aside; the state is restored from the next good copy.",
            )
        return cls(*_HEAD.unpack(data))

    def encode(self) -> bytes:
        """As bytes."""
        return _HEAD.pack(*self)

    def added(self, count: int) -> ListHead:
        """With more elements at the end."""
        return self._replace(following=self.following + count)

    def later(self, expiry: bytes) -> ListHead:
        """With an element that expires then."""
        return self if expiry <= self.latest else self._replace(latest=expiry)


def list_items(table: StateTable, key: bytes, head: ListHead) -> list[tuple[bytes, bytes]]:
    """The stored elements of a list, with their full keys, in order.

    Time and memory follow what is stored: a damaged head may name any number of elements, and an
    honest one may have a gap as long as the list (see ``ExpiryIndex``).

    Raises:
        LocalCopyError: the head names many elements, and there is none.
    """
    stored: list[tuple[bytes, bytes]] = []
    for start in range(head.first, head.following, _PIECE_ROWS):
        end = min(start + _PIECE_ROWS, head.following)
        found = _read(table, [key + pack_at(place) for place in range(start, end)])
        stored += found
        if not found and end < head.following:  # a gap: the others are looked for by the range
            there = _elements_between(table, key + pack_at(end), key + pack_at(head.following))
            for at in range(0, len(there), _PIECE_ROWS):
                stored += _read(table, there[at : at + _PIECE_ROWS])
            if not stored:
                raise LocalCopyError(
                    f"A list with a TTL names elements {head.first} to {head.following}, and none "
                    "of them is there.",
                    todo="The local store is set aside; the state is restored from the next good "
                    "copy.",
                )
            break
    return stored


def _read(table: StateTable, items: list[bytes]) -> list[tuple[bytes, bytes]]:
    found = zip(items, table.multi_get(items), strict=True)
    return [(item, data) for item, data in found if data is not None]


def _elements_between(table: StateTable, start: bytes, end: bytes) -> list[bytes]:
    """The full keys that are set there, in order: this epoch's own, too."""
    own = [key for key, data in table.entries.items() if start <= key < end and data is not None]
    return sorted({*set_between(table, start, end), *own})


class TtlCell(Cell):
    """What a TTL adds to each kind of cell: this epoch's times as they stand in keys, the index.

    It comes before the kind among the bases, and takes what that takes, and the TTL.
    """

    def __init__(self, *args: Any, ttl: TTL, now_ms: int) -> None:
        super().__init__(*args)
        self._keeps = ttl.update == "create"
        self._refreshes = ttl.update == "read"
        self._ttl = ttl
        self._times: dict[bytes, bytes] = {}
        self.set_now(now_ms)

    def set_now(self, now_ms: int) -> None:
        """What time it is, for all that follows; while no key is current."""
        ttl = self._ttl
        self._now = clamped(now_ms)
        # Expired: at or below; nothing is below the lowest time's predecessor.
        self._hidden = self._now if ttl.expired == "hide" else b""
        expiry_ms = now_ms + ttl.ms
        self._expiry = clamped(expiry_ms)
        self._stale = clamped(expiry_ms - read_share_ms(ttl.ms))
        self._stamp = expiry_stamp(self._expiry, ttl.ms)
        self._time = stamp_time(self._stamp)

    def _shown(self, data: bytes | None) -> bool:
        return data is not None and data[:TIME_BYTES] > self._hidden

    def _read_refreshes(self, data: bytes) -> bool:
        """Whether a read moves the expiry; what is expired stays so."""
        return self._refreshes and self._now < data[:TIME_BYTES] <= self._stale

    def _stamped(self, key: bytes, old: bytes | None, map_bytes: int = 0) -> bytes:
        """The stamp for a write over ``old``; the entry moves in the index if it must.

        ``map_bytes``: of a map entry, how much of ``key`` is the map's prefix.
        """
        if old is None:
            kind = map_kind(map_bytes) if map_bytes else ENTRY
            self._table.entries[index_key(key, self._time, kind)] = b""
            return self._stamp
        before = old[:STAMP_BYTES]
        if before == self._stamp or (self._keeps and before[:TIME_BYTES] > self._now):
            return before
        if self._time_of(before) != self._time:
            self._unlist(key, before, map_bytes)
            kind = map_kind(map_bytes) if map_bytes else ENTRY
            self._table.entries[index_key(key, self._time, kind)] = b""
        return self._stamp

    def _time_of(self, before: bytes) -> bytes:
        """Where the index has what bears this stamp; keys of one epoch mostly share it."""
        times = self._times
        found = times.get(before)
        if found is None:
            if len(times) >= _KNOWN_STAMPS:
                times.clear()
            found = times[before] = stamp_time(before)
        return found

    def _unlist(self, key: bytes, old: bytes, map_bytes: int = 0) -> None:
        kind = map_kind(map_bytes) if map_bytes else ENTRY
        time = self._time_of(old[:STAMP_BYTES])
        self._table.entries[index_key(key, time, kind)] = None


class ExpiryIndex:
    """Finds what has expired without its being touched, and removes it."""

    def __init__(self, table: StateTable) -> None:
        self._table = table

    def clean(self, key_groups: range, now_ms: int, limit: int) -> int:
        """Remove what has expired; after the epoch's calls, when no chunk is loaded any more.

        The same state and time give the same removals. Which key group comes first depends on the
        time, so that none waits for ever when more expires than is removed.

        Args:
            limit: about how many entries are looked at; a list is looked through to its end.

        Returns:
            how many entries (values, map entries, list elements) were removed.
        """
        now, end = clamped(now_ms), clamped(now_ms + 1)
        start = now_ms % len(key_groups) if len(key_groups) else 0
        groups = chain(key_groups[start:], key_groups[:start])
        due = (key for group in groups for key in self._due(group, end))
        removed = 0
        while limit > 0 and (batch := list(islice(due, min(limit, _BATCH)))):
            where = [_indexed(listed) for listed in batch]
            found = self._table.multi_get([key for key, _, _ in where])
            for listed, (key, kind, prefix), data in zip(batch, where, found, strict=True):
                self._table.put(listed, None)
                limit -= 1
                if data is None:
                    continue  # its state was dropped
                if kind == LIST:
                    seen, gone = self._clean_list(key, data, listed, now)
                    limit -= seen
                    removed += gone
                elif data[:TIME_BYTES] <= now:
                    self._table.put_under(prefix, key, None)
                    removed += 1
        return removed

    def _due(self, group: int, end: bytes) -> Iterator[bytes]:
        prefix = group.to_bytes(2, "big") + BY_EXPIRY
        return set_between(self._table, prefix, prefix + end)

    def _clean_list(self, key: bytes, data: bytes, listed: bytes, now: bytes) -> tuple[int, int]:
        """Look through one list: (elements seen, elements removed)."""
        head = ListHead.decode(data)
        if head.next_look != listed[4:_KIND_AT]:
            return 0, 0  # the list stands elsewhere in the index
        put, live, gone = self._table.put, list[tuple[bytes, bytes]](), 0
        items = list_items(self._table, key, head)
        for item, value in items:
            if value[:TIME_BYTES] <= now:
                put(item, None)
                gone += 1
            else:
                live.append((item, value))
        if not live:
            put(key, None)
            return len(items), gone
        earliest = min(value[:TIME_BYTES] for _, value in live)
        first, last = (int.from_bytes(live[at][0][-INDEX_BYTES:], "big") for at in (0, -1))
        head = head._replace(first=first, following=last + 1)
        if head.following - head.first > 2 * len(live):  # more gaps than elements: close them
            head = head._replace(first=head.following, following=head.following + len(live))
            for place, (item, value) in enumerate(live, start=head.first):
                put(item, None)
                put(key + place.to_bytes(INDEX_BYTES, "big"), value)
        # Not at the very next expiry: each look reads the elements that stay, too.
        ahead = int.from_bytes(head.latest, "big") - int.from_bytes(now, "big")
        next_ms = int.from_bytes(earliest, "big") + ahead // _LOOKS_PER_TTL
        next_look = min(next_ms, _LAST_TIME).to_bytes(TIME_BYTES, "big")
        head = head._replace(next_look=next_look)
        self._table.put(key, head.encode())
        self._table.put(index_key(key, next_look, LIST), b"")
        return len(items), gone


def _indexed(listed: bytes) -> tuple[bytes, bytes, bytes]:
    """The full key that the index means, its kind, and (of a map) the prefix of its map."""
    group, kind = listed[:2], listed[_KIND_AT : _KIND_AT + 1]
    if kind != MAP:
        key = group + listed[_KIND_AT + 1 :]
        return key, kind, key
    start = _KIND_AT + 1 + _LENGTH_BYTES
    key = group + listed[start:]
    return key, kind, key[: int.from_bytes(listed[_KIND_AT + 1 : start], "big")]
