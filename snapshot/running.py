"""One operator of a run: its lineage, the acks of the epoch that runs, and what is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

from snapshot.bases import BaseBook, Due, due
from snapshot.epoch import EpochState
from snapshot.lineage import OperatorLineage
from snapshot.messages import AckRequest, BeginRequest
from snapshot.operators import Admitted, CommitWork, OperatorSpec
from snapshot.record import Manifest
from statebackend.errors import ProtocolError

__all__ = ["RunningOperator"]


@dataclass(frozen=True)
class _Tail:
    """An epoch that is over and acked in full, whose record is on its way."""

    epoch: int
    acks: dict[int, AckRequest]


@dataclass
class RunningOperator:
    """What the coordinator keeps of an operator. ``acked``: subtasks that acked in this run."""

    spec: OperatorSpec
    lineage: OperatorLineage
    epoch: EpochState
    bases: BaseBook
    retain_epochs: int = 1
    acked: set[int] = field(default_factory=set)
    tail: _Tail | None = None

    def chain_at(self, subtask: int, epoch: int) -> str | None:
        """The lineage digest after an epoch that may be on its way to the log."""
        if self.tail is not None and self.tail.epoch == epoch:
            return self.tail.acks[subtask].chain
        return self.lineage.subtasks[subtask].chain_at(epoch)

    def admit(self, request: BeginRequest) -> Admitted:
        """What an attempt starts from, and what it has to write besides its delta."""
        base_epoch = request.epoch - 1
        chain = self.chain_at(request.subtask, base_epoch)
        if chain is None:
            raise ProtocolError(f"No lineage of {request.operator!r} at epoch {base_epoch}.")
        lineage = self.lineage.subtasks[request.subtask]
        durable_epoch = base_epoch if self.tail is None else self.tail.epoch - 1
        what = due(
            self.bases.policy,
            lineage,
            subtask=request.subtask,
            parallelism=self.spec.parallelism,
            epoch=request.epoch,
            large_bytes=self.bases.large_bytes.get(request.subtask, 0),
        )
        grant = None
        durable_chain = lineage.chain_at(durable_epoch)
        if what is Due.APART and durable_chain is not None:
            grant = self.bases.grant(request.subtask, durable_epoch, durable_chain)
        return Admitted(
            base_epoch=base_epoch,
            durable_epoch=durable_epoch,
            chain=chain,
            first_of_run=request.subtask not in self.acked,
            base_due=what is Due.INLINE,
            grant=grant,
            layer=self.tail.acks[request.subtask] if self.tail is not None else None,
        )

    def next_epoch(self, epoch: int, *, asynchronous: bool) -> None:
        """``epoch`` begins: the one before is durable, or on its way if that is allowed."""
        on_its_way = self.epoch.on_its_way() if asynchronous else None
        self.tail = _Tail(epoch - 1, on_its_way) if on_its_way else None
        durable_epoch = epoch - (2 if on_its_way else 1)
        self.lineage.prune(durable_epoch - (self.retain_epochs - 1))
        self.epoch = EpochState(self.spec.parallelism)

    def oldest_needed(self, epoch: int) -> int | None:
        """The oldest sequence that a restore may ask for while ``epoch`` runs; None for none.

        Until an epoch is confirmed the state before it may be asked for: n - 1 counts, and with
        asynchronous commits n - 2, while the record of n - 1 is on its way.
        """
        last = epoch - (1 if self.tail is None else 2)
        first = max(last - (self.retain_epochs - 1), self.lineage.first_epoch - 1)
        return self.lineage.oldest_needed(first)

    def committed(self, epoch: int, work: CommitWork, manifest: Manifest) -> None:
        """The record of ``work`` is durable; ``epoch`` runs."""
        tail = self.tail
        if work.epoch == epoch:
            self.epoch.made_durable(work.acks)
        elif tail is not None and tail.epoch == work.epoch:
            if work.acks is tail.acks:  # the last of this epoch's
                self.tail = None
        else:
            raise AssertionError(f"epoch {epoch} began while {work.epoch} was written")
        self.lineage.add(manifest)
        self.bases.written(work.bases)

    def pending_names(self) -> set[str]:
        """Objects of acks and bases that no record names yet."""
        names: set[str] = set()
        tails = self.tail.acks.values() if self.tail else ()
        for ack in (*self.epoch.acks.values(), *tails):
            names.update(part.name for part in (ack.delta, ack.base) if part and part.name)
        names.update(done.part.name for done in self.bases.waiting.values() if done.part.name)
        return names
