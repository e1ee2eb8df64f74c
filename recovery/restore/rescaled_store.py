"""One store out of several: how a subtask gets key groups that others held before.

What is large is not written anew. Each parent's store, or what of it is wanted, is hard-linked and
clipped, and becomes a part of the child's store; small parts, and those beyond eight, are copied
into the largest. The child stands nowhere until it is given a marker:

1. :func:`assemble` makes it beside its place and moves it there whole, without a marker;
2. the caller brings each parent's key groups to one epoch: ``store.apply_batches(rows, None)`` with
   the parent's deltas since, cut by :func:`clip_pieces`. Parents may stand at different epochs;
3. the caller sets the marker, ``store.apply((), (), marker)``, and flushes.

A process that ends before that leaves a store without a marker (a store in parts: without one on
some part), which nobody takes for a copy of anything.
"""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recovery.local.private_folders import unusable
from snapshot.formats.delta import DeltaRows
from statebackend.errors import LocalCopyError
from statebackend.rocks.clipping import group_key
from statebackend.rocks.parted import Opener, Store, open_database, open_store
from statebackend.rocks.parts_layout import Layout, write_layout
from statebackend.rocks.store import RocksSettings, Rows, StoreSlice

__all__ = ["Piece", "PieceError", "assemble", "clip_pieces", "clip_rows"]

PARTS_MAX: Final = 8  # each has buffers and open files of its own
SMALL_BYTES: Final = 16 << 20  # written anew in about 0.1 s
_BATCH_ROWS: Final = 10_000


@dataclass(frozen=True)
class Piece:
    """What is taken of one parent.

    Attributes:
        source: open; it stays so, and as it is. Nothing is applied to it meanwhile.
        first_group: the key groups that are taken, inclusive.
        last_group: likewise.
    """

    source: Store
    first_group: int
    last_group: int


class PieceError(Exception):
    """A parent's store turned out to be damaged; ``error`` says how."""

    def __init__(self, piece: Piece, error: LocalCopyError) -> None:
        super().__init__(error.what)
        self.piece, self.error = piece, error


@dataclass(frozen=True)
class _Taken:
    piece: Piece
    slice: StoreSlice
    size_bytes: int


def assemble(
    path: Path,
    pieces: Sequence[Piece],
    settings: RocksSettings,
    opener: Opener = open_database,
) -> Store:
    """Make a subtask's store of what its parents hold, and open it; it has no marker.

    What is cut off is freed in the background after ``store.compact_clipped()``.

    Args:
        path: where it is to be; there is nothing yet, and its folder is the caller's alone.
        pieces: their key groups do not overlap. Those that no piece has are empty.
        opener: opens a database that a store consists of.

    Raises:
        PieceError: a parent cannot be read.
        LocalDirError: the disk is full or failed.
    """
    making = path.with_name(f"{path.name}.making")
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            made = _make(making, path, pieces, settings, opener)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise unusable(str(path), error) from error
    return open_store(str(path), settings, make=not made, opener=opener)


def _make(
    making: Path,
    path: Path,
    pieces: Sequence[Piece],
    settings: RocksSettings,
    opener: Opener,
) -> bool:
    """Whether there was anything to make it of."""
    apart, small = _sorted_out(pieces)
    if not apart:
        return False
    names = [f"p{number}" for number in range(len(apart))]
    for name, taken in zip(names, apart, strict=True):
        try:
            taken.slice.branch(str(making / name), settings)
        except LocalCopyError as error:
            raise PieceError(taken.piece, error) from error
    if small:
        largest = max(range(len(apart)), key=lambda number: apart[number].size_bytes)
        store = opener(str(making / names[largest]), settings, make=False)
        try:
            for taken in small:
                store.apply_batches(_batches(taken), None)
        finally:
            store.close()
    else:
        largest = 0
    if len(apart) == 1:
        (making / names[0]).rename(path)
        return True
    owned = [(first, n) for n, taken in enumerate(apart) for first, _ in taken.slice.ranges]
    owned += [(first, largest) for taken in small for first, _ in taken.slice.ranges]
    write_layout(str(making), Layout(parts=names, routes=_routes(owned)))
    making.rename(path)
    return True


def _sorted_out(pieces: Sequence[Piece]) -> tuple[list[_Taken], list[_Taken]]:
    """What becomes a part, in the order of key groups, and what is copied into another."""
    found = []
    for piece in pieces:
        try:
            piece.source.flush()
            slices = piece.source.slices(piece.first_group, piece.last_group)
            found += [_Taken(piece, some, some.size_bytes) for some in slices]
        except LocalCopyError as error:
            raise PieceError(piece, error) from error
    found.sort(key=lambda taken: -taken.size_bytes)
    large = sum(taken.size_bytes >= SMALL_BYTES for taken in found)
    count = max(1, min(PARTS_MAX, large))
    apart = sorted(found[:count], key=lambda taken: taken.slice.ranges)
    return apart, found[count:]


def _batches(taken: _Taken) -> Iterator[Rows]:
    keys: list[bytes] = []
    values: list[bytes | None] = []
    try:
        for key, value in taken.slice.entries():
            keys.append(key)
            values.append(value)
            if len(keys) == _BATCH_ROWS:
                yield keys, values
                keys, values = [], []
    except LocalCopyError as error:
        raise PieceError(taken.piece, error) from error
    if keys:
        yield keys, values


def _routes(owned: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """From the first key groups of ranges and who has them; gaps go to the one before."""
    routes: list[tuple[int, int]] = []
    for first, part in sorted(owned):
        if not routes:
            routes.append((0, part))
        elif routes[-1][1] != part:
            routes.append((first, part))
    return routes


def clip_rows(rows: DeltaRows, first_group: int, last_group: int) -> DeltaRows:
    """Those rows of a delta (or of a piece of one) that are of these key groups; not copied."""

    def key(at: int) -> bytes:
        found: bytes = rows.keys[at].as_py()
        return found

    places = range(len(rows.keys))
    start = bisect_left(places, group_key(first_group), key=key)
    end = bisect_left(places, group_key(last_group + 1), lo=start, key=key)
    return DeltaRows(rows.keys.slice(start, end - start), rows.values.slice(start, end - start))


def clip_pieces(
    pieces: Iterable[DeltaRows], first_group: int, last_group: int
) -> Iterator[DeltaRows]:
    """As :func:`clip_rows`, for a delta that comes in pieces; all of them are asked for."""
    for rows in pieces:
        clipped = clip_rows(rows, first_group, last_group)
        if len(clipped.keys):
            yield clipped
