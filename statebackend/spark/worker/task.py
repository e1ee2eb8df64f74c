"""One subtask in one micro-batch: what ``mapInArrow`` runs.

Read to the barrier, begin, process key by key, freeze, make the snapshot safe, ack. Nothing is
acked without the barrier, and nothing before the last output row was handed to Spark.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import Broadcast

from recovery.local.local_copies import LocalSubtask, RecentDelta
from recovery.local.workspace import Workspace
from recovery.restore.restorer import OpenSubtask, Restorer
from snapshot.formats.delta import chain
from snapshot.formats.delta_stream import encode_frozen
from snapshot.formats.names import data_name
from snapshot.protocol.messages import (
    PROTOCOL,
    AckRequest,
    AncestorCopy,
    BaseGrant,
    BeginReply,
    BeginRequest,
    LocalCopy,
)
from snapshot.storage.counting import CountingStore
from statebackend.errors import LocalCopyError, LocalDirError
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.errors.task_errors import code_first
from statebackend.operators.input.broadcast_rows import BroadcastRows
from statebackend.operators.input.group_by_key import Groups
from statebackend.operators.input.lateness import EventMaxima, LateRows, in_time
from statebackend.operators.input.staging import InputStage
from statebackend.operators.operator_lists_maps import OperatorSnapshot
from statebackend.operators.rows.rowconv import arrow_schema
from statebackend.rpc.service import Credentials, client_for
from statebackend.runtime.worker.ack_slices import durable_slice, requests_of, small_base
from statebackend.runtime.worker.operator_state_io import OperatorStateIO, StateParts
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.worker_store import (
    base_upload,
    durable_store,
    local_subtask,
    site_of,
    store_pool_of,
)
from statebackend.spark.worker.batch_context import EpochContext
from statebackend.spark.worker.delegated_epochs import DelegatedEpochs, Request, pass_on
from statebackend.spark.worker.initial_rows import read_initial
from statebackend.spark.worker.input_reader import EpochInput, peeked, read_epoch
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import StateTable
from statebackend.system import SYSTEM, System, expanded, keep_loaded

__all__ = ["SubtaskTask"]

_log = logging.getLogger("statebackend.task")


_RECENT_BYTES = 16 << 20  # of an encoded delta whose rows are kept in memory for the next epoch
_RULES_SHARE = 4  # of the input's budget, in parts: what rules may take
_TRIED_TIMES = 4  # state that is so many times the budget on disk will not fit when packed


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
    """The function given to ``mapInArrow``; its credentials come by broadcast."""

    def __init__(
        self, spec: TaskSpec, processor: ShippedProcessor, credentials: Broadcast[Credentials]
    ) -> None:
        self.spec = spec
        self.processor = processor
        self.credentials = credentials

    @code_first
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One epoch of one subtask: here, or in the worker that has its store open."""
        context = EpochContext.current(self.spec.uid, self.credentials.value)
        work = Workspace.of_process(expanded(self.spec.local_dir), SYSTEM.new_id)
        if not self.spec.follow_stores_bytes:
            yield from self.epoch(context, batches, work)
            return
        hosting = DelegatedEpochs.of_process(store_pool_of(self.spec, work))
        with hosting.task(context.endpoint, self.spec.uid, self._as_guest):
            subtask, batches = peeked(batches)
            kept = None
            if subtask is not None:
                kept = local_subtask(self.spec, subtask, work).kept_elsewhere()
            host = hosting.host_of(
                kept, self.spec.uid, context, at_least_bytes=self.spec.follow_stores_bytes
            )
            if host is not None:
                yield from pass_on(batches, host)
            else:
                yield from self.epoch(context, batches, work)

    def _as_guest(
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
        spec = self.spec
        timings = _Timings(SYSTEM.monotonic_s)
        plan = spec.plan
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
        taken = read_epoch(
            batches,
            uid=spec.uid,
            schema=schema,
            key_positions=plan.key_positions,
            parallelism=spec.parallelism,
            max_parallelism=spec.max_parallelism,
            stage=stage,
            events=EventMaxima(spec.time.event_position, spec.time.side_position),
            packed=spec.packed,
            rules=rules,
        )
        timings.mark("read")
        store = CountingStore(durable_store(spec.uri, spec.store_options))
        spill = OverlaySpill(limit_bytes=spec.overlay_budget_bytes, folder=work.path)
        with contextlib.ExitStack() as stack:
            stack.callback(spill.close)
            stack.callback(taken.close)
            worker = SubtaskEpoch(
                self.spec,
                self.processor,
                context,
                taken,
                store=store,
                work=work,
                timings=timings,
                system=SYSTEM,
            )
            yield from worker.run(spill)
        keep_loaded("task")


class SubtaskEpoch:
    """One attempt at one epoch, once its input is whole."""

    def __init__(
        self,
        spec: TaskSpec,
        processor: ShippedProcessor,
        context: EpochContext,
        taken: EpochInput,
        *,
        store: CountingStore,
        work: Workspace,
        timings: _Timings,
        system: System,
    ) -> None:
        self._spec, self._processor = spec, processor
        self._context, self._taken = context, taken
        self._store, self._work, self._timings = store, work, timings
        self._system = system
        self._client = client_for(context.endpoint)
        self._counted: dict[str, int] = {}
        self._operator_state = OperatorStateIO(
            spec.local_name, spec.uid, taken.subtask, spec.parallelism, store
        )
        self._frozen: OperatorSnapshot | None = None
        self._next_timer_ms: int | None = None

    def run(self, spill: OverlaySpill) -> Iterator[pa.RecordBatch]:
        """Get the state, process, snapshot, ack."""
        spec, timings = self._spec, self._timings
        local = self._local()
        opened = self._restorer(local).open()
        timings.mark("restore")
        held = opened.incarnation
        try:
            if opened.reply.settled:
                run = self._context.endpoint.session
                local.sweep_others(spec.parallelism, spec.max_parallelism, run=run)
            if opened.reply.grant is not None:
                self._upload_base(opened, opened.reply.grant)
            table = StateTable(opened.store, spill=spill)
            for epoch, rows in opened.layers:
                table.add_layer(epoch, rows)
            with self._system.unhurried_collector():
                yield from self._process(table, opened.reply)
            timings.mark("process")
            request = self._snapshot(opened, table)
        except BaseException as error:
            if isinstance(error, LocalCopyError):
                # Marked before the attempt fails, so that the next one does not take it again.
                held.mark_bad(error.what)
            held.release()
            raise
        local.give_back(held)
        timings.mark("close")
        request = msgspec.structs.replace(
            request, timings_ms=timings.marks_ms, requests=requests_of(self._store)
        )
        self._client.ack(self._context.endpoint, request, timeout_s=spec.commit_timeout_s)

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
            stored=self._operator_state.read(reply),
        )
        late, position = None, spec.time.event_position
        if position is not None and spec.time.drops_late:
            late = LateRows(position, reply.late_watermark_ms)
        parts = taken.groups(spec.plan.key_codec, late)
        with contextlib.ExitStack() as stack:
            if spec.quick_frames:
                from statebackend.operators.frames.quickframes import quick_frames  # imports pandas

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
            self._store,
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

    def _local(self) -> LocalSubtask:
        return local_subtask(self._spec, self._taken.subtask, self._work)

    def _restorer(self, local: LocalSubtask) -> Restorer:
        spec, context, taken = self._spec, self._context, self._taken
        endpoint = context.endpoint
        site = site_of(spec, taken.subtask)

        def ask(
            copy: LocalCopy, ancestors: list[AncestorCopy] | None
        ) -> tuple[BeginReply, list[bytes]]:
            request = BeginRequest(
                protocol=PROTOCOL,
                job=spec.job,
                session=endpoint.session,
                operator=spec.uid,
                subtask=taken.subtask,
                epoch=context.epoch,
                stamp_ms=taken.stamp_ms,
                query_id=context.query_id,
                attempt=context.attempt,
                host=site.host,
                executor=site.executor,
                copy=copy,
                ancestors=ancestors,
                held=self._operator_state.held(),
                nonce=taken.nonce,
            )
            reply, bodies = self._client.begin(endpoint, request, timeout_s=spec.begin_timeout_s)
            return reply, self._operator_state.split_off(reply, bodies)

        return Restorer(
            local,
            site,
            ask=ask,
            store=self._store,
            now_s=self._system.monotonic_s,
            lease_timeout_s=spec.lease_timeout_s,
            settings=spec.rocks,
            threads=self._system.threads,
        )

    def _upload_base(self, opened: OpenSubtask, grant: BaseGrant) -> None:
        spec = self._spec
        base_upload(
            spec,
            self._taken.subtask,
            opened.incarnation,
            grant,
            client=self._client,
            endpoint=self._context.endpoint,
            store=durable_store(spec.uri, spec.store_options),
            generation=opened.reply.generation,
        ).start()

    def _snapshot(self, opened: OpenSubtask, table: StateTable) -> AckRequest:
        """Freeze, and make both copies of what changed."""
        spec, context, reply = self._spec, self._context, opened.reply
        epoch, held = context.epoch, opened.incarnation
        frozen = table.freeze(epoch)
        delta = encode_frozen(frozen, self._work.path)
        digest = delta.digest.hex()
        name = data_name(reply.generation, epoch, self._system.new_id())
        part = durable_slice(self._store, delta, reply.inline_budget_bytes, name)
        budget_bytes = reply.inline_budget_bytes - len(part.data)
        parts = self._operator_parts(reply, budget_bytes)
        budget_bytes -= parts.inline_bytes
        try:
            if delta.path is not None:
                held.adopt_delta(epoch, digest, delta.path)
            else:
                held.write_delta(epoch, digest, delta.data or b"")
                if not frozen.spilled and delta.size_bytes <= _RECENT_BYTES:
                    held.recent = RecentDelta(epoch, digest, *frozen.sorted())
        except LocalDirError as error:
            _log.warning("no local copy of epoch %d: %s", epoch, error)
        self._timings.mark("snapshot")
        base, live_bytes = None, opened.store.live_bytes()
        large_bytes = live_bytes if live_bytes > _TRIED_TIMES * reply.inline_budget_bytes else 0
        if reply.base_due and not large_bytes:
            name = data_name(reply.generation, epoch, self._system.new_id())
            limit_bytes = reply.inline_budget_bytes
            base, large_bytes = small_base(table, self._store, limit_bytes, budget_bytes, name)
            self._timings.mark("base")
        follows = chain(bytes.fromhex(reply.chain), delta.digest).hex()
        return AckRequest(
            protocol=PROTOCOL,
            job=spec.job,
            session=context.endpoint.session,
            operator=spec.uid,
            subtask=self._taken.subtask,
            epoch=epoch,
            stamp_ms=self._taken.stamp_ms,
            attempt=context.attempt,
            chain=follows,
            delta=part,
            base=base,
            large_bytes=large_bytes,
            max_event_ms=self._taken.max_event_ms,
            second_event_ms=self._taken.second_event_ms,
            next_timer_ms=self._next_timer_ms,
            figures=self._figures(opened),
            restore=opened.report,
            operator_state=parts.lists,
            broadcast=parts.maps,
            broadcast_digest=parts.maps_digest,
            use=context.use,
        )

    def _operator_parts(self, reply: BeginReply, budget_bytes: int) -> StateParts:
        """States that belong to no key, as the ack carries them."""
        assert self._frozen is not None
        names = [
            data_name(reply.generation, self._context.epoch, self._system.new_id()) for _ in "lm"
        ]
        return self._operator_state.write(self._frozen, reply, names, budget_bytes)

    def _figures(self, opened: OpenSubtask) -> dict[str, int]:
        return {
            "rows": self._taken.stage.rows,
            "spilled_bytes": self._taken.staged_bytes,
            "level0_files": opened.store.level0_files(),
            "stored_bytes": opened.store.stored_bytes(),
            **self._counted,
        }
