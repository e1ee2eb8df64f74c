"""What a caller gives for the operators of a savepoint, checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import SettingError
from statebackend.keygroups import TABLES_MAX_PARALLELISM
from statebackend.operators.declared_states import check_state_name, parse_schema
from statebackend.runtime.time_plan import time_mode_of
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.ttl_cells import TTL
from statebackend.tables.given_keyless import GivenKeyless, given_broadcast, given_list
from statebackend.tables.given_rows import GivenState, batches_of, given_state, timer_entries

__all__ = ["MAX_PARALLELISM", "GivenOperator", "OperatorState", "check_operators"]

MAX_PARALLELISM: Final = TABLES_MAX_PARALLELISM


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
        time_mode: as the operator has it: ``"none"``, ``"event"`` or ``"processing"``, or by
            Spark's names: ``"None"``, ``"EventTime"``, ``"ProcessingTime"``.
        schemas: of the values of states, where they are not to follow from the columns' types.
        ttl: of states that expire. Their rows say when, in a column ``expires_at_ms``.
        operator_lists: the rows of each operator list, by its name; with ``subtask`` they stay
            with their subtasks, if the savepoint has so many.
        list_modes: of operator lists: ``split``, the default, or ``union``.
        broadcast_maps: the rows of each broadcast map, by its name: ``map_key``, a struct, and the
            value's.
    """

    key: str | StructType
    states: Mapping[str, Any] = field(default_factory=dict)
    timers: Any = None
    time_mode: str = "none"
    schemas: Mapping[str, str | StructType] = field(default_factory=dict)
    ttl: Mapping[str, TTL] = field(default_factory=dict)
    operator_lists: Mapping[str, Any] = field(default_factory=dict)
    list_modes: Mapping[str, str] = field(default_factory=dict)
    broadcast_maps: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GivenOperator:
    """An operator's key and states, with their rows.

    Attributes:
        parallelism, max_parallelism: in which it is written.
        watermark_ms, event_max_ms, second_max_ms: see `Manifest`.
    """

    key: StructType
    states: list[tuple[GivenState, Iterator[pa.RecordBatch]]]
    timers: Iterator[pa.RecordBatch]
    time_mode: str
    keyless: list[GivenKeyless] = field(default_factory=list)
    parallelism: int = 1
    max_parallelism: int = MAX_PARALLELISM
    watermark_ms: int | None = None
    event_max_ms: int | None = None
    second_max_ms: int | None = None

    @classmethod
    def of(cls, uid: str, given: OperatorState) -> GivenOperator:
        """As it was given.

        Raises:
            SchemaError, UnsupportedTypeError: it is no state. SettingError: no time mode.
        """
        time_mode = time_mode_of(given.time_mode, uid)
        _check_names(uid, given)
        if given.timers is not None and time_mode == "none":
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
        return cls(key, states, timers, time_mode, _keyless(uid, given))


def _check_names(uid: str, given: OperatorState) -> None:
    """Refuse what is said of a state that is not there, and a name of two states.

    Raises:
        SettingError: naming it.
    """
    every = [*given.states, *given.operator_lists, *given.broadcast_maps]
    twice = sorted({name for name in every if every.count(name) > 1})
    if twice:
        raise SettingError(
            f"Operator {uid!r} has two states named {', '.join(map(repr, twice))}.",
            todo="Give each state a name of its own.",
        )
    of = {"schemas": every, "ttl": given.states, "list_modes": given.operator_lists}
    for argument, names in of.items():
        unknown = sorted(getattr(given, argument).keys() - set(names))
        if unknown:
            raise SettingError(
                f"Operator {uid!r} has {argument}= of {', '.join(map(repr, unknown))}, and no "
                f"rows of it.",
                todo=f"Its states are: {', '.join(map(repr, names))}.",
            )


def _keyless(uid: str, given: OperatorState) -> list[GivenKeyless]:
    made = []
    number = len(given.states)
    for name, rows in given.operator_lists.items():
        check_state_name(uid, name)
        mode = given.list_modes.get(name, "split")
        made.append(given_list(name, (number := number + 1), rows, mode, given.schemas.get(name)))
    for name, rows in given.broadcast_maps.items():
        check_state_name(uid, name)
        made.append(given_broadcast(name, (number := number + 1), rows, given.schemas.get(name)))
    return made


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
        more = (*one.operator_lists.values(), *one.broadcast_maps.values())
        for rows in (*one.states.values(), one.timers, *more):
            if isinstance(rows, pa.RecordBatchReader):
                if id(rows) in readers:
                    raise SettingError(
                        f"Operator {uid!r} was given a reader that another state was given, too.",
                        todo="Give each its own: a reader gives its rows once.",
                    )
                readers.add(id(rows))
