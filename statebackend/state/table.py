"""The overlay over RocksDB, and its copy-on-write freeze.

Writes of the current epoch live in an overlay: a dict from full key to encoded value, None for
deleted. Reads go overlay, then frozen overlays (newest first), then the base. At the barrier the
overlay is frozen and a fresh one put over it: constant time, whatever the state's size.

Full key: ``key group (2 bytes, big-endian) | state id (2 bytes) | user key | sub key``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

__all__ = ["FrozenOverlay", "MemoryBase", "ReadableBase", "StateTable", "state_prefix"]

_ABSENT: Final[Any] = object()


def state_prefix(key_group: int, state_id: int) -> bytes:
    """The first four bytes of every key of one state in one key group."""
    return key_group.to_bytes(2, "big") + state_id.to_bytes(2, "big")


class ReadableBase(Protocol):
    """What a table reads confirmed state from (RocksDB, or a dict in tests)."""

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, None where absent."""

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All entries under ``prefix``, in key order."""


@dataclass
class _Overlay:
    """One epoch's changes.

    ``entries`` holds every changed key. ``under`` holds, for the states that are read by prefix,
    which of these keys stand under which prefix: a dict cannot be asked for a range.
    """

    entries: dict[bytes, bytes | None] = field(default_factory=dict)
    under: dict[bytes, set[bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class FrozenOverlay:
    """One epoch's changes after the barrier; never written again."""

    epoch: int
    _overlay: _Overlay

    def __len__(self) -> int:
        return len(self._overlay.entries)

    def sorted(self) -> tuple[list[bytes], list[bytes | None]]:
        """Keys in ascending order and their values (None: deleted), as a delta wants them."""
        entries = self._overlay.entries
        keys = sorted(entries)
        return keys, list(map(entries.__getitem__, keys))


class StateTable:
    """All keyed state of one subtask: one sorted map from bytes to bytes.

    Not thread-safe: one task owns it.
    """

    def __init__(self, base: ReadableBase) -> None:
        self.base = base
        self._overlay = _Overlay()
        self._frozen: list[FrozenOverlay] = []

    @property
    def entries(self) -> dict[bytes, bytes | None]:
        """The current overlay. Point states write to it directly; it changes at each freeze."""
        return self._overlay.entries

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        found = self._overlay.entries.get(key, _ABSENT)
        if found is _ABSENT:
            for frozen in reversed(self._frozen):
                found = frozen._overlay.entries.get(key, _ABSENT)
                if found is not _ABSENT:
                    break
            else:
                return self.base.get(key)
        return found  # type: ignore[no-any-return]

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys`` in their order; one call into the base for those not overlaid."""
        layers = [self._overlay.entries, *(f._overlay.entries for f in reversed(self._frozen))]
        layers = [layer for layer in layers if layer]
        if not layers:
            return self.base.multi_get(keys)
        values: list[bytes | None] = [None] * len(keys)
        missing: list[int] = []
        for i, key in enumerate(keys):
            for layer in layers:
                found = layer.get(key, _ABSENT)
                if found is not _ABSENT:
                    values[i] = found
                    break
            else:
                missing.append(i)
        if missing:
            read = self.base.multi_get([keys[i] for i in missing])
            for i, value in zip(missing, read, strict=True):
                values[i] = value
        return values

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set (or, with None, delete) one key."""
        self._overlay.entries[key] = value

    def put_under(self, prefix: bytes, key: bytes, value: bytes | None) -> None:
        """As :meth:`put`, for a key that :meth:`scan` must find under ``prefix``."""
        self._overlay.entries[key] = value
        self._overlay.under.setdefault(prefix, set()).add(key)

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """The live entries under ``prefix`` in key order; ``prefix`` as given to ``put_under``."""
        merged: dict[bytes, bytes | None] = dict(self.base.scan(prefix))
        changed = False
        for overlay in (*(f._overlay for f in self._frozen), self._overlay):
            for key in overlay.under.get(prefix, ()):
                merged[key] = overlay.entries[key]
                changed = True
        if not changed:
            return list(merged.items())  # type: ignore[arg-type]
        return [(key, value) for key in sorted(merged) if (value := merged[key]) is not None]

    def freeze(self, epoch: int) -> FrozenOverlay:
        """Close the epoch: constant time. Reads see through it until :meth:`applied`."""
        frozen = FrozenOverlay(epoch, self._overlay)
        self._frozen.append(frozen)
        self._overlay = _Overlay()
        return frozen

    def applied(self, frozen: FrozenOverlay) -> None:
        """The base holds ``frozen`` now (it must be the oldest that is left)."""
        if not self._frozen or self._frozen[0] is not frozen:
            raise AssertionError("frozen overlays are applied in the order of their epochs")
        del self._frozen[0]

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Every live entry in key order, overlays included: what a base delta holds."""
        merged: dict[bytes, bytes | None] = {}
        for overlay in (*(f._overlay for f in self._frozen), self._overlay):
            merged.update(overlay.entries)
        pending = iter(sorted(merged))
        upcoming = next(pending, None)
        for key, value in self.base.scan():
            while upcoming is not None and upcoming < key:
                if (over := merged[upcoming]) is not None:
                    yield upcoming, over
                upcoming = next(pending, None)
            if upcoming == key:
                if (over := merged[key]) is not None:
                    yield key, over
                upcoming = next(pending, None)
            else:
                yield key, value
        while upcoming is not None:
            if (over := merged[upcoming]) is not None:
                yield upcoming, over
            upcoming = next(pending, None)


class MemoryBase:
    """A base in memory, for tests and for models."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        return self.entries.get(key)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, None where absent."""
        return [self.entries.get(key) for key in keys]

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All entries under ``prefix``, in key order."""
        for key in sorted(self.entries):
            if key.startswith(prefix):
                yield key, self.entries[key]

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Write a delta; None deletes."""
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value
