"""The event time of a frame: its column and watermark, and what goes on behind an operator."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from statebackend.errors import SchemaError, SettingError, UnsupportedQueryError
from statebackend.runtime.time_plan import TimePlan, time_mode_of
from statebackend.schema.ddl import quoted

__all__ = ["check_event_time", "passing_on", "time_plan", "with_event_time"]

_WATERMARK_NODE: Final = "EventTimeWatermark"
_DELAY: Final = "spark.watermarkDelayMs"
_PASSED_ON: Final = "statebackend.eventTimeOf"  # the operator whose event time a column has
_MOMENTS: Final = (TimestampType, TimestampNTZType)  # a window of event time has the mark, too
_IN_BETWEEN: Final = ("Project", "SubqueryAlias", "View")  # these neither add nor drop rows
_MULTIPLE: Final = "spark.sql.streaming.statefulOperator.allowMultiple"
# Spark passes no watermark on through these: one may be defined behind them.
_WITHOUT_WATERMARK: Final = ("FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState")


def time_plan(
    df: DataFrame,
    *,
    time_mode: str,
    event_time: str | None,
    watermark_delay: Any,
    side_position: int | None = None,
) -> TimePlan:
    """What the arguments mean for ``df``.

    A frame that Spark's ``withWatermark`` was called on says column and delay itself.

    Args:
        watermark_delay: an interval as ``withWatermark`` takes it ("10 seconds"), or a timedelta.
        side_position: of the column that says which of two inputs, both measured, a row is of.

    Raises:
        SettingError: the arguments do not go together. SchemaError: the column.
    """
    mode = time_mode_of(time_mode)
    if mode != "event":
        if event_time is not None or watermark_delay is not None:
            raise SettingError(
                f"event_time= or watermark_delay= was given with time_mode={mode!r}.",
                todo="Give time_mode='event', or leave them out.",
            )
        return TimePlan(mode)
    known = {
        field.name: int(field.metadata[_DELAY])
        for field in df.schema.fields
        if _DELAY in (field.metadata or {}) and isinstance(field.dataType, _MOMENTS)
    }
    if event_time is None and len(known) == 1:
        event_time = next(iter(known))
    if event_time is None:
        if watermark_delay is not None:
            raise SettingError(
                "watermark_delay= was given without event_time=.",
                todo="Name the column with event_time=.",
            )
        return TimePlan(mode)
    position = _moment(df, event_time)
    if not df.isStreaming:
        return TimePlan(mode, position)  # there is no watermark, and nothing is late
    if watermark_delay is not None:
        delay_ms: int | None = _delay_ms(df, event_time, watermark_delay)
    elif _is_passed_on(df, event_time):
        delay_ms = None  # the operator before it has the job's watermark made
    else:
        delay_ms = known.get(event_time)
        if delay_ms is not None:
            _check_one_watermark(df, event_time)
    return TimePlan(mode, position, delay_ms, side_position)


def passing_on(
    df: DataFrame, output: StructType, column: str, when: TimePlan, uid: str
) -> tuple[DataFrame, TimePlan]:
    """The input and the times of an operator whose output has an event-time column.

    Args:
        df: the operator's input. column: of its output, Spark's ``eventTimeColumnName``.

    Raises:
        SettingError: there is no event time that could go on. SchemaError: the column.
        UnsupportedQueryError: Spark's watermark is another one than the operator's.
    """
    if when.mode != "event":
        raise SettingError(
            f"eventTimeColumnName={column!r} was given to operator {uid!r} with "
            f"time_mode={when.mode!r}.",
            todo="Give time_mode='event'.",
        )
    known, delay_ms = when.event_position, when.delay_ms
    if known is None or (delay_ms is None and not _is_passed_on(df, df.columns[known])):
        raise SettingError(
            f"eventTimeColumnName={column!r} was given to operator {uid!r}, whose input has no "
            "event time.",
            todo="Call withWatermark() on the input, give event_time= and watermark_delay=, or "
            "give eventTimeColumnName= to the operator before it, too.",
        )
    place = _place(output, column, f"The output of operator {uid!r}")
    if delay_ms is None:
        delay_ms = int(df.schema[known].metadata[_DELAY])
    else:
        df = _marked_for_spark(df, known, delay_ms)
    return df, replace(when, output_position=place, output_delay_ms=delay_ms)


def _marked_for_spark(df: DataFrame, position: int, delay_ms: int) -> DataFrame:
    """``df`` with a watermark of Spark's own, made of the rows that the operator measures.

    If Spark measured other rows, its watermark could be ahead of the operator's. Its own operators
    behind would then drop what the operator gives out.
    """
    field, node = df.schema[position], df._jdf.queryExecution().analyzed()
    if _WATERMARK_NODE not in str(node.toString()):
        return df.withWatermark(field.name, f"{delay_ms} milliseconds")
    while str(node.getClass().getSimpleName()) in _IN_BETWEEN:
        node = node.children().head()
    last = str(node.getClass().getSimpleName())
    if last != _WATERMARK_NODE or (field.metadata or {}).get(_DELAY) != delay_ms:
        raise UnsupportedQueryError(
            f"eventTimeColumnName= was given, but Spark's watermark is not that of the operator: "
            f"the largest {field.name!r} of the rows that reach it, less {delay_ms} ms (the last "
            f"step before it is {last}).",
            todo="Call withWatermark() as the last step before the operator, and leave "
            "watermark_delay= out.",
        )
    return df


def with_event_time(result: DataFrame, when: TimePlan, uid: str) -> DataFrame:
    """An operator's output, its event-time column marked as Spark marks it."""
    if when.output_position is None:
        return result
    metadata = {_DELAY: when.output_delay_ms, _PASSED_ON: uid}
    columns = [F.col(quoted(name)) for name in result.columns]
    name = result.columns[when.output_position]
    columns[when.output_position] = columns[when.output_position].alias(name, metadata=metadata)
    return result.select(*columns)


