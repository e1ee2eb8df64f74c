"""Vectorised processors in the epoch: what they declare, their states and their calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from statebackend.api.arrow import ArrowContext, ArrowProcessor
from statebackend.api.context import Schema
from statebackend.errors import ValueMismatchError
from statebackend.operators.declared_states import (
    OPERATOR_KINDS,
    Declarations,
    EpochState,
    EpochTimes,
    Unbound,
)
from statebackend.operators.errors.user_errors import call_once, described
from statebackend.operators.input.group_by_key import Groups
from statebackend.operators.operator_plan import EpochFigures, OperatorPlan
from statebackend.operators.processor_calls import check_shape
from statebackend.operators.processor_contexts import RecordingContext, outside_open
from statebackend.operators.vector.column_entries import Entries
from statebackend.operators.vector.column_states import (
    ArrowListState,
    ArrowMapState,
    ArrowValueState,
    StateSite,
)
from statebackend.operators.vector.column_timers import ArrowTimers
from statebackend.operators.vector.column_ttl_entries import TtlEntries
from statebackend.operators.vector.column_ttl_list import ArrowTtlListState
from statebackend.operators.vector.key_vector import Keys
from statebackend.operators.vector.per_batch_loop import Output, VectorOperator
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.types import schema_from_json
from statebackend.state.column_table import ColumnTable
from statebackend.state.ttl_cells import TTL

__all__ = ["ARROW_METHODS", "ArrowEpochCalls", "record_arrow_states"]

ARROW_METHODS: Final = {"open": 1, "process": 2, "on_timers": 3, "on_initial": 2, "close": 0}
"""What a processor defines, and how many arguments each is called with."""


def record_arrow_states(processor: Any, uid: str, *, time_mode: str = "none") -> Declarations:
    """What states a processor's ``open`` asks for; give it a copy, which is used up.

    Raises:
        ProcessorError: ``open`` raised, or a method takes other arguments.
        SchemaError, UnsupportedTypeError, StateMismatchError: a state's declaration.
        UsageError: no processor of this kind, or a use that can only fail later.
    """
    check_shape(
        processor,
        uid,
        ARROW_METHODS,
        ArrowProcessor,
        todo="Subclass ArrowProcessor; a KeyedProcessor goes to process().",
    )
    declarations = Declarations(uid)
    recording = RecordingContext(declarations, uid, time_mode)

    def make(
        kind: str, name: str, schema: Schema, key_schema: Schema | None, ttl: TTL | None
    ) -> Any:
        return recording.record(kind, name, schema, key_schema, ttl=ttl)

    timers = None if time_mode == "none" else Unbound("timers", "open")
    ctx = ArrowContext(uid, make, EpochTimes(), time_mode, timers)
    call_once(uid, "open", lambda: processor.open(ctx))
    return declarations


class _States:
    """Hands out a worker's states, until the processor has opened."""

    def __init__(
        self,
        state: EpochState,
        columns: ColumnTable,
        uid: str,
        key_codec: KeyCodec,
        groups: range,
    ) -> None:
        self._state: EpochState | None = state
        self._columns = columns
        self._uid, self._key_codec, self._groups = uid, key_codec, groups

    def __call__(
        self, kind: str, name: str, schema: Schema, key_schema: Schema | None, ttl: TTL | None
    ) -> Any:
        state = self._state
        if state is None:
            raise outside_open(name, self._uid)
        if kind in OPERATOR_KINDS:
            return state.operator_state(name, kind)
        found, state_id = state.claimed(name, kind)
        declared, now_ms = found.time_to_live, state.times.processing_time_ms
        columns = self._columns
        entries = Entries(columns)
        if declared is not None:
            entries = timed = TtlEntries(columns, declared, now_ms)
            state.on_move(lambda times: timed.set_now(times.processing_time_ms))
        site = StateSite(
            columns,
            entries,
            name=name,
            state_id=state_id,
            key_codec=self._key_codec,
            key_groups=self._groups,
        )
        codec = state.codec(name)
        if kind == "value":
            return ArrowValueState(site, codec)
        if kind == "map":
            map_codec = KeyCodec(schema_from_json(found.key_schema), allow_all_null=True)
            return ArrowMapState(site, map_codec, codec)
        if declared is None:
            return ArrowListState(site, codec)
        rows = ArrowTtlListState(site, codec, declared, now_ms)
        state.on_move(lambda times: rows.set_now(times.processing_time_ms))
        return rows

    def opened(self) -> None:
        """Nothing more is handed out.

        The state is let go of, too: it has the context told of times, and in a ring with that the
        table would stay until Python looks for rings, which columns hardly ever make it do.
        """
        self._state = None


class ArrowEpochCalls:
    """The calls into a vectorised processor, from its opening to its end.

    Raises:
        ProcessorError: ``open`` raised.
        StateMismatchError: it asked for other states than on the driver.
    """

    def __init__(
        self, plan: OperatorPlan, processor: Any, state: EpochState, key_groups: range
    ) -> None:
        self._plan, self._processor, self._groups = plan, processor, key_groups
        self.columns = columns = ColumnTable(state.table)
        self._timers = None
        if state.timers is not None:
            self._timers = ArrowTimers(columns, state.timers)
        states = _States(state, columns, plan.uid, plan.key_codec, key_groups)
        self._ctx = ctx = ArrowContext(plan.uid, states, state.times, plan.time_mode, self._timers)
        call_once(plan.uid, "open", lambda: processor.open(ctx))
        states.opened()
        state.on_move(ctx._move)
        self._operator = VectorOperator(
            plan.uid,
            columns,
            plan.key_codec,
            plan.output_schema,
            lambda: described(plan.uid, processor),
        )

    def input(self, parts: Iterator[Groups]) -> Iterator[pa.RecordBatch]:
        """Rows of the input."""
        yield from self._operator.run_parts(parts, self._plan.key_positions, self._process)
        self._ctx._keys = None  # close() has none

    def initial(self, parts: Iterable[Groups]) -> Iterator[pa.RecordBatch]:
        """The initial state."""
        positions = self._plan.initial_key_positions
        yield from self._operator.run_parts(iter(parts), positions, self._initial)

    def timers(self, now_ms: int, figures: EpochFigures) -> Iterator[pa.RecordBatch]:
        """The timers that are due."""
        timers, operator = self._timers, self._operator
        assert timers is not None
        yield from operator.run_timers(timers, self._groups, now_ms, self._fire)
        figures.timers_fired = operator.timers_fired

    @property
    def late_rows(self) -> int:
        """Rows that the processor said it left out."""
        return self._ctx.late_rows

    def close(self) -> None:
        """Call the processor's ``close``."""
        call_once(self._plan.uid, "close", self._processor.close)

    def _process(self, batch: pa.RecordBatch, keys: Keys) -> Output:
        self._ctx._keys = keys
        return self._processor.process(batch, self._ctx)

    def _initial(self, batch: pa.RecordBatch, keys: Keys) -> Output:
        self._ctx._keys = keys
        if self._processor.on_initial(batch, self._ctx) is not None:
            raise ValueMismatchError(
                f"on_initial() of operator {self._plan.uid!r}'s processor returned something.",
                todo="It gives no output: write to state only, without yield and return.",
            )
        return None

    def _fire(self, keys: Keys, at_ms: Any) -> Output:
        self._ctx._keys = None
        return self._processor.on_timers(keys, at_ms, self._ctx)
