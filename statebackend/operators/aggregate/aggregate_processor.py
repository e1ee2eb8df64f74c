"""The operator behind ``backend.aggregate``: merges an epoch's rows into state, in columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.api.arrow import ArrowProcessor
from statebackend.operators.aggregate.accumulators import Columns
from statebackend.operators.aggregate.aggregation_plan import (
    PANE,
    ROWS,
    AggregatePlan,
    partial_name,
)
from statebackend.operators.aggregate.arrow_numpy import Ints, arrow_of, numpy_of, take
from statebackend.operators.aggregate.row_numbers import first_rows, group_rows
from statebackend.operators.aggregate.stored_accumulators import (
    Accumulators,
    Entries,
    StoredTotals,
)
from statebackend.operators.aggregate.value_counts import Pairs, ValueAccumulator
from statebackend.schema.conform import conform
from statebackend.schema.field_meanings import MEANING
from statebackend.schema.types import arrow_type

__all__ = ["AggregateProcessor", "Rows", "TotalsProcessor", "delete_entries", "distinct_keys"]


@dataclass(frozen=True)
class Rows:
    """Rows of a batch, or panes of them, sorted by key.

    Attributes:
        key: which key each is of. times_us: its event time, or the pane's start.
        rows: where it stands in the batch, or among the panes.
        weights, lifted: of panes: rows and accumulators of each, not yet in the order of ``rows``.
    """

    key: Ints
    times_us: Ints
    rows: Ints
    weights: Ints | None = None
    lifted: Accumulators | None = None

    def take(self, which: Ints) -> Rows:
        """Some of them."""
        return replace(
            self, key=self.key[which], times_us=self.times_us[which], rows=self.rows[which]
        )

    def lifted_columns(self) -> Accumulators:
        """The accumulators, in order."""
        assert self.lifted is not None, "only of panes"
        return [[take(column, self.rows) for column in columns] for columns in self.lifted]


class AggregateProcessor(ArrowProcessor):
    """What aggregations with and without windows share.

    Args:
        plan: what to do.
        partial: batches hold `plan.partial_schema`, not the plan's input columns.

    Attributes:
        late_rows: rows dropped since :meth:`open` as all of their window was late; with sliding
            windows, once for each late window.
    """

    def __init__(self, plan: AggregatePlan, *, partial: bool = False) -> None:
        assert plan.can_be_partial or not partial, "not to be aggregated before the shuffle"
        self.plan, self.partial = plan, partial
        self.late_rows = 0

    def open(self, ctx: Any) -> None:
        """Ask for the states."""
        self.late_rows = 0
        self._values = {
            index: self._value_state(ctx, accumulator)
            for index, accumulator in enumerate(self.plan.accumulators)
            if isinstance(accumulator, ValueAccumulator)
        }
        self._open(ctx)

    @abstractmethod
    def _open(self, ctx: Any) -> None: ...

    def _value_state(self, ctx: Any, accumulator: ValueAccumulator) -> Any:
        start = [T.StructField("start", T.LongType())] if self.plan.window is not None else []
        values = [
            T.StructField(f"value_{place}", dtype)
            for place, dtype in enumerate(accumulator.value_types)
        ]
        key = T.StructType([*start, *values])
        meaning = {MEANING: accumulator.meaning}
        entry = T.StructType(
            [T.StructField(f.name, f.dataType, metadata=meaning) for f in accumulator.entry_schema]
        )
        return ctx.map_state(f"values.{accumulator.name}", key, entry)

    # --- rows into accumulators

    def _inputs(self, batch: pa.RecordBatch, order: Ints | None) -> Accumulators:
        """For each accumulator the columns it reads, rows in this order (None: as they are)."""
        if order is not None and _whole(order, batch.num_rows):
            order = None
        known: dict[str, pa.Array] = {}

        def column(name: str, dtype: T.DataType) -> pa.Array:
            if name not in known:
                whole = conform(batch.column(name), T.StructField(name, dtype))
                known[name] = whole if order is None else take(whole, order)
            return known[name]

        if not self.partial:
            return [
                [column(field.name, field.dataType) for field in self.plan.inputs(accumulator)]
                for accumulator in self.plan.accumulators
            ]
        return [
            [
                column(partial_name(index, place), dtype)
                for place, dtype in enumerate(accumulator.fields.values())
            ]
            for index, accumulator in enumerate(self.plan.accumulators)
        ]

    def _added(
        self,
        index: int,
        old: Columns,
        columns: Columns,
        starts: Ints,
        entries: Entries | None,
        *,
        lifted: bool = False,
    ) -> list[pa.Array]:
        """An accumulator's new columns, one row for each group of the sorted rows.

        Args:
            lifted: the columns are those of accumulators already.
        """
        accumulator = self.plan.accumulators[index]
        if isinstance(accumulator, ValueAccumulator):
            assert entries is not None, "values are kept in a map state"
            group = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            pairs = Pairs.of(group, columns, accumulator.value_types)
            return accumulator.apply(entries, pairs, old)
        if not (self.partial or lifted):
            new: Columns = accumulator.lift(columns, starts)
        elif len(columns[0]) == len(starts) - 1:
            new = columns
        else:
            new = accumulator.merge(columns, starts)
        return accumulator.combine(old, new)

    # --- accumulators into rows

    def _output(
        self, keys: Any, accumulators: Accumulators, start_us: Ints | None, end_us: Ints | None
    ) -> pa.RecordBatch:
        columns = list(keys.columns.columns)
        if start_us is not None and end_us is not None:
            kind = arrow_type(self.plan.event_type)
            columns += [arrow_of(times_us, None, kind) for times_us in (start_us, end_us)]
        columns += [
            accumulator.result(own)
            for accumulator, own in zip(self.plan.accumulators, accumulators, strict=True)
        ]
        schema = self.plan.output_arrow
        fitting = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(fitting, schema=schema)

    # --- event time

    def _times(self, batch: pa.RecordBatch) -> tuple[Ints, Ints]:
        """The rows that have an event time, and it, in microseconds."""
        assert self.plan.event_time is not None, "only with windows"
        name = PANE if self.partial else self.plan.event_time
        field = T.StructField(name, self.plan.event_type)
        times_us, valid = numpy_of(conform(batch.column(name), field))
        if valid is None:
            return np.arange(len(times_us)), times_us
        rows = np.flatnonzero(valid)
        return rows, times_us[rows]

    def _drop_late(self, batch: pa.RecordBatch, some: Rows, end_us: Ints, ctx: Any) -> Ints | None:
        """The rows on time, whose windows end at ``end_us``; None: all. Counts the others."""
        on_time = end_us > np.int64(ctx.late_watermark_ms) * 1000
        if on_time.all():
            return None
        late = some.rows[~on_time]
        if some.weights is not None:
            dropped = int(some.weights[late].sum())
        elif self.partial:
            dropped = int(numpy_of(batch.column(ROWS))[0][late].sum())
        else:
            dropped = len(late)
        self.late_rows += dropped
        ctx.late_rows += dropped
        return np.flatnonzero(on_time)


class TotalsProcessor(AggregateProcessor):
    """Without windows: a row of output for each key and epoch that touched it."""

    def _open(self, ctx: Any) -> None:
        self._totals = StoredTotals(ctx, self.plan.accumulators)

    def process(self, batch: pa.RecordBatch, ctx: Any) -> pa.RecordBatch | None:
        """Merge the batch into state."""
        keys = ctx.keys
        if not len(keys):
            return None
        starts, old, inputs = keys.starts, self._totals.get(keys), self._inputs(batch, None)
        new = [
            self._added(index, old[index], inputs[index], starts, self._entries(index, keys))
            for index in range(len(inputs))
        ]
        self._totals.put(keys, new)
        return self._output(keys, new, None, None)

    def _entries(self, index: int, keys: Any) -> Entries | None:
        return Entries(self._values[index], keys) if index in self._values else None


def delete_entries(state: Any, keys: Any, starts: Ints) -> None:
    """Delete the entries of windows starts[i] of keys[i], no two alike."""
    if not len(starts):
        return
    # No other window of the keys is read: there may be many that are open.
    which, map_keys, _ = state.items(keys, under=[starts])
    if len(which):
        state.delete(keys.take(which), map_keys)


def distinct_keys(keys: Any, fields: Sequence[T.StructField]) -> tuple[Any, Ints]:
    """Each key once, in the order of first appearance, and which of them each is."""
    columns = [conform(c, T.StructField(f.name, f.dataType)) for c, f in _named(keys, fields)]
    grouped = group_rows(columns, [field.dataType for field in fields])
    first = first_rows(grouped)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return keys.take(first[order]), place[grouped.codes]


def _named(keys: Any, fields: Sequence[T.StructField]) -> list[tuple[pa.Array, T.StructField]]:
    return list(zip(keys.columns.columns, fields, strict=True))


def _whole(rows: Ints, count: int) -> bool:
    return len(rows) == count and bool((rows[1:] > rows[:-1]).all())
