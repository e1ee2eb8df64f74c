"""The overlay over RocksDB, and its copy-on-write freeze.

Writes of the current epoch live in an overlay: a dict from full key to encoded value, None for
deleted. An overlay over its limit goes to disk as a sorted run. Reads go overlay, its runs (newest
first), then frozen overlays and layers (newest first), then the base. At the barrier the overlay is
frozen and a fresh one put over it: constant time, whatever the state's size.

Full key: ``key group (2 bytes, big-endian) | state id (2 bytes) | user key | sub key``.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from statebackend.state.blocks import ABSENT, SortedRows, binary_array
from statebackend.state.spill import (
    ArrowRows,
    OverlayGauge,
    OverlaySpill,
    Run,
    count_merged,
    merge,
)

__all__ = ["FrozenOverlay", "MemoryBase", "ReadableBase", "StateTable", "state_prefix"]


def state_prefix(key_group: int, state_id: int) -> bytes:
    """The first four bytes of every key of one state in one key group."""
    return key_group.to_bytes(2, "big") + state_id.to_bytes(2, "big")


_END: tuple[None, None] = (None, None)


def _in_order(entries: dict[bytes, bytes | None]) -> tuple[list[bytes], list[bytes | None]]:
    keys = sorted(entries)
    return keys, list(map(entries.__getitem__, keys))


KeyRange = tuple[bytes, bytes, bytes]


class ReadableBase(Protocol):
    """What a table reads confirmed state from (RocksDB, or a dict in tests)."""

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, None where absent."""

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All entries under ``prefix``, in key order."""

    def scan_keys(self, ranges: Iterable[KeyRange]) -> Iterator[list[bytes]]:
        """The keys of ranges that ascend and do not overlap, in pieces, in key order.

        Of a range (start, end, stop): all keys from ``start`` below ``end``, and the first one
        after them that is below ``stop``.
        """


@dataclass
class _Overlay:
    """One epoch's changes.

    ``entries`` holds every changed key. ``under`` holds, for the states that are read by prefix,
    which of these keys stand under which prefix: a dict cannot be asked for a range. ``runs`` are
    the parts that left these dicts, oldest first; a key in ``entries`` beats them.
    """

    entries: dict[bytes, bytes | None] = field(default_factory=dict)
    under: dict[bytes, set[bytes]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def sources(self) -> Iterator[dict[bytes, bytes | None] | Run]:
        """What to look a key up in, newest first."""
        if self.entries:
            yield self.entries
        yield from reversed(self.runs)

    def all_runs(self) -> list[Run]:
        """Everything as runs, oldest first; what is in the dict as one more in memory."""
        if not self.entries:
            return self.runs
        keys, values = _in_order(self.entries)
        return [*self.runs, Run.in_memory([SortedRows(binary_array(keys), binary_array(values))])]


@dataclass(frozen=True)
class FrozenOverlay:
    """One epoch's changes after the barrier (or a layer); never written again."""

    epoch: int
    _overlay: _Overlay

    @property
    def spilled(self) -> bool:
        """Whether some of it stands in runs: then :meth:`merged` is the way to read it."""
        return bool(self._overlay.runs)

    @functools.cached_property
    def _ordered(self) -> tuple[list[bytes], list[bytes | None]]:
        return _in_order(self._overlay.entries)  # for the delta, and for the next epoch

    def __len__(self) -> int:
        if not self.spilled:
            return len(self._overlay.entries)
        return count_merged(self._overlay.all_runs())

    def sorted(self) -> tuple[list[bytes], list[bytes | None]]:
        """Keys in ascending order and their values (None: deleted), as a delta wants them."""
        if not self.spilled:
            return self._ordered
        keys: list[bytes] = []
        values: list[bytes | None] = []
        for some_keys, some_values in self.merged():
            keys += some_keys.to_pylist()
            values += some_values.to_pylist()
        return keys, values

    @functools.cached_property
    def runs(self) -> list[Run]:
        """All of it as runs, oldest first, to be read by the range."""
        return self._overlay.all_runs()

    def merged(self) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
        """As :meth:`sorted`, in pieces: binary keys and values (null: deleted)."""
        return merge(self._overlay.all_runs())


