"""The frame of ``backend.aggregate``: what is done before the shuffle, and its operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from statebackend.operators.aggregate.aggregate_processor import AggregateProcessor
from statebackend.operators.aggregate.aggregation_plan import EVENT_MAX, plan_aggregate
from statebackend.operators.aggregate.partial_aggregation import PartialAggregation
from statebackend.operators.aggregate.processor_for_plan import processor_for
from statebackend.operators.aggregate.windows import Window
from statebackend.runtime.time_plan import NO_TIME, TimePlan
from statebackend.schema.ddl import quoted
from statebackend.spark.frames.event_time import time_plan
from statebackend.spark.frames.frame_builder import Early

__all__ = ["Aggregated", "aggregated"]


@dataclass(frozen=True)
class Aggregated:
    """An operator's input, processor, output and time, and what is done before the shuffle."""

    frame: DataFrame
    processor: AggregateProcessor
    output_schema: StructType
    time: TimePlan
    early: Early | None


def aggregated(
    df: DataFrame,
    *,
    keys: list[str],
    aggregations: Mapping[str, Any],
    window: tuple[Window | None, str | None],
    watermark_delay: Any,
    emit: str,
) -> Aggregated:
    """Check an aggregation and lay it out; arguments of ``StateBackend.aggregate``.

    Args:
        window: with the column of its event time.

    Raises:
        UsageError: (one of its kinds) whatever is wrong with the arguments.
    """
    when, (windows, event_time) = NO_TIME, window
    if windows is not None:
        when = time_plan(
            df, time_mode="event", event_time=event_time, watermark_delay=watermark_delay
        )
        if event_time is None and when.event_position is not None:
            event_time = df.columns[when.event_position]
    plan = plan_aggregate(
        df.schema,
        keys=keys,
        aggregations=aggregations,
        window=windows,
        event_time=event_time,
        emit=emit,
    )
    # Only what is read goes to Python, and out of files that are read by the column.
    frame, partial = df.select(*map(quoted, plan.columns)), plan.can_be_partial
    early = Early(PartialAggregation(plan), plan.partial_schema) if partial else None
    if when.event_position is not None:
        column = EVENT_MAX if partial else str(plan.event_time)
        names = early.schema.names if early else frame.columns
        # Late is what belongs to a window that is closed: the operator looks to it.
        when = replace(when, event_position=names.index(column), drops_late=False)
    return Aggregated(frame, processor_for(plan, partial=partial), plan.output_schema, when, early)
