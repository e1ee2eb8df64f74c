"""The kinds of keyed state: value, list and map, each read and written for the current key.

A :class:`KeyCursor` says which key is current. Keys are loaded by the chunk, so that the point
states of a whole chunk cost one multi-get, and are decoded at once when the first of them is read;
then a read is a list index.

Layout under a state's prefix for one key (``p = key group | state id | user key``):

* value: ``p`` -> row
* list: ``p`` -> count (8 bytes, big-endian); ``p | index (8 bytes)`` -> row
* map: ``p | map key`` -> row
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from pyspark.sql import types as T

from statebackend.errors import LocalCopyError, ValueMismatchError
from statebackend.schema.type_table import simple_type
from statebackend.state.key_cursor import KeyCodecLike, KeyCursor, RowCodecLike
from statebackend.state.table import StateTable
from statebackend.state.unbound import OfOneEpoch

__all__ = ["Cell", "KeyCodecLike", "KeyCursor", "ListCell", "MapCell", "RowCodecLike", "ValueCell"]

Row = tuple[Any, ...]
_COUNT_BYTES = 8
_SAMPLED_KEYS = 16
_MANY_ROWS = 24  # below, to decode them by the column costs more
_UNLIKELY_ROWS = 1 << 16  # from there on the last one is looked for first
_UNREAD: Final[Any] = object()
_NO_INDEX: Final = -2  # -1 is the cursor's, where no key is current
_NO_KEY: Final[Any] = object()  # None may be given for a key, and is refused


def is_flat(schema: T.StructType) -> bool:
    """Whether rows of a schema are immutable all through: decoded once, given out again."""
    return all(simple_type(field.dataType) is not None for field in schema)


class Cell(OfOneEpoch):
    """What every kind shares: its name, and the full key (prefix) of each loaded key."""

    def __init__(self, cursor: KeyCursor, table: StateTable, name: str, state_id: int) -> None:
        self._cursor = cursor
        self._table = table
        self._name = name
        self._id = state_id.to_bytes(2, "big")
        self._keys: list[bytes] = []
        cursor.attach(self._load, table)

    def _load(self) -> None:
        self._keys = self._cursor.keys_of(self._id)

    def _index(self) -> int:
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        return index

    def _key(self) -> bytes:
        return self._keys[self._index()]


class ValueCell(Cell):
    """One row per key."""

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        name: str,
        state_id: int,
        codec: RowCodecLike,
    ) -> None:
        super().__init__(cursor, table, name, state_id)
        self._encode, self._decode = codec.encode, codec.decode
        self._decode_many = codec.decode_many if is_flat(codec.schema) else None
        self._current: list[bytes | None] = []
        # What get() gives, and one item more: that of index -1, when no key is current.
        self._rows: list[Any] = [_UNREAD]
        self._untouched = True

    def _load(self) -> None:
        super()._load()
        self._current = self._table.multi_get(self._keys)
        self._rows = [_UNREAD] * (len(self._keys) + 1)
        self._untouched = True
        sample = self._current[::_SAMPLED_KEYS]
        self._cursor.loaded_bytes += _SAMPLED_KEYS * sum(map(len, filter(None, sample)))

    def exists(self) -> bool:
        """Whether the current key has a value."""
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        return self._current[index] is not None

    def get(self) -> Row | None:
        """The current key's row, or None."""
        row = self._rows[self._cursor.index]
        return self._read() if row is _UNREAD else row

    def _read(self) -> Row | None:
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        if self._decode_many is None:
            data = self._current[index]
            return None if data is None else self._decode(data)
        if self._untouched:
            self._untouched = False
            self._rows = [*self._decode_many(self._current), _UNREAD]
        elif self._rows[index] is _UNREAD:
            data = self._current[index]
            self._rows[index] = None if data is None else self._decode(data)
        return cast("Row | None", self._rows[index])

    def update(self, newValue: Row) -> None:
        """Set the current key's row.

        Raises:
            ValueMismatchError: it does not fit the schema.
        """
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        data = self._encode(newValue)
        self._rows[index] = _UNREAD
        self._current[index] = self._table.entries[self._keys[index]] = data

    def clear(self) -> None:
        """Remove the current key's row."""
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        if self._current[index] is not None:
            self._rows[index] = _UNREAD
            self._current[index] = self._table.entries[self._keys[index]] = None


