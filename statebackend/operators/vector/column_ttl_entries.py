"""Single entries with a time to live, by the column: their stamps, and their places in the index.

Both are those of ``statebackend.state.ttl_cells``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.errors import LocalCopyError
from statebackend.operators.vector.column_entries import Entries, Lengths
from statebackend.operators.vector.key_vector import strictly
from statebackend.schema.arrow_buffers import boolean_array
from statebackend.state.binary_columns import (
    EMPTY,
    fixed_column,
    joined,
    newest,
    tail,
    take,
    valid_bits,
    width_of,
)
from statebackend.state.column_table import ColumnTable
from statebackend.state.expiry_index import (
    BY_EXPIRY,
    ENTRY,
    MAP,
    STAMP_BYTES,
    TIME_BYTES,
    TTL,
    expiry_stamp,
    read_share_ms,
    stamp_time,
)
from statebackend.state.time_ranges import clamped

__all__ = ["TtlEntries"]

_GROUP_BYTES: Final = 2
_LAST: Final = np.uint64(2**64 - 1)


class TtlEntries(Entries):
    """Entries that expire: stamp and row; each has its place in the index.

    Args:
        now_ms: the epoch's processing time.
    """

    def __init__(self, columns: ColumnTable, ttl: TTL, now_ms: int) -> None:
        super().__init__(columns)
        self._ttl = ttl
        self._keeps, self._refreshes = ttl.update == "create", ttl.update == "read"
        self._hides = ttl.expired == "hide"
        self.set_now(now_ms)

    def set_now(self, now_ms: int) -> None:
        """What time it is, for all that follows."""
        ttl = self._ttl
        expiry_ms = now_ms + ttl.ms
        self._now = _number(clamped(now_ms))
        self._stale = _number(clamped(expiry_ms - read_share_ms(ttl.ms)))
        stamp = expiry_stamp(clamped(expiry_ms), ttl.ms)
        self._stamp = np.frombuffer(stamp, np.uint8)
        self._time = _number(stamp_time(stamp))

    def look(self, full: pa.BinaryArray) -> pa.BinaryArray:
        """As :meth:`Entries.look`."""
        data = self._columns.get_columns(full)
        shown = self.shown(data)
        if int(shown.sum()) == len(data) - data.null_count:
            return data
        return pc.if_else(boolean_array(shown), data, pa.scalar(None, pa.binary()))

    def get(self, full: pa.BinaryArray, lengths: Lengths = None) -> pa.BinaryArray:
        """As :meth:`Entries.get`."""
        data = self.look(full)
        self._read(full, data, lengths)
        return tail(data, STAMP_BYTES)

    def rows(self, full: pa.BinaryArray, data: pa.BinaryArray, lengths: Lengths) -> pa.BinaryArray:
        """As :meth:`Entries.rows`."""
        self._read(full, data, lengths)
        return tail(data, STAMP_BYTES)

    def shown(self, data: pa.BinaryArray) -> NDArray[np.bool_]:
        """As :meth:`Entries.shown`."""
        valid = valid_bits(data)
        if self._hides:
            valid[valid] = _times(data.drop_null()) > self._now
        return valid

    def live(
        self, full: pa.BinaryArray, data: pa.BinaryArray
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """As :meth:`Entries.live`."""
        places = np.flatnonzero(self.shown(data))
        return take(full, places), tail(take(data, places), STAMP_BYTES)

    def put(self, full: pa.BinaryArray, rows: pa.BinaryArray, lengths: Lengths = None) -> None:
        """As :meth:`Entries.put`."""
        self._write(full, rows, self._columns.get_columns(full), lengths)

    def delete(self, full: pa.BinaryArray, lengths: Lengths = None) -> None:
        """As :meth:`Entries.delete`."""
        old = self._columns.get_columns(full)
        there = np.flatnonzero(valid_bits(old))
        full, lengths = take(full, there), None if lengths is None else lengths[there]
        listed = self._listed(full, _index_times(take(old, there)), lengths)
        self._put([(listed, None), (full, None)])

    def _read(self, full: pa.BinaryArray, data: pa.BinaryArray, lengths: Lengths) -> None:
        """A read moves the expiry, where the TTL says so; what is expired stays so."""
        if not self._refreshes:
            return
        moved = valid_bits(data)
        times = _times(data.drop_null())
        moved[moved] = (self._now < times) & (times <= self._stale)
        places = np.flatnonzero(moved)
        if not len(places):
            return
        full, data = take(full, places), take(data, places)
        lengths = None if lengths is None else lengths[places]
        order = strictly(full)
        if order is not None:
            full, data = take(full, order), take(data, order)
            lengths = None if lengths is None else lengths[order]
        self._write(full, tail(data, STAMP_BYTES), data, lengths)

    def _write(
        self, full: pa.BinaryArray, rows: pa.BinaryArray, old: pa.BinaryArray, lengths: Lengths
    ) -> None:
        count = len(full)
        stamps = np.broadcast_to(self._stamp, (count, STAMP_BYTES)).copy()
        valid = valid_bits(old)
        had = np.flatnonzero(valid)
        there = take(old, had)
        before = _stamps(there)
        kept = (before == self._stamp).all(axis=1)
        if self._keeps:
            kept |= _times(there) > self._now
        stamps[had[kept]] = before[kept]
        times = _index_times(there)
        moved = ~kept & (times != self._time)
        gone, listed = had[moved], np.sort(np.concatenate([np.flatnonzero(~valid), had[moved]]))

        def some(places: NDArray[np.int64]) -> Lengths:
            return None if lengths is None else lengths[places]

        new_times = np.full(len(listed), self._time)
        added = self._listed(take(full, listed), new_times, some(listed))
        empty = fixed_column(np.empty((len(added), 0), np.uint8))
        self._put(
            [
                (self._listed(take(full, gone), times[moved], some(gone)), None),
                (added, empty),
                (full, joined([fixed_column(stamps), rows])),
            ]
        )

    def _put(self, parts: list[tuple[pa.BinaryArray, pa.BinaryArray | None]]) -> None:
        """Write entries and places in the index together; None: deleted."""
        filled = [
            (keys, pa.nulls(len(keys), pa.binary()) if values is None else values)
            for keys, values in parts
        ]
        self._columns.put_columns(*newest(filled))

    def _listed(
        self, full: pa.BinaryArray, times: NDArray[np.uint64], lengths: Lengths
    ) -> pa.BinaryArray:
        """Where the index has entries."""
        if not len(full):
            return EMPTY
        kind: list[pa.BinaryArray | bytes] = [ENTRY]
        if lengths is not None:
            kind = [MAP, fixed_column(lengths.astype(">u4"))]
        group = pc.binary_slice(full, 0, _GROUP_BYTES)
        rest = tail(full, _GROUP_BYTES)
        return joined([group, BY_EXPIRY, fixed_column(times.astype(">u8")), *kind, rest])


def _number(time: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(time, "big"))


def _stamps(data: pa.BinaryArray) -> NDArray[np.uint8]:
    """The stamps of stored entries, none of them null.

    Raises:
        LocalCopyError: an entry has none.
    """
    if not len(data):
        return np.zeros((0, STAMP_BYTES), np.uint8)
    head = pc.binary_slice(data, 0, STAMP_BYTES)
    if width_of(head) != STAMP_BYTES:
        raise LocalCopyError(
            "An entry with a TTL is shorter than the time that stands before each.",
            todo="The local store is set aside; the state is restored from the next good copy.",
        )
    return np.frombuffer(head.buffers()[2], np.uint8, len(data) * STAMP_BYTES).reshape(
        -1, STAMP_BYTES
    )


def _times(data: pa.BinaryArray) -> NDArray[np.uint64]:
    head = np.ascontiguousarray(_stamps(data)[:, :TIME_BYTES])
    return head.view(">u8").reshape(-1).astype(np.uint64)


def _index_times(data: pa.BinaryArray) -> NDArray[np.uint64]:
    """Where the index has stored entries: their expiry, rounded up (see ``stamp_time``)."""
    stamps = _stamps(data)
    times, widths = _times(data), stamps[:, TIME_BYTES].astype(np.uint64)
    mask = (np.uint64(1) << widths) - np.uint64(1)
    up = times | mask
    return np.where((times & mask) == 0, times, np.where(up == _LAST, _LAST, up + np.uint64(1)))
