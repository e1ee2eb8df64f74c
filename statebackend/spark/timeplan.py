"""An operator's time: its mode, its event-time column, and how far its watermark lags behind."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql.types import TimestampNTZType, TimestampType

from statebackend.errors import SchemaError, SettingError

__all__ = ["NO_TIME", "TIME_MODES", "TimePlan", "time_plan"]

TIME_MODES: Final = ("none", "processing", "event")
_SPARKS_NAMES: Final = {"processingtime": "processing", "eventtime": "event"}
_WATERMARK_NODE: Final = "EventTimeWatermark"
_DELAY: Final = "spark.watermarkDelayMs"


@dataclass(frozen=True)
class TimePlan:
    """What time means to an operator.

    ``event_position``: of the event-time column, None without one. ``side_position``: of the column
    that says which of two measured inputs a row is of. ``delay_ms``: None where the
    operator takes the job's watermark and adds nothing to it. ``drops_late``: whether late rows are
    left out by their own event time; else the operator looks to it.
    """

    mode: str = "none"
    event_position: int | None = None
    delay_ms: int | None = None
    side_position: int | None = None
    drops_late: bool = True


NO_TIME: Final = TimePlan()


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
    mode = _SPARKS_NAMES.get(str(time_mode).lower(), str(time_mode).lower())
    if mode not in TIME_MODES:
        raise SettingError(
            f"The time mode is {time_mode!r}.",
            todo=f"Give one of {', '.join(map(repr, TIME_MODES))}.",
        )
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
        if _DELAY in (field.metadata or {})
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
    else:
        delay_ms = known.get(event_time)
        if delay_ms is not None:
            _check_one_watermark(df, event_time)
    return TimePlan(mode, position, delay_ms, side_position)


def _moment(df: DataFrame, event_time: str) -> int:
    """Where the event-time column stands."""
    if df.columns.count(event_time) != 1:
        raise SchemaError(
            f"The frame has {df.columns.count(event_time)} columns named {event_time!r} "
            f"({', '.join(df.columns)}).",
            todo="Name the event-time column as it is in the frame.",
        )
    position = df.columns.index(event_time)
    if not isinstance(df.schema[position].dataType, (TimestampType, TimestampNTZType)):
        raise SchemaError(
            f"The event-time column {event_time!r} is "
            f"{df.schema[position].dataType.simpleString()}.",
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
