"""One slot: a task of Spark's barrier stage, one process, a subtask of every vertex in it.

It opens its end of the exchange, registers with the driver, and does what it is told until it is
told to stop. Whatever fails in it is told to the driver first and then ends the task, and with it
the stage. When the driver does not answer any more, the slot ends by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark import BarrierTaskContext, Broadcast

from recovery.local.local_copies import copies_seen
from recovery.local.workspace import Workspace
from statebackend.continuous.exchange.channel import ChannelSender, LocalChannel
from statebackend.continuous.exchange.channel_client import ExchangeClient
from statebackend.continuous.exchange.channel_messages import Address, Identity
from statebackend.continuous.exchange.channel_server import ExchangeServer
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partitioner import Partitioner, broadcast, by_key_group
from statebackend.continuous.job.graph import Edge, Graph
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.slot_messages import (
    Copy,
    Deploy,
    Grant,
    Peer,
    Poll,
    Register,
    Stop,
    decode_commands,
)
from statebackend.continuous.sinks.sink import SinkContext, run_name
from statebackend.continuous.worker.driver_link import RETRY_S, SLOT, DriverLink
from statebackend.continuous.worker.keyed_state import SubtaskState
from statebackend.continuous.worker.keyed_subtask import Inputs, KeyedSubtask
from statebackend.continuous.worker.overtaken_rows import Place
from statebackend.continuous.worker.source_subtask import SourceSubtask
from statebackend.continuous.worker.subtask_base import Subtask
from statebackend.continuous.worker.subtask_output import Output, Route
from statebackend.errors import (
    CoordinatorUnreachableError,
    StaleRequestError,
    StateBackendError,
)
from statebackend.operators.streaming_operator import StreamOperator
from statebackend.rpc.driver_client import Client, client_for
from statebackend.rpc.session_endpoint import Credentials, Endpoint
from statebackend.rpc.tls import Tls, self_signed
from statebackend.runtime.worker.participant import Membership, Participant
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.worker_store import SubtaskStore, durable_store, local_subtask
from statebackend.system import SYSTEM, System, expanded, keep_loaded, quick_turns
from statebackend.threads import Pool, Thread

__all__ = ["Run", "Slot", "SlotTask"]

_log = logging.getLogger("statebackend.continuous")
_POLL_S: Final = 1.0
_END_S: Final = 10.0


@dataclass(frozen=True)
class Run:
    """What a slot is told of the run; in Spark's closure, so no secrets.

    Attributes:
        location, session: of the driver's service. run: names this start; generation: its tenure.
        specs, processors: of the keyed vertices.
    """

    job: str
    job_id: str
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
    """The function given to the barrier stage; the credentials come by broadcast."""

    def __init__(self, run: Run, credentials: Broadcast[Credentials]) -> None:
        self.run, self.credentials = run, credentials

    def __call__(self, _: Iterable[int]) -> Iterable[int]:
        """One slot, to the end of the run."""
        context = BarrierTaskContext.get()
        slot = context.partitionId()
        host = context.getTaskInfos()[slot].address.rsplit(":", 1)[0]
        keep_loaded("slot")
        with contextlib.ExitStack() as stack:
            stack.enter_context(quick_turns())
            if any(spec.quick_frames for spec in self.run.specs.values()):
                from statebackend.operators.pandas_frames.dataframe_shortcut import (
                    quick_frames,  # imports pandas
                )

                stack.enter_context(quick_frames())
            Slot(self.run, slot, self.credentials.value, host=host).serve()
        return ()


class Slot:
    """One slot of one run.

    Args:
        credentials: of the run: its token is for the driver's service and for the exchange. With a
            certificate the slot speaks TLS, and has a certificate of its own for the others.
        host: the address that other slots reach this one by.
    """

    def __init__(
        self,
        run: Run,
        slot: int,
        credentials: Credentials,
        *,
        host: str,
        system: System = SYSTEM,
    ) -> None:
        self._run, self._slot, self._system = run, slot, system
        graph = run.graph
        self._endpoint = Endpoint.of(run.location, run.session, credentials)
        self._client = self._reached()
        self._link = DriverLink(
            self._client,
            self._endpoint,
            job=run.job,
            slot=slot,
            silence_s=run.options.silence_s,
            system=system,
        )
        with self._reporting_failure():
            self._listen(credentials, host)
        self._inboxes: dict[str, Inbox] = {}
        self._index = -1  # of its subtasks; the driver says it
        self._host = host
        self._subtasks: dict[str, Subtask] = {}
        self._threads: list[Thread] = []
        count = max(1, len(graph.keyed))
        # One that waits for its turn keeps its thread.
        waiting = count * run.options.max_concurrent
        self._persisting = system.threads.pool(waiting, "statebackend-persist")
        self._background = system.threads.pool(2 * count, "statebackend-background")
        self._reporters: list[Pool] = []  # a thread for each source
        self._job_ended = False

    def _reached(self) -> Client:
        """The way to the driver."""
        return client_for(self._endpoint)

    def _listen(self, credentials: Credentials, host: str) -> None:
        run = self._run
        # The driver may have what TLS needs, and this host may lack it.
        self._tls: Tls | None = self_signed() if credentials.certificate else None
        identity = Identity(
            job=run.job, run=run.run, generation=run.generation, token=credentials.token
        )
        start_s = run.options.start_timeout_s  # others may be told earlier, or later, who they are
        self._server = ExchangeServer(identity, host=host, tls=self._tls, expect_s=start_s)
        self._exchange = ExchangeClient(identity, tls=self._tls is not None, welcome_s=start_s)

    @contextlib.contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Report what fails inside to the driver, as a subtask's failure is reported."""
        try:
            yield
        except (StaleRequestError, CoordinatorUnreachableError):
            raise  # the run is over, or nobody is there to be told
        except BaseException as error:
            self._link.broken(SLOT, self._slot, error)
            raise

    def _inbox(self, vertex: str) -> Inbox:
        """With its channels from other slots expected; whoever is quicker waits for that."""
        graph = self._run.graph
        channels = graph.channels(vertex)
        capacity_bytes = self._run.options.channel_bytes
        inbox = Inbox(channels, capacity_bytes=capacity_bytes, threads=self._system.threads)
        for edge in range(len(graph.inputs(vertex))):
            for other in range(graph.parallelism):
                channel = graph.channel(edge, other)
                if other != self._index:
                    address = Address(vertex=vertex, subtask=self._index, channel=channel)
                    self._server.expect(address, inbox, channel)
        return inbox

    # --- the run -------------------------------------------------------------------------------

    def serve(self) -> None:
        """To the end of the run.

        Raises:
            StateBackendError: what failed; the driver was told.
        """
        try:
            with self._reporting_failure():
                here = self._registration()
                self._link.repeated("register", here, self._run.options.start_timeout_s)
                self._obey()
        except StaleRequestError:
            pass  # the run is over, and nobody told this slot
        finally:
            self._end()
        failure = self._link.failure
        if failure is not None and self._link.is_known:
            # The driver logs its traceback; Spark logs what is raised here, in executor and driver.
            failure.__cause__, failure.__suppress_context__ = None, True
            failure.__traceback__ = None
        if failure is not None:
            raise failure

    def _registration(self) -> Register:
        return Register(
            slot=self._slot,
            peer=Peer(
                location=self._server.location,
                certificate=self._tls.certificate if self._tls is not None else b"",
            ),
            host=self._system.host_name(),
            executor=self._system.executor_name(),
            pid=os.getpid(),
            copies=[copy for spec in self._run.specs.values() for copy in self._seen(spec)],
        )

    def _seen(self, spec: TaskSpec) -> list[Copy]:
        """The copies of an operator's state on this host."""
        folder = expanded(spec.local_dir)
        found = copies_seen(folder, job=spec.local_name, operator=spec.uid)
        return [
            Copy(operator=spec.uid, key_group_start=of.start, key_group_end=of.end, epoch=epoch)
            for of, epoch in sorted(found.items())
        ]

    def _obey(self) -> None:
        """Poll and do, until the run is over or something failed."""
        first, heard_s = 0, self._system.monotonic_s()
        while not self._link.broke.is_set():
            poll = Poll(slot=self._slot, first=first, wait_s=_POLL_S)
            try:
                answer = self._link.call("poll", poll, _POLL_S + self._link.try_s)
            except CoordinatorUnreachableError:
                if self._system.monotonic_s() - heard_s > self._run.options.silence_s:
                    raise
                self._system.sleep_s(RETRY_S)
                continue
            heard_s = self._system.monotonic_s()
            found = decode_commands(answer)
            for number, command in enumerate(found.commands, found.first):
                if number < first:
                    continue
                first = number + 1
                if isinstance(command, Stop):
                    self._job_ended = command.job_ended
                    return
                if isinstance(command, Deploy):
                    self._deploy(command)
                elif isinstance(command, Grant):
                    self._subtasks[command.vertex].mailbox.put(command)
                else:
                    for subtask in self._subtasks.values():
                        subtask.mailbox.put(command)

    def _end(self) -> None:
        ended = self._job_ended
        if not ended:
            self._link.over.set()
        for subtask in self._subtasks.values():
            subtask.stop(job_ended=ended)
        until_s = self._system.monotonic_s() + (self._run.options.timeout_s if ended else _END_S)
        for thread in self._threads:
            while thread.is_alive() and (left_s := until_s - self._system.monotonic_s()) > 0:
                thread.join(min(left_s, _POLL_S))
                if ended and thread.is_alive():
                    self._still_here()
        self._link.over.set()
        self._persisting.shutdown(wait=False)
        for pool in (self._background, *self._reporters):
            pool.shutdown(wait=False)
        for inbox in self._inboxes.values():
            inbox.close()
        self._exchange.close()
        self._server.close()

    def _still_here(self) -> None:
        """Tell the driver that this slot still closes: that may take as long as a checkpoint."""
        with contextlib.suppress(StateBackendError):
            self._link.call("poll", Poll(slot=self._slot, first=0, wait_s=0.0), self._link.try_s)

    # --- deployment ----------------------------------------------------------------------------

    def _deploy(self, deploy: Deploy) -> None:
        run, index = self._run, deploy.subtask
        self._index = index
        for uid in run.graph.keyed:
            self._inboxes[uid] = self._inbox(uid)
        for uid, vertex in run.graph.sources.items():
            self._subtasks[uid] = SourceSubtask(
                self._place(uid),
                self._connecting(uid, deploy),
                self._link,
                source=vertex.source,
                batch_rows=run.options.batch_rows,
                reporting=self._reporting(),
                ask_again_s=run.options.discover_every_s,
                in_flight=deploy.in_flight.get(uid, ()),
                system=self._system,
            )
        for uid in run.graph.keyed:
            self._subtasks[uid] = self._keyed(uid, deploy)
        for uid, subtask in self._subtasks.items():
            self._threads.append(self._system.threads.start(subtask.run, f"{uid}/{index}"))

    def _reporting(self) -> Pool:
        self._reporters.append(self._system.threads.pool(1, "statebackend-report"))
        return self._reporters[-1]

    def _keyed(self, uid: str, deploy: Deploy) -> KeyedSubtask:
        run, spec = self._run, self._run.specs[uid]
        state = self._state(spec, deploy)

        def opened() -> StreamOperator:
            state.open(deploy.epoch, deploy.stamp_ms)
            return state.make_operator(run.processors[uid].fresh())

        edges = [edge for edge in run.graph.inputs(uid) for _ in range(run.graph.parallelism)]
        overtakes = run.options.alignment_timeout_s is not None
        return KeyedSubtask(
            self._place(uid),
            self._connecting(uid, deploy),
            self._link,
            state=state,
            opened=opened,
            inputs=Inputs(self._inboxes[uid], edges, run.options.mode, overtakes),
            time_mode=spec.plan.time_mode,
            persisting=self._persisting,
            system=self._system,
        )

    def _state(self, spec: TaskSpec, deploy: Deploy) -> SubtaskState:
        """A keyed subtask's, not open."""
        session = self._link.session(
            timeout_s=spec.begin_timeout_s, ack_timeout_s=spec.commit_timeout_s
        )
        participant = Participant(
            spec.subtask(self._index),
            Membership(session, self._endpoint.session, self._run.query_id),
            durable_store(spec.uri, spec.store_options),
            self._system,
        )
        work = Workspace.of_process(expanded(spec.local_dir), self._system.new_id)
        return SubtaskState(
            SubtaskStore(spec, participant, lambda: local_subtask(spec, self._index, work)),
            self._background,
            work=work,
            watermark_ms=deploy.watermarks_ms.get(spec.uid, 0),
        )

    def _place(self, uid: str) -> Place:
        run = self._run
        schemas = {name: one.source.schema.json() for name, one in run.graph.sources.items()}
        schemas |= {name: spec.plan.output_schema.json() for name, spec in run.specs.items()}
        return Place(uid, self._index, run.graph.parallelism, schemas)

    def _connecting(self, uid: str, deploy: Deploy) -> Any:
        return lambda: self._connect(uid, deploy)

    def _connect(self, uid: str, deploy: Deploy) -> Output:
        """The output of a subtask, in its thread."""
        run = self._run
        name = run_name(run.generation, run.run)
        routes = [
            Route(
                to,
                number,
                self._outbox(to, number, edge, deploy.peers),
                in_order=not edge.key_positions,
            )
            for to, number, edge in run.graph.outputs(uid)
        ]
        writers = {
            sink.uid: sink.sink.open(
                SinkContext(run.job, sink.uid, name, self._index, run.graph.parallelism, run.job_id)
            )
            for sink in run.graph.sinks_of(uid)
        }
        return Output(routes, writers, self._system)

    def _partitioner(self, edge: Edge) -> Partitioner:
        graph = self._run.graph
        if not edge.key_positions:
            return broadcast(graph.parallelism)
        return by_key_group(edge.key_positions, graph.parallelism, graph.max_parallelism)

    def _outbox(self, to: str, number: int, edge: Edge, peers: list[Peer]) -> Outbox:
        run, graph = self._run, self._run.graph
        channel = graph.channel(number, self._index)
        senders: list[ChannelSender] = []
        for other in range(graph.parallelism):
            if other == self._index:
                senders.append(LocalChannel(self._inboxes[to], channel))
                continue
            address = Address(vertex=to, subtask=other, channel=channel)
            peer = peers[other]
            senders.append(self._exchange.connect(peer.location, address, peer.certificate))
        return Outbox(
            senders,
            self._partitioner(edge),
            buffer_bytes=run.options.buffer_bytes,
            buffer_timeout_s=run.options.buffer_timeout_s,
            clock=self._system.monotonic_s,
        )
