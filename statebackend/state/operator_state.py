"""Operator state: rows that belong to a subtask and not to a key, and maps that all subtasks share.

It is held in memory and is small: offsets, rules, settings. Rows are kept as they are encoded, so
that a value which is changed after it was handed over shows neither in the state nor in a snapshot.

A *list* is of one subtask. When the parallelism changes, lists in mode ``split`` are concatenated
in the order of the old subtasks and cut into runs whose lengths differ by at most one, the longer
ones first; lists in mode ``union`` go to every subtask whole. A *broadcast* map is the same in all
subtasks, and stored once.

Blobs (part of the format): magic (8 bytes), format version (1 byte), the first 16 bytes of blake3
over what follows, then one msgpack array of the states, sorted by name:

* lists, ``SBOPLIST``: ``[name, mode, schema (JSON), schema version, [row, ...]]``
* maps, ``SBOPBCST``: ``[name, key schema (JSON), schema (JSON), schema version, [[key, row],
  ...]]``, sorted by key, so that maps of equal content are equal bytes.

Rows and keys are in the codecs of `statebackend.schema`; all rows of a state are of one version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgspec
from blake3 import blake3

from statebackend.errors import (
    BroadcastWriteError,
    CorruptionError,
    SettingError,
    StateMismatchError,
    UnsupportedFormatError,
)
from statebackend.state.cells import is_flat
from statebackend.state.unbound import OfOneEpoch

__all__ = [
    "BROADCAST",
    "LIST_MODES",
    "BroadcastState",
    "OperatorList",
    "StoredList",
    "StoredMap",
    "WriteGate",
    "decode_lists",
    "decode_maps",
    "encode_lists",
    "encode_maps",
    "redistribute",
]

LIST_MODES: Final = ("split", "union")
"""Of a list: what becomes of it when the parallelism changes."""
BROADCAST: Final = "broadcast"
"""The kind of a map that all subtasks share."""

_FORMAT: Final = 1
_MAGIC_BYTES: Final = 8
_DIGEST_BYTES: Final = 16
_HEAD_BYTES: Final = _MAGIC_BYTES + 1 + _DIGEST_BYTES
_LISTS_MAGIC: Final = b"SBOPLIST"
_MAPS_MAGIC: Final = b"SBOPBCST"

Row = tuple[Any, ...]
_Blob = TypeVar("_Blob")


@dataclass(frozen=True)
class StoredList:
    """A list as it is stored: encoded rows, all of one version of its schema (JSON)."""

    mode: str
    schema: str
    version: int
    rows: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class StoredMap:
    """A broadcast map as it is stored: encoded keys and rows. Its entries are never changed."""

    key_schema: str
    schema: str
    version: int
    entries: Mapping[bytes, bytes]


# --- blobs -------------------------------------------------------------------------------------


class _ListBlob(msgspec.Struct, array_like=True, frozen=True):
    name: str
    mode: str
    schema: str
    version: int
    rows: tuple[bytes, ...]


class _MapBlob(msgspec.Struct, array_like=True, frozen=True):
    name: str
    key_schema: str
    schema: str
    version: int
    entries: list[tuple[bytes, bytes]]


_pack = msgspec.msgpack.Encoder().encode
_lists_decoder = msgspec.msgpack.Decoder(list[_ListBlob])
_maps_decoder = msgspec.msgpack.Decoder(list[_MapBlob])


def encode_lists(lists: Mapping[str, StoredList]) -> bytes:
    """One subtask's lists, by name, as a blob; equal content gives equal bytes."""
    some = [
        _ListBlob(name, one.mode, one.schema, one.version, one.rows)
        for name, one in sorted(lists.items())
    ]
    return _sealed(_LISTS_MAGIC, _pack(some))


def decode_lists(blob: bytes, name: str = "") -> dict[str, StoredList]:
    """The lists in a blob.

    Args:
        name: of what it was read from, for errors.

    Raises:
        CorruptionError: truncated, flipped or foreign bytes.
        UnsupportedFormatError: a later format.
    """
    found = _opened(blob, _LISTS_MAGIC, _lists_decoder, name)
    lists = {}
    for one in found:
        if one.mode not in LIST_MODES:
            raise _damaged(name, f"state {one.name!r} has the mode {one.mode!r}")
        if any(row[:1] != bytes([one.version & 0xFF]) for row in one.rows):
            raise _damaged(name, f"a row of state {one.name!r} is of another schema version")
        lists[one.name] = StoredList(one.mode, one.schema, one.version, one.rows)
    return lists