def check_event_time(writer: DataStreamWriter, operators: Iterable[TimePlan], append: bool) -> None:
    """Refuse at the start what Spark would refuse in a batch, or only in plans of its own.

    Args:
        append: whether that is the query's output mode.

    Raises:
        UnsupportedQueryError: with the way out.
    """
    if not append and any(one.output_position is not None for one in operators):
        raise UnsupportedQueryError(
            "The query's output mode is not append, and eventTimeColumnName= was given.",
            todo="As in Spark, event time goes on behind an operator in outputMode('append') only.",
        )
    frame: Any = writer._df
    if frame.sparkSession.conf.get(_MULTIPLE, "true") != "false" and _is_marked_twice(
        frame._jdf.queryExecution().analyzed()
    ):
        raise UnsupportedQueryError(
            "withWatermark() was called on a frame whose input has a watermark already, which "
            "Spark refuses as soon as its watermark moves.",
            todo="Behind transform_with_state(), process() and transform_arrow() leave it out, and "
            "give them eventTimeColumnName= with the timestamp column of the output. Behind "
            "aggregate(), connect() and connect_broadcast() keep it, and give them event_time= and "
            "watermark_delay= instead of calling withWatermark() before them.",
        )


def _is_marked_twice(plan: Any) -> bool:
    if str(plan.toString()).count(_WATERMARK_NODE) < 2:
        return False
    nodes = [(plan, False)]
    while nodes:
        node, below = nodes.pop()
        name = str(node.getClass().getSimpleName())
        here = name == _WATERMARK_NODE
        if here and below:
            return True
        below = (below or here) and name not in _WITHOUT_WATERMARK
        children = node.children()
        nodes += [(children.apply(i), below) for i in range(children.length())]
    return False


def _is_passed_on(df: DataFrame, column: str) -> bool:
    return _PASSED_ON in (df.schema[column].metadata or {})


def _moment(df: DataFrame, event_time: str) -> int:
    return _place(df.schema, event_time, "The frame")


def _place(schema: StructType, event_time: str, what: str) -> int:
    """Where the event-time column stands."""
    names = schema.names
    if names.count(event_time) != 1:
        raise SchemaError(
            f"{what} has {names.count(event_time)} columns named {event_time!r} "
            f"({', '.join(names)}).",
            todo="Name the event-time column as it is there.",
        )
    position = names.index(event_time)
    if not isinstance(schema[position].dataType, _MOMENTS):
        raise SchemaError(
            f"The event-time column {event_time!r} is {schema[position].dataType.simpleString()}.",
            todo="Give a timestamp column; cast it first.",
        )
    return position


def _check_one_watermark(df: DataFrame, event_time: str) -> None:
    """Refuse several ``withWatermark`` in one frame: Spark goes by the slowest, one column by none.

    Raises:
        SettingError: with the ways out.
    """
    plan = str(df._jdf.queryExecution().analyzed().toString())
    if plan.count(_WATERMARK_NODE) > 1:
        raise SettingError(
            f"withWatermark() was called on several inputs of the frame, but the operator measures "
            f"one column, {event_time!r}, over all its rows: rows of a slower input would be late.",
            todo="Give event_time= and watermark_delay= if one watermark over all rows is right, "
            "or use connect(), which goes by the slower of two inputs.",
        )


def _delay_ms(df: DataFrame, column: str, delay: Any) -> int:
    if isinstance(delay, datetime.timedelta):
        found = delay // datetime.timedelta(milliseconds=1)
        if found < 0:
            raise SettingError(
                f"The watermark delay is {delay}.", todo="Give one that is not negative."
            )
        return found
    try:
        # Spark's own reading of the interval, and its own refusals.
        marked = df.select(df[f"`{column}`"].alias("t")).withWatermark("t", str(delay))
        return int(marked.schema["t"].metadata[_DELAY])
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingError(
            f"The watermark delay is {delay!r} ({reason}).",
            todo="Give an interval such as '10 seconds', or a timedelta.",
        ) from error