class StateTable:
    """All keyed state of one subtask: one sorted map from bytes to bytes.

    Not thread-safe: one task owns it.

    Args:
        base: the confirmed state.
        spill: where an overlay goes that grows too large; without it, it stays in memory.
    """

    def __init__(self, base: ReadableBase, *, spill: OverlaySpill | None = None) -> None:
        self.base = base
        self._begin(_Overlay())
        self._frozen: list[FrozenOverlay] = []
        self._spill = spill
        self._gauge = OverlayGauge()

    def _begin(self, overlay: _Overlay) -> None:
        self._overlay = overlay
        # The current overlay's. Point states write to it directly, so it is a plain attribute; it
        # is another dict after each `freeze` and `relieve`: do not keep it.
        self.entries: dict[bytes, bytes | None] = overlay.entries

    def relieve(self) -> None:
        """Write the overlay to disk if it is over its limit; between two keys' changes, or chunks.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        spill, overlay = self._spill, self._overlay
        if spill is None:
            return
        if self._gauge.look(overlay.entries, bool(overlay.under)) <= spill.limit_bytes:
            return
        run = spill.write(overlay.entries)
        self._begin(_Overlay(runs=[*overlay.runs, run]))
        self._gauge = OverlayGauge()

    def add_layer(self, epoch: int, rows: ArrowRows | Iterable[ArrowRows]) -> FrozenOverlay:
        """Put the changes of an earlier epoch, not yet in the base, below this one's.

        Layers are added oldest first, before anything is written.

        Args:
            rows: one block, which stays in memory, or blocks in key order. Of these more than a
                share of the spill's limit goes to disk, with one block in memory at a time.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        if not isinstance(rows, Iterable):
            run = Run.in_memory([rows])
        elif self._spill is None:
            run = Run.in_memory(rows)
        else:
            run = self._spill.keep(rows)
        layer = FrozenOverlay(epoch, _Overlay(runs=[run]))
        self._frozen.append(layer)
        return layer

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        found = self._overlay.entries.get(key, ABSENT)
        if found is not ABSENT:
            return found  # type: ignore[no-any-return]
        if self._frozen or self._overlay.runs:
            for source in self._sources():
                found = source.get(key) if isinstance(source, Run) else source.get(key, ABSENT)
                if found is not ABSENT:
                    return found  # type: ignore[no-any-return]
        return self.base.get(key)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys`` in their order; one call into the base for those not overlaid."""
        sources = self._sources()
        if not sources:
            return self.base.multi_get(keys)
        values: list[bytes | None] = [None] * len(keys)
        wanted = list(range(len(keys)))
        ends: tuple[bytes, bytes] | None = None
        for source in sources:
            if isinstance(source, Run):
                # Keys come in order: a chunk lies behind all that was spilled before it.
                ends = ends or (min(keys, default=b""), max(keys, default=b""))
                if source.touches(*ends):
                    wanted = source.get_many(keys, wanted, values, ends)
                continue
            missing = []
            for place in wanted:
                found = source.get(keys[place], ABSENT)
                if found is ABSENT:
                    missing.append(place)
                else:
                    values[place] = found
            wanted = missing
        if wanted:
            wanted.sort()
            read = self.base.multi_get([keys[place] for place in wanted])
            for place, value in zip(wanted, read, strict=True):
                values[place] = value
        return values

    def _sources(self) -> list[dict[bytes, bytes | None] | Run]:
        """What lies over the base, newest first."""
        sources = list(self._overlay.sources())
        for frozen in reversed(self._frozen):
            sources += frozen._overlay.sources()
        return sources

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
            for run in overlay.runs:
                for key, value in run.scan(prefix):
                    merged[key] = value
                    changed = True
            for key in overlay.under.get(prefix, ()):
                merged[key] = overlay.entries[key]
                changed = True
        if not changed:
            return list(merged.items())  # type: ignore[arg-type]
        return [(key, live) for key in sorted(merged) if (live := merged[key]) is not None]

    def freeze(self, epoch: int) -> FrozenOverlay:
        """Close the epoch: constant time. Reads see through it until :meth:`applied`."""
        frozen = FrozenOverlay(epoch, self._overlay)
        self._frozen.append(frozen)
        self._begin(_Overlay())
        self._gauge = OverlayGauge()
        return frozen

    def applied(self, frozen: FrozenOverlay) -> None:
        """The base holds ``frozen`` now (it must be the oldest that is left); its runs go."""
        if not self._frozen or self._frozen[0] is not frozen:
            raise AssertionError("frozen overlays are applied in the order of their epochs")
        del self._frozen[0]
        for run in frozen._overlay.runs:
            run.remove()

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Every live entry in key order, overlays included: what a base delta holds."""
        pending = self._changes()
        upcoming, over = next(pending, _END)
        for key, value in self.base.scan():
            while upcoming is not None and upcoming < key:
                if over is not None:
                    yield upcoming, over
                upcoming, over = next(pending, _END)
            if upcoming == key:
                if over is not None:
                    yield key, over
                upcoming, over = next(pending, _END)
            else:
                yield key, value
        while upcoming is not None:
            if over is not None:
                yield upcoming, over
            upcoming, over = next(pending, _END)

    def sorted_runs(self) -> tuple[list[Run], list[Run]]:
        """What can be read by the range above the base, oldest first.

        Returns:
            the runs of earlier epochs, and those of this one: with :attr:`entries` they are all.
        """
        return [run for frozen in self._frozen for run in frozen.runs], list(self._overlay.runs)

    def _changes(self) -> Iterator[tuple[bytes, bytes | None]]:
        """All that lies over the base, in key order."""
        overlays = [*(frozen._overlay for frozen in self._frozen), self._overlay]
        if any(overlay.runs for overlay in overlays):
            for keys, values in merge([run for o in overlays for run in o.all_runs()]):
                yield from zip(keys.to_pylist(), values.to_pylist(), strict=True)
            return
        merged: dict[bytes, bytes | None] = {}
        for overlay in overlays:
            merged.update(overlay.entries)
        for key in sorted(merged):
            yield key, merged[key]


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

    def scan_keys(self, ranges: Iterable[KeyRange]) -> Iterator[list[bytes]]:
        """As :meth:`ReadableBase.scan_keys`."""
        keys = sorted(self.entries)
        for start, end, stop in ranges:
            low, high = bisect_left(keys, start), bisect_left(keys, end)
            if high < len(keys) and keys[high] < stop:
                high += 1
            if low < high:
                yield keys[low:high]

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Write a delta; None deletes."""
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value
