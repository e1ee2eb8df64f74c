"""Event time, in columns: the maximum that makes a watermark, and the rows that came too late."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["LateRows", "largest_event_ms"]


def largest_event_ms(column: pa.Array) -> int | None:
    """The largest event time in milliseconds (rounded down); None if there is none."""
    largest = pc.max(column)
    return largest.value // 1000 if largest.is_valid else None


class LateRows:
    """Leaves out the rows whose event time is at or before the watermark, and counts them.

    Args:
        position: of the event-time column (microseconds). watermark_ms: rows up to it are late.
    """

    def __init__(self, position: int, watermark_ms: int) -> None:
        self._position = position
        self._limit = watermark_ms * 1000
        self.dropped = 0

    def mask(self, table: pa.Table) -> pa.ChunkedArray | None:
        """Which rows are on time; None if all are. A row without event time is never late."""
        column = table.column(self._position)
        on_time = pc.greater(column.cast(pa.int64()), self._limit).fill_null(True)
        late = len(on_time) - (pc.sum(on_time).as_py() or 0)
        self.dropped += late
        return on_time if late else None

    def keep(self, table: pa.Table) -> pa.Table:
        """The rows that are on time, not counting the others: that was done."""
        dropped = self.dropped
        mask = self.mask(table)
        self.dropped = dropped
        return table if mask is None else table.filter(mask)
