"""A keyed subtask's state over a stream: one open store, one table, a snapshot at each barrier.

At a barrier the table's overlay is frozen, which takes no time, and the subtask goes on. In another
thread what was frozen becomes a delta: durable, and beside the store. When its checkpoint is
complete, the rows, still in memory, are written to the store in the background, a few at a time;
until that is done they lie over it and are read from there, so that nobody sees the store half way.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.workspace import Workspace
from recovery.restore.restorer import OpenSubtask, Restorer, Site
from recovery.restore.upload import BaseUpload
from snapshot.barriers.channel_watermarks import END_MS
from snapshot.formats.delta import chain as chain_after
from snapshot.formats.delta_stream import EncodedDelta, encode_frozen
from snapshot.formats.names import data_name
from snapshot.protocol.messages import BaseGrant, BeginReply, SlicePart
from snapshot.storage.object_store import ObjectStore
from statebackend.continuous.worker.background_pace import RateLimit
from statebackend.continuous.worker.checkpointed_state import (
    Background,
    CheckpointedState,
    Frozen,
    Made,
    Membership,
    SharedFuture,
)
from statebackend.continuous.worker.overtaken_rows import Overtaken, decode, taken_out
from statebackend.errors import LocalCopyError, LocalDirError, StaleRequestError, StateBackendError
from statebackend.operators.operator_lists_maps import StoredOperatorState
from statebackend.operators.streaming_operator import StreamOperator, StreamTimes
from statebackend.rocks.store import Marker
from statebackend.runtime.worker.ack_slices import durable_slice, packed_base
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.worker_store import base_upload, local_subtask, site_of
from statebackend.state.blocks import SortedRows
from statebackend.state.overlay import FrozenOverlay, Overlay, joined
from statebackend.state.spill import OverlaySpill, Run
from statebackend.state.table import StateTable
from statebackend.system import SYSTEM, System

__all__ = ["KeyedFrozen", "SubtaskState"]

_log = logging.getLogger("statebackend.continuous")
_TRIED_TIMES: Final = 4  # state that is so many times the budget on disk will not fit when packed
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
        spec: of the operator. subtask, member, store, background: as for `CheckpointedState`.
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
        spec: TaskSpec,
        subtask: int,
        member: Membership,
        *,
        store: ObjectStore,
        work: Workspace,
        background: Background,
        watermark_ms: int | None = None,
        system: System = SYSTEM,
    ) -> None:
        super().__init__(spec, subtask, member, store=store, background=background, system=system)
        self._watermark_ms = watermark_ms
        self._spec, self._durable, self._work = spec, store, work
        self._spill = OverlaySpill(limit_bytes=spec.overlay_budget_bytes, folder=work.path)
        self._local: LocalSubtask | None = None
        self._opened: OpenSubtask | None = None
        self.times = StreamTimes()
        self.overtaken: list[Overtaken] = []
        self._told: dict[str, int] = {}  # the operator's figures at the last barrier
        self._layers: list[tuple[int, FrozenOverlay]] = []  # as in the table, by attempt
        self._persisted: dict[int, _Persisted] = {}
        self._confirmed_attempt = -1  # the newest
        self._stored: deque[int] = deque()  # attempts whose rows are in the store by now
        self._applied: SharedFuture[None] = SharedFuture.of(None)
        self._pace = RateLimit(system)  # of that

    # --- the subtask's own thread --------------------------------------------------------------

    def open(self, epoch: int, stamp_ms: int) -> BeginReply:
        """Open the store and bring it to the end of the epoch before, from the nearest copy.

        ``times`` are those that the checkpoint left the operator with.

        Raises:
            CorruptionError, LocalDirError, LocalCopyError: see `Restorer.open`.
            StateBackendError: the coordinator refused.
        """
        self.epoch, self._stamp_ms = epoch, stamp_ms
        spec = self._spec
        self._local = self._copies()
        self._opened = opened = Restorer(
            self._local,
            self._site(),
            ask=self._ask,
            store=self._store,
            now_s=self._system.monotonic_s,
            lease_timeout_s=spec.lease_timeout_s,
            settings=spec.rocks,
            threads=self._system.threads,
        ).open()
        reply, self._report = opened.reply, opened.report
        try:
            if opened.layers:
                raise StaleRequestError("A stream begins where everything is durable.")
            self._upload_base(reply)
            self.table = StateTable(opened.store, spill=self._spill, small_writes=True)
            stored, elements = taken_out(self.operator_state_io.read(reply))
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

    def _copies(self) -> LocalSubtask:
        """Those of this host."""
        return local_subtask(self._spec, self._subtask, self._work)

    def _site(self) -> Site:
        """Where it runs."""
        return site_of(self._spec, self._subtask)

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
        layer = self.table.freeze(self.epoch)
        self._layers.append((attempt, layer))
        figures = operator.counted.since(self._told)
        self._told = dict(vars(operator.counted))
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
            layers=tuple(self._layers),
        )

    def confirmed(self, attempt: int, next_stamp_ms: int) -> None:
        """As :meth:`CheckpointedState.confirmed`; the rows are written to the store meanwhile."""
        super().confirmed(attempt, next_stamp_ms)
        self.times.epoch = self._next_epoch
        self.tidy()

    def aborted(self, attempt: int) -> None:
        """As :meth:`CheckpointedState.aborted`."""
        super().aborted(attempt)
        self.times.epoch = self._next_epoch
        made = self._persisted.pop(attempt, None)
        if made is None or self._opened is None:
            return
        self._opened.incarnation.forget_delta(made.epoch, made.digest)
        self.tidy()
        if self._layers[0][0] <= self._confirmed_attempt:
            return  # a confirmed one is on its way to the store, alone
        merged = [layer for number, layer in self._layers if number <= attempt]
        if len(merged) > 2 and made.rows.columns is not None:
            # Attempt after attempt fails: reading must not go through ever more layers.
            rows = Run.in_memory([SortedRows(*made.rows.columns)])
            one = FrozenOverlay(self.epoch, Overlay(runs=[rows]))
            self.table.put_joined(one, merged)
            self._layers[: len(merged)] = [(attempt, one)]

    def tidy(self) -> None:
        """Let go of what is in the store by now; costs nothing, to be called now and then."""
        while self._stored:
            attempt = self._stored.popleft()
            while self._layers and self._layers[0][0] <= attempt:
                self.table.applied(self._layers.pop(0)[1])

    def close(self, error: BaseException | None = None) -> None:
        """The subtask ends: its store is kept open for the next execution, or let go.

        Waits for what is being written. May be called twice.

        Args:
            error: why it ends; a damaged store is marked, so that nobody takes it again.
        """
        self._stop()
        self._pace.hurry()
        with contextlib.suppress(BaseException):  # it was said already, or nobody wants to know
            self._applied.get()
        opened, self._opened = self._opened, None
        if opened is not None and self._local is not None:
            for one in (error, self._failure):
                if isinstance(one, LocalCopyError):
                    opened.incarnation.mark_bad(one.what)
            try:
                self._local.give_back(opened.incarnation)
            except StateBackendError as failed:  # marked by then
                _log.warning("%s", failed)
        self._spill.close()

    # --- another thread ------------------------------------------------------------------------

    def _make(self, frozen: Frozen, reply: BeginReply, epoch: int) -> Made | None:
        assert isinstance(frozen, KeyedFrozen)
        assert self._opened is not None
        own = [layer for number, layer in frozen.layers if number > self._confirmed_attempt]
        rows = joined(own)
        delta = encode_frozen(rows, self._work.path)
        try:
            return self._made(frozen, reply, epoch, rows, delta)
        finally:
            if delta.path is not None:  # unless it was taken over, nobody wants it any more
                delta.path.unlink(missing_ok=True)

    def _made(
        self,
        frozen: KeyedFrozen,
        reply: BeginReply,
        epoch: int,
        rows: FrozenOverlay,
        delta: EncodedDelta,
    ) -> Made | None:
        assert self._opened is not None
        digest = delta.digest.hex()
        if not self._wanted(frozen.attempt):
            return None
        name = data_name(reply.generation, epoch, self._system.new_id())
        part = durable_slice(self._store, delta, reply.inline_budget_bytes, name)
        budget_bytes = reply.inline_budget_bytes - len(part.data)
        parts = self._state_parts(frozen, reply, budget_bytes)
        budget_bytes -= parts.inline_bytes
        held = self._opened.incarnation
        try:
            if delta.path is not None:
                held.adopt_delta(epoch, digest, delta.path)
            else:
                held.write_delta(epoch, digest, delta.data or b"")
        except LocalDirError as error:
            _log.warning("no local copy of epoch %d: %s", epoch, error)
        base, large_bytes = self._inline_base(frozen, reply, budget_bytes)
        self._persisted[frozen.attempt] = _Persisted(epoch, digest, rows)
        event_ms = None
        if frozen.watermark_ms is not None and frozen.watermark_ms > 0:
            # As if rows of just that time had been seen: it gives this watermark again.
            event_ms = frozen.watermark_ms + (self._spec.time.delay_ms or 0)
        sided = self._spec.time.side_position is not None
        return Made(
            chain=chain_after(bytes.fromhex(reply.chain), delta.digest).hex(),
            delta=part,
            base=base,
            large_bytes=large_bytes,
            max_event_ms=event_ms,
            second_event_ms=event_ms if sided else None,
            figures={**frozen.figures, **self._store_figures()},
            operator_state=parts.lists,
            broadcast=parts.maps,
            broadcast_digest=parts.maps_digest,
        )

    def _store_figures(self) -> dict[str, int]:
        assert self._opened is not None
        store = self._opened.store
        return {"level0_files": store.level0_files(), "stored_bytes": store.stored_bytes()}

    def _inline_base(
        self, frozen: KeyedFrozen, reply: BeginReply, budget_bytes: int
    ) -> tuple[SlicePart | None, int]:
        """The whole state for the record, where it is due; or how large it is, where too large."""
        assert self._opened is not None
        live_bytes = self._opened.store.live_bytes()
        if live_bytes > _TRIED_TIMES * reply.inline_budget_bytes:
            return None, live_bytes
        if not reply.base_due:
            return None, 0
        layers = [layer for _, layer in frozen.layers]
        if any(layer.spilled for layer in layers):  # far from small; and its files go meanwhile
            return None, 0
        entries = list(self.table.snapshot_under(layers))
        name = data_name(reply.generation, self.epoch, self._system.new_id())
        limit_bytes = reply.inline_budget_bytes
        return packed_base(entries, self._store, limit_bytes, budget_bytes, name)

    # --- in the background ---------------------------------------------------------------------

    def _following(
        self, attempt: int, epoch: int, chain: str
    ) -> tuple[SharedFuture[BeginReply], SharedFuture[None]]:
        self._confirmed_attempt = attempt
        made, before, pace_before = self._persisted.pop(attempt), self._applied, self._pace
        self._persisted.clear()
        self._pace = pace = RateLimit(self._system)

        def begin() -> BeginReply:
            assert self._opened is not None
            pace_before.hurry()
            before.get()  # the store's marker is a part of what is asked
            return self._begin_next(self._opened.incarnation.describe(), chain)

        begun = SharedFuture(begin, self._system.threads)
        self._applied = SharedFuture(
            lambda: self._apply(attempt, made, begun.get(), pace), self._system.threads
        )
        return begun, self._applied

    def _apply(self, attempt: int, made: _Persisted, reply: BeginReply, pace: RateLimit) -> None:
        """Write a confirmed epoch's rows to the store."""
        assert self._opened is not None
        steps = [(step.epoch, step.digest) for step in reply.steps]
        if reply.fresh or steps != [(made.epoch, made.digest)]:
            raise StaleRequestError(
                f"The store of operator {self._spec.uid!r}, subtask {self._subtask}, does not "
                f"stand where epoch {made.epoch} follows ({reply.reason or steps}).",
                todo="The subtask is started again, and takes its state from a good copy.",
            )
        held, store = self._opened.incarnation, self._opened.store
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
            store.apply_batches(pace.of(_pieces(made.rows)), marker)
            held.unflushed_epochs += 1
            self._stored.append(attempt)
            self._upload_base(reply)
            if held.unflushed_epochs >= self._spec.store_pool.unflushed_epochs:
                held.flush()
        except LocalCopyError as error:
            held.mark_bad(error.what)
            raise

    def _upload_base(self, reply: BeginReply) -> None:
        """What comes with a begin: old copies are swept, a base that was granted is uploaded."""
        assert self._opened is not None
        assert self._local is not None
        spec = self._spec
        if reply.settled:
            run = self._member.endpoint.session
            self._local.sweep_others(spec.parallelism, spec.max_parallelism, run=run)
        if reply.grant is not None:
            self._upload(self._opened.incarnation, reply.grant, reply.generation).start()

    def _upload(self, held: StoreDirectory, grant: BaseGrant, generation: int) -> BaseUpload:
        """Of the store as it stands, not started."""
        return base_upload(
            self._spec,
            self._subtask,
            held,
            grant,
            client=self._member.client,
            endpoint=self._member.endpoint,
            store=self._durable,
            generation=generation,
        )


def _pieces(rows: FrozenOverlay) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
    """Rows as a store takes them, so few at a time that others can run in between."""
    columns = [rows.columns] if rows.columns is not None else rows.merged()
    for keys, values in columns:
        for start in range(0, len(keys), _APPLIED_ROWS):
            some = slice(start, start + _APPLIED_ROWS)
            yield keys[some].to_pylist(), values[some].to_pylist()
