"""Keys that are ordered by a time, read by the range: what is below a limit, and what comes next.

Such a key is ``key group (2) | state id (2) | time (8, big-endian, sign bit flipped) | rest``. It
may stand in the base, in sorted runs over it, and in the table's dict. The dict is in no order: who
writes such keys notes them.
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.state.binary_columns import EMPTY, lasts, take, valid_bits
from statebackend.state.blocks import binary_array
from statebackend.state.spill import Run
from statebackend.state.table import StateTable
from statebackend.state.table_base import after

__all__ = [
    "ABOVE",
    "BIAS",
    "SORTED_BYTES",
    "Part",
    "clamped",
    "of_base",
    "of_run",
    "pack_at",
    "resolved",
    "set_between",
    "times_of",
]

BIAS: Final = 1 << 63
SORTED_BYTES: Final = 12  # key group, state id and time
ABOVE: Final = b"\xff" * 9  # above every time
pack_at: Final = struct.Struct(">Q").pack

Part = tuple[pa.BinaryArray, Any]
"""Ascending keys of one source, and which of them are set (bool; None: all), not deleted."""


def clamped(at_ms: int) -> bytes:
    """A time as it stands in keys; one beyond 64 bits is the last (or first) that there is."""
    return pack_at(min(max(at_ms + BIAS, 0), 2 * BIAS - 1))


def times_of(keys: pa.BinaryArray) -> Any:
    """The times in such keys: uint64, sign bit flipped."""
    if not len(keys):
        return np.zeros(0, np.uint64)
    # A slice is a new array, so its bytes begin at the front.
    data = pc.binary_slice(keys, 4, SORTED_BYTES).buffers()[2]
    return np.frombuffer(data, ">u8", len(keys)).astype(np.uint64)


def _ranges(
    state_id: bytes, key_groups: range, limit: bytes, low: bytes
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """For each group: the key of the lowest time, the limit's, and where the state ends."""
    for group in key_groups:
        prefix = group.to_bytes(2, "big") + state_id
        yield prefix + low, prefix + limit, after(prefix)


def of_base(
    table: StateTable,
    state_id: bytes,
    key_groups: range,
    limit: bytes,
    heads: list[bytes],
    low: bytes = b"",
) -> Part:
    """The base's keys from ``low`` on, below ``limit``; the first from there go to ``heads``.

    That is one of each group. ``low`` is at most ``limit``.
    """
    pieces = []
    for some in table.base.scan_keys(_ranges(state_id, key_groups, limit, low)):
        keys = binary_array(some)
        below = times_of(keys) < np.uint64(int.from_bytes(limit, "big"))
        if not below.all():
            heads += map(some.__getitem__, np.flatnonzero(~below).tolist())
            keys = take(keys, np.flatnonzero(below))
        pieces.append(keys)
    return pa.concat_arrays(pieces) if pieces else EMPTY, None


def of_run(
    run: Run,
    state_id: bytes,
    key_groups: range,
    limit: bytes,
    heads: list[bytes] | None = None,
    low: bytes = b"",
) -> Part:
    """As :func:`of_base`, with deletions."""
    keys, flags = [EMPTY], []
    for start, end, stop in _ranges(state_id, key_groups, limit, low):
        for block in range(bisect_left(run.last, start), len(run.last)):
            if run.first[block] >= stop:
                break
            rows = run.load(block)
            first = rows.lower(start)
            high = rows.lower(end, first)
            if high > first:
                keys.append(rows.keys.slice(first, high - first))
                flags.append(valid_bits(rows.values.slice(first, high - first)))
            if high < len(rows):
                if heads is not None and (head := rows.key(high)) < stop:
                    heads.append(head)
                break
    return pa.concat_arrays(keys), np.concatenate(flags) if flags else None


def resolved(parts: Iterable[Part]) -> pa.BinaryArray:
    """The keys that are set, ascending; parts are oldest first, and the newest word counts."""
    filled = [part for part in parts if len(part[0])]
    if not filled:
        return EMPTY
    flags = [np.ones(len(keys), np.bool_) if some is None else some for keys, some in filled]
    if len(filled) == 1:
        keys, chosen = filled[0][0], flags[0]
        return keys if chosen.all() else take(keys, np.flatnonzero(chosen))
    together = pa.concat_arrays([keys for keys, _ in filled])
    order = pc.sort_indices(together)  # stable: of equal keys the newest comes last
    in_order = together.take(order)
    chosen = np.concatenate(flags)[np.frombuffer(order.buffers()[1], np.uint64, len(order))]
    chosen &= lasts(in_order)
    return in_order if chosen.all() else take(in_order, np.flatnonzero(chosen))


def set_between(table: StateTable, start: bytes, end: bytes) -> Iterator[bytes]:
    """The keys of ``start <= key < end`` that are set, in order, as they are asked for.

    Keys that were added in the table's dict are not seen; its deletions are.
    """
    base = (key for some in table.base.scan_keys([(start, end, end)]) for key in some)
    streams: list[Iterator[tuple[bytes, int, bool]]] = [((key, 0, True) for key in base)]
    earlier, own = table.sorted_runs()
    for age, run in enumerate([*earlier, *own], start=1):
        streams.append(_aged(run.scan(start, end), -age))
    changed, last = table.entries.get, None
    ordered = heapq.merge(*streams) if len(streams) > 1 else streams[0]
    for key, _, is_set in ordered:  # of equal keys the newest comes first
        if key != last and changed(key, b"" if is_set else None) is not None:
            yield key
        last = key


def _aged(
    entries: Iterator[tuple[bytes, bytes | None]], age: int
) -> Iterator[tuple[bytes, int, bool]]:
    return ((key, age, value is not None) for key, value in entries)
