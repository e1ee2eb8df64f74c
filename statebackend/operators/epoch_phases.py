"""The phases of a keyed operator, and one epoch of one subtask that runs them once.

In Spark's order: ``init``, the initial state (in the operator's first epoch), the input, the timers
that are due, ``close``. Who drives it (a task of Spark, the tester, a stream) brings the table and
takes the delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.operators.declared_states import EpochState, Times
from statebackend.operators.errors.user_errors import described
from statebackend.operators.input.group_by_key import Groups
from statebackend.operators.operator_plan import BatchCalls, Calls, EpochFigures, OperatorPlan
from statebackend.operators.operator_snapshot import OperatorSnapshot, StoredOperatorState
from statebackend.operators.per_key_loop import InputReader, KeyOperator, OutputWriter
from statebackend.operators.rows.row_conversion import row_type, shown_keys
from statebackend.operators.rows.row_reader import RowReader
from statebackend.operators.rows.row_writer import RowWriter
from statebackend.operators.stateful_processor_calls import TwsCalls
from statebackend.state.cells import KeyCursor
from statebackend.state.table import StateTable, state_prefix
from statebackend.state.timers import TimerIndex
from statebackend.state.ttl_cells import ExpiryIndex

__all__ = ["OperatorPhases", "StatefulEpoch"]

_CLEANED_ENTRIES: Final = 20_000  # expired entries that are removed in one epoch at most
_OF_OURS: Final = ("keyed", "sides", "broadcast")  # flavours of rows in our own API
_DELETED_KEYS: Final = 4_096  # between two looks at the overlay's size


class OperatorPhases:
    """A processor that was opened, and what may be done with it.

    Args:
        plan: the operator.
        processor: of the plan's flavour; used here only.
        table: the state.
        state_ids: the states' numbers, by name.
        times: in force when the processor opens, and as they move.
        key_groups: the subtask's.
        versions: the schemas of states that have had several, by name (see `EpochState`).
        stored: the states that belong to no key, as they are when it opens.

    Raises:
        ProcessorError: ``init`` raised.
        StateMismatchError: it asked for other states than on the driver.
    """

    timer_index: type[TimerIndex] = TimerIndex

    def __init__(
        self,
        plan: OperatorPlan,
        processor: Any,
        *,
        table: StateTable,
        state_ids: dict[str, int],
        times: Times,
        key_groups: range,
        versions: Mapping[str, Sequence[str]] | None = None,
        stored: StoredOperatorState | None = None,
    ) -> None:
        self._plan, self._table, self._times = plan, table, times
        self._key_groups = key_groups
        self.figures = EpochFigures()
        self.cursor = KeyCursor()
        self.timers: TimerIndex | None = None
        if plan.time_mode != "none":
            self.timers = self.timer_index(self.cursor, table)
        self.state = EpochState(
            self.cursor,
            table,
            declared=plan.states,
            ids=state_ids,
            times=times,
            timers=self.timers,
            timezone=plan.timezone if plan.flavour in _OF_OURS else "",
            versions=versions,
            stored=stored,
        )
        self._batches: BatchCalls | None = None
        if plan.flavour == "arrow":
            from statebackend.operators.arrow_calls import ArrowEpochCalls

            self._batches = ArrowEpochCalls(plan, processor, self.state, key_groups)
            return
        self._calls = _calls(plan, processor, self.state)
        self._writer = _writer(plan, processor)

    def _reader(self) -> InputReader:
        """Of the input."""
        plan = self._plan
        return _reader(plan, plan.input_schema, plan.key_positions, plan.sides, plan.shown)

    def _broadcast(self, rules: Iterator[Any]) -> None:
        from statebackend.operators.processor_calls import BroadcastCalls

        assert isinstance(self._calls, BroadcastCalls)
        self._calls.broadcast(rules)

    def operator_snapshot(self) -> OperatorSnapshot:
        """The states that belong to no key, frozen; between calls only."""
        return self.state.operator.snapshot()

    @property
    def _now_ms(self) -> int:
        """By which timers are due."""
        times = self._times
        return times.watermark_ms if self._plan.time_mode == "event" else times.processing_time_ms

    def _operator(self, reader: InputReader) -> KeyOperator:
        return KeyOperator(
            uid=self._plan.uid, cursor=self.cursor, reader=reader, writer=self._writer
        )

    def _initial(self, parts: Iterator[Groups]) -> Iterator[pa.RecordBatch]:
        assert self._plan.initial_schema is not None
        reader = _reader(self._plan, self._plan.initial_schema, self._plan.initial_key_positions)
        yield from self._operator(reader).run_parts(parts, self._calls.initial)

    def _timers(self, operator: KeyOperator, timers: TimerIndex) -> Iterator[pa.RecordBatch]:
        yield from operator.run_timers(
            timers.due_chunks(self._key_groups, self._now_ms),
            self._keys_of,
            self._calls.timer,
            timers,
        )
        self.figures.timers_fired = operator.timers_fired

    def _keys_of(self, encoded: Sequence[bytes]) -> Sequence[Any]:
        """Keys as a timer's call is given them, by the API that it belongs to."""
        codec = self._plan.key_codec
        if self._plan.flavour in _OF_OURS:
            return shown_keys(encoded, codec, codec.schema, self._plan.timezone)
        row, decode = row_type(codec.schema.names), codec.decode
        return [tuple.__new__(row, decode(key)[0]) for key in encoded]

    def _clean(self) -> int:
        """Remove what has expired, as far as is done at once; how many entries."""
        if all(one.time_to_live is None for one in self._plan.states.values()):
            return 0
        index = ExpiryIndex(self._table)
        return index.clean(self._key_groups, self._times.processing_time_ms, _CLEANED_ENTRIES)

    def _delete_state(self, state_id: int) -> None:
        for group in self._key_groups:
            prefix = state_prefix(group, state_id)
            for count, (key, _) in enumerate(self._table.scan(prefix), start=1):
                self._table.put(key, None)
                if count % _DELETED_KEYS == 0:
                    self._table.relieve()


