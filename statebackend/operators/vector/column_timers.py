"""Timers by the column; the layout is that of ``statebackend.state.timers``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.errors import UsageError, ValueMismatchError
from statebackend.operators.vector.column_entries import under_keys
from statebackend.operators.vector.key_vector import GROUP_BYTES, Keys
from statebackend.state.binary_columns import (
    bools_of,
    fixed_column,
    indices_of,
    joined,
    newest,
    tail,
    take,
)
from statebackend.state.blocks import binary_array
from statebackend.state.column_table import ColumnTable
from statebackend.state.streaming_timers import StreamingTimers
from statebackend.state.time_ranges import BIAS
from statebackend.state.timers import BY_KEY, BY_TIME, TimerIndex
from statebackend.state.unbound import OfOneEpoch

__all__ = ["ArrowTimers", "Fired"]

_AT_BYTES: Final = 8
_CHUNK_ROWS: Final = 65_536
_LAST_MS: Final = np.uint64(2**63 - 1)

AtMs = Any
"""Milliseconds since 1970: an int for all keys, or one integer for each."""


class Fired:
    """Timers that are due: (key group and encoded key) of each, and its time, in firing order."""

    def __init__(self, owners: pa.BinaryArray, at_ms: NDArray[np.int64]) -> None:
        self.owners, self.at_ms = owners, at_ms


class ArrowTimers(OfOneEpoch):
    """Timers by the column: each call sets or deletes one for each of many keys.

    Args:
        index: finds what is due, and what is left.
    """

    called = "the timers object"

    def __init__(self, columns: ColumnTable, index: TimerIndex) -> None:
        self._columns, self._index = columns, index
        self._firing = False
        self._gone: list[pa.BinaryArray] = []  # by time: deleted since it was asked what is due
        self._kept: list[pa.BinaryArray] = []  # by time: to be left set though they fire

    # --- for users -----------------------------------------------------------------------------

    def register(self, keys: Keys, at_ms: AtMs) -> None:
        """Set a timer for each key; setting it twice is setting it once.

        Raises:
            ValueMismatchError: not an int, or not as many as there are keys.
        """
        by_time, by_key = self._both(keys, _times(at_ms, len(keys)))
        full = pa.concat_arrays([by_time, by_key])
        if isinstance(self._index, StreamingTimers):
            self._index.note(by_time.to_pylist())
        self._put(full, fixed_column(np.empty((len(full), 0), np.uint8)))

    def delete(self, keys: Keys, at_ms: AtMs) -> None:
        """Delete a timer of each key, if there is one; one that is due later in this epoch too.

        Raises:
            ValueMismatchError: as `register`.
        """
        by_time, by_key = self._both(keys, _times(at_ms, len(keys)))
        full = pa.concat_arrays([by_time, by_key])
        self._put(full, pa.nulls(len(full), pa.binary()))
        if self._firing:
            self._gone.append(by_time)

    def list(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The timers of keys: which of ``keys`` each is of, and its time, ascending."""
        prefixes = _checked(keys).in_state(BY_KEY)
        index, full, _ = under_keys(self._columns, prefixes)
        if not len(full):
            return index, np.zeros(0, np.int64)
        starts = indices_of(pc.binary_length(prefixes)).astype(np.int64)[index]
        offsets = np.frombuffer(full.buffers()[1], np.int32)[full.offset :][: len(full)]
        data = np.frombuffer(full.buffers()[2], np.uint8)
        at = data[(offsets + starts)[:, None] + np.arange(_AT_BYTES)]
        return index, _from_bytes(np.ascontiguousarray(at))

    # --- for the operator ----------------------------------------------------------------------

    def due(self, key_groups: range, now_ms: int, at_once: Callable[[], int]) -> Iterator[Fired]:
        """The timers that are due, in the order of time, key group and key.

        What was deleted since is left out; `fired` is called after each piece.

        Args:
            at_once: how many there may be in the next piece.
        """
        if not isinstance(self._index, StreamingTimers):
            self._columns.table.seal()
        self._firing, self._gone = True, []
        for chunk in self._index.due_chunks(key_groups, now_ms, _CHUNK_ROWS):
            every = joined([binary_array(chunk.groups), binary_array(chunk.keys)])
            every_at = np.asarray(chunk.at_ms, np.int64)
            start = 0
            while start < len(every):
                end = start + at_once()
                owners, at = every[start:end], every_at[start:end]
                start = end
                if self._gone:
                    left = np.flatnonzero(~self._is_gone(owners, at))
                    owners, at = take(owners, left), at[left]
                if len(owners):
                    yield Fired(owners, at)

    def keep(self, keys: Keys, at_ms: AtMs) -> None:
        """Leave timers set that are firing: they are due again in the next epoch there is."""
        self._kept.append(self._both(keys, _times(at_ms, len(keys)))[0])

    def fired(self, some: Fired) -> None:
        """Their call is over: delete them."""
        by_time, by_key = _full_keys(some.owners, some.at_ms)
        if self._kept:
            kept, self._kept = pa.concat_arrays(self._kept), []
            places = np.flatnonzero(~bools_of(pc.is_in(by_time, value_set=kept)))
            by_time, by_key = take(by_time, places), take(by_key, places)
        full = pa.concat_arrays([by_time, by_key])
        self._put(full, pa.nulls(len(full), pa.binary()))

    def next_ms(self) -> int | None:
        """The earliest timer that is left; None if there is none."""
        return self._index.next_ms()

    def _is_gone(self, owners: pa.BinaryArray, at_ms: NDArray[np.int64]) -> NDArray[np.bool_]:
        gone = pa.concat_arrays(self._gone)
        return bools_of(pc.is_in(_full_keys(owners, at_ms)[0], value_set=gone))

    def _both(self, keys: Keys, at_ms: NDArray[np.int64]) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        return _full_keys(_checked(keys).full, at_ms)

    def _put(self, full: pa.BinaryArray, values: pa.BinaryArray) -> None:
        self._columns.put_columns(*newest([(full, values)]))


