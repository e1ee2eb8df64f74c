"""Aggregation before the shuffle: fewer rows to send, merged again by the operator.

Rows are collected, grouped and lifted to accumulators, which are held and merged while they shrink
well. Where grouping does not pay (nearly every row has a group of its own) rows are lifted one by
one, which costs little, and grouping is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.operators.aggregate.accumulators import counts_of
from statebackend.operators.aggregate.aggregation_plan import AggregatePlan
from statebackend.operators.aggregate.arrow_numpy import (
    Ints,
    arrow_of,
    numpy_of,
    single_starts,
    take,
)
from statebackend.operators.aggregate.row_numbers import first_rows, group_rows
from statebackend.operators.aggregate.windows import pane_starts
from statebackend.schema.conform import conform

__all__ = ["PartialAggregation"]

_RATIO_MAX: Final = 0.6
_LIFTED_BETWEEN: Final = 16
_OUT_ROWS: Final = 1 << 17


@dataclass(frozen=True)
class PartialAggregation:
    """From input rows to partial accumulators, for ``mapInArrow``; can be pickled.

    Args:
        plan: of which `can_be_partial` holds.
        rows_max: rows collected before they are grouped.
        groups_max: groups held before they are handed on.
        bytes_max: both in bytes.
    """

    plan: AggregatePlan
    rows_max: int = 1 << 19
    groups_max: int = 1 << 19
    bytes_max: int = 64 << 20

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Partial accumulators of all rows, in `plan.partial_schema`."""
        run = _Run(self)
        for batch in batches:
            if batch.num_rows:
                yield from run.take(batch)
        yield from run.end()


@dataclass
class _Run:
    """One task's rows."""

    limits: PartialAggregation
    rows: list[pa.RecordBatch] = field(default_factory=list)
    row_count: int = 0
    size_bytes: int = 0
    held: list[pa.RecordBatch] = field(default_factory=list)
    held_rows: int = 0
    held_bytes: int = 0
    lift_only: int = 0

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        plan = self.limits.plan
        columns = [conform(batch.column(n), _loose(plan.schema[n])) for n in plan.columns]
        narrow = pa.RecordBatch.from_arrays(columns, names=plan.columns)
        self.rows.append(narrow)
        self.row_count += narrow.num_rows
        self.size_bytes += narrow.nbytes
        if self.row_count >= self.limits.rows_max or self.size_bytes >= self.limits.bytes_max:
            yield from self._collected()

    def end(self) -> Iterator[pa.RecordBatch]:
        if self.row_count:
            yield from self._collected()
        if len(self.held) > 1:
            self._hold([merged_partials(self.limits.plan, _joined(self.held))])
        yield from self._flush()

    def _collected(self) -> Iterator[pa.RecordBatch]:
        rows = _joined(self.rows)
        self.rows, self.row_count, self.size_bytes = [], 0, 0
        if self.lift_only:
            self.lift_only -= 1
            yield from _slices(lifted(self.limits.plan, rows))
            return
        made = grouped(self.limits.plan, rows)
        if made.num_rows > _RATIO_MAX * rows.num_rows:
            self.lift_only = _LIFTED_BETWEEN
        self._hold([*self.held, made])
        if self._share_held() > 1:
            self._hold([merged_partials(self.limits.plan, _joined(self.held))])
            if self._share_held() > 0.5:  # what shrinks little is not merged for ever
                yield from self._flush()

    def _share_held(self) -> float:
        """How much is held of what may be, in groups or bytes (sketches and texts may be large)."""
        rows, size_bytes = self.limits.groups_max, self.limits.bytes_max
        return max(self.held_rows / rows, self.held_bytes / size_bytes)

    def _hold(self, batches: list[pa.RecordBatch]) -> None:
        self.held = batches
        self.held_rows = sum(batch.num_rows for batch in batches)
        self.held_bytes = sum(batch.nbytes for batch in batches)

    def _flush(self) -> Iterator[pa.RecordBatch]:
        for batch in self.held:
            yield from _slices(batch)
        self._hold([])


