"""The checkpoints of a continuous job that are under way, over all subtasks of all vertices.

An *attempt* has a number that rises and is never used twice in a run. The *epoch* is the number
that a checkpoint has in the commit log; epochs have no gaps, so an attempt that is given up leaves
its epoch to the next one, which then holds all that both would have held.

A subtask's part is what changed since the attempt before. So attempts are committed in their order,
and with one that is given up go all newer ones that had begun: they build on it. A record that is
being written is beyond giving up, for nobody knows yet whether it is there.

A subtask that has come to its end (every input has ended, and what was to be done then is done)
stays, and acks as before. The job is over with the complete checkpoint that every subtask acked
after its end: its last. Where subtasks may leave, one has finished with the first complete
checkpoint that it acked after its end: from there on nobody waits for it, and its part of that
checkpoint stands for it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from snapshot.barriers.barrier import Barrier
from statebackend.errors import ProtocolError, RescaleError

__all__ = [
    "Aborted",
    "Action",
    "Checkpoints",
    "Commit",
    "Complete",
    "Inject",
    "Reason",
    "Subtask",
    "check_in_flight",
]

Part = TypeVar("Part")


@dataclass(frozen=True, order=True)
class Subtask:
    """One of a vertex's parallel instances."""

    vertex: str
    index: int


class Reason(enum.Enum):
    """Why an attempt was given up."""

    DECLINED = "declined"  # a subtask could not take or keep its snapshot
    EXPIRED = "expired"  # it took too long
    STORE = "store"  # its record could not be written, and is not there
    NEWER = "newer"  # a subtask met a newer barrier first
    EARLIER = "earlier"  # one that it builds on was given up
    FAILOVER = "failover"  # the job is restarted
    STOPPED = "stopped"  # the job is ended

    @property
    def counts(self) -> bool:
        """Whether it is its own failure, and counts as `tolerable_failures` has it."""
        return self in (Reason.DECLINED, Reason.EXPIRED, Reason.STORE)


@dataclass(frozen=True)
class Inject:
    """Tell every subtask (`Alignment.triggered`); the sources send it into their channels."""

    barrier: Barrier
    epoch: int


@dataclass(frozen=True)
class Commit(Generic[Part]):
    """Write the record, then say `committed` or `not_committed`.

    Attributes:
        parts: of every subtask that was waited for; unless subtasks may leave, of all.
        finished: the others: they stand as in the checkpoint before.
        ended: among all of them, those that have nothing more to do after it.
    """

    checkpoint: int
    epoch: int
    kind: str
    parts: Mapping[Subtask, Part]
    finished: frozenset[Subtask]
    ended: frozenset[Subtask]


@dataclass(frozen=True)
class Complete:
    """The record is durable: commit what the sinks have prepared, and then notify every subtask.

    In this order: until it is notified a sink hands out again what it had prepared, so whatever
    record is the last one when the driver dies names all that is not committed yet.

    Attributes:
        is_last: the job is over: it was asked to end here, or every subtask is at its end.
    """

    checkpoint: int
    epoch: int
    is_last: bool


@dataclass(frozen=True)
class Aborted:
    """The attempt was given up: notify every subtask. ``by``: who declined, if anybody did."""

    checkpoint: int
    epoch: int
    reason: Reason
    by: Subtask | None = None


Action: TypeAlias = Inject | Commit[Part] | Complete | Aborted


@dataclass
class _Pending(Generic[Part]):
    barrier: Barrier
    epoch: int
    deadline_s: float
    waiting: set[Subtask]
    parts: dict[Subtask, Part] = field(default_factory=dict)
    ended: set[Subtask] = field(default_factory=set)
    writing: bool = False


