"""One subtask in one micro-batch: what ``mapInArrow`` runs.

Read to the barrier, begin, process key by key, freeze, make the snapshot safe, ack. Nothing is
acked without the barrier, and nothing before the last output row was handed to Spark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import Broadcast

from recovery.local.local_copies import RecentDelta
from recovery.local.workspace import Workspace
from recovery.restore.restorer import OpenSubtask
from snapshot.formats.delta_in_pieces import encode_frozen
from snapshot.protocol.messages import AckRequest, BeginReply
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.errors.task_errors import code_first
from statebackend.operators.input.broadcast_rows import BroadcastRows
from statebackend.operators.input.group_by_key import Groups
from statebackend.operators.input.lateness import EventMaxima, LateRows, in_time
from statebackend.operators.input.staging import InputStage
from statebackend.operators.operator_snapshot import OperatorSnapshot
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.rpc.driver_client import client_for
from statebackend.rpc.session_endpoint import Credentials
from statebackend.runtime.worker.participant import (
    AckTimes,
    EpochStamp,
    Membership,
    Participant,
    RemoteSession,
)
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.worker_store import (
    SubtaskStore,
    durable_store,
    local_subtask,
    store_pool_of,
)
from statebackend.spark.worker.batch_context import EpochContext, job_place
from statebackend.spark.worker.delegation_messages import Request
from statebackend.spark.worker.epoch_input import EpochInput, InputShape, peeked, read_epoch
from statebackend.spark.worker.initial_state_reader import read_initial
from statebackend.spark.worker.worker_delegation import DelegatedEpochs, pass_on
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import StateTable
from statebackend.system import SYSTEM, expanded, keep_loaded

__all__ = ["SubtaskTask"]

_RECENT_BYTES = 16 << 20  # of an encoded delta whose rows are kept in memory for the next epoch
_RULES_SHARE = 4  # of the input's budget, in parts: what rules may take


@dataclass
class _Timings:
    """Milliseconds since the last mark, by name."""

    now_s: Callable[[], float]
    last_s: float = field(init=False)
    marks_ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_s = self.now_s()

    def mark(self, name: str) -> None:
        now_s = self.now_s()
        self.marks_ms[name] = round((now_s - self.last_s) * 1000, 3)
        self.last_s = now_s


class SubtaskTask:
    """The function given to ``mapInArrow``; its credentials come by broadcast.

    Args:
        name: what Spark's plan calls it. A start finds its operators by these names.
    """

    def __init__(
        self,
        spec: TaskSpec,
        processor: ShippedProcessor,
        credentials: Broadcast[Credentials],
        name: str = "",
    ) -> None:
        self.spec = spec
        self.processor = processor
        self.credentials = credentials
        self.__name__ = name or type(self).__name__

    @code_first
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One epoch of one subtask: here, or in the worker that has its store open."""
        context = EpochContext.current(self.spec.uid, self.credentials.value)
        placed = SubtaskTask(
            self.spec.at(job_place(self.spec.uid)), self.processor, self.credentials
        )
        yield from placed.attempt(context, batches)

    def attempt(
        self, context: EpochContext, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """One epoch of one subtask, once its job is known: here, or where its store is open."""
        work = Workspace.of_process(expanded(self.spec.local_dir), SYSTEM.new_id)
        if not self.spec.follow_stores_bytes:
            yield from self.epoch(context, batches, work)
            return
        delegated = DelegatedEpochs.of_process(store_pool_of(self.spec, work))
        with delegated.task(context.endpoint, self.spec.uid, self._delegated):
            subtask, batches = peeked(batches)
            kept = None
            if subtask is not None:
                kept = local_subtask(self.spec, subtask, work).kept_elsewhere()
            host = delegated.host_of(
                kept, self.spec.uid, context, at_least_bytes=self.spec.follow_stores_bytes
            )
            if host is not None:
                yield from pass_on(batches, host)
            else:
                yield from self.epoch(context, batches, work)

    def _delegated(
        self, request: Request, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Another worker's attempt, in this one."""
        context = request.context(self.credentials.value)
        work = Workspace.of_process(expanded(self.spec.local_dir), SYSTEM.new_id)
        return self.epoch(context, batches, work)

    def epoch(
        self, context: EpochContext, batches: Iterator[pa.RecordBatch], work: Workspace
    ) -> Iterator[pa.RecordBatch]:
        """One epoch of one subtask, in this process."""
        timings = _Timings(SYSTEM.monotonic_s)
        taken = self._read(batches, work)
        timings.mark("read")
        spill = OverlaySpill(limit_bytes=self.spec.overlay_budget_bytes, folder=work.path)
        with contextlib.ExitStack() as stack:
            stack.callback(spill.close)
            stack.callback(taken.close)
            stores = self._stores(context, taken.subtask, work)
            yield from SubtaskEpoch(
                stores, self.processor, context, taken, work=work, timings=timings
            ).run(spill)
        keep_loaded("task")

    def _read(self, batches: Iterator[pa.RecordBatch], work: Workspace) -> EpochInput:
        """The whole input, up to the barrier."""
        spec, plan = self.spec, self.spec.plan
        schema = arrow_schema(plan.input_schema)
        rules, budget_bytes = None, spec.input_budget_bytes
        if plan.rules_schema is not None:
            rules_bytes = budget_bytes // _RULES_SHARE
            budget_bytes -= rules_bytes
            rules = BroadcastRows(
                arrow_schema(plan.rules_schema), budget_bytes=rules_bytes, folder=work.path
            )
        stage = InputStage(
            schema,
            key_positions=plan.key_positions,
            budget_bytes=budget_bytes,
            folder=work.path,
        )
        return read_epoch(
            batches,
            InputShape(
                spec.uid,
                schema,
                plan.key_positions,
                spec.parallelism,
                spec.max_parallelism,
                spec.packed,
            ),
            stage=stage,
            events=EventMaxima(spec.time.event_position, spec.time.side_position),
            rules=rules,
        )

    def _stores(self, context: EpochContext, subtask: int, work: Workspace) -> SubtaskStore:
        """The subtask's store, not open, and its side of the protocol."""
        spec, endpoint = self.spec, context.endpoint
        session = RemoteSession(
            client_for(endpoint),
            endpoint,
            timeout_s=spec.begin_timeout_s,
            ack_timeout_s=spec.commit_timeout_s,
        )
        participant = Participant(
            spec.subtask(subtask),
            Membership(session, endpoint.session, context.query_id, context.attempt),
            durable_store(spec.uri, spec.store_options),
        )
        return SubtaskStore(spec, participant, lambda: local_subtask(spec, subtask, work))


class SubtaskEpoch:
    """One attempt at one epoch, once its input is whole."""

    def __init__(
        self,
        stores: SubtaskStore,
        processor: ShippedProcessor,
        context: EpochContext,
        taken: EpochInput,
        *,
        work: Workspace,
        timings: _Timings,
    ) -> None:
        self._spec, self._processor = stores.spec, processor
        self._context, self._taken = context, taken
        self._at = EpochStamp(context.epoch, taken.stamp_ms, taken.nonce)
        self._stores, self._participant = stores, stores.participant
        self._work, self._timings = work, timings
        self._counted: dict[str, int] = {}
        self._frozen: OperatorSnapshot | None = None
        self._next_timer_ms: int | None = None

    def run(self, spill: OverlaySpill) -> Iterator[pa.RecordBatch]:
        """Get the state, process, snapshot, ack."""
        stores, timings, participant = self._stores, self._timings, self._participant
        opened = stores.open(self._at)
        timings.mark("restore")
        try:
            stores.begun(opened.reply)
            table = StateTable(opened.store, spill=spill)
            for epoch, rows in opened.layers:
                table.add_layer(epoch, rows)
            with participant.system.unhurried_collector():
                yield from self._process(table, opened.reply)
            timings.mark("process")
            request = self._snapshot(opened, table)
        except BaseException as error:
            # Marked before the attempt fails, so that the next one does not take it again.
            stores.mark_bad(error)
            stores.release()
            raise
        stores.give_back()
        timings.mark("close")
        participant.member.handler.ack(participant.with_requests(request, timings.marks_ms))

    def _process(self, table: StateTable, reply: BeginReply) -> Iterator[pa.RecordBatch]:
        spec, taken = self._spec, self._taken
        epoch = StatefulEpoch(
            spec.plan,
            self._processor.fresh(),
            table=table,
            state_ids=reply.states,
            times=EpochTimes(
                epoch=self._context.epoch,
                processing_time_ms=taken.stamp_ms,
                watermark_ms=reply.watermark_ms,
                late_watermark_ms=reply.late_watermark_ms,
            ),
            key_groups=range(reply.key_group_start, reply.key_group_end + 1),
            versions=reply.versions,
            stored=self._participant.operator_state.read(reply),
        )
        late, position = None, spec.time.event_position
        if position is not None and spec.time.drops_late:
            late = LateRows(position, reply.late_watermark_ms)
        parts = taken.groups(spec.plan.key_codec, late)
        with contextlib.ExitStack() as stack:
            if spec.quick_frames:
                from statebackend.operators.pandas_frames.dataframe_shortcut import (
                    quick_frames,  # imports pandas
                )

                stack.enter_context(quick_frames())
            initial = self._initial(reply, stack)
            rules, passed_on = self._rules(), spec.time.output_position
            output = epoch.run(parts, initial=initial, dropped=reply.dropped, rules=rules)
            if passed_on is not None:
                output = in_time(output, spec.uid, passed_on, reply.late_watermark_ms)
            yield from output
        self._frozen = epoch.operator_snapshot()
        self._processor.check_unchanged()
        self._next_timer_ms = epoch.figures.next_timer_ms
        if spec.time.mode != "none":
            self._counted["timers_fired"] = epoch.figures.timers_fired
        late_rows = epoch.figures.late_rows if late is None else late.dropped
        if late_rows:
            self._counted["late_rows"] = late_rows
        if epoch.figures.expired:
            self._counted["expired_entries"] = epoch.figures.expired

    def _rules(self) -> Iterator[Any] | None:
        """The epoch's rows that go to every subtask; None: there are none."""
        rules, plan = self._taken.rules, self._spec.plan
        if rules is None or not rules.rows:
            return None
        assert plan.rules_schema is not None
        self._counted["broadcast_rows"] = rules.rows
        return rules.shown(plan.rules_schema, plan.timezone)

    def _initial(self, reply: BeginReply, stack: contextlib.ExitStack) -> Iterator[Groups]:
        """The subtask's initial state, grouped; nothing where there is none."""
        spec, plan = self._spec, self._spec.plan
        if not reply.initial or plan.initial_schema is None:
            return iter(())
        schema = arrow_schema(plan.initial_schema)
        stage = InputStage(
            schema,
            key_positions=plan.initial_key_positions,
            budget_bytes=spec.input_budget_bytes,
            folder=self._work.path,
        )
        stack.callback(stage.close)
        taken = read_initial(
            self._participant.store,
            reply.initial,
            stage,
            subtask=self._taken.subtask,
            schema=schema,
            key_positions=plan.initial_key_positions,
            parallelism=spec.parallelism,
            max_parallelism=spec.max_parallelism,
            new_path=self._work.path,
        )
        return taken.groups(plan.key_codec)

    def _snapshot(self, opened: OpenSubtask, table: StateTable) -> AckRequest:
        """Freeze, and make both copies of what changed."""
        epoch, reply, taken = self._context.epoch, opened.reply, self._taken
        stores, participant = self._stores, self._participant
        assert self._frozen is not None
        frozen = table.freeze(epoch)
        delta = encode_frozen(frozen, self._work.path)
        live_bytes = opened.store.live_bytes()
        saved = participant.save(epoch, reply, delta, self._frozen, live_bytes=live_bytes)
        in_memory = delta.path is None and delta.size_bytes <= _RECENT_BYTES
        if stores.keep(epoch, delta) and in_memory:
            stores.held.recent = RecentDelta(epoch, delta.digest.hex(), *frozen.sorted())
        self._timings.mark("snapshot")
        if reply.base_due and not saved.large_bytes:
            if entries := list(table.snapshot()):
                saved = participant.with_base(saved, epoch, reply, entries)
            self._timings.mark("base")
        figures = {
            "rows": taken.stage.rows,
            "spilled_bytes": taken.staged_bytes,
            **stores.figures(delta),
            **table.figures(),
            **self._counted,
        }
        if delta.deletions:
            figures["removed_rows"] = delta.deletions
        times = AckTimes(taken.max_event_ms, taken.second_event_ms, self._next_timer_ms)
        attempt = self._context.attempt
        ack = participant.ack(self._at, saved, attempt, times, figures, opened.report)
        return msgspec.structs.replace(ack, use=self._context.use)
