"""On the driver: the acks of one attempt, held back until it is complete.

The coordinator of a run knows epochs, and takes for complete what every subtask has acked, in
whichever attempt: in micro-batches all attempts at an epoch come to the same. In a stream they do
not. So an ack goes to it only once all subtasks of all vertices have acked the same attempt.

Each vertex has a record of its own, written one after the other; an epoch counts once all have it.
They are written in one order, always the same, or else a crash between two of them could make a
whole of two halves: one vertex's record of this attempt, and another's of an attempt of an earlier
run at the same epoch, which had been cut off there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from blake3 import blake3

from snapshot.protocol.messages import AckReply, AckRequest
from statebackend.errors import ProtocolError
from statebackend.threads import THREADS, Threads

__all__ = ["PendingAcks"]


class Commits(Protocol):
    """Where complete attempts go (see :class:`statebackend.runtime.driver.session.RunSession`)."""

    def ack(self, request: AckRequest) -> AckReply: ...


class PendingAcks:
    """Acks by attempt. Thread-safe.

    Args:
        session: of the run, with synchronous commits.
        parallelism: of every vertex, by uid.
    """

    def __init__(
        self, session: Commits, parallelism: Mapping[str, int], threads: Threads = THREADS
    ) -> None:
        self._session = session
        self._parallelism = dict(parallelism)
        self._lock = threads.lock()
        self._held: dict[int, dict[tuple[str, int], AckRequest]] = {}

    def take(self, ack: AckRequest) -> bool:
        """Take in an ack; twice the same is once.

        Returns:
            whether every subtask has acked its attempt.

        Raises:
            ProtocolError: it is of no subtask of the run, or was damaged on its way.
        """
        if not 0 <= ack.subtask < self._parallelism.get(ack.operator, 0):
            raise ProtocolError(f"Vertex {ack.operator!r} has no subtask {ack.subtask}.")
        for part in (ack.delta, ack.base, ack.operator_state, ack.broadcast):
            if part is None or part.name or blake3(part.data).hexdigest() == part.digest:
                continue
            raise ProtocolError(
                f"The ack of {ack.operator!r}, subtask {ack.subtask}, for checkpoint {ack.attempt} "
                f"was damaged on its way.",
                todo="The checkpoint is given up; if it happens again, look at the network.",
            )
        with self._lock:
            held = self._held.setdefault(ack.attempt, {})
            held[ack.operator, ack.subtask] = ack
            return len(held) == sum(self._parallelism.values())

    def commit(self, attempt: int) -> int:
        """Make a complete attempt the run's next epoch; it is durable on return.

        Returns:
            the epoch.

        Raises:
            StateBackendError: it is not durable, and the run accepts nothing any more.
        """
        with self._lock:
            held = self._held.pop(attempt)
            self._held.clear()  # older ones: nobody completes them any more
        if len(held) != sum(self._parallelism.values()):
            raise AssertionError(f"checkpoint {attempt} is not complete")
        epoch = -1
        for _, ack in sorted(held.items()):
            epoch = ack.epoch
            self._session.ack(ack)
        return epoch

    def drop(self, attempt: int) -> None:
        """The attempt is given up."""
        with self._lock:
            self._held.pop(attempt, None)
