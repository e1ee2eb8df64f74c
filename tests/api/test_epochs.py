"""Processors of our own in a real epoch, with columns on both ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import KeyedProcessor
from statebackend.errors import ProcessorError, ValueMismatchError
from statebackend.key_hashing import key_groups
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.state.table import MemoryBase, StateTable
from tests.api.processors import Reminder, Totals

INPUT = T.StructType().add("user", "string").add("amount", "long").add("at", "long")
OUTPUT = T.StructType().add("user", "string").add("top", "long").add("mean", "double")
RANG = (
    T.StructType()
    .add("user", "string")
    .add("at", "long")
    .add("now", "long")
    .add("watermark", "long")
    .add("left", "long")
)
MAX_PARALLELISM = 8


class Job:
    """One subtask that owns every key group, epoch by epoch."""

    def __init__(self, processor: KeyedProcessor, output: T.StructType, **plan: Any) -> None:
        self.processor, self.epoch = processor, 0
        declared = record_keyed_states(processor, "job", time_mode=plan.get("time_mode", "none"))
        self.plan = OperatorPlan(
            uid="job",
            flavour="keyed",
            input_schema=INPUT,
            key_positions=(0,),
            output_schema=output,
            states=declared.declared,
            **plan,
        )
        self.ids = {name: n for n, name in enumerate(declared.declared, start=1)}
        self.base = MemoryBase()

    def groups(self, rows: list[tuple[Any, ...]]) -> Groups:
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        table = pa.table(
            [
                pa.array(columns[0], pa.string()),
                pa.array(columns[1], pa.int64()),
                pa.array(columns[2], pa.int64()),
            ],
            names=INPUT.names,
        )
        users = table.column(0).combine_chunks()
        encoded = self.plan.key_codec.encode_arrow([users])
        return group_rows(table, encoded, key_groups([users], MAX_PARALLELISM))

    def run(
        self, rows: list[tuple[Any, ...]], *, initial: Any = None, **times: int
    ) -> list[tuple[Any, ...]]:
        table = StateTable(self.base)
        epoch = StatefulEpoch(
            self.plan,
            self.processor,
            table=table,
            state_ids=self.ids,
            times=EpochTimes(epoch=self.epoch, **times),
            key_groups=range(MAX_PARALLELISM),
        )
        first = () if initial is None else [self.groups(initial)]
        batches = list(epoch.run(iter([self.groups(rows)]), initial=first))
        self.base.apply(*table.freeze(self.epoch).sorted())
        self.epoch += 1
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_states_of_every_kind_are_found_again_in_the_next_epoch() -> None:
    job = Job(Totals(), OUTPUT)
    assert sorted(job.run([("a", 1, 0), ("b", 7, 0), ("a", 5, 0)])) == [
        ("a", 5, 3.0),
        ("b", 7, 7.0),
    ]
    assert job.run([("a", 0, 0)]) == [("a", 5, 2.0)]


def test_an_initial_state_is_taken_in_once() -> None:
    job = Job(Totals(), OUTPUT, initial_schema=INPUT, initial_key_positions=(0,))
    found = job.run([("a", 1, 0)], initial=[("a", 9, 0), ("b", 4, 0), ("a", 2, 0)])
    assert found == [("a", 9, 4.0)]
    assert job.run([("b", 2, 0)], initial=[]) == [("b", 4, 3.0)]


@pytest.mark.parametrize("mode", ["processing", "event"])
def test_timers_fire_for_keys_without_rows(mode: str) -> None:
    job = Job(Reminder(), RANG, time_mode=mode)
    assert job.run([("a", 0, 100), ("b", 0, 50)], processing_time_ms=1) == []
    times = {"processing_time_ms": 70, "watermark_ms": 70 if mode == "event" else 0}
    watermark_ms = 70 if mode == "event" else -1
    assert job.run([], **times) == [("b", 50, 70, watermark_ms, 1)]


def failed(process: Callable[..., Any], kind: type[Exception]) -> str:
    class Wrong(KeyedProcessor):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            return process(key, rows)

    with pytest.raises(kind) as caught:
        Job(Wrong(), OUTPUT).run([("a", 1, 0)])
    return str(caught.value)


def test_rows_that_do_not_fit_the_output_schema_are_refused() -> None:
    assert "'top'" in failed(lambda key, rows: [("a", "x", 1.0)], ValueMismatchError)
    assert "3 fields" in failed(lambda key, rows: [("a", 1)], ValueMismatchError)
    assert "3 fields" in failed(lambda key, rows: ["a"], ValueMismatchError)
    assert "no iterable of rows" in failed(lambda key, rows: ("a", 1, 1.0), ValueMismatchError)


def test_what_a_processor_raises_names_key_and_line() -> None:
    said = failed(lambda key, rows: 1 // 0, ProcessorError)
    assert "('a',)" in said
    assert __file__ in said
