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

from snapshot.protocol.messages import AckRequest, BeginReply, LocalCopy, RestoreReport
from statebackend.errors import ProtocolError, StaleRequestError
from statebackend.operators.operator_snapshot import StoredOperatorState
from statebackend.runtime.worker.participant import EpochStamp, Participant
from statebackend.threads import THREADS, Future, Threads

__all__ = ["Background", "CheckpointedState", "Confirmed", "Frozen", "SharedFuture"]

T = TypeVar("T")
_NO_ATTEMPT: Final = -1


class Background(Protocol):
    """Where work goes that nobody waits for, such as a thread pool of the process."""

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:
        """Have it called by and by."""


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


@dataclass(frozen=True)
class Confirmed:
    """A confirmed epoch's state, from which the next epoch begins.

    Attributes:
        copy: what is here of it, for the coordinator; waits until the epoch before is written.
        apply: writes it to where it belongs, once the next epoch has begun.
    """

    copy: Callable[[], LocalCopy]
    apply: Callable[[BeginReply], None]


class CheckpointedState(ABC):
    """One subtask's state and its part in checkpoints.

    Args:
        participant: its side of the protocol. background: runs what nobody waits for.

    Attributes:
        epoch: the one that the next completed checkpoint will be.
    """

    def __init__(self, participant: Participant, background: Background) -> None:
        self._participant, self._background = participant, background
        self._system = system = participant.system
        self.epoch = -1
        self._stamp_ms = -1
        self._begun: SharedFuture[BeginReply]
        self._settled: SharedFuture[None] = SharedFuture.of(None)  # confirmed state is written
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
                    f"The barrier of checkpoint {attempt} came to {self._participant.who}, after "
                    f"that of checkpoint {self._newest_attempt}."
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
                    f"Checkpoint {attempt} was completed without {self._participant.who}."
                )
            self._frozen_attempts = [one for one in self._frozen_attempts if one > attempt]
            self.epoch += 1
            self._stamp_ms, self._report = next_stamp_ms, None
            confirmed = self._confirm(attempt, chain)
            begun = SharedFuture(
                lambda: self._begin_next(confirmed.copy(), chain), self._system.threads
            )
            settled = SharedFuture(lambda: confirmed.apply(begun.get()), self._system.threads)
            self._begun, self._settled = begun, settled
            self._turn.notify_all()
        self._background.submit(lambda: self._in_background(settled))

    def aborted(self, attempt: int) -> None:
        """The checkpoint is given up: the next attempt holds what it froze."""
        with self._turn:
            self._frozen_attempts = [one for one in self._frozen_attempts if one != attempt]
            self._chains.pop(attempt, None)
            self._turn.notify_all()

    def _in_background(self, settled: SharedFuture[None]) -> None:
        try:
            settled.get()
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
            ack = self._make(frozen, self._begun.get())
            if ack is None:
                return None
            with self._turn:
                if frozen.attempt not in self._frozen_attempts:
                    return None
                self._chains[frozen.attempt] = ack.chain
            timings_ms = {
                "sync": frozen.sync_ms,
                "async": round((self._system.monotonic_s() - started_s) * 1000, 3),
            }
            return self._participant.with_requests(ack, timings_ms)

    def _await_turn(self, attempt: int) -> bool:
        with self._turn:
            while self._wanted(attempt) and self._frozen_attempts[0] != attempt:
                self._turn.wait()
            return self._wanted(attempt)

    def _wanted(self, attempt: int) -> bool:
        return not self._closed and attempt in self._frozen_attempts

    # --- asking the coordinator --------------------------------------------------------------

    @property
    def _at(self) -> EpochStamp:
        return EpochStamp(self.epoch, self._stamp_ms)

    def _begin_next(self, copy: LocalCopy, chain: str) -> BeginReply:
        """Begin the epoch after one whose state is here, by the lineage that its ack named.

        Raises:
            StaleRequestError: the log holds another state of that epoch.
        """
        reply, _ = self._participant.begin(self._at, copy)
        self._participant.operator_state.pass_over()
        if reply.chain != chain or reply.durable_chain != chain or reply.layers:
            raise StaleRequestError(
                f"The checkpoint of {self._participant.who}, for epoch {self.epoch - 1} holds "
                "another state than was acked here.",
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
    def _confirm(self, attempt: int, chain: str) -> Confirmed:
        """The state of an attempt that is an epoch now; ``chain``: the lineage up to it."""

    @abstractmethod
    def _make(self, frozen: Frozen, reply: BeginReply) -> AckRequest | None:
        """Make durable what was frozen, and ack it; None once it is not wanted any more."""
