"""An unmodified ``pyspark.sql.streaming.StatefulProcessor`` on our state.

The state objects are pyspark's classes (``isinstance`` holds) over our cells; Spark's clients and
their socket are never made. ``init`` runs once on the driver with a handle that records: there DDL
strings can be parsed, and mistakes be refused where they are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)
from pyspark.sql.types import DataType, StructType

from statebackend.errors import (
    ProcessorError,
    SchemaError,
    StateMismatchError,
    UnsupportedQueryError,
)
from statebackend.ops.rows import call_once
from statebackend.schema.codec import codec_for
from statebackend.schema.keys import KeyCodec
from statebackend.state.cells import KeyCursor, ListCell, MapCell, ValueCell
from statebackend.state.table import StateTable

__all__ = ["StateDeclaration", "TwsCalls", "record_states"]

_NO_TIME = TimerValues(-1, -1)


class StateDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """A state as ``init`` declared it: its kind (value, list, map) and schemas as JSON."""

    name: str
    kind: str
    value_schema: str
    key_schema: str = ""

    def to_json(self) -> str:
        """As kept in the checkpoint."""
        return msgspec.json.encode(self).decode()


class TwsValueState(ValueCell, ValueState):
    """Spark's ValueState."""


class TwsListState(ListCell, ListState):
    """Spark's ListState."""

    appendValue = ListCell.append
    appendList = ListCell.extend


class TwsMapState(MapCell, MapState):
    """Spark's MapState."""

    getValue = MapCell.get_value
    containsKey = MapCell.contains_key
    updateValue = MapCell.update_value
    removeKey = MapCell.remove_key


def _no_ttl(name: str, ttl_ms: int | None) -> None:
    if ttl_ms is not None:
        raise UnsupportedQueryError(
            f"State {name!r} asks for a TTL, which needs a time mode.",
            todo="This release has no time modes yet: leave ttlDurationMs out and clear state "
            "yourself.",
        )


class _Handle(StatefulProcessorHandle):
    """What both handles refuse: timers without a time mode."""

    def __init__(self) -> None:  # Spark's takes its socket client
        pass

    def _timers(self) -> UnsupportedQueryError:
        return UnsupportedQueryError(
            "The processor uses timers, which need a time mode.",
            todo="This release has no time modes yet; timers cannot be registered.",
        )

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise self._timers()

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        raise self._timers()

    def listTimers(self) -> Iterator[int]:
        raise self._timers()

    def deleteIfExists(self, stateName: str) -> None:
        raise UnsupportedQueryError(
            f"deleteIfExists({stateName!r}) is not supported by this release.",
            todo="Clear the state key by key.",
        )