class ListCell(Cell):
    """Rows per key, in the order they were appended; an append costs the same at any length."""

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        name: str,
        state_id: int,
        codec: RowCodecLike,
    ) -> None:
        super().__init__(cursor, table, name, state_id)
        self._encode, self._decode = codec.encode, codec.decode
        self._decode_many = codec.decode_many
        self._heads: list[bytes | None] = []  # what stands at the keys themselves

    def _load(self) -> None:
        super()._load()
        self._heads = self._table.multi_get(self._keys)

    def _at(self) -> tuple[int, bytes, int]:
        """The current key's index, its full key, and how many rows it has."""
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        key, data = self._keys[index], self._heads[index]
        if data is None:
            return index, key, 0
        count = int.from_bytes(data, "big")
        if count >= _UNLIKELY_ROWS or len(data) != _COUNT_BYTES:
            self._check_count(key, data, count)
        return index, key, count

    def _check_count(self, key: bytes, data: bytes, count: int) -> None:
        """A damaged count must not cost the memory that it says."""
        if len(data) == _COUNT_BYTES and self._table.get(key + _pack_place(count - 1)) is not None:
            return
        raise LocalCopyError(
            f"List state {self._name!r} has the count {data[:16].hex()}, and no such element.",
            todo="The local store is set aside; the state is restored from the next good copy.",
        )

    def _set_count(self, index: int, key: bytes, count: int) -> None:
        data = count.to_bytes(_COUNT_BYTES, "big") if count else None
        self._heads[index] = self._table.entries[key] = data

    def exists(self) -> bool:
        """Whether the current key has at least one row."""
        return self._at()[2] > 0

    def get(self) -> Iterator[Row]:
        """The current key's rows; later changes do not show in the iterator."""
        _, key, count = self._at()
        if not count:
            return iter(())
        data = self._table.multi_get([key + _pack_place(place) for place in range(count)])
        if None in data:
            raise LocalCopyError(
                f"List state {self._name!r} has {count} elements, but one of them is missing.",
                todo="The local store is set aside; the state is restored from the next good copy.",
            )
        if count >= _MANY_ROWS:
            return iter(cast("list[Row]", self._decode_many(data)))
        return iter(list(map(self._decode, cast("list[bytes]", data))))

    def put(self, newState: list[Row]) -> None:
        """Replace the current key's rows.

        Raises:
            ValueMismatchError: a row does not fit the schema, or there is none (use ``clear``).
        """
        rows = self._encoded(newState)
        index, key, before = self._at()
        self._set(key, 0, rows)
        if before > len(rows):
            self._set(key, len(rows), [None] * (before - len(rows)))
        self._set_count(index, key, len(rows))

    def append(self, newState: Row) -> None:
        """Add one row at the end."""
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        row = self._encode(newState)
        key, place = self._keys[index], self._heads[index] or _NO_ROWS
        entries = self._table.entries
        entries[key + place] = row
        self._heads[index] = entries[key] = _count_after(place)

    def extend(self, newState: list[Row]) -> None:
        """Add rows at the end."""
        rows = self._encoded(newState)
        index, key, count = self._at()
        self._set(key, count, rows)
        self._set_count(index, key, count + len(rows))

    def clear(self) -> None:
        """Remove the current key's rows."""
        index, key, count = self._at()
        if count:
            self._set(key, 0, [None] * count)
            self._set_count(index, key, 0)

    def _set(self, key: bytes, first: int, rows: Sequence[bytes | None]) -> None:
        entries = self._table.entries
        for place, row in enumerate(rows, start=first):
            entries[key + _pack_place(place)] = row

    def _encoded(self, rows: list[Row]) -> list[bytes]:
        # All are encoded before one is written: a bad row leaves the list as it was.
        encoded = [self._encode(row) for row in rows]
        if not encoded:
            raise ValueMismatchError(
                f"An empty list was written to list state {self._name!r}.",
                todo="Call clear() to remove the list; as in Spark, a list state is never empty.",
            )
        return encoded


_NO_ROWS: Final = bytes(_COUNT_BYTES)
_pack_place: Final = struct.Struct(">Q").pack


def _count_after(count: bytes) -> bytes:
    return (int.from_bytes(count, "big") + 1).to_bytes(_COUNT_BYTES, "big")


