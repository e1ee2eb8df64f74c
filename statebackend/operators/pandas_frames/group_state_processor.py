"""The function of ``applyInPandasWithState`` as a vectorised processor.

State is read and written by the batch. Only the frames and the calls are made key by key.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.types import StructType

from statebackend.api.arrow import ArrowContext, ArrowProcessor
from statebackend.errors import StateBackendError, UsageError, ValueMismatchError
from statebackend.operators.errors.user_errors import failure
from statebackend.operators.pandas_frames.dataframe_shortcut import quick_frames
from statebackend.operators.pandas_frames.frame_reader import FrameReader, empty_frames
from statebackend.operators.pandas_frames.frame_writer import FrameWriter
from statebackend.operators.pandas_frames.group_state import (
    STATE,
    TIMEOUT,
    Changes,
    KeyState,
    StateTimes,
    Timeouts,
    with_timeouts,
)
from statebackend.operators.rows.returned_row_checks import MisfitError
from statebackend.operators.vector.column_states import ArrowValueState
from statebackend.operators.vector.key_vector import Keys
from statebackend.state.cells import is_flat

__all__ = ["FunctionPlan", "StateFunction"]

# As in statebackend.operators.per_key_loop: rows that are Python objects at one time.
_CHUNK_ROWS: Final = 16_384
_CHUNK_ROWS_MIN: Final = 1_024  # however small Spark's frames are to be
_CHUNK_BYTES: Final = 8 << 20
_CHANGED_BYTES: Final = 16 << 20  # of encoded state, held until it is written

Key = tuple[Any, ...]
Function = Callable[[Key, Iterable[Any], KeyState], Iterable[Any]]


@dataclass(frozen=True)
class FunctionPlan:
    """An operator of this kind, and what Spark's session says of frames.

    ``has_watermark``: whether the input has one. ``shown``: see :class:`FrameReader`.
    ``by_name``, ``safe``: see :class:`FrameWriter`.
    """

    uid: str
    input_schema: StructType
    key_positions: tuple[int, ...]
    output_schema: StructType
    state_schema: StructType
    timeout_conf: str
    has_watermark: bool = False
    timezone: str = "UTC"
    frame_rows: int = 10_000
    frame_bytes: int = 1 << 31
    by_name: bool = True
    safe: bool = False
    quick_frames: bool = True
    shown: int | None = None


class StateFunction(ArrowProcessor):
    """Calls a user's function for each key that has rows, and for those that have timed out."""

    def __init__(self, function: Function, plan: FunctionPlan) -> None:
        self.function, self.plan = function, plan

    def open(self, ctx: ArrowContext) -> None:
        """Ask for the states."""
        self._values = ctx.value_state(STATE, self.plan.state_schema)
        self._timeouts: Timeouts | None = None
        if with_timeouts(self.plan.timeout_conf):
            self._timeouts = Timeouts(ctx.value_state(TIMEOUT, "at_ms bigint"), ctx.timers)

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Iterator[pa.RecordBatch]:
        """Call the function for all keys of a batch."""
        plan, calls = self.plan, self._calls(ctx, timed_out=False)
        reader = FrameReader(
            plan.input_schema,
            plan.key_positions,
            timezone=plan.timezone,
            max_rows=plan.frame_rows,
            max_bytes=plan.frame_bytes,
            own_types=True,
            shown=plan.shown,
        )
        keys, table = ctx.keys, pa.Table.from_batches([batch])
        with self._quick():
            # What fits into one frame is cut without a look at how much it is.
            rows_at_once = min(_rows_at_once(table), max(plan.frame_rows, _CHUNK_ROWS_MIN))
            for first, last in _chunks(keys.starts, rows_at_once):
                shown, inputs = self._inputs(reader, table, keys.starts[first : last + 1])
                yield from calls.run(keys, first, last, shown, inputs)
                if calls.changes.nbytes > _CHANGED_BYTES:
                    calls.changes.write(keys)
            yield from calls.rest()
        calls.changes.write(keys)

    def on_timers(
        self, keys: Keys, at_ms: NDArray[np.int64], ctx: ArrowContext
    ) -> Iterator[pa.RecordBatch]:
        """Call it for keys that have timed out: with one frame without rows, as Spark does."""
        plan, calls = self.plan, self._calls(ctx, timed_out=True)
        schema = StructType([plan.input_schema[place] for place in plan.key_positions])
        reader = FrameReader(schema, range(len(schema)), timezone=plan.timezone, own_types=True)
        make = empty_frames(plan.input_schema.names[: plan.shown])
        with self._quick():
            for first in range(0, len(keys), _CHUNK_ROWS):
                last = min(first + _CHUNK_ROWS, len(keys))
                some = pa.Table.from_batches([keys.columns.slice(first, last - first)])
                shown = reader.keys(some)
                yield from calls.run(keys, first, last, shown, ([make()] for _ in shown))
            yield from calls.rest()
        calls.changes.write(keys, at_ms)

    def _calls(self, ctx: ArrowContext, *, timed_out: bool) -> _Calls:
        plan = self.plan
        watermark_ms = ctx.job_watermark_ms if plan.has_watermark else None
        times = StateTimes(plan.timeout_conf, ctx.processing_time_ms, watermark_ms)
        state = functools.partial(KeyState, times, timed_out=timed_out)
        return _Calls(self.function, plan, state, self._values, self._timeouts)

    def _quick(self) -> contextlib.AbstractContextManager[None]:
        return quick_frames() if self.plan.quick_frames else contextlib.nullcontext()

    def _inputs(
        self, reader: FrameReader, table: pa.Table, starts: NDArray[np.int64]
    ) -> tuple[list[Key], Iterable[Iterable[Any]]]:
        """The keys of a chunk, and what makes the frames of each."""
        begin, end = int(starts[0]), int(starts[-1])
        rows = table.slice(begin, end - begin)
        if len(starts) > 2 or end - begin <= self.plan.frame_rows:
            return reader.chunk(rows, (starts - begin).tolist())
        step = self.plan.frame_rows
        pieces = (rows.slice(at, step) for at in range(0, end - begin, step))
        return [reader.key(rows)], [(frame for piece in pieces for frame in reader.piece(piece))]


