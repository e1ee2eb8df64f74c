"""The overlay over RocksDB, and its copy-on-write freeze.

Writes of the current epoch live in an overlay: a dict from full key to encoded value, None for
deleted; in a stream what states by the column have is in `RowCache` beside it. An overlay over its
limit goes to disk as a sorted run. Reads go overlay, its runs (newest first), then frozen overlays
and layers (newest first), then the base. At the barrier the overlay is
frozen and a fresh one put over it: constant time, whatever the state's size.

Full key: ``key group (2 bytes, big-endian) | state id (2 bytes) | user key | sub key``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.state.binary_columns import (
    indices_of,
    newest,
    places_array,
    take,
    valid_bits,
)
from statebackend.state.blocks import ABSENT, SortedRows, binary_array
from statebackend.state.confirmed import BaseReads, MemoryBase, ReadableBase, after
from statebackend.state.decoded_states import DecodedStates
from statebackend.state.overlay import FrozenOverlay, Overlay
from statebackend.state.row_cache import RowCache
from statebackend.state.spill import ArrowRows, OverlayGauge, OverlaySpill, Run, merge

__all__ = ["FrozenOverlay", "MemoryBase", "ReadableBase", "StateTable", "state_prefix"]


def state_prefix(key_group: int, state_id: int) -> bytes:
    """The first four bytes of every key of one state in one key group."""
    return key_group.to_bytes(2, "big") + state_id.to_bytes(2, "big")


_END: Final = (None, None)


class StateTable:
    """All keyed state of one subtask: one sorted map from bytes to bytes.

    Not thread-safe: one task owns it. What is frozen never changes, and others may read it.

    Args:
        base: the confirmed state.
        spill: where an overlay goes that grows too large; without it, it stays in memory.
        small_writes: what is written by the column comes in many small pieces, as in a stream: it
            is kept in the dict as what is written by the key, or (`put_values`) in `RowCache`. Else
            each piece is a run of its own.
    """

    def __init__(
        self,
        base: ReadableBase,
        *,
        spill: OverlaySpill | None = None,
        small_writes: bool = False,
    ) -> None:
        self.base = base
        self.small_writes = small_writes
        self.read_bytes = 0  # of values that were read by the column
        self._reads = BaseReads(base)
        self._begin(Overlay())
        self._frozen: list[FrozenOverlay] = []
        self._spill = spill
        self._hot = DecodedStates(spill.limit_bytes / 2 if spill else math.inf)

    def _begin(self, overlay: Overlay, held_bytes: int = 0) -> None:
        self._overlay = overlay
        self._gauge = OverlayGauge()
        self._held_bytes = held_bytes  # of the runs that are in memory
        # The current overlay's, which point states write to; another after `freeze` and `relieve`.
        self.entries: dict[bytes, bytes | None] = overlay.entries
        self.under = overlay.under  # likewise

    def relieve(self) -> None:
        """Write the overlay to disk if it is over its limit; between two keys' changes, or chunks.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        spill, overlay = self._spill, self._overlay
        if spill is None:
            return
        size_bytes = self._gauge.look(overlay.entries, bool(overlay.under)) + self._held_bytes
        if size_bytes + overlay.hot_bytes <= spill.limit_bytes:
            return
        self._hot.shrink(overlay)
        if size_bytes + overlay.hot_bytes <= spill.limit_bytes:
            return
        runs = [run for run in overlay.runs if run.on_disk]
        held = [run for run in overlay.all_runs() if not run.on_disk]
        if len(held) == 1 and overlay.entries and not overlay.hot:
            runs.append(spill.write(overlay.entries))
        else:
            runs.append(spill.write_rows(SortedRows(*piece) for piece in merge(held)))
        self._begin(Overlay(runs=runs))

    def put_columns(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Set (or, where null, delete) many keys.

        Args:
            keys: strictly ascending.
        """
        if not len(keys):
            return
        if self.small_writes:
            self.entries.update(zip(keys.to_pylist(), values.to_pylist(), strict=True))
            return
        self.seal()
        self._overlay.runs.append(Run.in_memory([SortedRows(keys, values)]))
        self._held_bytes += keys.nbytes + values.nbytes

    def put_values(self, keys: pa.BinaryArray, values: pa.BinaryArray | None) -> None:
        """As :meth:`put_columns`, of one state that is written by this alone; None deletes."""
        if not len(keys):
            return
        if self.small_writes:
            overlays = self._overlays()
            if self._hot.put(overlays, keys, values, self.get_columns):
                return
        self.put_columns(keys, pa.nulls(len(keys), pa.binary()) if values is None else values)

    def get_values(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """As :meth:`get_columns`, of one state."""
        if len(keys) and self.small_writes:
            found = self._hot.get(self._overlays(), keys, self._of_base)
            if found is not None:
                self.read_bytes += found.nbytes
                return found
        return self.get_columns(keys)

    def seal(self) -> None:
        """Make columns of what was written bit by bit, so that later columns stand over it."""
        overlay = self._overlay
        if overlay.entries or overlay.hot:
            added_bytes = sum(hot.content_bytes for hot in overlay.hot.values())
            added_bytes += int(self._gauge.look(overlay.entries, bool(overlay.under)))
            runs = overlay.all_runs()
            if self.small_writes:
                runs = _fewer(runs)
            self._begin(Overlay(runs=runs), self._held_bytes + added_bytes)

    def get_columns(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The values of ``keys``, null where there is none; quickest where they ascend."""
        sources = self._sources()
        if not sources:
            found = self._of_base(keys)
        elif any(not isinstance(source, Run) or source.on_disk for source in sources):
            found = binary_array(self.multi_get(keys.to_pylist()))
        else:
            found = self._of_columns(keys, [one for one in sources if isinstance(one, Run)])
        self.read_bytes += found.nbytes
        return found

    def _of_base(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return binary_array(self._reads.get(keys))

    def _of_columns(self, keys: pa.BinaryArray, runs: list[Run]) -> pa.BinaryArray:
        """As :meth:`get_columns`, where all that lies over the base is columns in memory."""
        wanted = np.arange(len(keys))
        place = np.empty(len(keys), np.int64)
        found: list[pa.BinaryArray] = []
        total = 0
        for run in runs:
            if not len(wanted):
                break
            run_keys, run_values = run.near(keys)
            if not len(run_keys):
                continue
            some = keys if len(wanted) == len(keys) else take(keys, wanted)
            at = pc.index_in(some, value_set=run_keys)
            here = valid_bits(at)
            if here.any():
                place[wanted[here]] = total + indices_of(at)[here]
                found.append(run_values)
                total += len(run_values)
                wanted = wanted[~here]
        if len(wanted):
            missing = keys if len(wanted) == len(keys) else take(keys, wanted)
            values = self._of_base(missing)
            if not found:
                return values
            place[wanted] = total + np.arange(len(wanted))
            found.append(values)
        elif not found:
            return self._of_base(keys)
        return pa.concat_arrays(found).take(places_array(place))

    def add_layer(self, epoch: int, rows: ArrowRows | Iterable[ArrowRows]) -> FrozenOverlay:
        """Put an earlier epoch's changes below this one's; the oldest first, before any write.

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
        layer = FrozenOverlay(epoch, Overlay(runs=[run]))
        self._frozen.append(layer)
        return layer

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        found = self._overlay.entries.get(key, ABSENT)
        if found is not ABSENT:
            return found  # type: ignore[no-any-return]
        if self._frozen or self._overlay.runs or self._overlay.hot:
            for source in self._sources():
                if isinstance(source, RowCache):
                    found = source.get_many([key])[0]
                else:
                    found = source.get(key) if isinstance(source, Run) else source.get(key, ABSENT)
                if found is not ABSENT:
                    return found  # type: ignore[no-any-return]
        return self.base.get(key)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys`` in their order; one call into the base for those not overlaid."""
        values, wanted = self.multi_get_over(keys)
        if len(wanted) == len(keys):
            return self.base.multi_get(keys)
        if wanted:
            wanted.sort()
            read = self.base.multi_get([keys[place] for place in wanted])
            for place, value in zip(wanted, read, strict=True):
                values[place] = value
        return values

    def multi_get_over(self, keys: Sequence[bytes]) -> tuple[list[bytes | None], list[int]]:
        """As :meth:`multi_get`, without the base; also the places of those that it would say."""
        sources = self._sources()
        if sources and isinstance(sources[0], dict):
            values, wanted = _all_of(sources[0], keys)
            sources = sources[1:]
        else:
            values, wanted = [None] * len(keys), list(range(len(keys)))
        ends: tuple[bytes, bytes] | None = None
        for source in sources:
            if isinstance(source, Run):
                # Keys come in order: a chunk lies behind all that was spilled before it.
                ends = ends or (min(keys, default=b""), max(keys, default=b""))
                if source.touches(*ends):
                    wanted = source.get_many(keys, wanted, values, ends)
            elif isinstance(source, RowCache):
                found = source.get_many([keys[place] for place in wanted])
                wanted = _fill(values, wanted, found)
            else:
                found = [source.get(keys[place], ABSENT) for place in wanted]
                wanted = _fill(values, wanted, found)
        return values, wanted

    def _sources(self) -> list[dict[bytes, bytes | None] | RowCache | Run]:
        """What lies over the base, newest first."""
        return [source for overlay in self._overlays() for source in overlay.sources()]

    def _overlays(self) -> list[Overlay]:
        """The newest first."""
        return [self._overlay, *(frozen._overlay for frozen in reversed(self._frozen))]

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set (or, with None, delete) one key."""
        self._overlay.entries[key] = value

    def put_under(self, prefix: bytes, key: bytes, value: bytes | None) -> None:
        """As :meth:`put`, for a key that :meth:`scan` must find under ``prefix``."""
        self._overlay.entries[key] = value
        first = self._overlay.under.setdefault(prefix, key)
        if first is not key:
            self.list_under(prefix, first, key)

    def list_under(self, prefix: bytes, found: bytes | set[bytes], key: bytes) -> None:
        """Note a further key under ``prefix``, where ``found`` stands in ``under``."""
        if isinstance(found, set):
            found.add(key)
        elif found != key:
            self._overlay.under[prefix] = {found, key}

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """The live entries under ``prefix`` in key order; ``prefix`` as given to ``put_under``."""
        merged: dict[bytes, bytes | None] = dict(self.base.scan(prefix))
        changed = False
        if self._overlay.hot:
            self.seal()
        for overlay in (*(f._overlay for f in self._frozen), self._overlay):
            for run in overlay.all_runs() if overlay.hot else overlay.runs:
                for key, value in run.scan(prefix, after(prefix)):
                    merged[key] = value
                    changed = True
            found = overlay.under.get(prefix, ())
            for key in (found,) if isinstance(found, bytes) else found:
                merged[key] = overlay.entries[key]
                changed = True
        if not changed:
            return list(merged.items())  # type: ignore[arg-type]
        return [(key, live) for key in sorted(merged) if (live := merged[key]) is not None]

    def freeze(self, epoch: int) -> FrozenOverlay:
        """Close the epoch: constant time. Reads see through it until :meth:`applied`."""
        frozen = FrozenOverlay(epoch, self._overlay)
        self._hot.frozen()
        self._frozen.append(frozen)
        self._begin(Overlay())
        return frozen

    def applied(self, frozen: FrozenOverlay) -> None:
        """The base holds ``frozen`` now (it must be the oldest that is left); its runs go."""
        if not self._frozen or self._frozen[0] is not frozen:
            raise AssertionError("frozen overlays are applied in the order of their epochs")
        del self._frozen[0]
        self._hot.applied(frozen._overlay)
        for run in frozen._overlay.runs:
            run.remove()

    @property
    def sorted_runs_of_overlay(self) -> list[Run]:
        """Of :meth:`sorted_runs`, those of this epoch."""
        return list(self._overlay.runs)

    @property
    def frozen(self) -> list[FrozenOverlay]:
        """What lies between the base and the overlay, the oldest first."""
        return list(self._frozen)

    def put_joined(self, made: FrozenOverlay, layers: Sequence[FrozenOverlay]) -> None:
        """Have one layer in the place of the oldest ones, whose changes it holds (see `joined`)."""
        if self._frozen[: len(layers)] != list(layers):
            raise AssertionError("the oldest frozen overlays are joined")
        self._frozen[: len(layers)] = [made]

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Every live entry in key order, overlays included: what a base delta holds."""
        return self.snapshot_under([*self._frozen, FrozenOverlay(-1, self._overlay)])

    def snapshot_under(self, layers: Sequence[FrozenOverlay]) -> Iterator[tuple[bytes, bytes]]:
        """As :meth:`snapshot`, of the base and these layers (the oldest first).

        They need not be the table's any more; the base may hold some of them meanwhile.
        """
        pending = _changes(layers)
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


def _all_of(
    source: dict[bytes, bytes | None], keys: Sequence[bytes]
) -> tuple[list[bytes | None], list[int]]:
    """The value of each key in a first source, and the places of those that it does not have."""
    values: list[Any] = list(map(source.get, keys, repeat(ABSENT)))
    missing = [place for place, value in enumerate(values) if value is ABSENT]
    for place in missing:
        values[place] = None
    return values, missing


def _fill(values: list[bytes | None], wanted: list[int], found: Sequence[Any]) -> list[int]:
    """Put what was found in its places; the places that are still wanted."""
    missing = []
    for place, value in zip(wanted, found, strict=True):
        if value is ABSENT:
            missing.append(place)
        else:
            values[place] = value
    return missing


def _changes(layers: Sequence[FrozenOverlay]) -> Iterator[tuple[bytes, bytes | None]]:
    """All that lies over the base, in key order."""
    overlays = [layer._overlay for layer in layers]
    if any(overlay.runs or overlay.hot for overlay in overlays):
        for keys, values in merge([run for o in overlays for run in o.all_runs()]):
            yield from zip(keys.to_pylist(), values.to_pylist(), strict=True)
        return
    merged: dict[bytes, bytes | None] = {}
    for overlay in overlays:
        merged.update(overlay.entries)
    for key in sorted(merged):
        yield key, merged[key]


def _fewer(runs: list[Run]) -> list[Run]:
    """The same changes in runs of which each is a good deal larger than the next."""
    while len(runs) > 1 and not runs[-2].on_disk and len(runs[-2]) < 2 * len(runs[-1]):
        merged = newest([runs[-2].columns, runs[-1].columns])
        runs = [*runs[:-2], Run.in_memory([SortedRows(*merged)])]
    return runs