class MapCell(Cell):
    """A map per key, one entry each: touching one entry never reads the others."""

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        name: str,
        state_id: int,
        key_codec: KeyCodecLike,
        codec: RowCodecLike,
    ) -> None:
        super().__init__(cursor, table, name, state_id)
        self._encode_key, self._decode_key = key_codec.encode, key_codec.decode
        self._encode, self._decode = codec.encode, codec.decode
        # A map key is mostly used twice: read, then written. The very object has the same bytes,
        # if nothing in it can have changed.
        # (Of binary, a bytearray is taken, too.)
        self._flat_keys = is_flat(key_codec.schema) and not any(
            isinstance(field.dataType, T.BinaryType) for field in key_codec.schema
        )
        self._last_key: object = _NO_KEY
        self._last_encoded = b""
        # The last entry that was read or written: to look there again would cost a microsecond.
        # It is that of `_last_key` under the key at `_last_index`, unless this is _NO_INDEX.
        self._last_index = _NO_INDEX
        self._last_full = b""
        self._last_data: bytes | None = None

    def _load(self) -> None:
        super()._load()
        self._last_index, self._last_full = _NO_INDEX, b""

    def _full(self, index: int, key: Row) -> tuple[bytes, bytes]:
        """The full key of an entry, and its part behind the prefix."""
        if index < 0:
            self._cursor.outside(self._name)
        encoded = self._last_encoded if key is self._last_key else self._encode_key(key)
        return self._keys[index] + encoded, encoded

    def _note(self, index: int, key: Row, encoded: bytes, full: bytes, data: bytes | None) -> None:
        self._last_full, self._last_data = full, data
        if self._flat_keys and type(key) is tuple:
            self._last_key, self._last_encoded, self._last_index = key, encoded, index
        else:
            self._last_index = _NO_INDEX

    def _look_up(self, index: int, key: Row) -> bytes | None:
        # As _full and _note, without the calls.
        if index < 0:
            self._cursor.outside(self._name)
        encoded = self._last_encoded if key is self._last_key else self._encode_key(key)
        full = self._keys[index] + encoded
        data = self._last_data if full == self._last_full else self._table.get(full)
        self._last_full, self._last_data = full, data
        if self._flat_keys and type(key) is tuple:
            self._last_key, self._last_encoded, self._last_index = key, encoded, index
        else:
            self._last_index = _NO_INDEX
        return data

    def exists(self) -> bool:
        """Whether the current key's map has an entry."""
        return bool(self._live())

    def get_value(self, key: Row) -> Row | None:
        """The row under ``key``, or None."""
        index = self._cursor.index
        if key is self._last_key and index == self._last_index:
            data = self._last_data
        else:
            data = self._look_up(index, key)
        return None if data is None else self._decode(data)

    def contains_key(self, key: Row) -> bool:
        """Whether there is an entry under ``key``."""
        return self._look_up(self._cursor.index, key) is not None

    def update_value(self, key: Row, value: Row) -> None:
        """Set the row under ``key``."""
        index = self._cursor.index
        if key is self._last_key and index == self._last_index:
            full = self._last_full
            self._last_data = data = self._encode(value)
        else:
            full, encoded = self._full(index, key)
            data = self._encode(value)
            self._note(index, key, encoded, full, data)
        # As put_under, without the call.
        table, prefix = self._table, self._keys[index]
        table.entries[full] = data
        first = table.under.setdefault(prefix, full)
        if first is not full:
            table.list_under(prefix, first, full)

    def _put(self, prefix: bytes, full: bytes, data: bytes | None) -> None:
        self._table.put_under(prefix, full, data)
        self._last_index, self._last_full, self._last_data = _NO_INDEX, full, data

    def _remove(self, prefix: bytes, full: bytes, data: bytes) -> None:
        """Remove an entry, of which ``data`` is stored."""
        self._put(prefix, full, None)

    def _live(self) -> list[tuple[bytes, bytes]]:
        """Full key and what is stored of each entry of the current key's map."""
        return self._table.scan(self._key())

    def _read(self) -> list[tuple[bytes, bytes]]:
        """Full key and encoded row of each entry, for a user who reads the rows."""
        return self._live()

    def iterator(self) -> Iterator[tuple[Row, Row]]:
        """(map key, row) of each entry, in the order of the encoded map keys."""
        skip, decode_key, decode = len(self._key()), self._decode_key, self._decode
        return iter([(decode_key(full, skip)[0], decode(row)) for full, row in self._read()])

    def keys(self) -> Iterator[Row]:
        """The map keys."""
        skip = len(self._key())
        return iter([self._decode_key(full, skip)[0] for full, _ in self._live()])

    def values(self) -> Iterator[Row]:
        """The rows."""
        return iter([self._decode(row) for _, row in self._read()])

    def remove_key(self, key: Row) -> None:
        """Remove the entry under ``key``, if there is one."""
        index = self._cursor.index
        data = self._look_up(index, key)
        if data is not None:
            self._remove(self._keys[index], self._last_full, data)

    def clear(self) -> None:
        """Remove every entry of the current key's map."""
        prefix = self._key()
        for full, data in self._table.scan(prefix):
            self._remove(prefix, full, data)