class _RecordingHandle(_Handle):
    """Used on the driver: notes which states ``init`` asks for."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self.declared: dict[str, StateDeclaration] = {}

    def _declare(
        self, kind: str, name: str, value: StructType | str, key: StructType | str | None = None
    ) -> Any:
        if not isinstance(name, str) or not name or "\0" in name:
            raise StateMismatchError(
                f"Operator {self._uid!r} has a state named {name!r}.", todo="Give it a name."
            )
        if name in self.declared:
            raise StateMismatchError(
                f"State {name!r} of operator {self._uid!r} is declared twice.",
                todo="Give each state a name of its own.",
            )
        value_schema = parse_schema(value, f"state {name!r} of operator {self._uid!r}")
        codec_for(value_schema)  # refuses types that cannot be stored, here and not in a worker
        key_json = ""
        if key is not None:
            key_schema = parse_schema(key, f"the map key of state {name!r}")
            KeyCodec(key_schema)
            key_json = key_schema.json()
        self.declared[name] = StateDeclaration(
            name=name, kind=kind, value_schema=value_schema.json(), key_schema=key_json
        )
        return None

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        _no_ttl(stateName, ttlDurationMs)
        return self._declare("value", stateName, schema)  # type: ignore[no-any-return]

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        _no_ttl(stateName, ttlDurationMs)
        return self._declare("list", stateName, schema)  # type: ignore[no-any-return]

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        _no_ttl(stateName, ttlDurationMs)
        return self._declare("map", stateName, valueSchema, userKeySchema)  # type: ignore[no-any-return]


def parse_schema(schema: Any, what: str) -> StructType:
    """A StructType from a StructType or a DDL string; needs a driver's session for DDL.

    Raises:
        SchemaError: it does not parse, naming ``what``.
    """
    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise SchemaError(
            f"The schema of {what} is a {type(schema).__name__}.",
            todo="Give a StructType or a DDL string such as 'n bigint, name string'.",
        )
    try:
        parsed = DataType.fromDDL(schema)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise SchemaError(
            f"The schema of {what}, {schema!r}, does not parse ({reason}).",
            todo="Give a StructType or a DDL string such as 'n bigint, name string'.",
        ) from error
    return parsed if isinstance(parsed, StructType) else StructType().add("value", parsed)


def record_states(processor: StatefulProcessor, uid: str) -> list[StateDeclaration]:
    """What states a processor's ``init`` asks for; the processor itself is left untouched.

    Raises:
        ProcessorError: it cannot be pickled (as Spark must, to ship it), or ``init`` raised.
        SchemaError, UnsupportedTypeError, StateMismatchError: a state's declaration.
    """
    try:
        pickler: Any = CloudPickleSerializer()  # type: ignore[no-untyped-call]
        copy = pickler.loads(pickler.dumps(processor))  # our own bytes, of a moment ago
    except Exception as error:
        raise ProcessorError(
            f"The processor of operator {uid!r} cannot be shipped to executors "
            f"({type(error).__name__}: {error}).",
            todo="Open connections, locks and files in init(), not in __init__().",
        ) from error
    handle = _RecordingHandle(uid)
    call_once(uid, "init", lambda: copy.init(handle))
    return list(handle.declared.values())


class _WorkerHandle(_Handle):
    """Used in a worker: hands out cells over the subtask's table."""

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        declared: Mapping[str, StateDeclaration],
        ids: Mapping[str, int],
    ) -> None:
        self._cursor, self._table = cursor, table
        self._declared, self._ids = declared, ids

    def _find(self, name: str, kind: str) -> StateDeclaration:
        found = self._declared.get(name)
        if found is None or found.kind != kind or name not in self._ids:
            raise StateMismatchError(
                f"init() asked for {kind} state {name!r} in the worker but not on the driver.",
                todo="init() must declare the same states wherever it runs.",
            )
        return found

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        codec = codec_for(_schema(self._find(stateName, "value").value_schema))
        return TwsValueState(self._cursor, self._table, stateName, self._ids[stateName], codec)

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        codec = codec_for(_schema(self._find(stateName, "list").value_schema))
        return TwsListState(self._cursor, self._table, stateName, self._ids[stateName], codec)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        found = self._find(stateName, "map")
        return TwsMapState(
            self._cursor,
            self._table,
            stateName,
            self._ids[stateName],
            KeyCodec(_schema(found.key_schema)),
            codec_for(_schema(found.value_schema)),
        )


def _schema(text: str) -> StructType:
    return StructType.fromJson(msgspec.json.decode(text))


class TwsCalls:
    """One epoch's calls into a processor: ``init``, then once per key, then ``close``.

    As in Spark, a processor object lives for one epoch: what it keeps outside state is lost.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        uid: str,
        *,
        cursor: KeyCursor,
        table: StateTable,
        declared: Mapping[str, StateDeclaration],
        ids: Mapping[str, int],
    ) -> None:
        self._processor = processor
        self._uid = uid
        handle = _WorkerHandle(cursor, table, declared, ids)
        call_once(uid, "init", lambda: processor.init(handle))
        self._handle_rows = processor.handleInputRows

    def __call__(self, key: tuple[Any, ...], rows: Iterator[Any]) -> Iterable[Any] | None:
        """One key's rows, through the processor."""
        return self._handle_rows(key, rows, _NO_TIME)

    def close(self) -> None:
        """Call the processor's ``close``."""
        call_once(self._uid, "close", self._processor.close)
