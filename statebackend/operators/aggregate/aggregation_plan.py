"""A checked aggregation: its schemas, and the parts that run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.errors import SchemaError, SettingError
from statebackend.operators.aggregate.accumulators import Accumulator
from statebackend.operators.aggregate.aggregation_parser import parse_aggregations
from statebackend.operators.aggregate.windows import Window
from statebackend.schema.types import arrow_schema, arrow_type, check_key_schema

__all__ = ["EVENT_MAX", "PANE", "ROWS", "AggregatePlan", "plan_aggregate"]

WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
# Columns of partial accumulators, beside keys and state fields.
PANE: Final = "__pane"
EVENT_MAX: Final = "__event_max"
ROWS: Final = "__rows"


@dataclass(frozen=True)
class AggregatePlan:
    """An aggregation that fits its input.

    Attributes:
        schema: of the input.
        keys: names of the key columns.
        accumulators: in the order of the output columns.
        window, event_time: None without windows.
        emit: "updates" or "closed".
    """

    schema: T.StructType
    keys: tuple[str, ...]
    accumulators: tuple[Accumulator, ...]
    window: Window | None
    event_time: str | None
    emit: str

    @property
    def time_mode(self) -> str:
        """The operator's time mode: "event" with windows, else "none"."""
        return "none" if self.window is None else "event"

    @property
    def key_fields(self) -> list[T.StructField]:
        """The key columns."""
        # Without Spark's metadata, such as that of a watermark.
        return [T.StructField(name, self.schema[name].dataType) for name in self.keys]

    @property
    def event_type(self) -> T.DataType:
        """The type of the event-time column."""
        assert self.event_time is not None, "only asked with windows"
        return self.schema[self.event_time].dataType

    @property
    def columns(self) -> list[str]:
        """The input columns that are read: keys first, each once."""
        read = [*self.keys, *([self.event_time] if self.event_time else [])]
        for accumulator in self.accumulators:
            read += accumulator.inputs
        return list(dict.fromkeys(read))

    @property
    def output_schema(self) -> T.StructType:
        """Keys, window_start and window_end with windows, one column for each aggregation."""
        fields = list(self.key_fields)
        if self.window is not None:
            fields += [T.StructField(name, self.event_type) for name in (WINDOW_START, WINDOW_END)]
        fields += [T.StructField(a.name, a.result_type) for a in self.accumulators]
        return T.StructType(fields)

    @property
    def output_arrow(self) -> pa.Schema:
        """The output schema in Arrow, every column nullable."""
        return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in self.output_schema])

    @property
    def can_be_partial(self) -> bool:
        """Whether rows can be aggregated before the shuffle.

        Not sessions: which rows are late is said of rows, and what closes a session is in state.
        """
        session = self.window is not None and self.window.kind == "session"
        return not session and all(accumulator.mergeable for accumulator in self.accumulators)

    @property
    def partial_schema(self) -> T.StructType:
        """What goes through the shuffle then.

        Keys; with windows the pane's start, the largest event time (in the type of the event-time
        column) and the number of rows; the accumulators' fields.
        """
        fields = list(self.key_fields)
        if self.window is not None:
            fields += [
                T.StructField(PANE, self.event_type),
                T.StructField(EVENT_MAX, self.event_type),
                T.StructField(ROWS, T.LongType()),
            ]
        for index, accumulator in enumerate(self.accumulators):
            fields += [
                T.StructField(partial_name(index, place), dtype)
                for place, dtype in enumerate(accumulator.fields.values())
            ]
        return T.StructType(fields)

    @property
    def partial_arrow(self) -> pa.Schema:
        """The partial schema in Arrow, every column nullable."""
        return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in self.partial_schema])

    def inputs(self, accumulator: Accumulator) -> list[T.StructField]:
        """The columns that an accumulator reads."""
        return [self.schema[name] for name in accumulator.inputs]


def partial_name(index: int, place: int) -> str:
    """The name of an accumulator's field in partial accumulators."""
    return f"__acc_{index}_{place}"


