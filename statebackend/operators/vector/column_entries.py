"""Single entries by the column, without a time to live; and all entries under prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.state.binary_columns import (
    EMPTY,
    bools_of,
    firsts,
    indices_of,
    order_of,
    take,
    valid_bits,
)
from statebackend.state.column_table import ColumnTable
from statebackend.state.table import state_prefix
from statebackend.state.table_base import after

__all__ = ["Entries", "places_in", "scan_state", "under_keys"]

_PIECE_ROWS: Final = 65_536

Lengths = NDArray[np.int64] | None
"""Of map entries: how long the prefix of each one's map is."""


class Entries:
    """Entries without a time to live: what is stored are encoded rows."""

    def __init__(self, columns: ColumnTable) -> None:
        self._columns = columns

    def look(self, full: pa.BinaryArray) -> pa.BinaryArray:
        """What is stored under keys, null where nothing is (or nothing is seen)."""
        return self._columns.get_values(full)

    def get(self, full: pa.BinaryArray, lengths: Lengths = None) -> pa.BinaryArray:
        """The rows of keys, null where there is none; counts as a read."""
        return self._columns.get_values(full)

    def rows(self, full: pa.BinaryArray, data: pa.BinaryArray, lengths: Lengths) -> pa.BinaryArray:
        """The rows in what was stored; counts as a read."""
        return data

    def shown(self, data: pa.BinaryArray) -> NDArray[np.bool_]:
        """Which of what is stored is seen."""
        return valid_bits(data)

    def live(
        self, full: pa.BinaryArray, data: pa.BinaryArray
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """The keys whose entries are seen, and their rows; no read."""
        return full, data

    def put(self, full: pa.BinaryArray, rows: pa.BinaryArray, lengths: Lengths = None) -> None:
        """Write rows; keys ascend strictly."""
        self._columns.put_values(full, rows)

    def delete(self, full: pa.BinaryArray, lengths: Lengths = None) -> None:
        """Remove entries; keys ascend strictly."""
        self._columns.put_values(full, None)


def places_in(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... for each of the counts, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def scan_state(
    columns: ColumnTable, state_id: bytes, key_groups: range
) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
    """All entries of a state, in key order, in pieces of one key group or less."""
    for group in key_groups:
        prefix = state_prefix(group, int.from_bytes(state_id, "big"))
        full, data = columns.between([(prefix, after(prefix))])
        for start in range(0, len(full), _PIECE_ROWS):
            yield full.slice(start, _PIECE_ROWS), data.slice(start, _PIECE_ROWS)


def under_keys(
    columns: ColumnTable, prefixes: pa.BinaryArray
) -> tuple[NDArray[np.int64], pa.BinaryArray, pa.BinaryArray]:
    """The entries under prefixes of which none begins with another, in any order.

    Returns:
        which prefix each entry is under (ascending), full keys, and what is stored.
    """
    if not len(prefixes):
        return np.zeros(0, np.int64), EMPTY, EMPTY
    order = order_of(prefixes)
    ordered = take(prefixes, order)
    first = firsts(ordered)
    distinct = take(ordered, np.flatnonzero(first))
    which = np.empty(len(prefixes), np.int64)  # of each prefix, its place among the distinct
    which[order] = np.cumsum(first) - 1
    full, data = columns.between([(p, after(p)) for p in distinct.to_pylist()])
    owner = _owners(distinct, full)
    own = np.flatnonzero(owner >= 0)
    if len(own) < len(full):
        full, data, owner = take(full, own), take(data, own), owner[own]
    starts = np.searchsorted(owner, np.arange(len(distinct) + 1))
    counts = np.diff(starts)[which]
    places = np.repeat(starts[:-1][which], counts) + places_in(counts)
    index = np.repeat(np.arange(len(prefixes)), counts)
    if len(places) == len(full) and (np.diff(places) == 1).all():
        return index, full, data
    return index, take(full, places), take(data, places)


def _owners(prefixes: pa.BinaryArray, full: pa.BinaryArray) -> NDArray[np.int64]:
    """The place of the prefix (ascending) of each key (ascending); -1 where there is none."""
    both = order_of(pa.concat_arrays([prefixes, full]))
    is_prefix = both < len(prefixes)
    owner = np.empty(len(full), np.int64)
    owner[both[~is_prefix] - len(prefixes)] = (np.cumsum(is_prefix) - 1)[~is_prefix]
    lengths = indices_of(pc.binary_length(prefixes))
    of_owner = lengths[np.maximum(owner, 0)]
    for length in np.unique(of_owner):
        places = np.flatnonzero((of_owner == length) & (owner >= 0))
        heads = pc.binary_slice(take(full, places), 0, int(length))
        same = bools_of(pc.equal(heads, take(prefixes, owner[places])))
        owner[places[~same]] = -1
    return owner
