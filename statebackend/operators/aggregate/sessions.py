"""Session windows: open sessions in state grow, meet and merge as rows come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.operators.aggregate.aggregate_processor import (
    AggregateProcessor,
    Rows,
    delete_entries,
    distinct_keys,
)
from statebackend.operators.aggregate.arrow_numpy import Ints, arrow_of, numpy_of, take
from statebackend.operators.aggregate.row_numbers import order_by_code
from statebackend.operators.aggregate.stored_accumulators import (
    Accumulators,
    Entries,
    StoredWindows,
)
from statebackend.operators.aggregate.value_counts import Pairs, ValueAccumulator
from statebackend.operators.aggregate.windows import timer_ms
from statebackend.schema.field_meanings import MEANING, OF_ALL

__all__ = ["SessionsProcessor"]

_SPAN_MAX: Final = 1 << 62


class _Open:
    """The open sessions of some keys, as they are in state."""

    def __init__(self, keys: Any, windows: StoredWindows) -> None:
        self.keys = keys
        self.key, self.start_us, marks, self.accumulators = windows.items(keys)
        self.end_us: Ints = numpy_of(marks)[0]


class SessionsProcessor(AggregateProcessor):
    """With session windows.

    A session is an entry of the map state "sessions", its map key the start in microseconds; its
    end stands in the entry, and a timer at it. A session that starts earlier than it did, or was
    merged into an earlier one, moves: with it the values that were counted in it.
    """

    def _open(self, ctx: Any) -> None:
        meaning = {MEANING: "sessions", OF_ALL: True}
        mark = T.StructField("end_us", T.LongType(), metadata=meaning)
        self._sessions = StoredWindows(ctx, "sessions", mark, self.plan.accumulators)

    def process(self, batch: pa.RecordBatch, ctx: Any) -> pa.RecordBatch | None:
        """Merge the batch into open sessions."""
        window = self.plan.window
        assert window is not None, "a plan with windows"
        rows, times_us = self._times(batch)
        some = Rows(ctx.keys.index[rows], times_us, rows)
        on_time = self._drop_late(batch, some, times_us + window.duration_us, ctx)
        if on_time is not None:
            rows, times_us = rows[on_time], times_us[on_time]
        if not len(rows):
            return None
        touched, row_key = np.unique(ctx.keys.index[rows], return_inverse=True)
        old = _Open(ctx.keys.take(touched), self._sessions)
        merged = merge_sessions(
            row_key, times_us, window.duration_us, old.key, old.start_us, old.end_us
        )
        order = order_by_code(merged.of_row, len(merged.key))
        starts = np.searchsorted(merged.of_row[order], np.arange(len(merged.key) + 1))
        inputs = self._inputs(batch, rows[order])
        new = self._new(inputs, starts, merged, old)
        keys = old.keys.take(merged.key)
        self._write(keys, new, merged, old, ctx)
        if self.plan.emit == "closed":
            return None
        return self._output(keys, new, merged.start_us, merged.end_us)

    def _new(
        self, inputs: Accumulators, starts: Ints, merged: Sessions, old: _Open
    ) -> Accumulators:
        """The accumulators of the merged sessions."""
        members = np.flatnonzero(merged.of_stored >= 0)
        members = members[np.argsort(merged.of_stored[members], kind="stable")]
        session = merged.of_stored[members]
        stays = old.start_us[members] == merged.start_us[session]
        new = []
        for index, accumulator in enumerate(self.plan.accumulators):
            columns = old.accumulators[index]
            if isinstance(accumulator, ValueAccumulator):
                # What a moving session has counted is counted again, in its new place.
                kept = [take(c, members[stays]) for c in columns]
                before = _at(kept, session[stays], len(merged.key))
                new.append(self._counted(index, inputs[index], before, starts, merged, old))
                continue
            first = np.flatnonzero(np.append(True, session[1:] != session[:-1])[: len(session)])
            parts = accumulator.merge(
                [take(c, members) for c in columns], np.append(first, len(session))
            )
            before = _at(parts, session[first], len(merged.key))
            new.append(accumulator.combine(before, accumulator.lift(inputs[index], starts)))
        return new

    def _counted(
        self,
        index: int,
        columns: list[pa.Array],
        before: list[pa.Array],
        starts: Ints,
        merged: Sessions,
        old: _Open,
    ) -> list[pa.Array]:
        accumulator = self.plan.accumulators[index]
        assert isinstance(accumulator, ValueAccumulator), "it has a state of values"
        state = self._values[index]
        session = np.repeat(np.arange(len(merged.key)), np.diff(starts))
        weights = np.ones(len(session), np.int64)
        gone = _moved(merged, old)
        if len(gone):
            owners = old.keys.take(old.key[gone])
            which, map_keys, entries = state.items(owners, under=[old.start_us[gone]])
            state.delete(owners.take(which), map_keys)
            session = np.concatenate([merged.of_stored[gone][which], session])
            weights = np.concatenate([accumulator.weights(entries), weights])
            order = order_by_code(session, len(merged.key))
            session, weights = session[order], weights[order]
            columns = [
                take(pa.concat_arrays([stored, column]), order)
                for stored, column in zip(map_keys.columns[1:], columns, strict=True)
            ]
        pairs = Pairs.of(session, columns, accumulator.value_types, weights)
        place = Entries(state, old.keys.take(merged.key), merged.start_us)
        return accumulator.apply(place, pairs, before)

    def _write(self, keys: Any, new: Accumulators, merged: Sessions, old: _Open, ctx: Any) -> None:
        gone = _moved(merged, old)
        if len(gone):
            self._sessions.delete(old.keys.take(old.key[gone]), old.start_us[gone])
        ends = arrow_of(merged.end_us, None, pa.int64())
        self._sessions.put(keys, merged.start_us, ends, new)
        members = np.flatnonzero(merged.of_stored >= 0)
        before_ms = timer_ms(old.end_us[members])
        after_ms = timer_ms(merged.end_us)
        ended = members[before_ms != after_ms[merged.of_stored[members]]]
        if len(ended):
            ctx.timers.delete(old.keys.take(old.key[ended]), timer_ms(old.end_us[ended]))
        known = np.zeros(len(merged.key), bool)
        known[merged.of_stored[members[before_ms == after_ms[merged.of_stored[members]]]]] = True
        if not known.all():
            ctx.timers.register(keys.take(~known), after_ms[~known])

    def on_timers(self, keys: Any, at_ms: Ints, ctx: Any) -> pa.RecordBatch | None:
        """Close sessions."""
        distinct, key = distinct_keys(keys, self.plan.key_fields)
        old = _Open(distinct, self._sessions)
        ends_ms = timer_ms(old.end_us)
        due = _among(old.key, ends_ms, key, np.asarray(at_ms, np.int64))
        if not len(due):
            return None
        owners, start_us = distinct.take(old.key[due]), old.start_us[due]
        self._sessions.delete(owners, start_us)
        for state in self._values.values():
            delete_entries(state, owners, start_us)
        if self.plan.emit == "updates":
            return None
        accumulators = [[take(c, due) for c in own] for own in old.accumulators]
        return self._output(owners, accumulators, start_us, old.end_us[due])


def _moved(merged: Sessions, old: _Open) -> Ints:
    """The stored sessions that are part of one that starts elsewhere."""
    of = merged.of_stored
    return np.flatnonzero((of >= 0) & (old.start_us != merged.start_us[of]))


def _at(columns: list[pa.Array], places: Ints, rows: int) -> list[pa.Array]:
    """Columns spread over `rows` rows: the i-th row goes to places[i], the others are null."""
    index = np.full(rows, -1, np.int64)
    index[places] = np.arange(len(places))
    taken = arrow_of(index, index >= 0, pa.int64())
    return [column.take(taken) for column in columns]


def _among(key: Ints, value: Ints, keys: Ints, values: Ints) -> Ints:
    """The places of pairs (key, value) that are among (keys, values)."""
    distinct = np.unique(values)
    place = np.minimum(np.searchsorted(distinct, value), len(distinct) - 1)
    known = distinct[place] == value
    wanted = keys * len(distinct) + np.searchsorted(distinct, values)
    return np.flatnonzero(known & np.isin(key * len(distinct) + place, wanted))


@dataclass(frozen=True)
class Sessions:
    """Sessions that rows touched, in the order of (key, start).

    Attributes:
        key, start_us, end_us: of each session.
        of_row: the session of each row.
        of_stored: that of each stored session; -1 for those that no row touched.
    """

    key: Ints
    start_us: Ints
    end_us: Ints
    of_row: Ints
    of_stored: Ints


def merge_sessions(
    row_key: Ints,
    row_us: Ints,
    gap_us: int,
    stored_key: Ints,
    stored_start_us: Ints,
    stored_end_us: Ints,
) -> Sessions:
    """Put rows and stored sessions together: sessions that overlap or meet become one.

    Args:
        row_key: a number for the key of each row (from 0 on), and row_us: its time.
        stored_key, stored_start_us, stored_end_us: sessions that are open already.
    """
    stored = len(stored_key)
    key = np.concatenate([stored_key, row_key])
    start = np.concatenate([stored_start_us, row_us])
    end = np.concatenate([stored_end_us, row_us + np.int64(gap_us)])
    order = np.lexsort((start, key))
    key, start, end = key[order], start[order], end[order]
    furthest = _running_max(key, end)
    opens = np.ones(len(key), bool)
    opens[1:] = (key[1:] != key[:-1]) | (start[1:] > furthest[:-1])
    session = np.cumsum(opens) - 1
    begins = np.flatnonzero(opens)
    touched = np.logical_or.reduceat(order >= stored, begins)
    ends = np.append(begins[1:], len(key)) - 1
    numbers = np.where(touched, np.cumsum(touched) - 1, -1)
    of = np.empty(len(key), np.int64)
    of[order] = numbers[session]
    return Sessions(
        key=key[begins][touched],
        start_us=start[begins][touched],
        end_us=furthest[ends][touched],
        of_row=of[stored:],
        of_stored=of[:stored],
    )


def _running_max(key: Ints, values: Ints) -> Ints:
    """The largest value so far within each key; keys ascend."""
    low, high = int(np.min(values)), int(np.max(values))
    span = high - low + 1
    if (int(key[-1]) + 1) * span < _SPAN_MAX:
        base = key * np.int64(span)
        found: Ints = np.maximum.accumulate(base + (values - low)) - base + low
        return found
    distinct, ranks = np.unique(values, return_inverse=True)
    base = key * np.int64(len(distinct))
    by_rank: Ints = distinct[np.maximum.accumulate(base + ranks) - base]
    return by_rank
