"""Tumbling and sliding windows: rows go into open windows, timers close them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.operators.aggregate.aggregate_processor import (
    AggregateProcessor,
    Rows,
    delete_entries,
)
from statebackend.operators.aggregate.arrow_numpy import Ints, flags, take
from statebackend.operators.aggregate.row_numbers import order_by_code
from statebackend.operators.aggregate.stored_accumulators import Entries, StoredWindows
from statebackend.operators.aggregate.windows import pane_starts, pane_us, windows_of
from statebackend.schema.field_meanings import MEANING, OF_ALL
from statebackend.state.binary_columns import valid_bits

__all__ = ["WindowsProcessor"]

_CODES_MAX: Final = 1 << 62
_EXPANDED_ROWS: Final = 1 << 22  # at most so many at a time, unless they are one key's


class WindowsProcessor(AggregateProcessor):
    """With tumbling or sliding windows.

    A window is an entry of the map state "windows", its map key the start in milliseconds; a timer
    stands at its end.
    """

    def _open(self, ctx: Any) -> None:
        window = self.plan.window
        assert window is not None, "a plan with windows"
        # State knows windows by their starts: what their length is, nothing else says. (Where they
        # start may change: those that are open are closed in their time.)
        length_ms = window.duration_us // 1000
        meaning = {MEANING: f"{window.kind} windows of {length_ms} ms", OF_ALL: True}
        mark = T.StructField("open", T.BooleanType(), metadata=meaning)
        self._windows = StoredWindows(ctx, "windows", mark, self.plan.accumulators)

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        """Merge the batch into open windows."""
        rows, times_us = self._times(batch)
        key = ctx.keys.index[rows]
        bounds = _chunks(key, max(1, _EXPANDED_ROWS // self._overlap))
        for begin, end in itertools.pairwise(bounds):
            some = Rows(key[begin:end], times_us[begin:end], rows[begin:end])
            output = self._merged(batch, some, ctx)
            if output is not None:
                yield output

    @property
    def _overlap(self) -> int:
        window = self.plan.window
        assert window is not None, "a plan with windows"
        return -(-window.duration_us // window.slide_us)

    def _merged(self, batch: pa.RecordBatch, some: Rows, ctx: Any) -> pa.RecordBatch | None:
        window = self.plan.window
        assert window is not None, "a plan with windows"
        if self._overlap > 1 and self.plan.can_be_partial and not self.partial:
            some = self._panes(batch, some)
        repeated, start_us = windows_of(some.times_us, window)
        if repeated is not None:
            some = some.take(repeated)
        on_time = self._drop_late(batch, some, start_us + window.duration_us, ctx)
        if on_time is not None:
            some, start_us = some.take(on_time), start_us[on_time]
        if not len(some.key):
            return None
        key, start_us, starts, order = _by_window(some.key, start_us, window.slide_us)
        some = some if order is None else some.take(order)
        lifted = some.lifted is not None
        inputs = some.lifted_columns() if lifted else self._inputs(batch, some.rows)
        keys, start_ms = ctx.keys.take(key), start_us // 1000
        mark, old = self._windows.get(keys, start_ms)
        new = []
        for index, columns in enumerate(inputs):
            entries = self._entries(index, keys, start_ms)
            new.append(self._added(index, old[index], columns, starts, entries, lifted=lifted))
        self._windows.put(keys, start_ms, flags(np.ones(len(key), bool)), new)
        end_us = start_us + window.duration_us
        if mark.null_count:
            opened = ~valid_bits(mark)
            ctx.timers.register(keys.take(opened), end_us[opened] // 1000)
        return self._output(keys, new, start_us, end_us) if self.plan.emit == "updates" else None

    def _panes(self, batch: pa.RecordBatch, some: Rows) -> Rows:
        """Rows made one for each key and pane, so that fewer are repeated for every window."""
        window = self.plan.window
        assert window is not None, "a plan with windows"
        if not len(some.key):
            return some
        panes_us = pane_starts(some.times_us, window)
        key, panes_us, starts, order = _by_window(some.key, panes_us, pane_us(window))
        rows = some.rows if order is None else some.rows[order]
        inputs = self._inputs(batch, rows)
        lifted = [
            accumulator.lift(columns, starts)
            for accumulator, columns in zip(self.plan.accumulators, inputs, strict=True)
        ]
        return Rows(key, panes_us, np.arange(len(key)), np.diff(starts), lifted)

    def on_timers(self, keys: Any, at_ms: Ints, ctx: Any) -> pa.RecordBatch | None:
        """Close windows."""
        window = self.plan.window
        assert window is not None, "a plan with windows"
        start_ms = np.asarray(at_ms, np.int64) - window.duration_us // 1000
        mark, accumulators = self._windows.get(keys, start_ms)
        if mark.null_count:
            there = valid_bits(mark)
            places = np.flatnonzero(there)
            keys, start_ms = keys.take(there), start_ms[there]
            accumulators = [[take(c, places) for c in own] for own in accumulators]
        if not len(start_ms):
            return None
        self._windows.delete(keys, start_ms)
        self._forget(keys, start_ms)
        if self.plan.emit == "updates":
            return None
        start_us = start_ms * 1000
        return self._output(keys, accumulators, start_us, start_us + window.duration_us)

    def _entries(self, index: int, keys: Any, start_ms: Ints) -> Entries | None:
        return Entries(self._values[index], keys, start_ms) if index in self._values else None

    def _forget(self, keys: Any, starts: Ints) -> None:
        """Delete the values of windows that closed."""
        for state in self._values.values():
            delete_entries(state, keys, starts)


def _by_window(key: Ints, start_us: Ints, slide_us: int) -> tuple[Ints, Ints, Ints, Ints | None]:
    """Sort rows by (key, window).

    Args:
        key: of each row, ascending.

    Returns:
        Key and start of each group, the groups' segments, and the order (None: it was that).
    """
    low = int(np.min(start_us))
    slots = (int(np.max(start_us)) - low) // slide_us + 1
    if (int(key[-1]) + 1) * slots < _CODES_MAX:
        code = key * np.int64(slots) + (start_us - low) // slide_us
        order = None if (code[1:] >= code[:-1]).all() else _sorted_codes(code)
    else:
        order = np.lexsort((start_us, key))
    if order is not None:
        key, start_us = key[order], start_us[order]
    begins = np.ones(len(key), bool)
    begins[1:] = (key[1:] != key[:-1]) | (start_us[1:] != start_us[:-1])
    first = np.flatnonzero(begins)
    return key[first], start_us[first], np.append(first, len(key)), order


def _sorted_codes(code: Ints) -> Ints:
    largest = int(np.max(code)) + 1
    # Two or three radix passes beat a sort by comparison.
    if largest <= 1 << 48:
        return order_by_code(code, largest)
    return np.argsort(code, kind="stable")


def _chunks(key: Ints, rows_max: int) -> list[int]:
    """Where to cut sorted rows so that no key is cut; more than `rows_max` only of one key."""
    bounds = [0]
    while bounds[-1] < len(key):
        end = bounds[-1] + rows_max
        if end < len(key):
            cut = int(np.searchsorted(key, key[end]))
            end = cut if cut > bounds[-1] else int(np.searchsorted(key, key[end], side="right"))
        bounds.append(min(end, len(key)))
    return bounds
