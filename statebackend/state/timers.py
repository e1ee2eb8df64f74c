"""Timers: a time for the current key, ordered by time, part of the state as everything else.

Layout (``at``: milliseconds, 8 bytes, big-endian, sign bit flipped; values are empty):

* by time: ``key group (2) | FFFF | at | user key``, read when an epoch asks which timers are due
* by key: ``key group (2) | FFFE | user key | at``, read when a key asks for its own timers

A :class:`TimerIndex` lives for one epoch. The overlay is a dict, which cannot be asked for a range,
so the index notes which keys by time were written to it: one list entry for each change. What was
spilled, and what earlier epochs left above the base, lies in sorted runs and is read by the range.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statebackend.errors import ValueMismatchError
from statebackend.state.binary_columns import take
from statebackend.state.blocks import binary_array
from statebackend.state.cells import KeyCursor
from statebackend.state.table import StateTable
from statebackend.state.table_base import after
from statebackend.state.time_ranges import (
    ABOVE,
    BIAS,
    SORTED_BYTES,
    clamped,
    of_base,
    of_run,
    pack_at,
    resolved,
    set_between,
    times_of,
)
from statebackend.state.unbound import OfOneEpoch

__all__ = ["BY_KEY", "BY_TIME", "DueTimers", "TimerIndex", "at_bytes", "chunks_of"]

BY_TIME: Final = b"\xff\xff"
BY_KEY: Final = b"\xff\xfe"
DUE_AT_LIMIT: Final = True
"""Whether a timer at the very time is due, as it is in Spark."""

_join: Final = b"".join
_CHUNK_ROWS: Final = 8192


def at_bytes(at_ms: Any) -> bytes:
    """A time as it stands in keys: its bytes sort as the times do.

    Raises:
        ValueMismatchError: not a whole number of 64 bits.
    """
    try:
        return pack_at(operator.index(at_ms) + BIAS)
    except (TypeError, struct.error) as error:
        raise ValueMismatchError(
            f"A timer was set for {at_ms!r}, which is no time in milliseconds.",
            todo="Give whole milliseconds since 1970 as an int.",
        ) from error


def _at_of(by_time: bytes) -> bytes:
    return by_time[4:SORTED_BYTES]


def _at_ms(at: bytes) -> int:
    return int.from_bytes(at, "big") - BIAS


@dataclass(frozen=True, slots=True)
class DueTimers:
    """Timers in the order in which they fire: three columns of one length.

    Attributes:
        at_ms: their times.
        groups: the key group of each, 2 bytes.
        keys: the encoded user key of each.
    """

    at_ms: list[int]
    groups: list[bytes]
    keys: list[bytes]

    def __len__(self) -> int:
        return len(self.at_ms)

    def by_key(self) -> tuple[list[bytes], list[bytes], list[int]]:
        """What to load for them: each key once, in key order, and the place of each timer's key.

        Returns:
            (key groups, keys), ascending, and for each timer the index into these.
        """
        owners = list(map(operator.add, self.groups, self.keys))
        distinct = sorted(set(owners))
        place = dict(zip(distinct, range(len(distinct)), strict=True))
        return (
            [owner[:2] for owner in distinct],
            [owner[2:] for owner in distinct],
            list(map(place.__getitem__, owners)),
        )


class TimerIndex(OfOneEpoch):
    """The timers of one subtask in one epoch.

    ``register``, ``delete`` and ``list`` are for the cursor's current key.
    """

    called = "the timers object"
    __slots__ = (
        "_cursor",
        "_entries",
        "_firing",
        "_gone",
        "_groups",
        "_heads",
        "_indexed",
        "_log",
        "_owned",
        "_table",
    )

    def __init__(self, cursor: KeyCursor, table: StateTable) -> None:
        self._cursor = cursor
        self._table = table
        self._heads: list[bytes] | None = None  # by time: of each source, the first that is not due
        self._groups = range(0)
        self._firing = False
        self._gone: set[bytes] = set()  # by time: deleted by the processor since due() was asked
        self._turn(table.entries)

    def _turn(self, entries: dict[bytes, bytes | None]) -> None:
        """Another dict takes the changes: what was in the one before is in a run now."""
        self._entries = entries
        # Every key by time that was written to the dict, as often as it was.
        self._log = [key for key in entries if key[2:4] == BY_TIME]
        self._indexed = 0  # so many of the log are in _owned
        self._owned: dict[bytes, list[bytes]] = {}

    # --- for the current key ------------------------------------------------------------------

    def register(self, at_ms: int) -> None:
        """Set a timer for the current key; setting it twice is setting it once.

        Raises:
            KeyContextError: no key is current.
            ValueMismatchError: not a whole number of 64 bits.
        """
        cursor = self._cursor
        index = cursor.index
        if index < 0:
            cursor.outside()
        try:
            at = pack_at(at_ms + BIAS)
        except (TypeError, ValueError, OverflowError, struct.error):
            at = at_bytes(at_ms)
        group, key = cursor.prefixes[index], cursor.suffixes[index]
        entries = self._table.entries
        if entries is not self._entries:
            self._turn(entries)
        by_time = _join((group, BY_TIME, at, key))  # quicker than `+`
        if entries.get(by_time) is None:  # once: a timer may be set for every row
            self._log.append(by_time)
            entries[by_time] = b""
            entries[_join((group, BY_KEY, key, at))] = b""

    def delete(self, at_ms: int) -> None:
        """Delete a timer of the current key, if there is one; while firing, it will not fire.

        Raises:
            KeyContextError, ValueMismatchError: as :meth:`register`.
        """
        cursor = self._cursor
        index = cursor.index
        if index < 0:
            cursor.outside()
        at = at_bytes(at_ms)
        group, key = cursor.prefixes[index], cursor.suffixes[index]
        by_time = group + BY_TIME + at + key
        if self._table.get(by_time) is not None:
            self._remove(by_time, group + BY_KEY + key + at)
            if self._firing:
                self._gone.add(by_time)

    def list(self) -> list[int]:
        """The times of the current key's timers, ascending.

        Raises:
            KeyContextError: no key is current.
        """
        cursor, table = self._cursor, self._table
        index = cursor.index
        if index < 0:
            cursor.outside()
        entries = table.entries
        if entries is not self._entries:
            self._turn(entries)
        group, key = cursor.prefixes[index], cursor.suffixes[index]
        prefix = group + BY_KEY + key
        found: dict[bytes, bytes | None] = dict(table.base.scan(prefix))
        for runs in table.sorted_runs():
            for run in runs:
                found.update(run.scan(prefix, after(prefix)))
        for by_key in found:
            found[by_key] = entries.get(by_key, found[by_key])
        for at in self._noted(group + key):
            found[prefix + at] = entries[prefix + at]
        skip = len(prefix)
        return [_at_ms(by_key[skip:]) for by_key in sorted(found) if found[by_key] is not None]

    def _noted(self, owner: bytes) -> Sequence[bytes]:
        """The times in the log for an owner (group and key), some perhaps twice."""
        owned = self._owned
        for by_time in self._log[self._indexed :]:
            owned.setdefault(by_time[:2] + by_time[SORTED_BYTES:], []).append(
                by_time[4:SORTED_BYTES]
            )
        self._indexed = len(self._log)
        return owned.get(owner, ())

    # --- firing -------------------------------------------------------------------------------

    def due(self, key_groups: range, before_ms: int) -> Iterator[tuple[int, bytes, bytes]]:
        """(time, key group, encoded key) of the timers below ``before_ms``, as they are now.

        Ordered by time, key group and key. What is registered later is not among them.
        """
        chunks = self.due_chunks(key_groups, before_ms)
        return (row for c in chunks for row in zip(c.at_ms, c.groups, c.keys, strict=True))

    def due_chunks(
        self, key_groups: range, before_ms: int, max_rows: int = _CHUNK_ROWS
    ) -> Iterator[DueTimers]:
        """As :meth:`due`, by the column, at most ``max_rows`` at a time.

        All of them are held as packed bytes (about 8 more than the key by time), not as objects.
        """
        if self._firing or self._table.entries is not self._entries:
            self._turn(self._table.entries)  # what was fired before is not in the log
        self._firing = True
        self._gone = set()
        keys = self._collect(key_groups, clamped(before_ms + DUE_AT_LIMIT))
        at = times_of(keys)
        order = np.argsort(at, kind="stable")  # by key group and key they are in order
        return chunks_of(keys, at, order, max_rows)

    def is_current_set(self, at_ms: int) -> bool:
        """Whether the current key's timer, which :meth:`due` gave, was not deleted since."""
        if not self._gone:
            return True
        cursor = self._cursor
        index = cursor.index
        return not self.cancelled(cursor.prefixes[index], cursor.suffixes[index], at_ms)

    def fired(self, at_ms: int) -> None:
        """The current key's timer has had its call: delete it."""
        cursor = self._cursor
        index = cursor.index
        self.remove(cursor.prefixes[index], cursor.suffixes[index], at_ms)

    def cancelled(self, group: bytes, key: bytes, at_ms: int) -> bool:
        """Whether the processor deleted a timer after :meth:`due` gave it: reads nothing.

        One that was set again then stays set, for a later epoch.
        """
        gone = self._gone
        return bool(gone) and group + BY_TIME + pack_at(at_ms + BIAS) + key in gone

    def is_set(self, group: bytes, key: bytes, at_ms: int) -> bool:
        """Whether there is such a timer; may cost a read (:meth:`cancelled` does not)."""
        return self._table.get(group + BY_TIME + at_bytes(at_ms) + key) is not None

    def remove(self, group: bytes, key: bytes, at_ms: int) -> None:
        """Delete a timer that has fired, without looking whether there is one."""
        at = pack_at(at_ms + BIAS)
        by_time, by_key = _join((group, BY_TIME, at, key)), _join((group, BY_KEY, key, at))
        if not self._firing:
            self._remove(by_time, by_key)
            return
        entries = self._table.entries  # not noted: due() would look through them if asked again
        entries[by_time] = None
        entries[by_key] = None

    def _remove(self, by_time: bytes, by_key: bytes) -> None:
        entries = self._table.entries
        if entries is not self._entries:
            self._turn(entries)
        if by_time not in entries:
            self._log.append(by_time)
        entries[by_time] = None
        entries[by_key] = None

    def _collect(self, key_groups: range, limit: bytes) -> pa.BinaryArray:
        """The keys by time below ``limit`` that are set, in their order; notes the heads."""
        table, entries, heads = self._table, self._entries, list[bytes]()
        earlier, own = table.sorted_runs()
        parts = [of_base(table, BY_TIME, key_groups, limit, heads)]
        parts += [of_run(run, BY_TIME, key_groups, limit, heads) for run in earlier]
        parts += [of_run(run, BY_TIME, key_groups, limit) for run in own]
        low, high = key_groups.start.to_bytes(2, "big"), key_groups.stop.to_bytes(2, "big")
        noted = sorted(
            dict.fromkeys(
                key for key in self._log if key[4:SORTED_BYTES] < limit and low <= key < high
            )
        )
        is_set = np.fromiter((entries[key] is not None for key in noted), np.bool_, len(noted))
        parts.append((binary_array(noted), is_set))
        self._heads, self._groups = heads, key_groups
        return resolved(parts)

    # --- what is left -------------------------------------------------------------------------

    def next_ms(self, key_groups: range | None = None) -> int | None:
        """The earliest timer that is left, None if there is none.

        Timers that :meth:`due` gave are not left, unless they were set again.

        Args:
            key_groups: those of the subtask; needed only if :meth:`due` was not asked.
        """
        table, entries = self._table, self._table.entries
        if entries is not self._entries:
            self._turn(entries)
        if self._heads is None:
            if key_groups is None:
                raise AssertionError("without due(), next_ms() needs the key groups")
            self._heads, self._groups, lowest = [], key_groups, bytes(8)
            of_base(table, BY_TIME, key_groups, lowest, self._heads)
            for run in table.sorted_runs()[0]:
                of_run(run, BY_TIME, key_groups, lowest, self._heads)
        best = self._first_noted(self._first_spilled())
        for candidate in sorted(self._heads, key=_at_of):
            if best is not None and _at_of(candidate) >= best:
                break
            end = candidate[:4] + (best or ABOVE)
            live = next(set_between(table, candidate, end), None)
            if live is not None:
                best = _at_of(live)
        return None if best is None else _at_ms(best)

    def _first_noted(self, best: bytes | None) -> bytes | None:
        """The earliest time in the log that is still set, or ``best`` if that is earlier."""
        log, get = self._log, self._entries.get
        if not log:
            return best
        at = times_of(binary_array(log))
        place = int(at.argmin())
        if get(log[place]) is None:
            live = np.fromiter((get(key) is not None for key in log), np.bool_, len(log))
            if not live.any():
                return best
            place = int(np.flatnonzero(live)[at[live].argmin()])
        found = _at_of(log[place])
        return found if best is None else min(best, found)

    def _first_spilled(self) -> bytes | None:
        """The earliest time that is set among what left the dict in this epoch."""
        parts = [of_run(run, BY_TIME, self._groups, ABOVE) for run in self._table.sorted_runs()[1]]
        keys = resolved(parts)
        get = self._entries.get
        for place in np.argsort(times_of(keys), kind="stable"):
            key: bytes = keys[int(place)].as_py()
            if get(key, b"") is not None:
                return _at_of(key)
        return None


def chunks_of(keys: pa.BinaryArray, at: Any, order: Any, max_rows: int) -> Iterator[DueTimers]:
    """Timers in an order of theirs (places), in pieces; ``at``: as in keys, as numbers."""
    at_ms = (at ^ np.uint64(BIAS)).view(np.int64)
    for start in range(0, len(order), max_rows):
        places = order[start : start + max_rows]
        some = take(keys, places).to_pylist()
        yield DueTimers(
            at_ms[places].tolist(), [key[:2] for key in some], [key[SORTED_BYTES:] for key in some]
        )
