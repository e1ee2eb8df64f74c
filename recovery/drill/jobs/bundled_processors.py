"""The processors of the bundled jobs; imported by drivers and workers alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import KeyedProcessor

__all__ = ["RunningTotals", "Windows"]


class RunningTotals(StatefulProcessor):
    """Rows in the order of their sequence, whatever the order in which they came in the batch."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the states."""
        self._totals = handle.getValueState("totals", "n bigint, total bigint")
        self._of_file = handle.getMapState("of_file", "file int", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        """One row of output for each of input."""
        n, total = self._totals.get() or (0, 0)
        for row in sorted(rows, key=lambda row: row.seq):
            n, total = n + 1, total + row.v
            before = self._of_file.getValue((row.file,))
            of_file = (before[0] if before else 0) + 1
            self._of_file.updateValue((row.file,), (of_file,))
            yield Row(k=key[0], seq=row.seq, n=n, total=total, of_file=of_file)
        self._totals.update((n, total))

    def close(self) -> None:
        """Nothing to close."""


class Windows(KeyedProcessor):
    """Counts and sums per window, put out by a timer at the window's end."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms

    def open(self, ctx: ProcessorContext) -> None:
        """Declare the state."""
        self._windows = ctx.map_state("windows", "end_ms bigint", "n bigint, total bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        """Add rows to their windows."""
        width = self._window_ms
        for row in rows:
            end_ms = round(row.at.timestamp() * 1000) // width * width + width
            n, total = self._windows.get_value((end_ms,)) or (0, 0)
            self._windows.update_value((end_ms,), (n + 1, total + row.v))
            ctx.timers.register(end_ms)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[tuple[Any, ...]]:
        """Put the window out. One that it finds empty had fired before."""
        n, total = self._windows.get_value((at_ms,)) or (0, 0)  # zeros are in no truth
        self._windows.remove_key((at_ms,))
        yield key[0], at_ms, n, total