class Checkpoints(Generic[Part]):
    """The attempts of one run.

    Args:
        subtasks: of every vertex, sources and sinks too.
        epoch: of the last record in the log.
        before: the highest number of an attempt that the job ever made.
        timeout_s: an attempt that is not acked in full after so long is given up.
        may_leave: subtasks at their end may leave before the job is over.
    """

    def __init__(
        self,
        subtasks: Iterable[Subtask],
        *,
        epoch: int,
        before: int,
        timeout_s: float,
        may_leave: bool = False,
    ) -> None:
        self._subtasks = frozenset(subtasks)
        self._epoch = epoch
        self._number = before
        self._timeout_s = timeout_s
        self._pending: dict[int, _Pending[Part]] = {}  # ascending
        self._at_end: set[Subtask] = set()
        self._finished: set[Subtask] = set()
        self._may_leave = may_leave
        self._over = False

    # --- what is seen --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of the last complete checkpoint."""
        return self._epoch

    @property
    def number(self) -> int:
        """Of the newest attempt; the next one's is higher."""
        return self._number

    @property
    def pending(self) -> list[int]:
        """The attempts under way, ascending."""
        return list(self._pending)

    @property
    def last_is_due(self) -> bool:
        """Whether every subtask has come to its end, and no checkpoint is under way to say so."""
        return self._all_at_end and not self._over and not self._pending

    @property
    def is_ending(self) -> bool:
        """Whether the job's last checkpoint is under way, or complete: no other one begins."""
        return self._over or any(
            pending.barrier.kind == "last" for pending in self._pending.values()
        )

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` will have something to do."""
        return min((p.deadline_s for p in self._pending.values() if not p.writing), default=None)

    def waiting_for(self, checkpoint: int) -> frozenset[Subtask]:
        """Whose acks an attempt lacks; nobody's if it is not under way."""
        pending = self._pending.get(checkpoint)
        return frozenset(pending.waiting) if pending is not None else frozenset()

    # --- what happens --------------------------------------------------------------------------

    def begin(
        self,
        now_s: float,
        *,
        stamp_ms: int,
        kind: str = "checkpoint",
        alignment_timeout_ms: int | None = None,
    ) -> list[Action[Part]]:
        """Begin an attempt: `Inject`.

        Args:
            kind: as `Barrier.kind`. ``last`` ends the job where it is: at its barrier the sources
                stop, until it is given up. Once every subtask is at its end it is the last anyway.
        """
        if self._all_at_end and kind == "checkpoint":
            kind = "last"
        self._number += 1
        barrier = Barrier(
            checkpoint=self._number,
            stamp_ms=stamp_ms,
            kind=kind,
            alignment_timeout_ms=alignment_timeout_ms,
        )
        epoch = self._epoch + len(self._pending) + 1
        waiting = set(self._subtasks - self._finished)
        self._pending[self._number] = _Pending(barrier, epoch, now_s + self._timeout_s, waiting)
        return [Inject(barrier, epoch), *self._advance()]

    def ack(
        self, subtask: Subtask, checkpoint: int, part: Part, *, ended: bool = False
    ) -> list[Action[Part]]:
        """A subtask's part is safe. Late or repeated, it changes nothing.

        Args:
            ended: the part was taken after the subtask had come to its end.
        """
        pending = self._pending.get(checkpoint)
        if pending is None or subtask not in pending.waiting:
            return []
        pending.waiting.discard(subtask)
        pending.parts[subtask] = part
        if ended:
            pending.ended.add(subtask)
        return self._advance()

    def decline(
        self, subtask: Subtask, checkpoint: int, reason: Reason = Reason.DECLINED
    ) -> list[Action[Part]]:
        """A subtask has no part for an attempt, and will have none."""
        return self._give_up(checkpoint, reason, subtask)

    def at_end(self, subtask: Subtask) -> None:
        """A subtask has come to its end: see `last_is_due`."""
        self._at_end.add(subtask)

    def committed(self, checkpoint: int) -> list[Action[Part]]:
        """The record is durable.

        Raises:
            ProtocolError: it was not asked for.
        """
        pending = self._written(checkpoint)
        del self._pending[checkpoint]
        self._epoch = pending.epoch
        ended = pending.ended | self._finished
        self._over = pending.barrier.kind == "last" or len(ended) == len(self._subtasks)
        if self._may_leave:
            self._finished = ended
            # They have nothing more to say in the attempts under way.
            for newer in self._pending.values():
                newer.ended |= ended
                newer.waiting -= ended
        actions: list[Action[Part]] = [Complete(checkpoint, pending.epoch, self._over)]
        if self._over:
            return actions + self.abort_all(Reason.STOPPED)
        return actions + self._advance()

    def not_committed(self, checkpoint: int) -> list[Action[Part]]:
        """The record is not there and will not be. While that is unknown, say nothing.

        Raises:
            ProtocolError: it was not asked for.
        """
        self._written(checkpoint).writing = False
        return self._give_up(checkpoint, Reason.STORE)

    def abort(self, checkpoint: int, reason: Reason) -> list[Action[Part]]:
        """Give an attempt up, and the newer ones; nothing if its record is being written."""
        return self._give_up(checkpoint, reason)

    def abort_all(self, reason: Reason) -> list[Action[Part]]:
        """Give up every attempt whose record is not being written."""
        open_ = [number for number, pending in self._pending.items() if not pending.writing]
        return self._give_up(open_[0], reason, every=True) if open_ else []

    def tick(self, now_s: float) -> list[Action[Part]]:
        """Time has passed."""
        late = [n for n, p in self._pending.items() if not p.writing and p.deadline_s <= now_s]
        return self._give_up(late[0], Reason.EXPIRED) if late else []

    # --- how -----------------------------------------------------------------------------------

    @property
    def _all_at_end(self) -> bool:
        return len(self._at_end | self._finished) == len(self._subtasks)

    def _advance(self) -> list[Action[Part]]:
        """Have the oldest written, if it is acked in full: records are written one by one."""
        oldest = next(iter(self._pending.values()), None)
        if oldest is None or oldest.waiting or oldest.writing:
            return []
        oldest.writing = True
        return [
            Commit(
                oldest.barrier.checkpoint,
                oldest.epoch,
                oldest.barrier.kind,
                dict(oldest.parts),
                self._subtasks - oldest.parts.keys(),
                frozenset(oldest.ended | self._finished),
            )
        ]

    def _written(self, checkpoint: int) -> _Pending[Part]:
        pending = self._pending.get(checkpoint)
        if pending is None or not pending.writing:
            raise ProtocolError(
                f"The outcome of checkpoint {checkpoint} was told, but its record was not asked "
                "for.",
                todo="This is a fault in the driver's loop: report it with the job's log.",
            )
        return pending

    def _give_up(
        self, checkpoint: int, reason: Reason, by: Subtask | None = None, *, every: bool = False
    ) -> list[Action[Part]]:
        pending = self._pending.get(checkpoint)
        if pending is None or pending.writing:
            return []
        gone: list[Action[Part]] = []
        for number in [n for n in self._pending if n >= checkpoint]:
            epoch = self._pending.pop(number).epoch
            own = every or number == checkpoint
            who = by if number == checkpoint else None
            gone.append(Aborted(number, epoch, reason if own else Reason.EARLIER, who))
        return gone


def check_in_flight(
    with_rows: Collection[str], saved: Mapping[str, int], wanted: Mapping[str, int]
) -> None:
    """Whether rows that barriers have overtaken can be put back in front of their channels.

    They belong to a channel, from one subtask to another, and lie between what its two ends have
    in their states. So they go back into the same channel, before anything that its sender sends
    anew, and that channel is there only at the same parallelism. They are not redistributed: rows
    of a broadcast are in flight to some subtasks and in the state of others, and where a vertex's
    parallelism has changed, neither holds of any subtask of the new run. Savepoints are never
    unaligned, and so are checkpoints whose alignment was in time: they go to any parallelism.

    Args:
        with_rows: vertices whose parts hold such rows, of the checkpoint to be restored.
        saved, wanted: parallelism by vertex.

    Raises:
        RescaleError: there are such rows, and the parallelism of any vertex changes.
    """
    changed = [v for v in saved if v in wanted and saved[v] != wanted[v]]
    if not with_rows or not changed:
        return
    what = ", ".join(f"{v!r} from {saved[v]} to {wanted[v]}" for v in sorted(changed))
    raise RescaleError(
        f"The checkpoint is unaligned: it holds rows in flight to "
        f"{', '.join(map(repr, sorted(with_rows)))}, and the parallelism of {what} is to change.",
        todo="Start once more with the saved parallelism, stop with a savepoint (it is always "
        "aligned), and start from that one.",
    )