def encode_maps(maps: Mapping[str, StoredMap]) -> bytes:
    """An operator's broadcast maps, by name, as a blob; equal content gives equal bytes."""
    some = [
        _MapBlob(name, one.key_schema, one.schema, one.version, sorted(one.entries.items()))
        for name, one in sorted(maps.items())
    ]
    return _sealed(_MAPS_MAGIC, _pack(some))


def decode_maps(blob: bytes, name: str = "") -> dict[str, StoredMap]:
    """The broadcast maps in a blob. Args, raises: as :func:`decode_lists`."""
    found = _opened(blob, _MAPS_MAGIC, _maps_decoder, name)
    maps = {}
    for one in found:
        keys = [key for key, _ in one.entries]
        if any(low >= high for low, high in pairwise(keys)):
            raise _damaged(name, f"the keys of state {one.name!r} are not in order")
        if any(row[:1] != bytes([one.version & 0xFF]) for _, row in one.entries):
            raise _damaged(name, f"a row of state {one.name!r} is of another schema version")
        maps[one.name] = StoredMap(one.key_schema, one.schema, one.version, dict(one.entries))
    return maps


def _sealed(magic: bytes, content: bytes) -> bytes:
    return b"".join((magic, bytes([_FORMAT]), blake3(content).digest(_DIGEST_BYTES), content))


def _opened(
    blob: bytes, magic: bytes, decoder: msgspec.msgpack.Decoder[list[_Blob]], name: str
) -> list[_Blob]:
    if len(blob) < _HEAD_BYTES or blob[:_MAGIC_BYTES] != magic:
        raise _damaged(name, f"its {len(blob)} bytes do not begin as operator state")
    version = blob[_MAGIC_BYTES]
    if version > _FORMAT:
        raise UnsupportedFormatError(
            f"The operator state{_in(name)} has the format version {version}; this release reads "
            f"up to {_FORMAT}.",
            todo="Use a release that is at least as new as the one that wrote it.",
        )
    content = blob[_HEAD_BYTES:]
    digest = blob[_MAGIC_BYTES + 1 : _HEAD_BYTES]
    if version < 1 or blake3(content).digest(_DIGEST_BYTES) != digest:
        raise _damaged(name, "its digest is another")
    try:
        found = decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(name, f"it does not read ({error})") from error
    names = [one.name for one in found]  # type: ignore[attr-defined]
    if names != sorted(set(names)):
        raise _damaged(name, "its states are not in order, or one is there twice")
    return found


def _in(name: str) -> str:
    return f" in {name!r}" if name else ""


def _damaged(name: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"The operator state{_in(name)} is damaged or foreign: {reason}.",
        todo="Restore it from another copy of the store.",
    )


# --- another parallelism -------------------------------------------------------------------------


def redistribute(
    old: Sequence[Mapping[str, StoredList]], parallelism: int, index: int
) -> dict[str, StoredList]:
    """The lists that one subtask begins with.

    Args:
        old: of every subtask before, in their order.
        parallelism: subtasks now. index: which of them.

    Raises:
        SettingError: there is no such subtask.
        StateMismatchError: old subtasks have one state in several modes.
    """
    if not 0 <= index < parallelism:
        raise SettingError(f"There is no subtask {index} of {parallelism}.")
    found: dict[str, list[StoredList]] = {}
    for lists in old:
        for name, one in lists.items():
            found.setdefault(name, []).append(one)
    return {
        name: _redistributed(name, some, old, parallelism, index)
        for name, some in sorted(found.items())
    }


def _redistributed(
    name: str,
    some: Sequence[StoredList],
    old: Sequence[Mapping[str, StoredList]],
    parallelism: int,
    index: int,
) -> StoredList:
    shapes = {(one.mode, one.schema, one.version) for one in some}
    if len(shapes) > 1:
        raise StateMismatchError(
            f"The subtasks of a checkpoint have the operator state {name!r} in several modes or "
            f"schemas ({', '.join(sorted(f'{m}, version {v}' for m, _, v in shapes))}).",
            todo="Report this: all subtasks of one epoch declare the same.",
        )
    (mode, schema, version) = shapes.pop()
    if mode == "split" and len(old) == parallelism:
        rows: tuple[bytes, ...] = old[index][name].rows if name in old[index] else ()
    else:
        rows = tuple(row for one in some for row in one.rows)
    if mode == "split" and len(old) != parallelism:
        each, longer = divmod(len(rows), parallelism)
        start = index * each + min(index, longer)
        rows = rows[start : start + each + (index < longer)]
    return StoredList(mode, schema, version, rows)


# --- what a processor is given -------------------------------------------------------------------