def _checked(keys: Keys) -> Keys:
    if not isinstance(keys, Keys):
        raise UsageError(
            f"Timers were given a {type(keys).__name__} as their keys.",
            todo="Give ctx.keys, or what take() gave.",
        )
    return keys


def _times(at_ms: AtMs, rows: int) -> NDArray[np.int64]:
    if isinstance(at_ms, pa.ChunkedArray):
        at_ms = at_ms.combine_chunks()
    if isinstance(at_ms, pa.Array) and pa.types.is_integer(at_ms.type) and not at_ms.null_count:
        at_ms = indices_of(at_ms)
    found = np.asarray(at_ms)
    plain = found.dtype.kind == "i" or (found.dtype.kind == "u" and (found <= _LAST_MS).all())
    if not plain or found.shape not in ((), (rows,)):
        raise ValueMismatchError(
            f"Timers of {rows} keys were set for {found.shape} times of {found.dtype}.",
            todo="Give whole milliseconds since 1970: one int, or an integer for each key.",
        )
    return np.broadcast_to(found.astype(np.int64), (rows,))


def _full_keys(
    owners: pa.BinaryArray, at_ms: NDArray[np.int64]
) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """The keys by time and by key."""
    at = fixed_column((at_ms.view(np.uint64) ^ np.uint64(BIAS)).astype(">u8"))
    group, key = pc.binary_slice(owners, 0, GROUP_BYTES), tail(owners, GROUP_BYTES)
    return joined([group, BY_TIME, at, key]), joined([group, BY_KEY, key, at])


def _from_bytes(at: NDArray[np.uint8]) -> NDArray[np.int64]:
    biased = at.view(">u8").reshape(-1).astype(np.uint64)
    return (biased ^ np.uint64(BIAS)).view(np.int64)
