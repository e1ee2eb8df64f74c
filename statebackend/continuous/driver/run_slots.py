"""The slots of a run, as its driver knows them: which processes they are, and who is silent."""

from __future__ import annotations

from collections.abc import Sequence

from snapshot.barriers.pending_checkpoints import Subtask
from statebackend.continuous.driver.slot_assignment import placed
from statebackend.continuous.job.graph import Graph
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.slot_messages import Copy, Peer
from statebackend.errors import PeerLostError, ProtocolError

__all__ = ["RunSlots"]


class RunSlots:
    """Takes in who registers, and which subtasks have got ready.

    Args:
        now_s: when the run begins.

    Attributes:
        slot_of: by subtask, once every slot is there.
    """

    def __init__(self, graph: Graph, options: RunOptions, now_s: float) -> None:
        self._graph, self._options = graph, options
        self._peers: dict[int, Peer] = {}  # by slot, as the next two
        self._copies: dict[int, Sequence[Copy]] = {}
        self._heard_s: dict[int, float] = {}
        self.slot_of: dict[int, int] = {}
        self._starting, self._started_s = set(graph.subtasks), now_s

    def registered(self, slot: int, peer: Peer, now_s: float, copies: Sequence[Copy]) -> bool:
        """A slot is there.

        Returns:
            whether it was the last one: all subtasks have their slots now.

        Raises:
            PeerLostError: it is another process than before: another attempt of Spark's.
            ProtocolError: there is no such slot.
        """
        if slot in self._peers and self._peers[slot] != peer:
            raise PeerLostError(f"Slot {slot} was started again by Spark, within its run.")
        if not 0 <= slot < self._graph.parallelism:
            raise ProtocolError(f"There is no slot {slot}.")
        new = slot not in self._peers
        self._peers[slot] = peer
        self._copies[slot] = copies
        self._heard_s[slot] = now_s
        if not new or len(self._peers) < self._graph.parallelism:
            return False
        given = placed(self._copies, self._graph.parallelism, self._graph.max_parallelism)
        self.slot_of = {subtask: slot for slot, subtask in given.items()}
        return True

    @property
    def peers(self) -> list[Peer]:
        """By subtask, once every slot is there."""
        return [self._peers[self.slot_of[i]] for i in range(self._graph.parallelism)]

    def heard(self, slot: int, now_s: float) -> None:
        """A slot has said something."""
        self._heard_s[slot] = now_s

    def started(self, subtask: Subtask) -> bool:
        """A subtask has its state and its channels; whether all of them do."""
        self._starting.discard(subtask)
        return not self._starting

    @property
    def restored(self) -> tuple[int, int]:
        """How many subtasks have their state and their channels, and of how many."""
        total = len(self._graph.subtasks)
        return total - len(self._starting), total

    def lost(self, now_s: float) -> PeerLostError | None:
        """Who has not got ready in time, or was silent for too long."""
        if self._starting and now_s - self._started_s > self._options.start_timeout_s:
            missing = sorted(set(range(self._graph.parallelism)) - set(self._peers))
            what = f"slots {missing} are not there" if missing else "subtasks have not got ready"
            return PeerLostError(
                f"After {self._options.start_timeout_s:g} s {what}.",
                todo="A barrier stage needs as many free task slots as the job's parallelism: "
                "lower it, or give the cluster more cores.",
            )
        for slot, heard_s in self._heard_s.items():
            if now_s - heard_s > self._options.silence_s:
                return PeerLostError(f"Slot {slot} was not heard of for {now_s - heard_s:.1f} s.")
        return None
