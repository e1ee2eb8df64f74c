"""Aggregations in real epochs over a base in memory, and what plain Python makes of the rows."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.key_hashing import key_groups
from statebackend.operators.aggregate.aggregation_plan import AggregatePlan
from statebackend.operators.aggregate.partial_aggregation import PartialAggregation
from statebackend.operators.aggregate.processor_for_plan import processor_for
from statebackend.operators.arrow_calls import record_arrow_states
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.operators.input.packing import RowPacker, unpacked
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.redeclared_states import redeclared, versions_of
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.schema.types import arrow_type
from statebackend.state.table import MemoryBase, StateTable

MAX_PARALLELISM = 8
Row = dict[str, Any]


def batch_of(schema: T.StructType, rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as a record batch; timestamps are given in microseconds."""
    arrays = []
    for field in schema:
        kind = arrow_type(field.dataType)
        values = [row.get(field.name) for row in rows]
        if pa.types.is_timestamp(kind):
            arrays.append(pa.array(values, pa.int64()).cast(kind))
        else:
            arrays.append(pa.array(values, kind))
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """A record batch as rows; timestamps in microseconds."""
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()


class Job:
    """One subtask that owns every key group, epoch by epoch.

    Args:
        early: rows are aggregated before the shuffle, in so many tasks.
    """

    def __init__(self, plan: AggregatePlan, *, early: int = 0) -> None:
        self.plan, self.early, self.epoch = plan, early, 0
        self.processor = processor_for(plan, partial=early > 0)
        schema = plan.partial_schema if early else plan.schema
        mode = plan.time_mode
        declared = record_arrow_states(
            processor_for(plan, partial=early > 0), "job", time_mode=mode
        )
        self.operator = OperatorPlan(
            uid="job",
            flavour="arrow",
            input_schema=schema,
            key_positions=tuple(schema.names.index(name) for name in plan.keys),
            output_schema=plan.output_schema,
            states=declared.declared,
            time_mode=mode,
        )
        self.ids = {name: n for n, name in enumerate(declared.declared, start=1)}
        self.base = MemoryBase()
        self.late_rows = 0
        self.read_bytes = 0  # by the last epoch

    def restarted(self, plan: AggregatePlan, *, early: int = 0) -> Job:
        """Another plan that goes on from this one's state, as a query with the same uid does.

        Raises:
            StateMismatchError: it cannot.
        """
        new = Job(plan, early=early)
        known = self.operator.states
        states = {
            name: redeclared("job", known[name], made) if name in known else made
            for name, made in new.operator.states.items()
        }
        # As a checkpoint: states that the plan does not have are kept.
        new.operator = dataclasses.replace(new.operator, states=states)
        new.ids = dict(self.ids)
        for name in states:
            new.ids.setdefault(name, 1 + max(new.ids.values()))
        new.base, new.epoch = self.base, self.epoch
        return new

    def run(self, rows: Sequence[Row], watermark_ms: int = 0, late_ms: int = 0) -> list[Row]:
        """One epoch: the rows of its output."""
        batch = batch_of(self.plan.schema, rows)
        parts = list(self._parts(batch))
        table = StateTable(self.base)
        times = EpochTimes(
            epoch=self.epoch,
            processing_time_ms=1,
            watermark_ms=watermark_ms,
            late_watermark_ms=late_ms,
        )
        epoch = StatefulEpoch(
            self.operator,
            self.processor,
            table=table,
            state_ids=self.ids,
            times=times,
            key_groups=range(MAX_PARALLELISM),
            versions=versions_of(self.operator.states),
        )
        output = [row for made in epoch.run(iter(parts)) for row in rows_of(made)]
        self.read_bytes = epoch._batches.columns.read_bytes
        frozen = table.freeze(self.epoch)
        self.base.apply(*frozen.sorted())
        self.epoch += 1
        assert epoch.figures.late_rows == self.processor.late_rows
        self.late_rows += self.processor.late_rows
        return output

    def entries(self) -> int:
        """How many entries state has, timers too."""
        return len(self.base.entries)

    def _parts(self, batch: pa.RecordBatch) -> Iterator[Groups]:
        if self.early:
            share = -(-batch.num_rows // self.early) or 1
            early = RowPacker(
                PartialAggregation(self.plan, rows_max=5, groups_max=4),
                self.operator.input_schema,
                self.operator.key_positions,
                1,
                MAX_PARALLELISM,
                payload_bytes=200,
            )
            schema = arrow_schema(self.operator.input_schema)
            made = []
            for start in range(0, batch.num_rows, share):
                for packed in early(iter([batch.slice(start, share)])):
                    made += [rows for rows, _ in unpacked(packed.column(0), schema)]
            if not made:
                return
            table = pa.Table.from_batches(made)
        else:
            if not batch.num_rows:
                return
            table = pa.Table.from_batches([batch])
        keys = [table.column(i).combine_chunks() for i in self.operator.key_positions]
        encoded = self.operator.key_codec.encode_arrow(keys)
        yield group_rows(table, encoded, key_groups(keys, MAX_PARALLELISM))


# --- the truth ------------------------------------------------------------------------------------


def present(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def order(value: Any) -> Any:
    """NaN is larger than every number; zeros are one."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return (0, value)


def same(value: Any) -> Any:
    """Values that are equal to the engine are equal here."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    return value


def total(values: Sequence[Any]) -> Any:
    there = present(values)
    if not there:
        return None
    return sum(there[1:], start=there[0])


def mean(values: Sequence[Any]) -> Any:
    there = present(values)
    return float(sum(there[1:], start=there[0])) / len(there) if there else None


def variance(values: Sequence[Any]) -> Any:
    there = [float(value) for value in present(values)]
    if len(there) < 2:
        return None
    if not all(map(math.isfinite, there)):
        return math.nan
    return statistics.variance(there)


def top(values: Sequence[Any], k: int) -> list[Row]:
    counts = Counter(present(values))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [{"value": value, "count": count} for value, count in ranked[:k]]


TRUTHS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "count": len,
    "there": lambda values: len(present(values)),
    "sum": total,
    "min": lambda values: min(present(values), key=order, default=None),
    "max": lambda values: max(present(values), key=order, default=None),
    "mean": mean,
    "variance": variance,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "distinct": lambda values: len({same(value) for value in present(values)}),
    "top": lambda values: top(values, 2),
}


def alike(got: Any, wanted: Any) -> bool:
    """Equal, floats but for rounding."""
    if isinstance(got, float) and isinstance(wanted, float | int):
        if math.isnan(got) or math.isnan(wanted):
            return math.isnan(got) and math.isnan(wanted)
        return math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-6)
    if isinstance(got, Decimal) and isinstance(wanted, Decimal):
        return got == wanted
    return bool(got == wanted and type(got) is type(wanted))


def assert_alike(got: list[Row], wanted: list[Row], keys: Sequence[str]) -> None:
    """Rows are the same, in any order."""

    def name(row: Row) -> str:
        return repr([row[key] for key in keys])

    got, wanted = sorted(got, key=name), sorted(wanted, key=name)
    assert [name(row) for row in got] == [name(row) for row in wanted]
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for column in one:
            assert alike(one[column], other[column]), (column, one, other)
