"""Timers of a stream: asked time and again what is due, for the whole life of a subtask.

The layout is that of :mod:`statebackend.state.timers`. What became due since the last time is all
that is read, and when that is nothing, no state is read at all. Three things make that possible:

* whatever was due has fired: below the last limit nothing is set in the base and in the runs, but
  what is deleted above them (looked up, key by key, among what is found), and what was in a log
  whose dict became a run or went into the base (the limit is lowered then);
* a dict that was frozen keeps its log, so that nobody needs to sort it for this;
* the first timers beyond the limit were seen when it was asked: with the logs', they are a bound,
  whatever moves from a dict to a run, and from there to the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statebackend.state.binary_columns import take
from statebackend.state.blocks import binary_array
from statebackend.state.cells import KeyCursor
from statebackend.state.table import StateTable
from statebackend.state.time_ranges import (
    BIAS,
    clamped,
    of_base,
    of_run,
    pack_at,
    resolved,
    times_of,
)
from statebackend.state.timers import BY_TIME, DUE_AT_LIMIT, DueTimers, TimerIndex, chunks_of

__all__ = ["StreamingTimers"]

_NEVER: Final = 2**64 - 1
_NO_TIMES: Final = np.zeros(0, np.uint64)
_CHUNK_ROWS: Final = 8192


class StreamingTimers(TimerIndex):
    """The timers of a subtask; each that :meth:`due` gives must have fired before the next call."""

    __slots__ = ("_first_at", "_log_at", "_low", "_segments", "_taken")

    def __init__(self, cursor: KeyCursor, table: StateTable) -> None:
        # Times here are as in keys: unsigned, the sign bit flipped.
        self._low = 0  # what was set below it has fired, but for the dict and its log
        self._first_at = 0  # no timer below it, but for those in the log
        self._log_at: Any = _NO_TIMES  # of the first of the log
        self._taken: Any = None  # which of the first of the log were given
        self._segments: list[_Segment] = []  # logs of dicts that were frozen, the oldest first
        self._log: list[bytes] = []
        for layer in table.frozen:
            if log := [key for key in layer.entries if key[2:4] == BY_TIME]:
                self._segments.append(_Segment(layer.entries, log, times_of(binary_array(log))))
        super().__init__(cursor, table)

    def _turn(self, entries: dict[bytes, bytes | None]) -> None:
        if self._log:
            segment = _Segment(self._entries, self._log, self._times_noted())
            self._segments.append(segment)
            self._drop_segments()  # at once, if it became a run
        self._log_at, self._taken = _NO_TIMES, None
        super()._turn(entries)

    def look(self, key_groups: range) -> None:
        """Find the first timers, so that a bound is known."""
        self._new_due(key_groups, 0)

    def note(self, by_time: Sequence[bytes]) -> None:
        """Keys by time are about to be written to the table's dict, by the column."""
        if self._table.entries is not self._entries:
            self._turn(self._table.entries)
        self._log += by_time

    def may_be_due(self, now_ms: int) -> bool:
        """False: nothing is due; reads no state."""
        return self._bound() < _limit_of(now_ms)

    def not_before_ms(self) -> int | None:
        """No timer is set below this time; None: none is set. Reads no state."""
        first = self._bound()
        return None if first == _NEVER else first - BIAS

    def due_chunks(
        self, key_groups: range, before_ms: int, max_rows: int = _CHUNK_ROWS
    ) -> Iterator[DueTimers]:
        """As :meth:`TimerIndex.due_chunks`: what was not given before.

        Args:
            key_groups: always the subtask's.
        """
        if self._table.entries is not self._entries:
            self._turn(self._table.entries)
        self._firing = True
        self._gone = set()
        keys = self._new_due(key_groups, _limit_of(before_ms))
        at = times_of(keys)
        return chunks_of(keys, at, np.argsort(at, kind="stable"), max_rows)

    def _bound(self) -> int:
        if self._table.entries is not self._entries:
            self._turn(self._table.entries)
        at = self._times_noted()
        firsts = [self._first_at, *(segment.first for segment in self._segments)]
        return min(*firsts, int(at.min()) if len(at) else _NEVER)

    def _drop_segments(self) -> None:
        """Those whose dict is no layer's any more: what they had is in a run or in the base."""
        there = {id(layer.entries) for layer in self._table.frozen}
        for segment in self._segments:
            if id(segment.entries) not in there:
                self._first_at = min(self._first_at, segment.first)
                self._low = min(self._low, segment.first)
        self._segments = [one for one in self._segments if id(one.entries) in there]

    def _times_noted(self) -> Any:
        known = len(self._log_at)
        if known < len(self._log):
            new = times_of(binary_array(self._log[known:]))
            self._log_at = np.concatenate([self._log_at, new]) if known else new
        return self._log_at

    def _new_due(self, key_groups: range, limit: int) -> pa.BinaryArray:
        """The timers below ``limit`` that were not given before, in the order of their keys."""
        self._drop_segments()
        parts = [*self._new_stored(key_groups, limit), self._new_logged(limit)]
        return self._still_set(resolved([(keys, None) for keys in parts]))

    def _new_stored(self, key_groups: range, limit: int) -> list[pa.BinaryArray]:
        """Those in the base and in the runs, deleted ones too; the first beyond are the bound.

        The dicts of layers are not looked through: what was set in them is in the segments.
        """
        table, beyond = self._table, list[bytes]()
        low, end = pack_at(min(self._low, limit)), pack_at(limit)
        runs = [run for layer in table.frozen for run in layer.sorted_runs]
        runs += table.sorted_runs_of_overlay
        parts = [of_base(table, BY_TIME, key_groups, end, beyond, low)]
        parts += [of_run(run, BY_TIME, key_groups, end, beyond, low) for run in runs]
        self._low = max(self._low, limit)
        self._first_at = min((int.from_bytes(key[4:12], "big") for key in beyond), default=_NEVER)
        return [keys for keys, _ in parts]

    def _new_logged(self, limit: int) -> pa.BinaryArray:
        """Those in the log and in the segments, deleted ones too, each once and in order."""
        found = self._take_noted(limit)
        for segment in self._segments:
            found.update(segment.take(limit))
        return binary_array(sorted(found))

    def _still_set(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Those that nothing over the base deletes; what it says nothing of is the base's."""
        if not len(keys):
            return keys
        values, of_the_base = self._table.multi_get_over(keys.to_pylist())
        is_set = np.fromiter((value is not None for value in values), np.bool_, len(values))
        is_set[of_the_base] = True
        return keys if is_set.all() else take(keys, np.flatnonzero(is_set))

    def _take_noted(self, limit: int) -> set[bytes]:
        """The keys in the log that are due; the next call drops them.

        Until then their owners may ask for those that have not fired yet.
        """
        at = self._times_noted()
        if self._taken is not None:
            left = np.ones(len(at), np.bool_)
            left[: len(self._taken)] = ~self._taken
            self._log = list(compress(self._log, left.tolist()))
            self._log_at = at = at[left]
            self._taken, self._indexed, self._owned = None, 0, {}
        below = at < np.uint64(limit)
        if not below.any():
            return set()
        log, self._taken = self._log, below
        at[below] = _NEVER
        return {log[place] for place in np.flatnonzero(below).tolist()}


class _Segment:
    """The log of a dict that was frozen, and the times in it; what was given has none."""

    def __init__(self, entries: dict[bytes, bytes | None], log: list[bytes], at: Any) -> None:
        self.entries, self._log, self._at = entries, log, at
        self.first = int(at.min())

    def take(self, limit: int) -> list[bytes]:
        """The keys that are due, once."""
        if self.first >= limit:
            return []
        below = np.flatnonzero(self._at < np.uint64(limit))
        self._at[below] = _NEVER
        self.first = int(self._at.min())
        return [self._log[place] for place in below.tolist()]


def _limit_of(now_ms: int) -> int:
    return int.from_bytes(clamped(now_ms + DUE_AT_LIMIT), "big")
