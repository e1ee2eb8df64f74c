"""What ``backend.apply_in_pandas_with_state`` is given, checked and laid out.

Arguments are refused where Spark refuses them, and for its reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import StructType

from statebackend.errors import SettingError, UnsupportedQueryError
from statebackend.operators.declared_states import parse_schema
from statebackend.operators.pandas_frames.group_state_processor import FunctionPlan, StateFunction
from statebackend.runtime.time_plan import TimePlan
from statebackend.spark.frames.event_time import time_plan
from statebackend.spark.frames.grouped_input import grouped_for_function
from statebackend.spark.session_settings import frame_limits

__all__ = ["FunctionFrame", "function_frame"]

_TIME_MODES: Final = {
    GroupStateTimeout.NoTimeout: "none",
    GroupStateTimeout.ProcessingTimeTimeout: "processing",
    GroupStateTimeout.EventTimeTimeout: "event",
}
_OUTPUT_MODES: Final = ("append", "update")
_BY_NAME: Final = "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName"
_SAFE: Final = "spark.sql.execution.pandas.convertToArrowArraySafely"


@dataclass(frozen=True)
class FunctionFrame:
    """An operator's input, its keys, processor, output and time."""

    frame: DataFrame
    names: list[str]
    processor: StateFunction
    output_schema: StructType
    time: TimePlan


def function_frame(
    grouped: GroupedData | DataFrame,
    function: Any,
    output_schema: StructType | str,
    state_schema: StructType | str,
    output_mode: str,
    timeout_conf: str,
    *,
    keys: str | list[str] | None,
    uid: str,
    event_time: str | None,
    watermark_delay: Any,
    quick_frames: bool,
) -> FunctionFrame:
    """Check the arguments of ``StateBackend.apply_in_pandas_with_state`` and lay them out.

    Raises:
        UsageError: (one of its kinds) whatever is wrong with them.
    """
    df, names, shown = grouped_for_function(grouped, keys)
    _check(function, output_mode, timeout_conf, uid)
    when = _time(df, timeout_conf, event_time, watermark_delay, uid)
    frame_rows, frame_bytes = frame_limits(df.sparkSession)
    output = parse_schema(output_schema, f"the output of operator {uid!r}")
    conf = df.sparkSession.conf
    plan = FunctionPlan(
        uid=uid,
        input_schema=df.schema,
        key_positions=tuple(df.columns.index(name) for name in names),
        output_schema=output,
        state_schema=parse_schema(state_schema, f"the state of operator {uid!r}"),
        timeout_conf=timeout_conf,
        has_watermark=when.event_position is not None,
        timezone=str(conf.get("spark.sql.session.timeZone", "UTC")),
        frame_rows=frame_rows,
        frame_bytes=frame_bytes,
        by_name=str(conf.get(_BY_NAME, "true")).lower() == "true",
        safe=str(conf.get(_SAFE, "false")).lower() == "true",
        quick_frames=quick_frames,
        shown=shown,
    )
    return FunctionFrame(df, names, StateFunction(function, plan), output, when)


def _check(function: Any, output_mode: Any, timeout_conf: Any, uid: str) -> None:
    if not callable(function):
        raise SettingError(
            f"Operator {uid!r} was given a {type(function).__name__} as its function.",
            todo="Give func= a function of (key, frames, state).",
        )
    if str(output_mode).lower() not in _OUTPUT_MODES:
        raise SettingError(
            f"The output mode of operator {uid!r} is {output_mode!r}.",
            todo='As in Spark, give "append" or "update", in any case.',
        )
    if timeout_conf not in _TIME_MODES:
        raise SettingError(
            f"The timeout of operator {uid!r} is {timeout_conf!r}.",
            todo=f"Give one of {', '.join(map(repr, _TIME_MODES))}.",
        )


def _time(
    df: DataFrame, timeout_conf: str, event_time: str | None, watermark_delay: Any, uid: str
) -> TimePlan:
    """What time means to the operator: as in Spark, rows are late with timeouts in event time only.

    Raises:
        SettingError, SchemaError: the arguments. UnsupportedQueryError: there is no watermark.
    """
    mode = _TIME_MODES[timeout_conf]
    asked = event_time is not None or watermark_delay is not None
    try:
        when = time_plan(
            df, time_mode="event", event_time=event_time, watermark_delay=watermark_delay
        )
    except SettingError:
        if mode == "event" or asked:
            raise
        return TimePlan(mode)  # several watermarks: a function may do without
    if mode == "event" and when.event_position is None:
        raise UnsupportedQueryError(
            f"Operator {uid!r} has timeouts in event time, but its input has no watermark.",
            todo="Call withWatermark() on it, or give event_time= and watermark_delay=.",
        )
    if mode == "event":
        return when
    return replace(when, mode=mode, drops_late=False)