def grouped(plan: AggregatePlan, rows: pa.RecordBatch) -> pa.RecordBatch:
    """One accumulator for each group of rows.

    Args:
        rows: the columns of `plan.columns`.
    """
    keys = [rows.column(name) for name in plan.keys]
    dtypes = [f.dataType for f in plan.key_fields]
    panes = _panes(plan, rows)
    if panes is not None:
        keys, dtypes = [*keys, panes], [*dtypes, T.LongType()]
    groups = group_rows(keys, dtypes)
    starts = groups.starts()
    read = [name for a in plan.accumulators for name in a.inputs]
    if plan.event_time is not None:
        read.append(plan.event_time)
    order = groups.order() if read else np.zeros(0, np.int64)
    inputs = {name: take(rows.column(name), order) for name in dict.fromkeys(read)}
    first = first_rows(groups)
    heads = [take(rows.column(name), first) for name in plan.keys]
    if panes is not None:
        assert plan.event_time is not None, "panes are made of it"
        heads += _times(plan, take(panes, first), inputs[plan.event_time], starts)
    for accumulator in plan.accumulators:
        heads += accumulator.lift([inputs[name] for name in accumulator.inputs], starts)
    return pa.RecordBatch.from_arrays(heads, schema=plan.partial_arrow)


def lifted(plan: AggregatePlan, rows: pa.RecordBatch) -> pa.RecordBatch:
    """One accumulator for each row."""
    starts = single_starts(rows.num_rows)
    heads = [rows.column(name) for name in plan.keys]
    panes = _panes(plan, rows)
    if panes is not None:
        heads += _times(plan, panes, rows.column(plan.event_time), starts)
    for accumulator in plan.accumulators:
        heads += accumulator.lift([rows.column(name) for name in accumulator.inputs], starts)
    return pa.RecordBatch.from_arrays(heads, schema=plan.partial_arrow)


def merged_partials(plan: AggregatePlan, partials: pa.RecordBatch) -> pa.RecordBatch:
    """Partial accumulators, one for each group."""
    told = len(plan.keys) + (plan.window is not None)
    dtypes = [f.dataType for f in plan.partial_schema.fields[:told]]
    groups = group_rows(partials.columns[:told], dtypes)
    starts = groups.starts()
    first = first_rows(groups)
    heads = [take(column, first) for column in partials.columns[:told]]
    order = groups.order()
    rest = [take(column, order) for column in partials.columns[told:]]
    if plan.window is not None:
        latest, counts, *rest = rest
        heads.append(_latest(latest, starts))
        heads.append(arrow_of(np.add.reduceat(numpy_of(counts)[0], starts[:-1]), None, pa.int64()))
    for accumulator in plan.accumulators:
        own, rest = rest[: len(accumulator.fields)], rest[len(accumulator.fields) :]
        heads += accumulator.merge(own, starts)
    return pa.RecordBatch.from_arrays(heads, schema=plan.partial_arrow)


def _panes(plan: AggregatePlan, rows: pa.RecordBatch) -> pa.Array | None:
    """Starts of panes in microseconds; null where there is no event time."""
    if plan.window is None:
        return None
    times_us, valid = numpy_of(rows.column(plan.event_time))
    return arrow_of(pane_starts(times_us, plan.window), valid, pa.int64())


def _times(plan: AggregatePlan, panes: pa.Array, times: pa.Array, starts: Ints) -> list[pa.Array]:
    counts = arrow_of(counts_of(None, starts), None, pa.int64())
    return [panes.view(times.type), _latest(times, starts), counts]


def _latest(times: pa.Array, starts: Ints) -> pa.Array:
    """The largest time by segment; those of one pane are all null, or none is."""
    times_us, valid = numpy_of(times)
    latest = np.maximum.reduceat(times_us, starts[:-1])
    return arrow_of(latest, None if valid is None else valid[starts[:-1]], times.type)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, _OUT_ROWS):
        yield batch.slice(start, _OUT_ROWS)


def _loose(column: T.StructField) -> T.StructField:
    return T.StructField(column.name, column.dataType)
