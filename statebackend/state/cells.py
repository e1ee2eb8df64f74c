"""The kinds of keyed state: value, list and map, each read and written for the current key.

A :class:`KeyCursor` says which key is current. Keys are loaded by the chunk, so that the point
states of a whole chunk cost one multi-get; within it a read is a list index.

Layout under a state's prefix for one key (``p = key group | state id | user key``):

* value: ``p`` -> row
* list: ``p`` -> count (8 bytes, big-endian); ``p | index (8 bytes)`` -> row
* map: ``p | map key`` -> row
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from statebackend.errors import KeyContextError, LocalCopyError, ValueMismatchError
from statebackend.state.table import StateTable

__all__ = ["KeyCursor", "ListCell", "MapCell", "ValueCell"]

Row = tuple[Any, ...]
_COUNT_BYTES = 8
_SAMPLED_KEYS = 16


class RowCodecLike(Protocol):
    """A value codec (see ``statebackend.schema.codec``)."""

    def encode(self, values: Row) -> bytes: ...
    def decode(self, data: bytes) -> Row: ...


class KeyCodecLike(Protocol):
    """A key codec (see ``statebackend.schema.keys``)."""

    def encode(self, values: Row) -> bytes: ...
    def decode(self, data: bytes, offset: int = 0) -> tuple[Row, int]: ...


class KeyCursor:
    """The chunk of keys that is loaded, and which of them is current.

    ``index`` is -1 outside a call for a key: state cannot be touched then. ``loaded_bytes``: about
    how much state was read for the chunk.
    """

    __slots__ = ("_loaders", "_tables", "index", "loaded_bytes", "prefixes", "suffixes")

    def __init__(self) -> None:
        self.index = -1
        self.prefixes: Sequence[bytes] = ()
        self.suffixes: Sequence[bytes] = ()
        self.loaded_bytes = 0
        self._loaders: list[Callable[[], None]] = []
        self._tables: list[StateTable] = []

    def attach(self, loader: Callable[[], None], table: StateTable | None = None) -> None:
        """``loader`` is called after each :meth:`load`; ``table`` is what it reads."""
        self._loaders.append(loader)
        if table is not None and table not in self._tables:
            self._tables.append(table)

    def relieve(self) -> None:
        """Let tables spill that have grown over their limit; never between a read and its write."""
        for table in self._tables:
            table.relieve()

    def load(self, key_groups: Sequence[bytes], keys: Sequence[bytes]) -> None:
        """Make a chunk of keys available.

        Args:
            key_groups: the key group of each key, 2 bytes, big-endian.
            keys: the encoded user keys, ascending within a key group.
        """
        self.index = -1
        self.relieve()
        self.loaded_bytes = 0
        self.prefixes = key_groups
        self.suffixes = keys
        for loader in self._loaders:
            loader()

    def outside(self, name: str) -> NoReturn:
        """Refuse an access without a current key."""
        raise KeyContextError(
            f"State {name!r} was used outside the call for a key.",
            todo="Use state only inside handleInputRows, and finish with it before the next key.",
        )


class _Cell:
    """What every kind shares: its name, and the full key (prefix) of each loaded key."""

    def __init__(self, cursor: KeyCursor, table: StateTable, name: str, state_id: int) -> None:
        self._cursor = cursor
        self._table = table
        self._name = name
        self._id = state_id.to_bytes(2, "big")
        self._keys: list[bytes] = []
        cursor.attach(self._load, table)

    def _load(self) -> None:
        cursor, state_id = self._cursor, self._id
        self._keys = [
            group + state_id + key
            for group, key in zip(cursor.prefixes, cursor.suffixes, strict=True)
        ]

    def _key(self) -> bytes:
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        return self._keys[index]


class ValueCell(_Cell):
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
        self._current: list[bytes | None] = []

    def _load(self) -> None:
        super()._load()
        self._current = self._table.multi_get(self._keys)
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
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        data = self._current[index]
        return None if data is None else self._decode(data)

    def update(self, newValue: Row) -> None:
        """Set the current key's row.

        Raises:
            ValueMismatchError: it does not fit the schema.
        """
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        data = self._encode(newValue)
        self._current[index] = data
        self._table.entries[self._keys[index]] = data

    def clear(self) -> None:
        """Remove the current key's row."""
        index = self._cursor.index
        if index < 0:
            self._cursor.outside(self._name)
        if self._current[index] is not None:
            self._current[index] = None
            self._table.entries[self._keys[index]] = None


