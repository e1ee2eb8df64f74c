"""A subtask's part in checkpoints of a stream: what those with keyed state and those without share.

Checkpoints use the machinery of micro-batches. An *epoch* is what a completed checkpoint is in the
log; an *attempt* is a barrier's number. A subtask begins epoch n + 1 with the coordinator once the
checkpoint of epoch n is complete, and goes on meanwhile. An attempt that was aborted leaves nothing
behind: its epoch is taken by the next attempt, whose delta holds what both froze.

The subtask's own thread calls `freeze`, `confirmed`, `aborted` and `close`; `persist` is called in
another, once for each attempt. What confirmation takes (asking the coordinator, writing to the
store) is done in the background, in order; what fails there is raised by the next call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from snapshot.formats.names import data_name
from snapshot.protocol.messages import (
    PROTOCOL,
    AckRequest,
    AncestorCopy,
    BeginReply,
    BeginRequest,
    LocalCopy,
    RestoreReport,
)
from snapshot.storage.counting import CountingStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import ProtocolError, StaleRequestError
from statebackend.operators.operator_lists_maps import StoredOperatorState, encoded
from statebackend.rpc.service import Endpoint
from statebackend.runtime.worker.ack_slices import requests_of
from statebackend.runtime.worker.operator_state_io import OperatorStateIO, StateParts
from statebackend.runtime.worker.upload_reporter import UploadClient
from statebackend.system import SYSTEM, System
from statebackend.threads import THREADS, Future, Threads

__all__ = [
    "Background",
    "CheckpointedState",
    "Frozen",
    "Membership",
    "SharedFuture",
    "StateClient",
    "VertexSpec",
]

T = TypeVar("T")
_NO_ATTEMPT: Final = -1


class StateClient(UploadClient, Protocol):
    """The coordinator, as a subtask asks it (see :class:`statebackend.rpc.service.Client`)."""

    def begin(
        self, endpoint: Endpoint, request: BeginRequest, *, timeout_s: float
    ) -> tuple[BeginReply, list[bytes]]:
        """Ask to begin an epoch; the reply and the slices that come with it."""


class Background(Protocol):
    """Where work goes that nobody waits for, such as a thread pool of the process."""

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:
        """Have it called by and by."""


class VertexSpec(Protocol):
    """A vertex of the dataflow (see `TaskSpec`)."""

    @property
    def job(self) -> str:
        """The job's name."""

    @property
    def local_name(self) -> str:
        """As hosts know the job."""

    @property
    def uid(self) -> str:
        """The vertex."""

    @property
    def parallelism(self) -> int:
        """How many subtasks it has."""

    @property
    def begin_timeout_s(self) -> float:
        """How long the coordinator may take."""


@dataclass(frozen=True)
class Membership:
    """Which run a subtask belongs to, and how it reaches its driver.

    Attributes:
        endpoint: of the run's session. query_id: of the run, as its coordinator has it.
        execution: numbers this start of the subtask, growing within a run.
    """

    client: StateClient
    endpoint: Endpoint
    query_id: str
    execution: int = 0


@dataclass(frozen=True)
class Frozen:
    """What a subtask had at a barrier; it never changes.

    Attributes:
        attempt: the barrier's number. operator_state: the states that belong to no key.
        next_timer_ms: no timer is left below it. watermark_ms: the one in force.
        figures: counts since the barrier before. sync_ms: what freezing took.
    """

    attempt: int
    operator_state: StoredOperatorState
    next_timer_ms: int | None = None
    watermark_ms: int | None = None
    figures: dict[str, int] = field(default_factory=dict)
    sync_ms: float = 0.0


class SharedFuture(Generic[T]):
    """Something that is done once, by whoever wants it first; the others wait for it."""

    def __init__(self, do: Callable[[], T], threads: Threads = THREADS) -> None:
        self._do: Callable[[], T] | None = do
        self._lock = threads.lock()
        self._found: T | None = None
        self._error: BaseException | None = None

    @classmethod
    def of(cls, found: T) -> SharedFuture[T]:
        """What is known already."""
        made = cls(lambda: found)
        made.get()
        return made

    def get(self) -> T:
        """The result. Raises what doing it raised, each time."""
        with self._lock:
            if self._do is not None:
                do, self._do = self._do, None
                try:
                    self._found = do()
                except BaseException as error:
                    self._error = error
            if self._error is not None:
                raise self._error
            return self._found  # type: ignore[return-value]