def plan_aggregate(
    schema: T.StructType,
    *,
    keys: str | Sequence[str],
    aggregations: Mapping[str, Any],
    window: Window | None = None,
    event_time: str | None = None,
    emit: str = "updates",
) -> AggregatePlan:
    """Check an aggregation against its input.

    Raises:
        SchemaError, SettingError: what does not fit, and to what.
        UnsupportedTypeError: a key of a type that cannot be one.
        EnvironmentMissingError: a function needs a package that is not installed.
    """
    schema = _loose(schema)
    names = _keys(schema, keys)
    _check_time(schema, window, event_time, emit)
    taken = [*names, *([WINDOW_START, WINDOW_END] if window is not None else [])]
    lowered = [name.lower() for name in taken]
    if len(set(lowered)) < len(lowered):
        raise SchemaError(
            f"Two output columns would be named alike: {', '.join(taken)}.",
            todo=f"Rename the key; {WINDOW_START} and {WINDOW_END} are the window's.",
        )
    accumulators = parse_aggregations(aggregations, schema, taken)
    plan = AggregatePlan(schema, names, tuple(accumulators), window, event_time, emit)
    reserved = {name for name in names if name.startswith("__")} & set(plan.partial_schema.names)
    inner = plan.partial_schema.names[len(names) :]
    if reserved & set(inner):
        raise SchemaError(
            f"Key {sorted(reserved)[0]!r} is named as a column of partial aggregates.",
            todo="Rename the key: such names begin with two underscores.",
        )
    arrow_schema(plan.output_schema)
    return plan


def _loose(dtype: T.DataType) -> Any:
    """A type with nulls everywhere: what Spark says of them hangs on the plan, and so changes."""
    if isinstance(dtype, T.StructType):
        return T.StructType(
            [T.StructField(f.name, _loose(f.dataType), metadata=f.metadata) for f in dtype]
        )
    if isinstance(dtype, T.ArrayType):
        return T.ArrayType(_loose(dtype.elementType))
    if isinstance(dtype, T.MapType):
        return T.MapType(_loose(dtype.keyType), _loose(dtype.valueType))
    return dtype


def _keys(schema: T.StructType, keys: str | Sequence[str]) -> tuple[str, ...]:
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise SchemaError(
            f"Key column {missing[0]!r} is not in the input.",
            todo=f"Use one of: {', '.join(schema.names)}.",
        )
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise SchemaError(
            f"The input has two columns named {twice[0]!r}.", todo="Rename one of them."
        )
    check_key_schema(T.StructType([schema[name] for name in names]))
    return names


def _check_time(
    schema: T.StructType, window: Window | None, event_time: str | None, emit: str
) -> None:
    if emit not in ("updates", "closed"):
        raise SettingError(f"emit is {emit!r}.", todo='Give "updates" or "closed".')
    if window is None:
        if emit == "closed":
            raise SettingError(
                'emit="closed" was given without a window: nothing ever closes.',
                todo='Give window=, or emit="updates".',
            )
        if event_time is not None:
            raise SettingError(
                "event_time= was given without a window.",
                todo="Give window= too, or leave event_time= out.",
            )
        return
    if not isinstance(window, Window):
        raise SettingError(
            f"window= is {window!r}.",
            todo='Give tumbling("10 minutes"), sliding("10 minutes", "5 minutes") or '
            'session("30 minutes").',
        )
    if event_time is None:
        raise SettingError("A window has no event_time=.", todo="Name a timestamp column.")
    if event_time not in schema.names:
        raise SchemaError(
            f"The event-time column {event_time!r} is not in the input.",
            todo=f"Use one of: {', '.join(schema.names)}.",
        )
    if not isinstance(schema[event_time].dataType, T.TimestampType | T.TimestampNTZType):
        raise SchemaError(
            f"The event-time column {event_time!r} is of type "
            f"{schema[event_time].dataType.simpleString()}.",
            todo="Cast it to timestamp.",
        )