class StatefulEpoch(OperatorPhases):
    """Runs a processor over one epoch; the table's overlay is its change.

    Args and Raises: as :class:`OperatorPhases`.
    """

    def run(
        self,
        parts: Iterator[Groups],
        *,
        initial: Iterable[Groups] = (),
        dropped: Iterable[int] = (),
        rules: Iterator[Any] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The whole epoch: output as it comes.

        Args:
            parts: the input, grouped. initial: the initial state, grouped.
            dropped: numbers of states whose entries are deleted first.
            rules: rows for every subtask, which come before all others; None: there are none.

        Raises:
            ProcessorError, ValueMismatchError: the user's code raised, or gave what does not fit.
            LocalCopyError, LocalDirError: the local store is damaged, or its disk full.
        """
        for state_id in dropped:
            self._delete_state(state_id)
        if self._batches is not None:
            yield from self._run_batches(self._batches, parts, initial)
            return
        if rules is not None:
            self._broadcast(rules)
        if self._plan.initial_schema is not None:
            yield from self._initial(iter(initial))
        reader = self._reader()
        yield from self._operator(reader).run_parts(parts, self._calls.rows)
        if self.timers is not None:
            yield from self._timers(self._operator(reader), self.timers)
            self.figures.next_timer_ms = self.timers.next_ms()
        self.figures.expired = self._clean()
        self._calls.close()

    def _run_batches(
        self, calls: BatchCalls, parts: Iterator[Groups], initial: Iterable[Groups]
    ) -> Iterator[pa.RecordBatch]:
        if self._plan.initial_schema is not None:
            yield from calls.initial(initial)
        yield from calls.input(parts)
        if self.timers is not None:
            yield from calls.timers(self._now_ms, self.figures)
            self.figures.next_timer_ms = self.timers.next_ms()
        self.figures.expired = self._clean()
        self.figures.late_rows = calls.late_rows
        calls.close()


def _calls(plan: OperatorPlan, processor: Any, state: EpochState) -> Calls:
    if plan.flavour in ("rows", "pandas"):
        return TwsCalls(
            processor, plan.uid, state, time_mode=plan.time_mode, withdrawn=plan.withdrawn
        )
    from statebackend.operators.processor_calls import processor_calls

    return processor_calls(plan, processor, state)


def _reader(
    plan: OperatorPlan,
    schema: StructType,
    positions: tuple[int, ...],
    sides: tuple[StructType, StructType] | None = None,
    shown: int | None = None,
) -> InputReader:
    if plan.flavour == "pandas":
        from statebackend.operators.pandas_frames.frame_reader import (
            FrameReader,  # imports pandas: a second in a new worker
        )

        return FrameReader(
            schema,
            positions,
            timezone=plan.timezone,
            max_rows=plan.frame_rows,
            max_bytes=plan.frame_bytes,
            shown=shown,
        )
    if sides is not None:
        from statebackend.operators.two_input_rows import SideReader

        return SideReader(schema, positions, *sides, timezone=plan.timezone)
    return RowReader(schema, positions, timezone=plan.timezone, shown=shown)


def _writer(plan: OperatorPlan, processor: Any) -> OutputWriter:
    def who() -> str:
        return described(plan.uid, processor)

    if plan.flavour == "pandas":
        from statebackend.operators.pandas_frames.frame_writer import FrameWriter

        return FrameWriter(plan.output_schema, who, timezone=plan.timezone)
    return RowWriter(plan.output_schema, who)
