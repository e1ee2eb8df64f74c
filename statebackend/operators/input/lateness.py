"""Event time, in columns: the maximum that makes a watermark, and the rows that came too late."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.errors import LateOutputError

__all__ = ["EventMaxima", "LateRows", "in_time"]


class EventMaxima:
    """The largest event time of an attempt's rows, late ones too; in milliseconds, rounded down.

    Args:
        position: of the event-time column (microseconds); None: nothing is measured.
        side_position: of the column that says which of two inputs a row is of (0 or 1), each of
            which has a maximum of its own.
    """

    def __init__(self, position: int | None = None, side_position: int | None = None) -> None:
        self._position, self._side_position = position, side_position
        self.max_ms: int | None = None
        self.second_ms: int | None = None

    def take(self, rows: pa.RecordBatch) -> None:
        """Look at some rows."""
        if self._position is None:
            return
        column = rows.column(self._position)
        if self._side_position is None:
            self.max_ms = _larger(self.max_ms, column)
            return
        first = pc.equal(rows.column(self._side_position), 0)
        self.max_ms = _larger(self.max_ms, column.filter(first))
        self.second_ms = _larger(self.second_ms, column.filter(pc.invert(first)))


def _larger(known_ms: int | None, column: pa.Array) -> int | None:
    largest = pc.max(column)
    if not largest.is_valid:
        return known_ms
    found_ms: int = largest.value // 1000
    return found_ms if known_ms is None else max(known_ms, found_ms)


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


def in_time(
    output: Iterator[pa.RecordBatch], uid: str, position: int, watermark_ms: int
) -> Iterator[pa.RecordBatch]:
    """Passes an operator's output on; refuses rows that operators behind it would drop as late.

    Args:
        position: of the event-time column (microseconds). watermark_ms: rows up to it are late.

    Raises:
        LateOutputError: with the first such row.
    """
    for batch in output:
        late = pc.less_equal(batch.column(position).cast(pa.int64()), watermark_ms * 1000)
        if pc.any(late).as_py():
            row = batch.filter(late).slice(0, 1).to_pylist()[0]
            raise LateOutputError(
                f"The processor of operator {uid!r} gave out {row!r}, whose event time "
                f"{batch.schema.names[position]!r} is not after the watermark "
                f"({watermark_ms} ms): operators behind it would drop the row.",
                todo="Give such rows an event time after the watermark, or leave "
                "eventTimeColumnName= out.",
            )
        yield batch
