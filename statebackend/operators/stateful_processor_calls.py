"""An unmodified ``pyspark.sql.streaming.StatefulProcessor`` on our state.

The state objects are pyspark's classes (``isinstance`` holds) over our cells; Spark's clients and
their socket are never made. ``init`` runs once on the driver with a handle that records: there DDL
strings can be parsed, and mistakes be refused where they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from types import GeneratorType
from typing import Any, Final, NoReturn, cast

from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)
from pyspark.sql.types import Row, StructType

from statebackend.errors import SchemaError, UnsupportedQueryError, UsageError
from statebackend.operators.declared_states import (
    Declarations,
    EpochState,
    Times,
    Unbound,
    parse_schema,
)
from statebackend.operators.errors.spark_errors import TimersRefusedError
from statebackend.operators.errors.user_errors import call_once
from statebackend.operators.rows.row_conversion import row_type
from statebackend.schema.types import schema_from_json
from statebackend.state.cells import ListCell, MapCell, ValueCell
from statebackend.state.timers import TimerIndex
from statebackend.state.ttl_cells import TTL, TtlListCell, TtlMapCell, TtlValueCell
from statebackend.state.unbound import Deleted, OfOneEpoch

__all__ = ["TwsCalls", "parse_schema", "record_states"]

_named: Final[Callable[[type[Row], tuple[Any, ...]], Row]] = tuple.__new__


class TwsValueState(ValueCell, ValueState):
    """Spark's ValueState."""


class TwsTtlValueState(TtlValueCell, ValueState):
    """Spark's ValueState with a TTL."""


class TwsListState(ListCell, ListState):
    """Spark's ListState."""

    appendValue = ListCell.append
    appendList = ListCell.extend


class TwsTtlListState(TtlListCell, ListState):
    """Spark's ListState with a TTL."""

    appendValue = TtlListCell.append
    appendList = TtlListCell.extend


class _NamedValues:
    """A map cell's getter that gives Rows with names: in Spark this getter alone does so."""

    get_value: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._row = row_type(args[-1].schema.names)

    def getValue(self, key: tuple[Any, ...]) -> Row | None:
        """As ``get_value``, with the fields' names."""
        found = self.get_value(key)
        return None if found is None else _named(self._row, found)


class TwsMapState(_NamedValues, MapCell, MapState):
    """Spark's MapState."""

    containsKey = MapCell.contains_key
    updateValue = MapCell.update_value
    removeKey = MapCell.remove_key


class TwsTtlMapState(_NamedValues, TtlMapCell, MapState):
    """Spark's MapState with a TTL."""

    containsKey = TtlMapCell.contains_key
    updateValue = TtlMapCell.update_value
    removeKey = TtlMapCell.remove_key


_CLASSES = {
    ("value", False): TwsValueState,
    ("list", False): TwsListState,
    ("map", False): TwsMapState,
    ("value", True): TwsTtlValueState,
    ("list", True): TwsTtlListState,
    ("map", True): TwsTtlMapState,
}


class _Handle(OfOneEpoch, StatefulProcessorHandle):
    """What both handles refuse: timers without a time mode."""

    called = "the handle"

    def __init__(self, time_mode: str) -> None:  # Spark's takes its socket client
        self._time_mode = time_mode

    def _ttl(self, name: str, ttl_ms: int | None) -> TTL | None:
        if not ttl_ms:  # as in Spark, 0 is no TTL
            return None
        if self._time_mode != "processing":
            raise UnsupportedQueryError(
                f"State {name!r} asks for a TTL in time mode {self._time_mode!r}.",
                todo="As in Spark, a TTL needs timeMode='ProcessingTime'.",
            )
        return TTL(ttl_ms)

    def _refuse_timers(self) -> NoReturn:
        raise TimersRefusedError(
            "The processor uses timers, but the operator has no time mode.",
            todo="Give timeMode='ProcessingTime' or 'EventTime' where the frame is made.",
        )

    def _check_timers(self) -> None:
        if self._time_mode == "none":
            self._refuse_timers()


class _RecordingHandle(_Handle):
    """Used on the driver: notes which states ``init`` asks for."""

    def __init__(self, declarations: Declarations, time_mode: str) -> None:
        super().__init__(time_mode)
        self._to = declarations

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        self._to.add("value", stateName, schema, ttl=self._ttl(stateName, ttlDurationMs))
        return cast(ValueState, Unbound(f"state {stateName!r}", "init"))

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        self._to.add("list", stateName, schema, ttl=self._ttl(stateName, ttlDurationMs))
        return cast(ListState, Unbound(f"state {stateName!r}", "init"))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        ttl = self._ttl(stateName, ttlDurationMs)
        self._to.add("map", stateName, valueSchema, userKeySchema, ttl)
        return cast(MapState, Unbound(f"state {stateName!r}", "init"))

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._outside()

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._outside()

    def listTimers(self) -> Iterator[int]:
        self._outside()

    def _outside(self) -> NoReturn:
        self._check_timers()
        raise UnsupportedQueryError(
            "init() uses timers, which belong to a key.",
            todo="Use them in handleInputRows or handleExpiredTimer.",
        )

    def deleteIfExists(self, stateName: str) -> None:
        self._to.drop(stateName)