class OperatorList(OfOneEpoch):
    """Rows of one subtask, in the order in which they were added; they belong to no key."""

    def __init__(self, name: str, codec: Any, rows: Iterable[bytes] = ()) -> None:
        self._name = name
        self._codec = codec
        self._rows = list(rows)

    def get(self) -> Iterator[Row]:
        """The rows; later changes do not show in the iterator."""
        return iter(self._codec.decode_many(self._rows))

    def add(self, row: Row, /) -> None:
        """Append a row.

        Raises:
            ValueMismatchError: it does not fit the schema.
        """
        self._rows.append(self._codec.encode(row))

    def update(self, rows: Iterable[Row], /) -> None:
        """Replace all rows; none is fine. Raises as :meth:`add`, and changes nothing then."""
        self._rows = [self._codec.encode(row) for row in rows]

    def clear(self) -> None:
        """Remove all rows."""
        self._rows = []

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def stored(self) -> tuple[bytes, ...]:
        """The rows as they are encoded."""
        return tuple(self._rows)


class WriteGate:
    """Whether broadcast state may be written now: in ``process_broadcast`` only."""

    def __init__(self) -> None:
        self.is_open = False


class BroadcastState(OfOneEpoch):
    """A map that is the same in every subtask; it belongs to no key.

    It can be read everywhere, and written in ``process_broadcast`` alone: there every subtask is
    given the same rows in the same order, so that all of them come to the same map.

    Args:
        entries: encoded keys and rows; they are not changed.
    """

    def __init__(
        self,
        name: str,
        key_codec: Any,
        codec: Any,
        gate: WriteGate,
        entries: Mapping[bytes, bytes] | None = None,
    ) -> None:
        self._name, self._gate = name, gate
        self._key_codec, self._codec = key_codec, codec
        self._entries: Mapping[bytes, bytes] = {} if entries is None else entries
        self._own: dict[bytes, bytes] | None = None  # a copy, once something is written
        # Rows that nobody can change are decoded once: a rule is read for every key.
        self._keeps = is_flat(codec.schema)
        self._known: dict[bytes, Row] = {}
        self._items: list[tuple[Row, Row]] | None = None
        self._items_kept = self._keeps and is_flat(key_codec.schema)

    def get(self, key: Row, /) -> Row | None:
        """The row under a key, or None.

        Raises:
            ValueMismatchError: it is no key of the schema.
        """
        encoded = self._key_codec.encode(key)
        row = self._known.get(encoded)
        if row is not None:
            return row
        found = self._entries.get(encoded)
        if found is None:
            return None
        decoded: Row = self._codec.decode(found)
        if self._keeps:
            self._known[encoded] = decoded
        return decoded

    def contains(self, key: Row, /) -> bool:
        """Whether there is an entry."""
        return self._key_codec.encode(key) in self._entries

    def items(self) -> Iterator[tuple[Row, Row]]:
        """(key, row) of every entry, in one order in all subtasks; later changes do not show."""
        if self._items is not None:
            return iter(self._items)
        keys = sorted(self._entries)
        rows = self._codec.decode_many([self._entries[key] for key in keys])
        decode = self._key_codec.decode
        items = [(decode(key)[0], row) for key, row in zip(keys, rows, strict=True)]
        if self._items_kept:
            self._items = items
        return iter(items)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._entries)

    def put(self, key: Row, row: Row, /) -> None:
        """Set an entry.

        Raises:
            BroadcastWriteError: called outside ``process_broadcast``.
            ValueMismatchError: key or row do not fit their schemas.
        """
        entries, encoded = self._writable(), self._key_codec.encode(key)
        entries[encoded] = self._codec.encode(row)
        self._known.pop(encoded, None)

    def remove(self, key: Row, /) -> None:
        """Remove an entry, if there is one. Raises as :meth:`put`."""
        entries, encoded = self._writable(), self._key_codec.encode(key)
        entries.pop(encoded, None)
        self._known.pop(encoded, None)

    def clear(self) -> None:
        """Remove all entries. Raises as :meth:`put`."""
        self._writable().clear()
        self._known.clear()

    def _writable(self) -> dict[bytes, bytes]:
        if not self._gate.is_open:
            raise BroadcastWriteError(
                f"Broadcast state {self._name!r} was written outside process_broadcast().",
                todo="It must be the same in all subtasks, and only process_broadcast() is given "
                "the same rows in the same order in all of them: write it there, and keep what "
                "belongs to a key in value, list or map state.",
            )
        if self._own is None:
            self._entries = self._own = dict(self._entries)
        self._items = None
        return self._own

    def stored(self) -> Mapping[bytes, bytes]:
        """The entries as they are encoded; to be copied by who goes on writing."""
        return self._entries
