"""A store in parts: several databases under one face, each with key groups of its own.

It is how a store is made of others without writing them anew: each of them is hard-linked and
clipped. ``PARTS`` in the store's folder says which part holds what (see
:mod:`statebackend.rocks.parts_layout`); a folder without it is one database.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, Protocol

import msgspec

from statebackend.errors import LocalCopyError, StateBackendError
from statebackend.rocks.clipping import LAST_GROUP, group_key
from statebackend.rocks.parts_layout import LAYOUT_FILE, Layout, Routes, read_layout, write_layout
from statebackend.rocks.rocksdb_errors import classify
from statebackend.rocks.rocksdb_options import RocksSettings
from statebackend.rocks.rocksdb_reads import META_PREFIX, KeyRange
from statebackend.rocks.store import Marker, RocksStore, Rows, StoreSlice
from statebackend.rocks.store_figures import joined_figures

__all__ = ["Opener", "PartedStore", "Store", "open_database", "open_store"]

_GROUP_BYTES: Final = 2


class Opener(Protocol):
    """Opens one database, as `RocksStore.open`."""

    def __call__(
        self, path: str, settings: RocksSettings | None = None, *, make: bool = True
    ) -> RocksStore:
        """Open it, or make an empty one."""


def open_database(
    path: str, settings: RocksSettings | None = None, *, make: bool = True
) -> RocksStore:
    """A real one: see `RocksStore.open`."""
    return RocksStore.open(path, settings, make=make)


def open_store(
    path: str,
    settings: RocksSettings | None = None,
    *,
    make: bool = True,
    opener: Opener = open_database,
) -> Store:
    """Open the store at ``path``, in parts or not.

    Args:
        make: where there is none, make an empty one.
        opener: opens a database that it consists of.

    Raises:
        StoreBusyError: another process has it open.
        LocalCopyError: it is damaged.
    """
    layout = read_layout(path)
    if layout is None:
        return opener(path, settings, make=make)
    return PartedStore.open(path, layout, settings, opener)


class PartedStore:
    """What :class:`RocksStore` is, over parts with key groups of their own.

    **What a crash leaves.** Each part has a marker of its own and is by itself what a `RocksStore`
    is: on disk it stands at some epoch that was applied, whole, or says which one it is half way
    to. But the parts reach the disk independently of each other, as their buffers fill, so that
    after a crash they may stand at different epochs; also an error may end an epoch between two
    parts. Therefore:

    1. The store stands at the epoch of its *oldest* part: only from there on are all later deltas
       known to be applied to all parts, if they are applied again. ``marker().epoch`` is that one.
    2. It must not be taken for that epoch itself if another part is newer, and not for any one
       between: a newer part holds rows of later epochs, and there is no way back. So ``applying``
       is the digest of the *newest* epoch that any part has reached, or is half way to; with
       ``applying_epoch`` if it is not the one after. Whoever plans a restore takes the store for
       that epoch or later ones only, and only if the log has that digest there.
    3. On the way, a part takes no delta that it holds already (of an epoch at or before its own):
       it would bring back old values under a marker that says nothing of it, were it cut off
       there. A part is at any moment at one epoch of its own line, or half way to the next.
    4. The parts between need no look of their own: all markers of a store come from one sequence
       of epochs, each on top of the one before. If the oldest part's digest and the newest one's
       are the log's, so are those between. Two digests for one epoch cannot come from that: such a
       store is damaged.
    5. A part without a marker stands nowhere, and so does the store: it was being put together.
    """

    def __init__(self, path: str, layout: Layout, parts: Sequence[RocksStore]) -> None:
        self.path = path
        self._layout = layout
        self._routes = Routes(layout.routes)
        self._parts = list(parts)
        self._of_place = [self._parts[part] for part in self._routes.parts]

    @classmethod
    def open(
        cls,
        path: str,
        layout: Layout,
        settings: RocksSettings | None = None,
        opener: Opener = open_database,
    ) -> PartedStore:
        """Open all parts.

        Raises:
            StoreBusyError: another process has it open.
            LocalCopyError: a part is damaged, or there is none.
        """
        parts: list[RocksStore] = []
        try:
            for name in layout.parts:
                folder = os.path.join(path, name)
                if not os.path.exists(os.path.join(folder, "CURRENT")):
                    raise LocalCopyError(
                        f"The local store {path} lacks its part {name}.",
                        todo="It is set aside and the state is restored from the next good copy.",
                    )
                parts.append(opener(folder, settings, make=False))
        except BaseException:
            for part in parts:
                with contextlib.suppress(StateBackendError):
                    part.close()
            raise
        return cls(path, layout, parts)

    # --- where it stands -------------------------------------------------------------------------

    def marker(self) -> Marker | None:
        """What the store holds; None if a part stands nowhere."""
        markers = [marker for part in self._parts if (marker := part.marker()) is not None]
        if len(markers) < len(self._parts):
            return None
        oldest = min(markers, key=lambda one: one.epoch)
        chains: dict[int, str] = {}
        for one in markers:
            reached = [(one.epoch, one.chain)]
            if one.applying:
                reached.append((one.epoch + 1, one.applying))
            for epoch, chain in reached:
                if chains.setdefault(epoch, chain) != chain or _line(one) != _line(oldest):
                    raise self._torn()
        newest = max(chains)
        if newest == oldest.epoch:
            return oldest
        gap = newest > oldest.epoch + 1
        return msgspec.structs.replace(
            oldest, applying=chains[newest], applying_epoch=newest if gap else 0
        )

    def _torn(self) -> LocalCopyError:
        found = [(m.epoch, m.chain[:8]) for part in self._parts if (m := part.marker())]
        return LocalCopyError(
            f"The parts of the local store {self.path} are not of one line ({found}).",
            todo="The store is set aside and the state is restored from the next good copy.",
        )

    # --- reading ---------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        return self._of_place[self._routes.place(key)].get(key)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys``, None where absent. Sorted keys are quicker."""
        shares = self._routes.shares(keys)
        if len(shares) == 1:
            return self._parts[next(iter(shares))].multi_get(keys)
        values: list[bytes | None] = [None] * len(keys)
        for part, share in shares.items():
            found = self._parts[part].multi_get(_taken(keys, share))
            if isinstance(share, slice):
                values[share] = found
            else:
                for at, value in zip(share, found, strict=True):
                    values[at] = value
        return values

    def merge_get(self, keys: Sequence[bytes], entries_max: int) -> list[bytes | None]:
        """As :meth:`RocksStore.merge_get`."""
        values: list[bytes | None] = []
        left = entries_max
        for place, start, end in self._routes.cut(keys):
            found, left = self._of_place[place].merge_some(keys[start:end], left)
            values += found
            if left < 0:
                break
        return values

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All entries whose key starts with ``prefix``, in key order, without the markers."""
        if len(prefix) >= _GROUP_BYTES:
            yield from self._of_place[self._routes.place(prefix)].scan(prefix)
            return
        low, high = prefix.ljust(_GROUP_BYTES, b"\0"), META_PREFIX
        if prefix and prefix != b"\xff":
            high = group_key((prefix[0] + 1) << 8)
        views = [part.cursor() for part in self._parts]  # all of one moment
        try:
            for place, number in enumerate(self._routes.parts):
                start, end = self._routes.ends(place)
                here = max(low, start), min(high, end)
                yield from self._parts[number].between(views[number], *here)
        finally:
            views.clear()

    def scan_ranges(
        self, ranges: Iterable[tuple[bytes, bytes]]
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """As :meth:`RocksStore.scan_ranges`; each range lies within one key group."""
        for place, inside in groupby(ranges, key=lambda one: self._routes.place(one[0])):
            yield from self._of_place[place].scan_ranges(inside)

    def scan_keys(self, ranges: Iterable[KeyRange]) -> Iterator[list[bytes]]:
        """As :meth:`RocksStore.scan_keys`."""
        for place, inside in groupby(ranges, key=self._place_of):
            if place is not None:
                yield from self._of_place[place].scan_keys(inside)
                continue
            for one in inside:
                yield from self._scan_across(*one)

    def _place_of(self, one: KeyRange) -> int | None:
        """The place in which a range lies; None if it lies in several."""
        start, end, stop = one
        place = self._routes.place(start)
        return place if max(end, stop) <= self._routes.ends(place)[1] else None

    def _scan_across(self, start: bytes, end: bytes, stop: bytes) -> Iterator[list[bytes]]:
        for place in range(self._routes.place(start), len(self._of_place)):
            low, high = self._routes.ends(place)
            if low >= max(end, stop):
                return
            here = max(start, low), min(end, high), min(stop, high)
            for keys in self._of_place[place].scan_keys([here]):
                yield keys
                if keys[-1] >= end:  # the one after the range
                    return

    # --- writing ---------------------------------------------------------------------------------

    def apply(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], marker: Marker | None
    ) -> None:
        """As :meth:`RocksStore.apply`."""
        shares = self._routes.shares(keys)
        for part in self._wanting(marker):
            self._parts[part].apply(*_rows(keys, values, shares.get(part)), marker)

    def apply_batches(self, batches: Iterable[Rows], marker: Marker | None) -> None:
        """As :meth:`RocksStore.apply_batches`."""
        wanting = self._wanting(marker)
        pieces = iter(batches)
        pending: Rows = next(pieces, ((), ()))
        for number, piece in enumerate(pieces):
            if not number:
                for part in wanting:
                    self._parts[part].write_before(marker)
            self._write(wanting, pending, None)
            pending = piece
        self._write(wanting, pending, marker)

    def _wanting(self, marker: Marker | None) -> list[int]:
        """The parts that do not hold an epoch yet."""
        found = []
        for number, part in enumerate(self._parts):
            before = part.marker()
            if marker is None:
                part.write_before(None)
            elif before is not None and before.epoch >= marker.epoch:
                if before.epoch == marker.epoch and before.chain != marker.chain:
                    raise self._torn()
                continue
            found.append(number)
        return found

    def _write(self, wanting: Sequence[int], rows: Rows, marker: Marker | None) -> None:
        shares = self._routes.shares(rows[0])
        for part in wanting:
            if marker is not None or part in shares:
                self._parts[part]._write_checked(*_rows(*rows, shares.get(part)), marker)

    # --- files -----------------------------------------------------------------------------------

    def level0_files(self) -> int:
        """Files that every point read of some part may have to look into."""
        return max(part.level0_files() for part in self._parts)

    def figures(self) -> dict[str, int]:
        """Counts of the store, of all parts together; see `store_figures`."""
        return joined_figures([part.figures() for part in self._parts])

    def give_up_whole_filters(self) -> bool:
        """As :meth:`RocksStore.give_up_whole_filters`, of any part; each notes it for itself."""
        return True in [part.give_up_whole_filters() for part in self._parts]

    def live_bytes(self) -> int:
        """About how large the live data is on disk; unflushed writes are not in it."""
        return sum(part.live_bytes() for part in self._parts)

    def stored_bytes(self) -> int:
        """At most about how large the data is: :meth:`live_bytes` and what is not flushed yet."""
        return sum(part.stored_bytes() for part in self._parts)

    def flush(self) -> None:
        """Bring everything that was applied to disk; the interpreter is free meanwhile."""
        for part in self._parts:
            part.flush()

    def checkpoint(self, path: str) -> list[str]:
        """As :meth:`RocksStore.checkpoint`; nothing may be applied meanwhile.

        Returns:
            the names of the files that make it up, those of parts with their folder in front.
        """
        try:
            os.mkdir(path)
            write_layout(path, self._layout)
        except OSError as error:
            raise classify(error, path) from error
        names = [LAYOUT_FILE]
        for name, part in zip(self._layout.parts, self._parts, strict=True):
            names += [f"{name}/{file}" for file in part.checkpoint(os.path.join(path, name))]
        return names

    def slices(self, first_group: int, last_group: int) -> list[StoreSlice]:
        """What of this store holds these key groups, to be branched."""
        found = []
        marker = self.marker()
        known = (marker.key_group_start, marker.key_group_end) if marker else (0, LAST_GROUP)
        for number, part in enumerate(self._parts):
            ranges = self._layout.ranges_of(number, first_group, last_group)
            inside = max(first_group, known[0]), min(last_group, known[1])
            held = self._layout.ranges_of(number, *known)
            whole = held == self._layout.ranges_of(number, *inside)
            if ranges:
                found.append(StoreSlice(part, ranges, held, whole))
        return found

    @property
    def clipped(self) -> bool:
        """Whether what a branch cut off still takes room."""
        return any(part.clipped for part in self._parts)

    def compact_clipped(self, after_s: float = 5.0) -> None:
        """As :meth:`RocksStore.compact_clipped`, for each part."""
        for part in self._parts:
            part.compact_clipped(after_s)

    def settle_compaction(self) -> None:
        """Wait for what :meth:`compact_clipped` began."""
        for part in self._parts:
            part.settle_compaction()

    def close(self) -> None:
        """Flush and close all parts; may be called twice."""
        errors = []
        for part in self._parts:
            try:
                part.close()
            except StateBackendError as error:
                errors.append(error)
        if errors:
            raise errors[0]


Store = RocksStore | PartedStore


def _line(marker: Marker) -> tuple[str, str, int, int]:
    """Of which line of epochs a marker is."""
    return marker.job_id, marker.operator, marker.key_group_start, marker.key_group_end


def _taken(items: Sequence[Any], share: list[int] | slice) -> Sequence[Any]:
    return items[share] if isinstance(share, slice) else [items[at] for at in share]


def _rows(
    keys: Sequence[bytes], values: Sequence[bytes | None], share: list[int] | slice | None
) -> Rows:
    """A part's share of rows."""
    return ((), ()) if share is None else (_taken(keys, share), _taken(values, share))
