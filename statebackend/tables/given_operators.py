"""What a caller gives for the operators of a savepoint, checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import SettingError
from statebackend.operators.declared_states import check_state_name, parse_schema
from statebackend.schema.keys import KeyCodec
from statebackend.state.ttl import TTL
from statebackend.tables.given_rows import GivenState, batches_of, given_state, timer_entries

__all__ = ["MAX_PARALLELISM", "GivenOperator", "OperatorState", "check_operators"]

MAX_PARALLELISM: Final = 1024
_TIME_MODES: Final = ("none", "event", "processing")


@dataclass(frozen=True)
class OperatorState:
    """What an operator is to begin with.

    Args:
        key: its key columns, as in ``user string``.
        states: the rows of each state, by its name: an Arrow table or reader, a pandas or a Spark
            frame. Columns as `statebackend.read_state` gives them (``key`` and ``value``, structs;
            ``map_key`` of a map; ``index`` of a list), or key columns by their names and others,
            which are the value's fields. The last row of a key counts, and of a list all, in the
            order in which they come.
        timers: rows with the key and ``at_ms``, milliseconds.
        time_mode: as the operator has it: none, event or processing.
        schemas: of the values of states, where they are not to follow from the columns' types.
        ttl: of states that expire. Their rows say when, in a column ``expires_at_ms``.
    """

    key: str | StructType
    states: Mapping[str, Any] = field(default_factory=dict)
    timers: Any = None
    time_mode: str = "none"
    schemas: Mapping[str, str | StructType] = field(default_factory=dict)
    ttl: Mapping[str, TTL] = field(default_factory=dict)


@dataclass(frozen=True)
class GivenOperator:
    """An operator's key and states, with their rows."""

    key: StructType
    states: list[tuple[GivenState, Iterator[pa.RecordBatch]]]
    timers: Iterator[pa.RecordBatch]
    time_mode: str

    @classmethod
    def of(cls, uid: str, given: OperatorState) -> GivenOperator:
        """As it was given.

        Raises:
            SchemaError, UnsupportedTypeError: it is no state. SettingError: no time mode.
        """
        if given.time_mode not in _TIME_MODES:
            raise SettingError(
                f"Operator {uid!r} has time_mode={given.time_mode!r}.",
                todo=f"Give one of {', '.join(_TIME_MODES)}.",
            )
        for argument in ("schemas", "ttl"):
            unknown = sorted(getattr(given, argument).keys() - given.states.keys())
            if unknown:
                raise SettingError(
                    f"Operator {uid!r} has {argument}= of {', '.join(map(repr, unknown))}, and no "
                    f"rows of it.",
                    todo=f"Its states are: {', '.join(map(repr, given.states))}.",
                )
        if given.timers is not None and given.time_mode == "none":
            raise SettingError(
                f"Operator {uid!r} was given timers and no time mode.",
                todo="Give time_mode='event' or time_mode='processing', as the operator has it.",
            )
        key = parse_schema(given.key, f"the key of operator {uid!r}")
        KeyCodec(key)
        states = []
        for number, (name, rows) in enumerate(given.states.items(), start=1):
            check_state_name(uid, name)
            schema, batches = batches_of(rows)
            state = given_state(
                name, number, key, schema, given.schemas.get(name), given.ttl.get(name)
            )
            list(state.entries(_empty(schema), MAX_PARALLELISM, 0))  # its columns fit
            states.append((state, batches))
        timers: Iterator[pa.RecordBatch] = iter(())
        if given.timers is not None:
            schema, timers = batches_of(given.timers)
            list(timer_entries(_empty(schema), key, MAX_PARALLELISM))
        return cls(key, states, timers, given.time_mode)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], one.type) for one in schema], schema=schema)


def check_operators(operators: Mapping[str, OperatorState], watermark_ms: int | None) -> None:
    """Refuse what can be no operators, or no watermark.

    Raises:
        SettingError: there is none, one without a uid, or a reader that was given twice.
    """
    if not operators or not all(isinstance(uid, str) and uid for uid in operators):
        raise SettingError(
            f"No operator was given, or one without a uid: {list(operators)!r}.",
            todo="Give at least one, each by its uid.",
        )
    if watermark_ms is not None and type(watermark_ms) is not int:
        raise SettingError(
            f"watermark_ms is {watermark_ms!r}.", todo="Give whole milliseconds, as an int."
        )
    readers: set[int] = set()
    for uid, one in operators.items():
        for rows in (*one.states.values(), one.timers):
            if isinstance(rows, pa.RecordBatchReader):
                if id(rows) in readers:
                    raise SettingError(
                        f"Operator {uid!r} was given a reader that another state was given, too.",
                        todo="Give each its own: a reader gives its rows once.",
                    )
                readers.add(id(rows))
