"""What a processor is given besides its rows: states (while it opens), timers and times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, cast

from pyspark.sql.types import StructType

from statebackend.api.state_protocols import (
    AggregatingState,
    BroadcastMap,
    ListState,
    MapState,
    OperatorRows,
    ReducingState,
    Timers,
    ValueState,
)
from statebackend.errors import SettingError, UnsupportedQueryError
from statebackend.operators.declared_states import Times as OperatorTimes
from statebackend.state.operator_state import BROADCAST, LIST_MODES
from statebackend.state.ttl_cells import TTL
from statebackend.state.unbound import OfOneEpoch

__all__ = ["NoTimers", "ProcessorContext", "check_mode"]

Row = tuple[Any, ...]
Schema = StructType | str


class ProcessorContext(OfOneEpoch, ABC):
    """What a processor is given: its states, its timers, and the times of the batch.

    Ask for states in ``open``, and keep them as attributes.

    Attributes:
        timers: of the current key.
        epoch: the number of the batch; in a continuous job of the checkpoint that comes next.
        processing_time_ms: the batch's, the same in all subtasks and whenever it is repeated.
        watermark_ms: as in Spark, -1 without event time and 0 before any was seen.
    """

    called = "the context"

    def __init__(
        self, uid: str, times: OperatorTimes, time_mode: str, timers: Timers | None
    ) -> None:
        self._uid, self._time_mode = uid, time_mode
        self.timers: Timers = timers or cast(Timers, NoTimers(uid))
        self._move(times)

    def _move(self, times: OperatorTimes) -> None:
        self.epoch = times.epoch
        self.processing_time_ms = times.processing_time_ms
        self.watermark_ms = times.watermark_ms if self._time_mode == "event" else -1

    def value_state(self, name: str, schema: Schema, *, ttl: TTL | None = None) -> ValueState:
        """A state with one row per key.

        Args:
            name: of the state, unique in the operator; it names the state in checkpoints.
            schema: of the row: a StructType or a DDL string.
            ttl: how long a row lives, in processing time, whatever the time mode.

        Raises:
            UsageError: called outside ``open``.
            StateMismatchError: the name is taken.
            SchemaError, UnsupportedTypeError: the schema does not parse or cannot be stored.
        """
        return cast(ValueState, self._state("value", name, schema, ttl=ttl))

    def list_state(self, name: str, schema: Schema, *, ttl: TTL | None = None) -> ListState:
        """A state with a list of rows per key. Each row has its own time to live.

        Arguments and errors: as `value_state`.
        """
        return cast(ListState, self._state("list", name, schema, ttl=ttl))

    def map_state(
        self, name: str, key_schema: Schema, value_schema: Schema, *, ttl: TTL | None = None
    ) -> MapState:
        """A state with a map per key. Each entry has its own time to live.

        Arguments and errors: as `value_state`; ``key_schema`` is that of the map's keys.
        """
        return cast(MapState, self._state("map", name, value_schema, key_schema, ttl=ttl))

    def reducing_state(
        self,
        name: str,
        schema: Schema,
        reduce: Callable[[Row, Row], Row],
        *,
        ttl: TTL | None = None,
    ) -> ReducingState:
        """A state with one row per key, into which ``add`` reduces others of the same schema.

        Args:
            reduce: from the row so far and the added one to the next; the first is kept as it is.
        """
        _check_callable(name, reduce=reduce)
        return cast(ReducingState, self._state("reducing", name, schema, ttl=ttl, fold=(reduce,)))

    def aggregating_state(
        self,
        name: str,
        schema: Schema,
        *,
        create: Callable[[], Row],
        add: Callable[[Row, Any], Row],
        result: Callable[[Row], Any] | None = None,
        merge: Callable[[Row, Row], Row] | None = None,
        ttl: TTL | None = None,
    ) -> AggregatingState:
        """A state with an accumulator per key.

        Args:
            schema: of the accumulator; what is added and what is got has none.
            create: the accumulator of a key that has none.
            add: from the accumulator and what is added to the next accumulator.
            result: from the accumulator to what ``get`` gives; the accumulator itself without it.
            merge: from two accumulators to one; needed only to call ``merge`` on the state.
        """
        result = _itself if result is None else result
        _check_callable(name, create=create, add=add, result=result)
        if merge is not None:
            _check_callable(name, merge=merge)
        fold = (create, add, result, merge)
        return cast(AggregatingState, self._state("aggregating", name, schema, ttl=ttl, fold=fold))

    def operator_list(self, name: str, schema: Schema, *, mode: str = "split") -> OperatorRows:
        """A list of rows of the subtask that belong to no key.

        It may be used anywhere, in ``open`` and ``close`` too. Errors: as `value_state`.

        Args:
            mode: what becomes of the rows when the query is started with another parallelism.
                ``"split"``: those of all subtasks, one after the other, are cut into runs of equal
                length, one for each. ``"union"``: every subtask gets those of all.

        Raises:
            SettingError: another mode.
        """
        check_mode(name, mode)
        return cast(OperatorRows, self._state(mode, name, schema, ttl=None))

    def broadcast_state(self, name: str, key_schema: Schema, value_schema: Schema) -> BroadcastMap:
        """A map that is the same in every subtask, of a `BroadcastProcessor`.

        It is read everywhere and written in ``process_broadcast``. Arguments and errors: as
        `map_state`.
        """
        return cast(BroadcastMap, self._state(BROADCAST, name, value_schema, key_schema, ttl=None))

    @abstractmethod
    def _state(
        self,
        kind: str,
        name: str,
        schema: Any,
        key_schema: Any = None,
        *,
        ttl: TTL | None,
        fold: tuple[Any, ...] = (),
    ) -> Any:
        """A state that ``open`` asked for."""


def check_mode(name: object, mode: object) -> None:
    """Refuse a mode that a list of a subtask cannot have.

    Raises:
        SettingError: naming those that it can.
    """
    if mode not in LIST_MODES:
        raise SettingError(
            f"Operator list {name!r} was given mode={mode!r}.",
            todo=f"Give one of {', '.join(map(repr, LIST_MODES))}; what every subtask shares is "
            f"ctx.broadcast_state() of a BroadcastProcessor.",
        )


def _itself(accumulator: Row) -> Row:
    return accumulator


def _check_callable(name: object, **functions: Any) -> None:
    for what, function in functions.items():
        if not callable(function):
            raise SettingError(
                f"State {name!r} was given {what}={function!r}, which cannot be called.",
                todo="Give a function.",
            )


class NoTimers:
    """Timers of an operator without a time mode."""

    def __init__(self, uid: str) -> None:
        self._uid = uid

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedQueryError(
            f"The processor of operator {self._uid!r} uses timers, but has no time mode.",
            todo="Give time_mode='processing' or 'event' where the operator is made.",
        )

    register = delete = list = _refuse
