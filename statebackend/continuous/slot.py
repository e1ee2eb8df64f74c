"""One slot: a task of Spark's barrier stage, one process, a subtask of every vertex in it.

It opens its end of the exchange, registers with the driver, and does what it is told until it is
told to stop. Whatever fails in it is told to the driver first and then ends the task, and with it
the stage. When the driver does not answer any more, the slot ends by itself.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from pyspark import BarrierTaskContext, Broadcast

from recovery.workspace import Workspace
from snapshot.messages import PROTOCOL
from statebackend import system
from statebackend.continuous.exchange.channel import ChannelSender, LocalChannel
from statebackend.continuous.exchange.client import ExchangeClient
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.messages import Address, Identity
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partition import Partitioner, broadcast, by_key_group
from statebackend.continuous.exchange.server import ExchangeServer
from statebackend.continuous.graph import Edge, Graph
from statebackend.continuous.messages import (
    Commands,
    Deploy,
    Event,
    Failed,
    Grant,
    Poll,
    Register,
    Report,
    Stop,
    decode,
    encode,
)
from statebackend.continuous.options import RunOptions
from statebackend.continuous.output import Output
from statebackend.continuous.sinks.base import SinkContext
from statebackend.continuous.sourcetask import SourceSubtask
from statebackend.continuous.subtask import KeyedSubtask, Subtask
from statebackend.continuous.subtaskstate import SubtaskState
from statebackend.continuous.vertexstate import Membership
from statebackend.errors import (
    CoordinatorUnreachableError,
    ProcessorError,
    StaleRequestError,
    StateBackendError,
)
from statebackend.spark.opening import durable_store
from statebackend.spark.shipped import ShippedProcessor
from statebackend.spark.taskspec import TaskSpec
from statebackend.spark.wire import Call, Client, Endpoint, client_for

__all__ = ["Run", "Slot", "SlotTask"]

_log = logging.getLogger("statebackend.continuous")
_POLL_S: Final = 1.0
_RETRY_S: Final = 0.2
_END_S: Final = 10.0


@dataclass(frozen=True)
class Run:
    """What a slot is told of the run; in Spark's closure, so no secrets.

    Attributes:
        location, session: of the driver's service. run: names this start; generation: its tenure.
        specs, processors: of the keyed vertices.
    """

    job: str
    run: str
    generation: int
    location: str
    session: str
    query_id: str
    graph: Graph
    options: RunOptions
    specs: Mapping[str, TaskSpec]
    processors: Mapping[str, ShippedProcessor]


class SlotTask:
    """The function given to the barrier stage; the token comes by broadcast."""

    def __init__(self, run: Run, token: Broadcast[str]) -> None:
        self.run, self.token = run, token

    def __call__(self, _: Iterable[int]) -> Iterable[int]:
        """One slot, to the end of the run."""
        context = BarrierTaskContext.get()
        slot = context.partitionId()
        host = context.getTaskInfos()[slot].address.rsplit(":", 1)[0]
        Slot(self.run, slot, self.token.value, host=host).serve()
        return ()


class _Link:
    """How the subtasks of a slot reach the driver."""

    def __init__(self, run: Run, slot: int, endpoint: Endpoint, client: Client) -> None:
        self._run, self._slot = run, slot
        self._endpoint, self._client = endpoint, client
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        self.broke = threading.Event()

    def call(self, kind: str, message: Any, timeout_s: float) -> bytes:
        request = Call(
            protocol=PROTOCOL,
            job=self._run.job,
            session=self._endpoint.session,
            kind=kind,
            body=encode(message),
        )
        return self._client.call(self._endpoint, request, timeout_s=timeout_s)

    def report(self, *events: Event) -> None:
        """Say what happened."""
        report = Report(slot=self._slot, events=list(events))
        self.call("report", report, self._run.options.silence_s)

    def broken(self, vertex: str, subtask: int, error: BaseException) -> None:
        """The first failure is told, and ends the slot."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        known = error if isinstance(error, StateBackendError) else _unknown(vertex, error)
        failed = Failed(
            vertex=vertex,
            subtask=subtask,
            code=known.code,
            what=known.what,
            todo=known.todo,
            trace="".join(traceback.format_exception(error))[-20_000:],
        )
        try:
            self.report(failed)
        except StateBackendError as unreachable:
            _log.warning("%s", unreachable)
        self.broke.set()


def _unknown(vertex: str, error: BaseException) -> StateBackendError:
    return ProcessorError(
        f"A subtask of {vertex!r} failed: {type(error).__name__}: {error}.",
        todo="See the traceback.",
    )


