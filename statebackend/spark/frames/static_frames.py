"""Runs a static frame through a processor once, over empty state, as Spark's own engine does.

There is no query, so there is no job either: no log, no coordinator, nothing that outlives a task.
Rows are shuffled by key group. A task runs one epoch over the keys that it gets, and forgets the
state. A task that is run again begins anew.

As in Spark the processing time is that at which the frame is evaluated, and there is no watermark
(it is -1): no row is late, and a timer of event time fires only if it was set for a time before
1970.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from recovery.local.workspace import Workspace
from statebackend import system
from statebackend.keygroups import default_max_parallelism
from statebackend.operators.declared_states import Declarations, EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.errors.task_errors import code_first
from statebackend.operators.input.group_by_key import Groups, group_parts
from statebackend.operators.input.staging import InputStage
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.runtime.driver.initial_state_frame import InitialState
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.runtime.time_plan import TimePlan
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.schema.ddl import quoted
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.settings import Settings
from statebackend.spark.frames.key_hash_expression import key_group_expression
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import MemoryBase, StateTable

__all__ = ["StaticSpec", "StaticTask", "once_through", "static_operator"]

_CONTROL_COLUMNS: Final = ("__statebackend_key_group", "__statebackend_now", "__statebackend_side")
_NO_WATERMARK_MS: Final = -1


def static_operator(
    uid: str,
    rows: StructType,
    names: list[str],
    declared: Declarations,
    when: TimePlan,
    initial: InitialState | None,
    settings: Settings,
) -> Operator:
    """An operator that is in no job: the store is not asked about it."""
    key_schema = StructType([rows[name] for name in names])
    KeyCodec(key_schema)  # refuses types that cannot be keys
    parallelism = settings.parallelism or 1
    return Operator(
        uid=uid,
        parallelism=parallelism,
        max_parallelism=settings.max_parallelism or default_max_parallelism(parallelism),
        key_schema=key_schema,
        states=declared.declared,
        time=when,
        initial=initial,
        withdrawn=frozenset(declared.withdrawn),
    )


def once_through(
    df: DataFrame,
    operator: Operator,
    plan: OperatorPlan,
    processor: ShippedProcessor,
    settings: Settings,
    local_dir: str,
) -> DataFrame:
    """The output of a processor over a static frame."""
    spec = StaticSpec(
        plan=plan,
        max_parallelism=operator.max_parallelism,
        local_dir=local_dir,
        input_budget_bytes=settings.input_budget_bytes,
        overlay_budget_bytes=settings.overlay_budget_bytes,
        quick_frames=bool(settings.quick_frames) and plan.flavour == "pandas",
    )
    together = _keys_together(df, operator, settings.parallelism)
    return together.mapInArrow(StaticTask(spec, processor), plan.output_schema)


def _keys_together(df: DataFrame, operator: Operator, partitions: int | None) -> DataFrame:
    """Rows with key group, time and side, those of one key in one partition.

    Rows of the initial state are on side 1; their columns follow those of ``df``, and each row has
    nulls in the other side's.

    Args:
        partitions: None: as many as Spark finds right.
    """
    initial, max_parallelism = operator.initial, operator.max_parallelism
    first = initial.frame if initial else None
    rows = _half(df, operator.key_schema.names, 0, (df, first), max_parallelism)
    if initial is not None:
        keys = [initial.frame.columns[i] for i in initial.key_positions]
        rows = rows.union(_half(initial.frame, keys, 1, (df, first), max_parallelism))
    where = F.col(_CONTROL_COLUMNS[0])
    return rows.repartition(partitions, where) if partitions else rows.repartition(where)


def _half(
    frame: DataFrame,
    keys: list[str],
    side: int,
    both: tuple[DataFrame, DataFrame | None],
    max_parallelism: int,
) -> DataFrame:
    columns: list[Column] = []
    for number, of in enumerate(both):
        for i, field in enumerate(of.schema.fields if of is not None else ()):
            mine = F.col(quoted(field.name)) if number == side else F.lit(None)
            columns.append(mine.cast(field.dataType).alias(f"c{number}_{i}"))
    group = key_group_expression([F.col(quoted(name)) for name in keys], max_parallelism)
    now_ms = F.unix_millis(F.current_timestamp())  # one for the whole evaluation
    for name, value in zip(_CONTROL_COLUMNS, (group, now_ms, F.lit(side)), strict=True):
        columns.append(value.alias(name))
    return frame.select(*columns)


@dataclass(frozen=True)
class StaticSpec:
    """What a task is told of its operator."""

    plan: OperatorPlan
    max_parallelism: int
    local_dir: str
    input_budget_bytes: int
    overlay_budget_bytes: int
    quick_frames: bool


class StaticTask:
    """The function given to ``mapInArrow``."""

    def __init__(self, spec: StaticSpec, processor: ShippedProcessor) -> None:
        self.spec, self.processor = spec, processor

    @code_first
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows of some keys, through the processor."""
        spec, plan = self.spec, self.spec.plan
        work = Workspace.of_process(system.expanded(spec.local_dir), system.new_id)
        with contextlib.ExitStack() as stack:
            schemas = [(plan.input_schema, plan.key_positions)]
            if plan.initial_schema is not None:
                schemas.append((plan.initial_schema, plan.initial_key_positions))
            stages = [self._stage(*one, work) for one in schemas]
            for stage in stages:
                stack.callback(stage.close)
            now_ms = _taken(batches, stages)
            if now_ms is None:
                return
            spill = OverlaySpill(limit_bytes=spec.overlay_budget_bytes, folder=work.path)
            stack.callback(spill.close)
            if spec.quick_frames:
                from statebackend.operators.pandas_frames.dataframe_shortcut import (
                    quick_frames,  # imports pandas
                )

                stack.enter_context(quick_frames())
            inputs = [
                group_parts(stage.parts(), plan.key_codec.encode_arrow, positions)
                for stage, (_, positions) in zip(stages, schemas, strict=True)
            ]
            yield from self._epoch(StateTable(MemoryBase(), spill=spill), now_ms, inputs)

    def _stage(self, schema: StructType, positions: tuple[int, ...], work: Workspace) -> InputStage:
        return InputStage(
            arrow_schema(schema),
            key_positions=positions,
            budget_bytes=self.spec.input_budget_bytes,
            folder=work.path,
        )

    def _epoch(
        self, table: StateTable, now_ms: int, inputs: list[Iterator[Groups]]
    ) -> Iterator[pa.RecordBatch]:
        plan = self.spec.plan
        epoch = StatefulEpoch(
            plan,
            self.processor.fresh(),
            table=table,
            state_ids={name: number for number, name in enumerate(plan.states, start=1)},
            times=EpochTimes(
                processing_time_ms=now_ms,
                watermark_ms=_NO_WATERMARK_MS,
                late_watermark_ms=_NO_WATERMARK_MS,
            ),
            key_groups=range(self.spec.max_parallelism),
        )
        rows, *initial = inputs
        yield from epoch.run(rows, initial=initial[0] if initial else ())
        self.processor.check_unchanged()


def _taken(batches: Iterator[pa.RecordBatch], stages: list[InputStage]) -> int | None:
    """Take in all rows, each on its side; returns the time that they have, None without rows."""
    now_ms: Any = None
    for batch in batches:
        if not batch.num_rows:
            continue
        *columns, groups, times, sides = batch.columns
        now_ms, start = times[0].as_py(), 0
        for side, stage in enumerate(stages):
            end = start + len(stage.schema)
            own = pa.RecordBatch.from_arrays(columns[start:end], schema=stage.schema)
            here = pc.equal(sides, side)
            start = end
            stage.add(own.filter(here), groups.filter(here).to_numpy().astype("uint16"))
    return now_ms  # type: ignore[no-any-return]