def record_states(
    processor: StatefulProcessor,
    uid: str,
    *,
    time_mode: str = "none",
    nullable_only: bool = False,
) -> Declarations:
    """What states a processor's ``init`` asks for; give it a copy, which is used up.

    Args:
        nullable_only: refuse fields that are NOT NULL, as Spark does where it keeps state in Avro.

    Raises:
        ProcessorError: ``init`` raised.
        SchemaError, UnsupportedTypeError, StateMismatchError: a state's declaration.
        UnsupportedQueryError: it uses timers or a TTL that the time mode does not have.
    """
    declarations = Declarations(uid)
    handle = _RecordingHandle(declarations, time_mode)
    call_once(uid, "init", lambda: processor.init(handle))
    if nullable_only:
        _check_nullable(declarations, uid)
    return declarations


def _check_nullable(declarations: Declarations, uid: str) -> None:
    for name, declared in declarations.declared.items():
        fields = [one.name for one in schema_from_json(declared.value_schema) if not one.nullable]
        if fields:
            raise SchemaError(
                f"State {name!r} of operator {uid!r} has fields that are NOT NULL "
                f"({', '.join(fields)}), which Spark refuses with its Avro encoding of state "
                f"([TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE]).",
                todo="Make them nullable, or unset "
                "spark.sql.streaming.stateStore.encodingFormat, which is not needed here.",
            )


class _WorkerHandle(_Handle):
    """Used in a worker: hands out cells over the subtask's table."""

    def __init__(self, state: EpochState, time_mode: str, withdrawn: Collection[str]) -> None:
        super().__init__(time_mode)
        self._state = state
        self._open = True
        self._to_be_deleted = set(withdrawn)  # init() asks for these first, and deletes them later

    def initialized(self) -> None:
        """From here on, asking for a state is refused: its cell would not be loaded."""
        self._open = False

    def _cell(self, name: str, kind: str) -> Any:
        if not self._open:
            raise UsageError(
                f"State {name!r} was asked for outside init().",
                todo="Ask for states in init(), keep them as attributes, and use those.",
            )
        if name in self._to_be_deleted:
            return Deleted(f"state {name!r}", "init", kind)
        return self._state.cell(name, kind, _CLASSES)

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        return self._cell(stateName, "value")  # type: ignore[no-any-return]

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        return self._cell(stateName, "list")  # type: ignore[no-any-return]

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        return self._cell(stateName, "map")  # type: ignore[no-any-return]

    def _timers(self) -> TimerIndex:
        if self._state.timers is None:
            self._refuse_timers()
        return self._state.timers

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._timers().register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._timers().delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return iter(self._timers().list())

    def deleteIfExists(self, stateName: str) -> None:
        """Done by the epoch itself: the driver saw the same call in its ``init``."""
        if self._state.cursor.index >= 0:
            raise UnsupportedQueryError(
                f"deleteIfExists({stateName!r}) was called for a key.",
                todo="Call it in init(): it deletes the state of every key.",
            )
        self._to_be_deleted.discard(stateName)


class TwsCalls:
    """The calls into a processor: ``init``, then once per key, then ``close``.

    In micro-batches, as in Spark, it lives for one epoch: what it keeps outside state is lost.

    Args:
        withdrawn: names of states that ``init`` asks for, and deletes afterwards.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        uid: str,
        state: EpochState,
        *,
        time_mode: str = "none",
        withdrawn: Collection[str] = (),
    ) -> None:
        self._processor = processor
        self._uid, self._time_mode = uid, time_mode
        self._values = timer_values(time_mode, state.times)
        handle = _WorkerHandle(state, time_mode, withdrawn)
        call_once(uid, "init", lambda: processor.init(handle))
        handle.initialized()
        state.on_move(self._move)
        self._handle_rows = processor.handleInputRows
        self._handle_timer = processor.handleExpiredTimer
        self._handle_initial: Callable[..., Any] = processor.handleInitialState

    def _move(self, times: Times) -> None:
        self._values = timer_values(self._time_mode, times)

    def rows(self, key: tuple[Any, ...], rows: Iterator[Any]) -> Iterable[Any] | None:
        """One key's input, through the processor."""
        return self._handle_rows(key, rows, self._values)

    def initial(self, key: tuple[Any, ...], rows: Iterator[Any]) -> None:
        """One key's initial state, row by row (frame by frame)."""
        for row in rows:
            returned = self._handle_initial(key, row, self._values)
            if type(returned) is GeneratorType:  # Spark drops it, unrun
                code = returned.gi_code
                raise UsageError(
                    f"handleInitialState() of operator {self._uid!r}'s processor is a generator, "
                    f"of which nothing runs ({code.co_filename}:{code.co_firstlineno}).",
                    todo="It gives no output: write to state only, without yield.",
                )

    def timer(self, key: tuple[Any, ...], at_ms: int) -> Iterable[Any] | None:
        """One key's timer; by keyword, as Spark calls it."""
        return self._handle_timer(
            key=key, timerValues=self._values, expiredTimerInfo=ExpiredTimerInfo(at_ms)
        )

    def close(self) -> None:
        """Call the processor's ``close``."""
        call_once(self._uid, "close", self._processor.close)


def timer_values(time_mode: str, times: Times) -> TimerValues:
    """What Spark shows a processor of the time, by mode."""
    if time_mode == "none":
        return TimerValues(-1, -1)
    return TimerValues(times.processing_time_ms, times.watermark_ms)