class _Calls:
    """The calls of an epoch's batch, their output, and what they do to state."""

    def __init__(
        self,
        function: Function,
        plan: FunctionPlan,
        state: Callable[[tuple[Any, ...] | None], KeyState],
        values: ArrowValueState,
        timeouts: Timeouts | None,
    ) -> None:
        self._function, self._uid, self._state, self._values = function, plan.uid, state, values
        self._describe = functools.partial(_described, plan.uid, function)
        self._writer = FrameWriter(
            plan.output_schema,
            self._describe,
            timezone=plan.timezone,
            by_name=plan.by_name,
            safe=plan.safe,
        )
        self.changes = Changes(values, timeouts)

    def run(
        self, keys: Keys, first: int, last: int, shown: list[Key], inputs: Iterable[Iterable[Any]]
    ) -> Iterator[pa.RecordBatch]:
        """Some of the keys, in their order: what is full of the output.

        Raises:
            ProcessorError, ValueMismatchError: the function raised, or gave what does not fit.
        """
        function, state_of, collect = self._function, self._state, self._writer.collect
        note = self._note
        key: Key = ()
        try:
            rows = self._rows(keys.take(np.arange(first, last)))
            for place, key, frames, row in zip(
                range(first, last), shown, inputs, rows, strict=True
            ):
                state = state_of(row)
                yield from collect(function(key, frames, state))
                note(place, state)
        except Exception as error:
            if isinstance(error, StateBackendError) and not isinstance(error, UsageError):
                raise
            raise failure(self._uid, key, error, FrameWriter.__module__) from error

    def _note(self, place: int, state: KeyState) -> None:
        try:
            self.changes.note(place, state)
        except ValueMismatchError as error:
            raise MisfitError(
                f"{self._describe()} updated its state with what does not fit: {error.what}",
                todo=error.todo,
            ) from error

    def _rows(self, keys: Keys) -> Iterable[tuple[Any, ...] | None]:
        found, codec = self._values.get_encoded(keys), self._values.codec
        if is_flat(codec.schema):
            return codec.decode_many(found)
        return (None if data is None else codec.decode(data) for data in found)

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What is left of the output."""
        if self._writer.pending:
            yield self._writer.take()


def _chunks(starts: NDArray[np.int64], max_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of keys that have at most so many rows, or are one key."""
    first, count = 0, len(starts) - 1
    while first < count:
        full = int(np.searchsorted(starts, starts[first] + max_rows, side="right")) - 1
        last = max(full, first + 1)
        yield first, last
        first = last


def _rows_at_once(table: pa.Table) -> int:
    if table.nbytes <= _CHUNK_BYTES:
        return _CHUNK_ROWS
    return min(_CHUNK_ROWS, _CHUNK_BYTES * int(table.num_rows) // int(table.nbytes) + 1)


def _described(uid: str, function: Function) -> str:
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"The function of operator {uid!r}{where}"
