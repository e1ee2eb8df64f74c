"""One subtask in one micro-batch: what ``mapInArrow`` runs.

Read to the barrier, begin, process key by key, freeze, make the snapshot safe, ack. Nothing is
acked without the barrier, and nothing before the last output row was handed to Spark.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
from blake3 import blake3
from pyspark import Broadcast
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from recovery.local import Clock, LocalSubtask
from recovery.restore import OpenSubtask, Restorer, Site
from snapshot.delta import chain, encode_delta
from snapshot.messages import PROTOCOL, AckRequest, BeginReply, BeginRequest, LocalCopy, SlicePart
from snapshot.storage.base import ObjectStore
from snapshot.storage.open import open_store
from statebackend import system
from statebackend.errors import LocalCopyError, LocalDirError
from statebackend.ops.grouping import Groups, group_rows
from statebackend.ops.rowconv import arrow_schema
from statebackend.ops.rows import RowOperator
from statebackend.rocks.store import RocksSettings
from statebackend.schema.keys import KeyCodec
from statebackend.spark.context import EpochContext
from statebackend.spark.intake import EpochInput, read_epoch
from statebackend.spark.tws import StateDeclaration, TwsCalls
from statebackend.spark.wire import client_for
from statebackend.state.cells import KeyCursor
from statebackend.state.table import StateTable

__all__ = ["SubtaskTask", "TaskSpec"]

_log = logging.getLogger("statebackend.task")


_YOUNG_OBJECTS = 50_000


@dataclass(frozen=True)
class TaskSpec:
    """An operator as a task needs it. Ships in Spark's closure: no secrets, no addresses."""

    job: str
    local_name: str
    uid: str
    parallelism: int
    max_parallelism: int
    input_schema: StructType
    key_positions: tuple[int, ...]
    output_schema: StructType
    states: dict[str, StateDeclaration]
    uri: str
    local_dir: str
    lease_timeout_s: float
    begin_timeout_s: float
    commit_timeout_s: float
    base_limit_bytes: int
    rocks: RocksSettings


@dataclass
class _Timings:
    """Milliseconds since the last mark, by name."""

    last_s: float = field(default_factory=system.monotonic_s)
    marks_ms: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        now_s = system.monotonic_s()
        self.marks_ms[name] = round((now_s - self.last_s) * 1000, 3)
        self.last_s = now_s


