"""A keyed operator over a stream: one processor, opened once, on one table, for as long as it runs.

What is done with it (input, rules, timers, removal of what has expired) is what an epoch of a
micro-batch does, by the same code; only here each is done whenever there is a reason. The times are
the caller's and move between two calls; whatever keeps them is told of it before the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from statebackend.operators.epoch_phases import OperatorPhases
from statebackend.operators.input.group_by_key import Groups, group_batch
from statebackend.operators.input.lateness import LateRows
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.operator_snapshot import StoredOperatorState
from statebackend.operators.per_key_loop import InputReader, KeyOperator
from statebackend.operators.rows.row_conversion import columns_to_python, make_rows, row_type
from statebackend.state.streaming_timers import StreamingTimers
from statebackend.state.table import StateTable

__all__ = ["StreamFigures", "StreamOperator", "StreamTimes"]


@dataclass
class StreamTimes:
    """What time it is, in milliseconds (see `Times`); to be changed by whoever reads the channels.

    ``epoch``: that of the checkpoint which will hold what comes now.
    """

    epoch: int = 0
    processing_time_ms: int = -1
    watermark_ms: int = 0
    late_watermark_ms: int = 0


@dataclass
class StreamFigures:
    """What an operator has done since it was opened; they only grow."""

    rows: int = 0
    broadcast_rows: int = 0
    late_rows: int = 0
    timers_fired: int = 0
    expired_entries: int = 0

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        """What was added; what is 0 is left out, but for ``rows``."""
        added = {name: now - before.get(name, 0) for name, now in vars(self).items()}
        return {name: count for name, count in added.items() if count or name == "rows"}


class StreamOperator(OperatorPhases):
    """Runs a processor over a stream.

    Not thread-safe: one thread calls it. Each iterator must be used up before the next call. Once a
    call has raised, nothing may follow: state may be half written.

    Args:
        plan: the operator.
        processor: of the plan's flavour; used here only.
        table: the state; with ``small_writes``, since a stream comes in small batches.
        state_ids: the states' numbers, by name.
        times: read at each call. key_groups: the subtask's.
        max_parallelism: how many key groups there are.
        late_position: of the event-time column (microseconds) by which late rows are dropped; None:
            they are not.
        versions: the schemas of states that have had several, by name (see `EpochState`).
        stored: the states that belong to no key, as the checkpoint has them.

    Raises:
        ProcessorError: ``init`` raised.
        StateMismatchError: it asked for other states than on the driver.
    """

    timer_index = StreamingTimers

    def __init__(
        self,
        plan: OperatorPlan,
        processor: Any,
        *,
        table: StateTable,
        state_ids: dict[str, int],
        times: StreamTimes,
        key_groups: range,
        max_parallelism: int,
        late_position: int | None = None,
        versions: Mapping[str, Sequence[str]] | None = None,
        stored: StoredOperatorState | None = None,
    ) -> None:
        super().__init__(
            plan,
            processor,
            table=table,
            state_ids=state_ids,
            times=times,
            key_groups=key_groups,
            versions=versions,
            stored=stored,
        )
        if isinstance(self.timers, StreamingTimers):
            self.timers.look(key_groups)
        self._seen = self._now()
        self._max_parallelism, self._late_position = max_parallelism, late_position
        self._late: LateRows | None = None
        self._late_limit_ms: int | None = None
        self._own_late = 0
        self.counted = StreamFigures()
        self._keyed: KeyOperator | None = None
        if self._batches is None:
            self._keyed = KeyOperator(
                uid=plan.uid, cursor=self.cursor, reader=self._reader(), writer=self._writer
            )

    def _operator(self, reader: InputReader) -> KeyOperator:
        # One for all calls: it learns how large the state of a key is.
        return self._keyed or super()._operator(reader)

    def _now(self) -> tuple[int, int, int, int]:
        times = self._times
        watermarks = times.watermark_ms, times.late_watermark_ms
        return times.epoch, times.processing_time_ms, *watermarks

    def _send_times(self) -> None:
        now = self._now()
        if now != self._seen:
            self._seen = now
            self.state.move()

    # --- before the first input --------------------------------------------------------------

    def drop(self, state_ids: Iterable[int]) -> None:
        """Delete all entries of states that the driver said are gone; before anything else."""
        for state_id in state_ids:
            self._delete_state(state_id)

    def initial(self, parts: Iterable[Groups]) -> Iterator[pa.RecordBatch]:
        """Take in the initial state, grouped; in the operator's first epoch, before any input."""
        self._send_times()
        if self._batches is not None:
            yield from self._batches.initial(parts)
        else:
            yield from self._initial(iter(parts))

    # --- the stream --------------------------------------------------------------------------

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Give the processor a batch's rows, key by key: its output as it comes.

        Args:
            batch: of the plan's input schema. Keys are taken in the order of their encoded form,
                the rows of one key in that of the batch.

        Raises:
            NullKeyError: a key is null.
            ProcessorError, ValueMismatchError: the user's code raised, or gave what does not fit.
            LocalCopyError, LocalDirError: the local store is damaged, or its disk full.
        """
        self._send_times()
        self.counted.rows += batch.num_rows
        batch = self._on_time(batch)
        if not batch.num_rows:
            return
        plan = self._plan
        encode = plan.key_codec.encode_arrow
        groups = group_batch(batch, encode, plan.key_positions, self._max_parallelism)
        parts = iter((groups,))
        if self._batches is None:
            assert self._keyed is not None
            yield from self._keyed.run_parts(parts, self._calls.rows)
            return
        yield from self._batches.input(parts)
        self.counted.late_rows += self._batches.late_rows - self._own_late
        self._own_late = self._batches.late_rows

    def _on_time(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._late_position is None or not batch.num_rows:
            return batch
        limit_ms = self._times.late_watermark_ms
        if self._late is None or limit_ms != self._late_limit_ms:
            self._late, self._late_limit_ms = LateRows(self._late_position, limit_ms), limit_ms
        before = self._late.dropped
        mask = self._late.mask(batch)
        self.counted.late_rows += self._late.dropped - before
        return batch if mask is None else batch.filter(mask)

    def broadcast(self, batch: pa.RecordBatch) -> None:
        """Give the processor rules, in their order; they must reach every subtask in one order.

        Args:
            batch: of the plan's ``rules_schema``.

        Raises: as :meth:`process`.
        """
        schema = self._plan.rules_schema
        assert schema is not None
        if not batch.num_rows:
            return
        self._send_times()
        table = pa.Table.from_batches([batch])
        columns = columns_to_python(table, schema, timezone=self._plan.timezone)
        self._broadcast(iter(make_rows(columns, row_type(schema.names))))
        self.counted.broadcast_rows += batch.num_rows

    @property
    def timers_due(self) -> bool:
        """False: :meth:`fire` has nothing to do; costs next to nothing."""
        return isinstance(self.timers, StreamingTimers) and self.timers.may_be_due(self._now_ms)

    def fire(self) -> Iterator[pa.RecordBatch]:
        """Call the processor for the timers that are due by the times, in their order.

        One that is set meanwhile, for a time that has come already, fires with the next call.

        Raises: as :meth:`process`.
        """
        if not self.timers_due:
            return
        assert self.timers is not None
        self._send_times()
        if self._batches is not None:
            yield from self._batches.timers(self._now_ms, self.figures)
        else:
            assert self._keyed is not None
            yield from self._timers(self._keyed, self.timers)
        self.counted.timers_fired = self.figures.timers_fired

    def clean(self) -> int:
        """Remove state whose time to live is over: some thousand entries at most; how many.

        Looks into every key group: to be called once in a while, such as before each barrier.
        """
        self._send_times()
        removed = self._clean()
        self.counted.expired_entries += removed
        return removed

    # --- the barrier -------------------------------------------------------------------------

    def frozen_operator_state(self) -> StoredOperatorState:
        """The states that belong to no key, as they are now; not yet as bytes."""
        return self.state.operator.frozen()

    @property
    def next_timer_ms(self) -> int | None:
        """No timer is left below it; None: there is none."""
        if not isinstance(self.timers, StreamingTimers):
            return None
        return self.timers.not_before_ms()

    def close(self) -> None:
        """Call the processor's ``close``.

        Raises:
            ProcessorError: it raised.
        """
        self._send_times()
        (self._calls if self._batches is None else self._batches).close()
