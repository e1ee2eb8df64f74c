"""Lists with a time to live, by the column: the row-wise cell underneath, key by key.

Each element of such a list has its own expiry and the list a head that is rewritten, so there is
little to gain by the column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.operators.vector.column_states import StateSite
from statebackend.operators.vector.given_columns import Columns, arrow_fields, columns_of, record
from statebackend.operators.vector.key_vector import GROUP_BYTES, Keys
from statebackend.schema.codec import RowCodec
from statebackend.state.binary_columns import tail
from statebackend.state.blocks import binary_array
from statebackend.state.key_cursor import KeyCursor
from statebackend.state.ttl_cells import TTL, TtlListCell
from statebackend.state.unbound import OfOneEpoch

__all__ = ["ArrowTtlListState"]


class ArrowTtlListState(OfOneEpoch):
    """The face of ``ArrowListState``, for elements that expire one by one."""

    def __init__(self, site: StateSite, codec: RowCodec, ttl: TTL, now_ms: int) -> None:
        self._site, self._codec, self._name = site, codec, site.name
        self._fields = arrow_fields(codec.schema)
        self._cursor = KeyCursor()
        self._cell = TtlListCell(
            self._cursor,
            site.columns.table,
            site.name,
            int.from_bytes(site.id, "big"),
            codec,
            ttl=ttl,
            now_ms=now_ms,
        )

    def set_now(self, now_ms: int) -> None:
        """What time it is, for all that follows."""
        self._cell.set_now(now_ms)

    def get(self, keys: Keys) -> tuple[NDArray[np.int64], pa.RecordBatch]:
        """See ``ArrowListState.get``."""
        counts, rows = np.zeros(len(keys), np.int64), list[tuple[Any, ...]]()
        for place in self._each(keys):
            found = list(self._cell.get())
            counts[place] = len(found)
            rows += found
        encoded = binary_array(self._codec.encode_many(rows))
        index = np.repeat(np.arange(len(keys)), counts)
        return index, record(self._codec.decode_arrow(encoded), self._fields)

    def exists(self, keys: Keys) -> pa.BooleanArray:
        """See ``ArrowListState.exists``."""
        return pa.array([self._cell.exists() for _ in self._each(keys)], pa.bool_())

    def append(self, keys: Keys, values: Columns) -> None:
        """See ``ArrowListState.append``."""
        rows = self._rows(values, len(keys))
        for place in self._each(keys):
            self._cell.append(rows[place])

    def put(self, keys: Keys, index: NDArray[np.int64], values: Columns) -> None:
        """See ``ArrowListState.put``."""
        self._site.full(keys)  # says so if these are none
        owners = keys.take(index)
        rows = self._rows(values, len(owners))
        self.delete(keys)
        for place in self._each(owners):
            self._cell.append(rows[place])

    def delete(self, keys: Keys) -> None:
        """See ``ArrowListState.delete``."""
        for _ in self._each(keys):
            self._cell.clear()

    def _rows(self, values: Columns, count: int) -> list[tuple[Any, ...]]:
        columns = columns_of(values, self._codec.schema, count, f"State {self._name!r}")
        encoded = self._codec.encode_arrow(columns).to_pylist()
        return [row for row in self._codec.decode_many(encoded) if row is not None]

    def _each(self, keys: Keys) -> Any:
        """Makes each key current, in turn."""
        self._site.full(keys)  # says so if these are none
        cursor = self._cursor
        own = tail(keys.full, GROUP_BYTES).to_pylist()
        groups = pc.binary_slice(keys.full, 0, GROUP_BYTES).to_pylist()
        try:
            for place, (group, key) in enumerate(zip(groups, own, strict=True)):
                cursor.load([group], [key])  # of a key that comes twice, as the first left it
                cursor.index = 0
                yield place
        finally:
            cursor.index = -1