class SubtaskTask:
    """The function given to ``mapInArrow``; the session's token comes by broadcast."""

    def __init__(self, spec: TaskSpec, processor: StatefulProcessor, token: Broadcast[str]) -> None:
        self.spec = spec
        self.processor = processor
        self.token = token

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One epoch of one subtask."""
        spec = self.spec
        context = EpochContext.current(spec.uid, self.token.value)
        timings = _Timings()
        taken = read_epoch(
            batches,
            uid=spec.uid,
            schema=arrow_schema(spec.input_schema),
            key_positions=spec.key_positions,
            parallelism=spec.parallelism,
            max_parallelism=spec.max_parallelism,
        )
        timings.mark("read")
        key_codec = KeyCodec(StructType([spec.input_schema[i] for i in spec.key_positions]))
        key_columns = [taken.rows.column(i).combine_chunks() for i in spec.key_positions]
        groups = group_rows(taken.rows, key_codec.encode_arrow(key_columns), taken.key_groups)
        timings.mark("group")
        store = _durable_store(spec.uri)
        opened = self._restorer(context, taken, store).open()
        timings.mark("restore")
        try:
            table = StateTable(opened.store)
            with _unhurried_collector():
                yield from self._process(groups, table, opened.reply.states)
            timings.mark("process")
            request = self._snapshot(context, taken, opened, table, store, timings)
        except LocalCopyError as error:
            # Marked before the attempt fails, so that the next one does not take it again.
            opened.incarnation.mark_bad(error.what)
            raise
        finally:
            opened.incarnation.release()
        timings.mark("close")
        request = msgspec.structs.replace(request, timings_ms=timings.marks_ms)
        endpoint = context.endpoint
        client_for(endpoint.location).ack(endpoint, request, timeout_s=spec.commit_timeout_s)

    def _process(
        self, groups: Groups, table: StateTable, state_ids: dict[str, int]
    ) -> Iterator[pa.RecordBatch]:
        spec, cursor = self.spec, KeyCursor()
        calls = TwsCalls(
            self.processor,
            spec.uid,
            cursor=cursor,
            table=table,
            declared=spec.states,
            ids=state_ids,
        )
        operator = RowOperator(
            uid=spec.uid,
            cursor=cursor,
            input_schema=spec.input_schema,
            key_positions=spec.key_positions,
            output_schema=spec.output_schema,
        )
        yield from operator.run(groups, calls)
        calls.close()

    def _restorer(self, context: EpochContext, taken: EpochInput, store: ObjectStore) -> Restorer:
        spec, endpoint = self.spec, context.endpoint
        client = client_for(endpoint.location)
        site = Site(
            operator=spec.uid,
            subtask=taken.subtask,
            host=system.host_name(),
            executor=system.executor_name(),
        )

        def ask(copy: LocalCopy) -> tuple[BeginReply, list[bytes]]:
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
            )
            return client.begin(endpoint, request, timeout_s=spec.begin_timeout_s)

        local = LocalSubtask(
            system.expanded(spec.local_dir),
            job=spec.local_name,
            operator=spec.uid,
            subtask=taken.subtask,
            new_id=system.new_id,
            clock=Clock(system.monotonic_s, system.sleep_s),
        )
        return Restorer(
            local,
            site,
            ask=ask,
            fetch=store.get,
            now_s=system.monotonic_s,
            lease_timeout_s=spec.lease_timeout_s,
            settings=spec.rocks,
        )

    def _snapshot(
        self,
        context: EpochContext,
        taken: EpochInput,
        opened: OpenSubtask,
        table: StateTable,
        store: ObjectStore,
        timings: _Timings,
    ) -> AckRequest:
        """Freeze, and make both copies of what changed."""
        reply, epoch = opened.reply, context.epoch
        frozen = table.freeze(epoch)
        budget_bytes = reply.inline_budget_bytes
        keys, values = frozen.sorted()
        delta = encode_delta(keys, values) if keys else None
        data = delta.data if delta else b""
        part = _part(data, len(keys), budget_bytes, store)
        try:
            opened.incarnation.write_delta(epoch, part.digest, data)
        except LocalDirError as error:
            _log.warning("no local copy of epoch %d: %s", epoch, error)
        timings.mark("snapshot")
        base = None
        if reply.base_due and self._base_fits(opened):
            entries = list(table.snapshot())
            full = encode_delta([k for k, _ in entries], [v for _, v in entries])
            base = _part(full.data, full.rows, budget_bytes - len(part.data), store)
            timings.mark("base")
        follows = chain(bytes.fromhex(reply.chain), bytes.fromhex(part.digest)).hex()
        return AckRequest(
            protocol=PROTOCOL,
            job=self.spec.job,
            session=context.endpoint.session,
            operator=self.spec.uid,
            subtask=taken.subtask,
            epoch=epoch,
            stamp_ms=taken.stamp_ms,
            attempt=context.attempt,
            chain=follows,
            delta=part,
            base=base,
            restore=opened.report,
        )

    def _base_fits(self, opened: OpenSubtask) -> bool:
        # A base is made whole in memory, within the batch: only for state that this suits.
        size_bytes = opened.store.live_bytes()
        if size_bytes > self.spec.base_limit_bytes:
            _log.warning(
                "operator %s: no base is written of %d bytes of state (the limit is %d)",
                self.spec.uid,
                size_bytes,
                self.spec.base_limit_bytes,
            )
            return False
        return True


@contextlib.contextmanager
def _unhurried_collector() -> Iterator[None]:
    """Look for cycles less often: rows come and go by the thousand, and hardly ever form one."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _part(data: bytes, rows: int, budget_bytes: int, store: ObjectStore) -> SlicePart:
    """A slice: inline if the budget allows, else an object of its own, durable on return."""
    digest = blake3(data).hexdigest()
    if len(data) <= budget_bytes:
        return SlicePart(digest=digest, size_bytes=len(data), rows=rows, data=data)
    name = f"data/{system.new_id()}"
    store.put(name, [data])
    return SlicePart(digest=digest, size_bytes=len(data), rows=rows, name=name)


_stores: dict[str, ObjectStore] = {}


def _durable_store(uri: str) -> ObjectStore:
    store = _stores.get(uri)
    if store is None:
        store = _stores[uri] = open_store(uri, new_id=system.new_id)
    return store
