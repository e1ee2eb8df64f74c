"""The states of one subtask that belong to no key, in one epoch: from their blobs and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statebackend.errors import StateMismatchError
from statebackend.state.operator_state import (
    BROADCAST,
    BroadcastState,
    OperatorList,
    StoredList,
    StoredMap,
    WriteGate,
    encode_lists,
    encode_maps,
)

__all__ = ["HeldOperatorState", "OperatorSnapshot", "StoredOperatorState", "encoded"]


@dataclass(frozen=True)
class StoredOperatorState:
    """What a subtask begins with: its lists, and the operator's broadcast maps, by name."""

    lists: Mapping[str, StoredList] = field(default_factory=dict)
    maps: Mapping[str, StoredMap] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorSnapshot:
    """A subtask's operator state at the end of an epoch, as rows and as blobs.

    A blob is None if all of its states are empty. Equal content gives equal bytes. A state without
    rows is in no blob: its schema, in all versions that it has had, is in every record.
    """

    stored: StoredOperatorState
    lists: bytes | None
    maps: bytes | None


@dataclass(frozen=True)
class _Held:
    kind: str
    codec: Any
    schema: str
    key_schema: str


class HeldOperatorState:
    """Every declared state of a subtask that belongs to no key.

    Those that a processor does not ask for are carried on all the same.

    Args:
        stored: as they were stored; a state that is not there begins empty.

    Attributes:
        states: what a processor is given, by name.
        gate: whether broadcast state may be written.
    """

    def __init__(self, stored: StoredOperatorState) -> None:
        self._stored = stored
        self._held: dict[str, _Held] = {}
        self.states: dict[str, OperatorList | BroadcastState] = {}
        self.gate = WriteGate()

    def hold(
        self, name: str, kind: str, codec: Any, key_codec: Any, schema: str, key_schema: str
    ) -> None:
        """Make a declared state, from what is stored of it.

        Args:
            kind: split, union or broadcast.
            codec: writes the newest version of the schema (JSON) and reads all.

        Raises:
            StateMismatchError: it was stored as one of another kind.
            FormatError: a row does not read.
        """
        self._held[name] = _Held(kind, codec, schema, key_schema)
        self._check_kind(name, kind)
        if kind == BROADCAST:
            before = self._stored.maps.get(name)
            entries = {} if before is None else _renewed(before, codec)
            self.states[name] = BroadcastState(name, key_codec, codec, self.gate, entries)
            return
        rows: list[bytes] = []
        if (known := self._stored.lists.get(name)) is not None:
            rows = list(known.rows)
            if known.version != codec.version:
                rows = [codec.encode(row) for row in codec.decode_many(rows)]
        self.states[name] = OperatorList(name, codec, rows)

    def _check_kind(self, name: str, kind: str) -> None:
        before = BROADCAST if name in self._stored.maps else kind
        if name in self._stored.lists:
            before = self._stored.lists[name].mode
        if before != kind:
            raise StateMismatchError(
                f"State {name!r} was stored with the mode {before!r}, and is asked for with "
                f"{kind!r}.",
                todo=f"Ask for it with {before!r}, or give the new one another name.",
            )

    def snapshot(self) -> OperatorSnapshot:
        """What is there now; later changes do not show in it."""
        return encoded(self.frozen())

    def frozen(self) -> StoredOperatorState:
        """As :meth:`snapshot`, not yet as blobs (see :func:`encoded`)."""
        lists: dict[str, StoredList] = {}
        maps: dict[str, StoredMap] = {}
        for name, state in self.states.items():
            held = self._held[name]
            version = held.codec.version
            if isinstance(state, BroadcastState):
                entries = dict(state.stored())
                maps[name] = StoredMap(held.key_schema, held.schema, version, entries)
            else:
                lists[name] = StoredList(held.kind, held.schema, version, state.stored())
        return StoredOperatorState(lists, maps)


def encoded(stored: StoredOperatorState) -> OperatorSnapshot:
    """What a subtask ends with, from what was frozen of it."""
    lists = {name: one for name, one in stored.lists.items() if one.rows}
    maps = {name: one for name, one in stored.maps.items() if one.entries}
    return OperatorSnapshot(
        StoredOperatorState(lists, maps),
        encode_lists(lists) if lists else None,
        encode_maps(maps) if maps else None,
    )


def _renewed(stored: StoredMap, codec: Any) -> Mapping[bytes, bytes]:
    """The entries of a map in the newest version of its schema."""
    if stored.version == codec.version:
        return stored.entries
    rows = codec.decode_many(list(stored.entries.values()))
    return {key: codec.encode(row) for key, row in zip(stored.entries, rows, strict=True)}