class Slot:
    """One slot of one run.

    Args:
        token: of the run, for the driver's service and for the exchange.
        host: the address that other slots reach this one by.
    """

    def __init__(self, run: Run, slot: int, token: str, *, host: str) -> None:
        self._run, self._slot = run, slot
        graph = run.graph
        self._endpoint = Endpoint(location=run.location, session=run.session, token=token)
        self._client = client_for(run.location)
        self._link = _Link(run, slot, self._endpoint, self._client)
        identity = Identity(job=run.job, run=run.run, generation=run.generation, token=token)
        self._server = ExchangeServer(identity, host=host)
        self._exchange = ExchangeClient(identity)
        self._inboxes: dict[str, Inbox] = {}
        for vertex in graph.keyed:
            self._inboxes[vertex] = self._inbox(vertex)
        self._host = host
        self._subtasks: dict[str, Subtask] = {}
        self._threads: list[threading.Thread] = []
        count = max(1, len(graph.keyed))
        self._persisting = ThreadPoolExecutor(count, "statebackend-persist")
        self._background = ThreadPoolExecutor(2 * count, "statebackend-background")

    def _inbox(self, vertex: str) -> Inbox:
        """With its channels from other slots expected: whoever is quicker finds them."""
        graph = self._run.graph
        channels = graph.channels(vertex)
        inbox = Inbox(channels, capacity_bytes=self._run.options.channel_bytes)
        for edge in range(len(graph.inputs(vertex))):
            for other in range(graph.parallelism):
                channel = graph.channel(edge, other)
                if other != self._slot:
                    address = Address(vertex=vertex, subtask=self._slot, channel=channel)
                    self._server.expect(address, inbox, channel)
        return inbox

    # --- the run -------------------------------------------------------------------------------

    def serve(self) -> None:
        """To the end of the run.

        Raises:
            StateBackendError: what failed; the driver was told.
        """
        try:
            here = Register(
                slot=self._slot,
                location=self._server.location,
                host=system.host_name(),
                executor=system.executor_name(),
                pid=os.getpid(),
            )
            self._link.call("register", here, self._run.options.start_timeout_s)
            self._obey()
        except StaleRequestError:
            pass  # the run is over, and nobody told this slot
        finally:
            self._end()
        if self._link.failure is not None:
            raise self._link.failure

    def _obey(self) -> None:
        """Poll and do, until the run is over or something failed."""
        first, heard_s = 0, system.monotonic_s()
        while not self._link.broke.is_set():
            poll = Poll(slot=self._slot, first=first, wait_s=_POLL_S)
            try:
                answer = self._link.call("poll", poll, _POLL_S + self._run.options.silence_s)
            except CoordinatorUnreachableError:
                if system.monotonic_s() - heard_s > self._run.options.silence_s:
                    raise
                system.sleep_s(_RETRY_S)
                continue
            heard_s = system.monotonic_s()
            found = decode(answer, Commands)
            for number, command in enumerate(found.commands, found.first):
                if number < first:
                    continue
                first = number + 1
                if isinstance(command, Stop):
                    return
                if isinstance(command, Deploy):
                    self._deploy(command)
                elif isinstance(command, Grant):
                    self._subtasks[command.vertex].mailbox.put(command)
                else:
                    for subtask in self._subtasks.values():
                        subtask.mailbox.put(command)

    def _end(self) -> None:
        for subtask in self._subtasks.values():
            subtask.stop()
        for thread in self._threads:
            thread.join(_END_S)
        self._persisting.shutdown(wait=False)
        self._background.shutdown(wait=False)
        for inbox in self._inboxes.values():
            inbox.close()
        self._exchange.close()
        self._server.close()

    # --- deployment ----------------------------------------------------------------------------

    def _deploy(self, deploy: Deploy) -> None:
        run, slot = self._run, self._slot
        for uid, vertex in run.graph.sources.items():
            self._subtasks[uid] = SourceSubtask(
                uid,
                slot,
                self._connecting(uid, deploy),
                self._link,
                source=vertex.source,
                batch_rows=run.options.batch_rows,
            )
        for uid in run.graph.keyed:
            self._subtasks[uid] = self._keyed(uid, deploy)
        for uid, subtask in self._subtasks.items():
            thread = threading.Thread(target=subtask.run, name=f"{uid}/{slot}", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _keyed(self, uid: str, deploy: Deploy) -> KeyedSubtask:
        run, slot, spec = self._run, self._slot, self._run.specs[uid]
        member = Membership(self._client, self._endpoint, run.query_id)
        state = SubtaskState(
            spec,
            slot,
            member,
            store=durable_store(spec.uri, spec.store_options),
            work=Workspace.of_process(system.expanded(spec.local_dir), system.new_id),
            background=self._background,
        )
        return KeyedSubtask(
            uid,
            slot,
            self._connecting(uid, deploy),
            self._link,
            state=state,
            processor=run.processors[uid].fresh,
            inbox=self._inboxes[uid],
            inputs=[edge for edge in run.graph.inputs(uid) for _ in range(run.graph.parallelism)],
            mode=run.options.mode,
            time_mode=spec.plan.time_mode,
            epoch=deploy.epoch,
            stamp_ms=deploy.stamp_ms,
            persisting=self._persisting,
        )

    def _connecting(self, uid: str, deploy: Deploy) -> Any:
        return lambda: self._connect(uid, deploy)

    def _connect(self, uid: str, deploy: Deploy) -> Output:
        """The output of a subtask, in its thread."""
        run, slot = self._run, self._slot
        boxes = [
            self._outbox(to, number, edge, deploy.locations)
            for to, number, edge in run.graph.outputs(uid)
        ]
        writers = {
            sink.uid: sink.sink.open(
                SinkContext(run.job, sink.uid, run.run, slot, run.graph.parallelism)
            )
            for sink in run.graph.sinks_of(uid)
        }
        return Output(boxes, writers)

    def _partitioner(self, edge: Edge) -> Partitioner:
        graph = self._run.graph
        if not edge.key_positions:
            return broadcast(graph.parallelism)
        return by_key_group(edge.key_positions, graph.parallelism, graph.max_parallelism)

    def _outbox(self, to: str, number: int, edge: Edge, locations: list[str]) -> Outbox:
        run, graph = self._run, self._run.graph
        channel = graph.channel(number, self._slot)
        senders: list[ChannelSender] = []
        for other in range(graph.parallelism):
            if other == self._slot:
                senders.append(LocalChannel(self._inboxes[to], channel))
                continue
            address = Address(vertex=to, subtask=other, channel=channel)
            senders.append(self._exchange.connect(locations[other], address))
        return Outbox(
            senders,
            self._partitioner(edge),
            buffer_bytes=run.options.buffer_bytes,
            buffer_timeout_s=run.options.buffer_timeout_s,
        )
