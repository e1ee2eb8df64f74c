"""One epoch's changes, open and frozen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import pyarrow as pa

from statebackend.state.binary_columns import Entries, ascends, newest, order_of, take
from statebackend.state.blocks import SortedRows, binary_array
from statebackend.state.row_cache import RowCache
from statebackend.state.spill import Run, count_merged, merge

__all__ = ["FrozenOverlay", "Overlay", "joined"]

_SORTED_AS_COLUMNS: Final = 4096  # entries; below, Python's own sort is quicker
_PIECE_ENTRIES: Final = 8_192


def _as_columns(entries: dict[bytes, bytes | None]) -> Entries:
    """As :func:`_in_order`, in columns; the interpreter is free most of the time."""
    if len(entries) < _SORTED_AS_COLUMNS:
        keys, values = _in_order(entries)
        return binary_array(keys), binary_array(values)
    pieces: list[Entries] = []
    items = iter(entries.items())
    while some := list(islice(items, _PIECE_ENTRIES)):  # a piece at a time: others may run between
        one, other = zip(*some, strict=True)
        pieces.append((binary_array(one), binary_array(other)))
    column = pa.concat_arrays([piece[0] for piece in pieces])
    values = pa.concat_arrays([piece[1] for piece in pieces])
    if ascends(column):  # keys come in their order
        return column, values
    order = order_of(column)
    return take(column, order), take(values, order)


def _in_order(entries: dict[bytes, bytes | None]) -> tuple[list[bytes], list[bytes | None]]:
    keys = sorted(entries)
    return keys, list(map(entries.__getitem__, keys))


@dataclass
class Overlay:
    """One epoch's changes.

    ``entries`` holds every changed key. ``under`` holds, for the states that are read by prefix,
    which of these keys stand under which prefix (a set of them, but the only one as it is): a dict
    cannot be asked for a range. ``hot`` holds those of states that are written by the column, bit
    by bit, by the numbers of these states; beside them it may have others, as they were before,
    only to be found sooner. ``runs`` are the parts that left all these, oldest first; a key in
    ``entries`` or ``hot`` beats them.
    """

    entries: dict[bytes, bytes | None] = field(default_factory=dict)
    under: dict[bytes, bytes | set[bytes]] = field(default_factory=dict)
    hot: dict[bytes, RowCache] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def hot_bytes(self) -> int:
        """What ``hot`` takes of the memory."""
        return sum(hot.nbytes for hot in self.hot.values())

    def sources(self) -> Iterator[dict[bytes, bytes | None] | RowCache | Run]:
        """What to look a key up in, newest first."""
        if self.entries:
            yield self.entries
        yield from self.hot.values()
        yield from reversed(self.runs)

    def all_runs(self) -> list[Run]:
        """All changes as runs, oldest first; what is in no run as one more in memory each."""
        more = [hot.entries() for hot in self.hot.values()]
        if self.entries:
            more.append(_as_columns(self.entries))
        if len(more) > 1:
            more = [newest(more)]
        return [*self.runs, *(Run.in_memory([SortedRows(*one)]) for one in more)]


@dataclass(frozen=True)
class FrozenOverlay:
    """One epoch's changes after the barrier (or a layer); never written again."""

    epoch: int
    _overlay: Overlay

    @property
    def spilled(self) -> bool:
        """Whether some of it is on disk: then :meth:`merged` is the way to read it."""
        return any(run.on_disk for run in self._overlay.runs)

    @property
    def entries(self) -> dict[bytes, bytes | None]:
        """What is still a dict of it."""
        return self._overlay.entries

    @property
    def sorted_runs(self) -> list[Run]:
        """What is not, oldest first."""
        return self._overlay.runs

    @functools.cached_property
    def _ordered(self) -> tuple[list[bytes], list[bytes | None]]:
        return _in_order(self._overlay.entries)  # for the delta, and for the next epoch

    @functools.cached_property
    def columns(self) -> Entries | None:
        """All of it as columns, if it was written as such and is in memory."""
        if not (self._overlay.runs or self._overlay.hot) or self.spilled:
            return None
        return newest([run.columns for run in self._overlay.all_runs()])

    def __len__(self) -> int:
        if self.spilled:
            return count_merged(self._overlay.all_runs())
        return len(self._overlay.entries) if self.columns is None else len(self.columns[0])

    def sorted(self) -> tuple[list[bytes], list[bytes | None]]:
        """Keys in ascending order and their values (None: deleted), as a delta wants them."""
        if self.columns is not None:
            return self.columns[0].to_pylist(), self.columns[1].to_pylist()
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


def joined(layers: Sequence[FrozenOverlay]) -> FrozenOverlay:
    """Layers, the oldest first, as one; in columns, or (where some are) in runs on disk."""
    runs = [run for layer in layers for run in layer.runs]
    return FrozenOverlay(layers[-1].epoch, Overlay(runs=runs))
