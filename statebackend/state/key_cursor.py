"""Which key is current, and the chunk of keys that is loaded around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Final, NoReturn, Protocol, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from statebackend.errors import KeyContextError
from statebackend.state.table import StateTable

__all__ = ["KeyCursor"]

Row = tuple[Any, ...]
_GROUP_BYTES: Final = 2

_join: Final = b"".join


class RowCodecLike(Protocol):
    """A value codec (see ``statebackend.schema.codec``)."""

    schema: T.StructType

    def encode(self, values: Row, /) -> bytes: ...
    def decode(self, data: bytes, /) -> Row: ...
    def decode_many(self, rows: Sequence[bytes | None]) -> list[Row | None]: ...


class KeyCodecLike(Protocol):
    """A key codec (see ``statebackend.schema.keys.key_codec``)."""

    schema: T.StructType

    def encode(self, values: Row) -> bytes: ...
    def decode(self, data: bytes, offset: int = 0) -> tuple[Row, int]: ...


class KeyCursor:
    """The chunk of keys that is loaded, and which of them is current.

    ``index`` is -1 outside a call for a key: state cannot be touched then. ``loaded_bytes``: about
    how much state was read for the chunk. ``prefixes``, ``suffixes``: key group (2 bytes) and
    encoded key of each key.
    """

    __slots__ = ("_full", "_loaders", "_tables", "index", "loaded_bytes", "prefixes", "suffixes")
    prefixes: Sequence[bytes]
    suffixes: Sequence[bytes]

    def __init__(self) -> None:
        self.index = -1
        self.prefixes = self.suffixes = ()
        self.loaded_bytes = 0
        self._full: pa.BinaryArray | None = None
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
        self._full = None
        self.prefixes, self.suffixes = key_groups, keys
        self._load()

    def load_full(self, full: pa.BinaryArray) -> None:
        """As :meth:`load`; each item is a key group and the encoded key after it."""
        self._full = full
        # Few ask for them: they are made when one does, in __getattr__.
        self.prefixes = self.suffixes = ()
        del self.prefixes, self.suffixes
        self._load()

    def _load(self) -> None:
        self.index = -1
        self.relieve()
        self.loaded_bytes = 0
        for loader in self._loaders:
            loader()

    def __getattr__(self, name: str) -> Any:
        if name not in ("prefixes", "suffixes") or self._full is None:
            raise AttributeError(name)
        full: list[bytes] = self._full.to_pylist()
        self.prefixes = [key[:_GROUP_BYTES] for key in full]
        self.suffixes = [key[_GROUP_BYTES:] for key in full]
        return getattr(self, name)

    def keys_of(self, state_id: bytes) -> list[bytes]:
        """The full key of each key in a state."""
        if self._full is not None:
            keys = pc.binary_replace_slice(self._full, _GROUP_BYTES, _GROUP_BYTES, state_id)
            return cast("list[bytes]", keys.to_pylist())
        return list(map(_join, zip(self.prefixes, repeat(state_id), self.suffixes, strict=False)))

    def outside(self, name: str = "") -> NoReturn:
        """Refuse an access to a state (without a name: to timers) without a current key."""
        what = f"State {name!r} was" if name else "Timers were"
        raise KeyContextError(
            f"{what} used outside the call for a key.",
            todo="Use states and timers only while a key's rows, timers or initial state are "
            "handled, and be done with them when the call's output ends: init, open and close "
            "have no key.",
        )