class ListCell(_Cell):
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
        self._counts: list[bytes | None] = []

    def _load(self) -> None:
        super()._load()
        self._counts = self._table.multi_get(self._keys)

    def _count(self) -> int:
        data = self._counts[self._cursor.index]
        return 0 if data is None else int.from_bytes(data, "big")

    def _set_count(self, key: bytes, count: int) -> None:
        data = count.to_bytes(_COUNT_BYTES, "big") if count else None
        self._counts[self._cursor.index] = data
        self._table.put(key, data)

    def exists(self) -> bool:
        """Whether the current key has at least one row."""
        self._key()
        return self._count() > 0

    def get(self) -> Iterator[Row]:
        """The current key's rows; later changes do not show in the iterator."""
        key, count = self._key(), self._count()
        data = self._table.multi_get([key + i.to_bytes(_COUNT_BYTES, "big") for i in range(count)])
        if None in data:
            raise LocalCopyError(
                f"List state {self._name!r} has {count} elements, but one of them is missing.",
                todo="The local store is set aside; the state is restored from the next good copy.",
            )
        return iter([self._decode(row) for row in data])  # type: ignore[arg-type]

    def put(self, newState: list[Row]) -> None:
        """Replace the current key's rows.

        Raises:
            ValueMismatchError: a row does not fit the schema, or there is none (use ``clear``).
        """
        rows = self._encoded(newState)
        key, before = self._key(), self._count()
        for i, row in enumerate(rows):
            self._table.put(key + i.to_bytes(_COUNT_BYTES, "big"), row)
        for i in range(len(rows), before):
            self._table.put(key + i.to_bytes(_COUNT_BYTES, "big"), None)
        self._set_count(key, len(rows))

    def append(self, newState: Row) -> None:
        """Add one row at the end."""
        key = self._key()
        count = self._count()
        self._table.put(key + count.to_bytes(_COUNT_BYTES, "big"), self._encode(newState))
        self._set_count(key, count + 1)

    def extend(self, newState: list[Row]) -> None:
        """Add rows at the end."""
        rows = self._encoded(newState)
        key, count = self._key(), self._count()
        for i, row in enumerate(rows, start=count):
            self._table.put(key + i.to_bytes(_COUNT_BYTES, "big"), row)
        self._set_count(key, count + len(rows))

    def clear(self) -> None:
        """Remove the current key's rows."""
        key, count = self._key(), self._count()
        if not count:
            return
        for i in range(count):
            self._table.put(key + i.to_bytes(_COUNT_BYTES, "big"), None)
        self._set_count(key, 0)

    def _encoded(self, rows: list[Row]) -> list[bytes]:
        # All are encoded before one is written: a bad row leaves the list as it was.
        encoded = [self._encode(row) for row in rows]
        if not encoded:
            raise ValueMismatchError(
                f"An empty list was written to list state {self._name!r}.",
                todo="Call clear() to remove the list; as in Spark, a list state is never empty.",
            )
        return encoded


class MapCell(_Cell):
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

    def exists(self) -> bool:
        """Whether the current key's map has an entry."""
        return bool(self._table.scan(self._key()))

    def get_value(self, key: Row) -> Row | None:
        """The row under ``key``, or None."""
        data = self._table.get(self._key() + self._encode_key(key))
        return None if data is None else self._decode(data)

    def contains_key(self, key: Row) -> bool:
        """Whether there is an entry under ``key``."""
        return self._table.get(self._key() + self._encode_key(key)) is not None

    def update_value(self, key: Row, value: Row) -> None:
        """Set the row under ``key``."""
        prefix = self._key()
        self._table.put_under(prefix, prefix + self._encode_key(key), self._encode(value))

    def iterator(self) -> Iterator[tuple[Row, Row]]:
        """(map key, row) of each entry, in the order of the encoded map keys."""
        prefix = self._key()
        skip, decode_key, decode = len(prefix), self._decode_key, self._decode
        return iter(
            [(decode_key(key, skip)[0], decode(value)) for key, value in self._table.scan(prefix)]
        )

    def keys(self) -> Iterator[Row]:
        """The map keys."""
        prefix = self._key()
        skip = len(prefix)
        return iter([self._decode_key(key, skip)[0] for key, _ in self._table.scan(prefix)])

    def values(self) -> Iterator[Row]:
        """The rows."""
        return iter([self._decode(value) for _, value in self._table.scan(self._key())])

    def remove_key(self, key: Row) -> None:
        """Remove the entry under ``key``, if there is one."""
        prefix = self._key()
        full = prefix + self._encode_key(key)
        if self._table.get(full) is not None:
            self._table.put_under(prefix, full, None)

    def clear(self) -> None:
        """Remove every entry of the current key's map."""
        prefix = self._key()
        for key, _ in self._table.scan(prefix):
            self._table.put_under(prefix, key, None)
