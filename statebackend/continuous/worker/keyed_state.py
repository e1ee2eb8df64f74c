"""A keyed subtask's state over a stream: one open store, one table, a snapshot at each barrier.

At a barrier the table's overlay is frozen, which takes no time, and the subtask goes on. In another
thread what was frozen becomes a delta: durable, and beside the store. When its checkpoint is
complete, the rows, still in memory, are written to the store in the background, a few at a time;
until that is done they lie over it and are read from there, so that nobody sees the store half way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from recovery.local.workspace import Workspace
from snapshot.barriers.channel_watermarks import END_MS
from snapshot.formats.delta_in_pieces import EncodedDelta, encode_frozen
from snapshot.protocol.messages import AckRequest, BeginReply, LocalCopy
from statebackend.continuous.worker.attempt_layers import AttemptLayers
from statebackend.continuous.worker.checkpointed_state import (
    Background,
    CheckpointedState,
    Confirmed,
    Frozen,
    SharedFuture,
)
from statebackend.continuous.worker.overtaken_rows import Overtaken, decode, taken_out
from statebackend.continuous.worker.rate_limit import RateLimit
from statebackend.errors import LocalCopyError, StaleRequestError, StateBackendError
from statebackend.operators.operator_snapshot import StoredOperatorState, encoded
from statebackend.operators.streaming_operator import StreamOperator, StreamTimes
from statebackend.rocks.store import Marker
from statebackend.runtime.worker.participant import AckTimes, Saved
from statebackend.runtime.worker.worker_store import SubtaskStore
from statebackend.state.overlay import FrozenOverlay, joined
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import StateTable

__all__ = ["KeyedFrozen", "SubtaskState"]

_log = logging.getLogger("statebackend.continuous")
_APPLIED_ROWS: Final = 512  # at once: others wait for the interpreter as long as that takes


@dataclass(frozen=True)
class KeyedFrozen(Frozen):
    """As :class:`Frozen`. ``layers``: all that lay over the store, by attempt, the oldest first."""

    layers: tuple[tuple[int, FrozenOverlay], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class _Persisted:
    """What an acked attempt wrote, until it is in the store (or the attempt is aborted)."""

    epoch: int
    digest: str
    rows: FrozenOverlay


class SubtaskState(CheckpointedState):
    """The state of one keyed subtask, from its opening to its end.

    Args:
        stores: its store, not open. background: as for `CheckpointedState`.
        work: where the process puts what it needs for a while.
        watermark_ms: of this operator in the restored checkpoint; None: the job's.

    Attributes:
        table: the state, once :meth:`open` was called; one for the whole life.
        times: what the operator goes by; the caller moves them.
        overtaken: rows that the restored snapshot holds beside the state; the caller's, once open.
    """

    table: StateTable
    operator: StreamOperator

    def __init__(
        self,
        stores: SubtaskStore,
        background: Background,
        *,
        work: Workspace,
        watermark_ms: int | None = None,
    ) -> None:
        super().__init__(stores.participant, background)
        self._spec, self._stores = stores.spec, stores
        self._watermark_ms, self._work = watermark_ms, work
        self._spill = OverlaySpill(limit_bytes=self._spec.overlay_budget_bytes, folder=work.path)
        self.times = StreamTimes()
        self.overtaken: list[Overtaken] = []
        self._counted: dict[str, int] = {}  # the operator's figures at the last barrier
        self._read: dict[str, int] = {}  # and the table's
        self._figures: dict[int, dict[str, int]] = {}  # of attempts that are under way
        self._given_up: dict[str, int] = {}  # of those that were aborted: the next one has them
        self._persisted: dict[int, _Persisted] = {}
        self._pace = RateLimit(self._system)  # of what is being written to the store

    # --- the subtask's own thread --------------------------------------------------------------

    def open(self, epoch: int, stamp_ms: int) -> BeginReply:
        """Open the store and bring it to the end of the epoch before, from the nearest copy.

        ``times`` are those that the checkpoint left the operator with.

        Raises:
            CorruptionError, LocalDirError, LocalCopyError: see `Restorer.open`.
            StateBackendError: the coordinator refused.
        """
        self.epoch, self._stamp_ms = epoch, stamp_ms
        spec, opened = self._spec, self._stores.open(self._at)
        reply, self._report = opened.reply, opened.report
        try:
            if opened.layers:
                raise StaleRequestError("A stream begins where everything is durable.")
            self._stores.begun(reply)
            self.table = StateTable(opened.store, spill=self._spill, small_writes=True)
            self._layers = AttemptLayers(self.table)
            stored, elements = taken_out(self._participant.operator_state.read(reply))
            self._operator_state: StoredOperatorState = stored
            own_ms = self._restored(decode(spec.uid, elements, spec.parallelism), reply)
        except BaseException as error:
            self.close(error)
            raise
        self._begun = SharedFuture.of(reply)
        self.times.epoch = epoch
        self.times.watermark_ms = self.times.late_watermark_ms = own_ms
        self.times.processing_time_ms = stamp_ms
        return reply

    def _restored(self, overtaken: list[Overtaken], reply: BeginReply) -> int:
        """Keep rows that were in flight; the watermark to begin with."""
        self.overtaken = [one for one in overtaken if one.direction != "at"]
        for one in overtaken:
            if one.direction == "at":  # this subtask's own: rows that were in time still are
                return one.at_ms
        return reply.watermark_ms if self._watermark_ms is None else self._watermark_ms

    def make_operator(self, processor: Any) -> StreamOperator:
        """The operator over this state, opened; what a changed processor dropped is deleted."""
        spec, reply = self._spec, self._begun.get()
        time = spec.time
        self.operator = StreamOperator(
            spec.plan,
            processor,
            table=self.table,
            state_ids=reply.states,
            times=self.times,
            key_groups=range(reply.key_group_start, reply.key_group_end + 1),
            max_parallelism=spec.max_parallelism,
            late_position=time.event_position if time.drops_late else None,
            versions=reply.versions,
            stored=self._operator_state,
        )
        self.operator.drop(reply.dropped)
        return self.operator

    def freeze(self, attempt: int) -> KeyedFrozen:
        """What the state is at a barrier: constant time, whatever its size.

        But for the states that belong to no key, which are copied.

        Raises:
            StateBackendError: what failed in the background.
        """
        started_s = self._system.monotonic_s()
        self._freezing(attempt)
        self.tidy()
        operator = self.operator
        stored = operator.frozen_operator_state()
        layers = self._layers.freeze(attempt, self.epoch)
        figures, before = operator.counted.since(self._counted), self._read
        self._counted, self._read = dict(vars(operator.counted)), self.table.figures()
        figures |= {name: count - before.get(name, 0) for name, count in self._read.items()}
        given_up, self._given_up = self._given_up, {}
        figures |= {name: figures.get(name, 0) + count for name, count in given_up.items()}
        self._figures[attempt] = figures
        self.times.epoch = self._next_epoch
        timed, at_ms = self._spec.time.mode == "event", self.times.watermark_ms
        if at_ms == END_MS:  # that all inputs have ended is of this run alone
            at_ms = self.times.late_watermark_ms
        return KeyedFrozen(
            attempt,
            stored,
            next_timer_ms=operator.next_timer_ms,
            watermark_ms=at_ms if timed else None,
            figures=figures,
            sync_ms=round((self._system.monotonic_s() - started_s) * 1000, 3),
            layers=layers,
        )

    def confirmed(self, attempt: int, next_stamp_ms: int) -> None:
        """As :meth:`CheckpointedState.confirmed`; the rows are written to the store meanwhile."""
        super().confirmed(attempt, next_stamp_ms)
        self._figures = {one: held for one, held in self._figures.items() if one > attempt}
        self.times.epoch = self._next_epoch
        self.tidy()

    def aborted(self, attempt: int) -> None:
        """As :meth:`CheckpointedState.aborted`."""
        super().aborted(attempt)
        for name, count in self._figures.pop(attempt, {}).items():
            self._given_up[name] = self._given_up.get(name, 0) + count
        self.times.epoch = self._next_epoch
        made = self._persisted.pop(attempt, None)
        if made is None or self._closed:  # nothing was written for it; or the store is let go
            return
        self._stores.held.forget_delta(made.epoch, made.digest)
        self._layers.merge(attempt, self.epoch, made.rows)

    def tidy(self) -> None:
        """Let go of what is in the store by now; costs nothing, to be called now and then."""
        self._layers.tidy()

    def close(self, error: BaseException | None = None) -> None:
        """The subtask ends: its store is kept open for the next execution, or let go.

        Waits for what is being written. May be called twice.

        Args:
            error: why it ends; a damaged store is marked, so that nobody takes it again.
        """
        self._stop()
        self._pace.hurry()
        with contextlib.suppress(BaseException):  # it was said already, or nobody wants to know
            self._settled.get()
        if self._stores.opened is not None:
            self._stores.mark_bad(error)
            self._stores.mark_bad(self._failure)
            try:
                self._stores.give_back()
            except StateBackendError as failed:  # marked by then
                _log.warning("%s", failed)
        self._spill.close()

    # --- another thread ------------------------------------------------------------------------

    def _make(self, frozen: Frozen, reply: BeginReply) -> AckRequest | None:
        assert isinstance(frozen, KeyedFrozen)
        confirmed = self._layers.confirmed
        rows = joined([layer for number, layer in frozen.layers if number > confirmed])
        delta = encode_frozen(rows, self._work.path)
        try:
            if not self._wanted(frozen.attempt):
                return None
            saved = self._saved(frozen, reply, delta)
        finally:
            if delta.path is not None:  # unless it was taken over, nobody wants it any more
                delta.path.unlink(missing_ok=True)
        self._persisted[frozen.attempt] = _Persisted(self.epoch, saved.delta.digest, rows)
        figures = {**frozen.figures, **self._stores.figures(delta)}
        if delta.deletions:
            figures["removed_rows"] = delta.deletions
        times = self._ack_times(frozen)
        return self._participant.ack(self._at, saved, frozen.attempt, times, figures, self._report)

    def _saved(self, frozen: KeyedFrozen, reply: BeginReply, delta: EncodedDelta) -> Saved:
        """What was frozen, durable, and its delta beside the store."""
        epoch, participant = self.epoch, self._participant
        snapshot, live_bytes = encoded(frozen.operator_state), self._stores.store.live_bytes()
        saved = participant.save(epoch, reply, delta, snapshot, live_bytes=live_bytes)
        self._stores.keep(epoch, delta)
        layers = [layer for _, layer in frozen.layers]
        # What was spilled is far from small; and its files go meanwhile.
        small = not saved.large_bytes and not any(layer.spilled for layer in layers)
        if reply.base_due and small:
            entries = list(self.table.snapshot_under(layers))
            saved = participant.with_base(saved, epoch, reply, entries)
        return saved

    def _ack_times(self, frozen: KeyedFrozen) -> AckTimes:
        time, event_ms = self._spec.time, None
        if frozen.watermark_ms is not None and frozen.watermark_ms > 0:
            # As if rows of just that time had been seen: it gives this watermark again.
            event_ms = frozen.watermark_ms + (time.delay_ms or 0)
        second_ms = None if time.side_position is None else event_ms
        return AckTimes(event_ms, second_ms, frozen.next_timer_ms)

    # --- in the background ---------------------------------------------------------------------

    def _confirm(self, attempt: int, chain: str) -> Confirmed:
        self._layers.confirmed = attempt
        made = self._persisted.pop(attempt)
        self._persisted.clear()
        before, pace_before = self._settled, self._pace
        self._pace = pace = RateLimit(self._system)

        def copy() -> LocalCopy:
            pace_before.hurry()
            before.get()  # the store's marker is a part of what is asked
            return self._stores.held.describe()

        return Confirmed(copy, lambda reply: self._apply(attempt, made, reply, pace))

    def _apply(self, attempt: int, made: _Persisted, reply: BeginReply, pace: RateLimit) -> None:
        """Write a confirmed epoch's rows to the store."""
        steps = [(step.epoch, step.digest) for step in reply.steps]
        if reply.fresh or steps != [(made.epoch, made.digest)]:
            raise StaleRequestError(
                f"The store of {self._participant.who}, does not stand where epoch {made.epoch} "
                f"follows ({reply.reason or steps}).",
                todo="The subtask is started again, and takes its state from a good copy.",
            )
        held = self._stores.held
        marker = Marker(
            job_id=reply.job_id,
            operator=self._spec.uid,
            key_group_start=reply.key_group_start,
            key_group_end=reply.key_group_end,
            epoch=made.epoch,
            chain=reply.durable_chain,
        )
        try:
            held.settle()
            self._stores.store.apply_batches(pace.of(_pieces(made.rows)), marker)
            held.unflushed_epochs += 1
            self._layers.stored(attempt)
            self._stores.begun(reply)
            if held.unflushed_epochs >= self._spec.store_pool.unflushed_epochs:
                held.flush()
        except LocalCopyError as error:
            held.mark_bad(error.what)
            raise


def _pieces(rows: FrozenOverlay) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
    """Rows as a store takes them, so few at a time that others can run in between."""
    columns = [rows.columns] if rows.columns is not None else rows.merged()
    for keys, values in columns:
        for start in range(0, len(keys), _APPLIED_ROWS):
            some = slice(start, start + _APPLIED_ROWS)
            yield keys[some].to_pylist(), values[some].to_pylist()