class CheckpointedState(ABC):
    """One subtask's state and its part in checkpoints.

    Args:
        spec: the vertex. subtask: which of its subtasks.
        member: of the run. store: the durable one. background: runs what nobody waits for.
        system: what its process stands on.

    Attributes:
        epoch: the one that the next completed checkpoint will be.
    """

    def __init__(
        self,
        spec: VertexSpec,
        subtask: int,
        member: Membership,
        *,
        store: ObjectStore,
        background: Background,
        system: System = SYSTEM,
    ) -> None:
        self._system = system
        self._vertex, self._subtask, self._member = spec, subtask, member
        self._store = CountingStore(store)
        self._counted = dict(requests_of(self._store))
        self._background = background
        self.operator_state_io = OperatorStateIO(
            spec.local_name, spec.uid, subtask, spec.parallelism, self._store
        )
        self.epoch = -1
        self._stamp_ms = -1
        self._begun: SharedFuture[BeginReply]
        self._report: RestoreReport | None = None
        self._turn = system.threads.condition()  # guards the following
        self._frozen_attempts: list[int] = []  # neither confirmed nor aborted, in their order
        self._newest_attempt = _NO_ATTEMPT
        self._closed = False
        self._chains: dict[int, str] = {}  # of attempts that were acked
        self._failure: BaseException | None = None
        self._persisting = system.threads.lock()

    # --- the subtask's own thread ------------------------------------------------------------

    def check(self) -> None:
        """Raise what failed in the background, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _freezing(self, attempt: int) -> None:
        self.check()
        with self._turn:
            if attempt <= self._newest_attempt:
                raise ProtocolError(
                    f"The barrier of checkpoint {attempt} came to operator {self._vertex.uid!r}, "
                    f"subtask {self._subtask}, after that of checkpoint {self._newest_attempt}."
                )
            self._newest_attempt = attempt
            self._frozen_attempts.append(attempt)

    @property
    def _next_epoch(self) -> int:
        """The epoch that will hold what comes now, as far as is known: see `StreamTimes.epoch`."""
        return self.epoch + len(self._frozen_attempts)

    def confirmed(self, attempt: int, next_stamp_ms: int) -> None:
        """The checkpoint is complete, durable in all vertices: its epoch is over.

        Returns at once; the rest is done in the background.

        Args:
            next_stamp_ms: the stamp of the next epoch, the same for all its attempts and subtasks.

        Raises:
            ProtocolError: this subtask has not acked it.
            StateBackendError: what failed in the background.
        """
        self.check()
        with self._turn:
            chain = self._chains.pop(attempt, None)
            if chain is None or attempt not in self._frozen_attempts:
                raise ProtocolError(
                    f"Checkpoint {attempt} was completed without operator {self._vertex.uid!r}, "
                    f"subtask {self._subtask}."
                )
            self._frozen_attempts = [one for one in self._frozen_attempts if one > attempt]
            self.epoch += 1
            self._stamp_ms, self._report = next_stamp_ms, None
            epoch = self.epoch
            work = self._following(attempt, epoch, chain)
            self._begun = work[0]
            self._turn.notify_all()
        self._background.submit(lambda: self._in_background(work))

    def aborted(self, attempt: int) -> None:
        """The checkpoint is given up: the next attempt holds what it froze."""
        with self._turn:
            self._frozen_attempts = [one for one in self._frozen_attempts if one != attempt]
            self._chains.pop(attempt, None)
            self._turn.notify_all()

    def _in_background(self, work: tuple[SharedFuture[BeginReply], SharedFuture[None]]) -> None:
        try:
            for one in work:
                one.get()
        except BaseException as error:
            if self._failure is None and not self._closed:
                self._failure = error

    def _stop(self) -> None:
        """Nothing is persisted any more, and nobody is waited for."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        with self._persisting:
            pass

    # --- another thread ----------------------------------------------------------------------

    def persist(self, frozen: Frozen) -> AckRequest | None:
        """Make what was frozen durable, and describe it.

        Waits until every earlier attempt was confirmed or aborted. The coordinator may be told only
        when every subtask of every vertex has acked the same attempt (see `PendingAcks`).

        Returns:
            the ack; None if the attempt was aborted, or the subtask closed, meanwhile.

        Raises:
            StateBackendError: it could not be made durable, or something failed in the background.
        """
        started_s = self._system.monotonic_s()
        if not self._await_turn(frozen.attempt):
            return None
        with self._persisting:
            if not self._wanted(frozen.attempt):
                return None
            self.check()
            reply, epoch, stamp_ms = self._begun.get(), self.epoch, self._stamp_ms
            made = self._make(frozen, reply, epoch)
            if made is None:
                return None
            with self._turn:
                if frozen.attempt not in self._frozen_attempts:
                    return None
                self._chains[frozen.attempt] = made.chain
            timings_ms = {
                "sync": frozen.sync_ms,
                "async": round((self._system.monotonic_s() - started_s) * 1000, 3),
            }
            return AckRequest(
                protocol=PROTOCOL,
                job=self._vertex.job,
                session=self._member.endpoint.session,
                operator=self._vertex.uid,
                subtask=self._subtask,
                epoch=epoch,
                stamp_ms=stamp_ms,
                attempt=frozen.attempt,
                next_timer_ms=frozen.next_timer_ms,
                timings_ms=timings_ms,
                restore=self._report,
                requests=self._requests(),
                **vars(made),
            )

    def _await_turn(self, attempt: int) -> bool:
        with self._turn:
            while self._wanted(attempt) and self._frozen_attempts[0] != attempt:
                self._turn.wait()
            return self._wanted(attempt)

    def _wanted(self, attempt: int) -> bool:
        return not self._closed and attempt in self._frozen_attempts

    def _requests(self) -> dict[str, tuple[int, int]]:
        """What was asked of the object store since the last ack."""
        before, self._counted = self._counted, requests_of(self._store)
        found = {}
        for verb, (requests, size_bytes) in self._counted.items():
            earlier = before.get(verb, (0, 0))
            if requests > earlier[0]:
                found[verb] = requests - earlier[0], size_bytes - earlier[1]
        return found

    def _state_parts(self, frozen: Frozen, reply: BeginReply, budget_bytes: int) -> StateParts:
        """States that belong to no key, as the ack carries them."""
        names = [data_name(reply.generation, self.epoch, self._system.new_id()) for _ in "lm"]
        snapshot = encoded(frozen.operator_state)
        return self.operator_state_io.write(snapshot, reply, names, budget_bytes)

    # --- asking the coordinator --------------------------------------------------------------

    def _ask(
        self, copy: LocalCopy, ancestors: list[AncestorCopy] | None
    ) -> tuple[BeginReply, list[bytes]]:
        member, spec = self._member, self._vertex
        request = BeginRequest(
            protocol=PROTOCOL,
            job=spec.job,
            session=member.endpoint.session,
            operator=spec.uid,
            subtask=self._subtask,
            epoch=self.epoch,
            stamp_ms=self._stamp_ms,
            query_id=member.query_id,
            attempt=member.execution,
            host=self._system.host_name(),
            executor=self._system.executor_name(),
            copy=copy,
            ancestors=ancestors,
            held=self.operator_state_io.held(),
        )
        reply, bodies = member.client.begin(
            member.endpoint, request, timeout_s=spec.begin_timeout_s
        )
        return reply, self.operator_state_io.split_off(reply, bodies)

    def _begin_next(self, copy: LocalCopy, chain: str) -> BeginReply:
        """Begin the epoch after one whose state is here, by the lineage that its ack named.

        Raises:
            StaleRequestError: the log holds another state of that epoch.
        """
        reply, _ = self._ask(copy, None)
        self.operator_state_io.pass_over()
        if reply.chain != chain or reply.durable_chain != chain or reply.layers:
            raise StaleRequestError(
                f"The checkpoint of operator {self._vertex.uid!r}, subtask {self._subtask}, for "
                f"epoch {self.epoch - 1} holds another state than was acked here.",
                todo="Nothing to do: another execution of the subtask has taken over.",
            )
        return reply

    # --- of each kind ------------------------------------------------------------------------

    @abstractmethod
    def open(self, epoch: int, stamp_ms: int) -> BeginReply:
        """Begin the run's first epoch, with the state as it was after the one before."""

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """The subtask ends, because of an error or not; may be called twice."""

    @abstractmethod
    def _following(
        self, attempt: int, epoch: int, chain: str
    ) -> tuple[SharedFuture[BeginReply], SharedFuture[None]]:
        """How the next epoch is begun, and what is done with the state of the one before."""

    @abstractmethod
    def _make(self, frozen: Frozen, reply: BeginReply, epoch: int) -> Made | None:
        """Make durable what was frozen; None once it is not wanted any more."""


@dataclass(frozen=True)
class Made:
    """What of an ack says what became of the state (see :class:`AckRequest`)."""

    chain: str
    delta: Any
    base: Any = None
    large_bytes: int = 0
    max_event_ms: int | None = None
    second_event_ms: int | None = None
    figures: dict[str, int] = field(default_factory=dict)
    operator_state: Any = None
    broadcast: Any = None
    broadcast_digest: str = ""
