"""One operator of a run: its lineage, the acks of the epoch that runs, and what is on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from snapshot.barriers.job_watermark import JobTime, OperatorTime, resumed
from snapshot.formats.lineage_digest import DIGEST_BYTES, chain
from snapshot.formats.record import Manifest
from snapshot.protocol.base_leases import BaseBook
from snapshot.protocol.base_policy import Due, due
from snapshot.protocol.epoch_acks import EpochState
from snapshot.protocol.lineage import EpochEntry, OperatorLineage
from snapshot.protocol.messages import AckRequest, BeginRequest
from snapshot.protocol.operator_state_slices import (
    NO_BLOBS,
    OperatorBlobs,
    check_agreement,
    diverged_after_record,
)
from snapshot.protocol.operators import Admitted, CommitWork, OperatorSpec
from statebackend.errors import BroadcastDivergedError, ProtocolError

__all__ = ["RunningOperator", "resumed_time"]


def resumed_time(
    specs: Mapping[str, OperatorSpec], lineages: Mapping[str, OperatorLineage], epoch: int
) -> tuple[JobTime, list[OperatorTime]]:
    """The times of an epoch as the first of a run, and every operator's before it.

    Args:
        specs, lineages: by operator; one without a lineage has seen nothing.
        epoch: the first of the run.
    """
    before, again, operators = [], [], []
    for uid, spec in specs.items():
        known = lineages[uid].epochs if uid in lineages else {}
        entry, repeated = known.get(epoch - 1), known.get(epoch)
        before.append(entry.watermark_ms if entry else None)
        again.append(repeated.watermark_ms if repeated else None)
        operators.append(
            spec.time(entry.event_max_ms, entry.next_timer_ms, entry.second_max_ms)
            if entry
            else spec.time(None, None)
        )
    return resumed(before, operators, again), operators


@dataclass(frozen=True)
class _Tail:
    """An epoch that is over and acked in full, whose record is on its way."""

    epoch: int
    acks: dict[int, AckRequest]


@dataclass
class RunningOperator:
    """What the coordinator keeps of an operator.

    Attributes:
        number: the epoch that runs. epoch: its acks.
        acked: subtasks that acked in this run.
        event_max_ms, second_max_ms: the largest event times of the epochs before the one that runs.
        gone: ids of deleted states of which nothing was left before the epoch that runs.
        dropping: those whose entries are deleted in it.
        blobs: the states that belong to no key, before the epoch that runs.
    """

    spec: OperatorSpec
    lineage: OperatorLineage
    number: int
    epoch: EpochState
    bases: BaseBook
    retain_epochs: int = 1
    acked: set[int] = field(default_factory=set)
    tail: _Tail | None = None
    event_max_ms: int | None = None
    second_max_ms: int | None = None
    gone: frozenset[int] = frozenset()
    dropping: frozenset[int] = frozenset()
    blobs: OperatorBlobs = NO_BLOBS

    @classmethod
    def resumed(
        cls,
        spec: OperatorSpec,
        lineage: OperatorLineage,
        epoch: int,
        bases: BaseBook,
        retain_epochs: int,
        recorded: Mapping[int, EpochEntry],
    ) -> RunningOperator:
        """In its first epoch of a run, from the record of the epoch before, if there is one.

        Args:
            recorded: all that the log has of the operator, also of what is repeated now.
        """
        before = lineage.epochs.get(epoch - 1)
        gone = before.dropped_ids if before else frozenset()
        # What an earlier attempt at this epoch deleted is deleted again.
        again = [entry.dropped_ids for e, entry in recorded.items() if e >= epoch]
        return cls(
            spec,
            lineage,
            epoch,
            EpochState(spec.parallelism),
            bases,
            retain_epochs,
            event_max_ms=before.event_max_ms if before else None,
            second_max_ms=before.second_max_ms if before else None,
            gone=gone,
            dropping=frozenset(spec.dropped.values()).union(*again) - gone,
            blobs=OperatorBlobs.of_record(before),
        )

    def chain_at(self, subtask: int, epoch: int) -> str | None:
        """The lineage digest after an epoch that may be on its way to the log."""
        if self.tail is not None and self.tail.epoch == epoch:
            return self.tail.acks[subtask].chain
        return self.lineage.subtasks[subtask].chain_at(epoch)

    def follows(self, ack: AckRequest) -> bool:
        """Whether an ack's lineage is that of its subtask before the epoch and its delta."""
        if not 0 <= ack.subtask < self.spec.parallelism:
            return False
        before = self.chain_at(ack.subtask, ack.epoch - 1)
        try:
            digest = bytes.fromhex(ack.delta.digest)
        except ValueError:
            return False
        if before is None or len(digest) != DIGEST_BYTES:
            return False
        return chain(bytes.fromhex(before), digest).hex() == ack.chain

    def check_agreement(self, ack: AckRequest) -> None:
        """Refuse an ack whose broadcast state is another than that of the same stage run.

        Once the epoch is recorded, another run of the stage may not change its mind: Spark might
        commit the batch with rows of both, and the next start would go on from the record. The
        batch fails instead, and is repeated.

        Raises:
            BroadcastDivergedError: its task fails, and nothing else does: another attempt may
                agree.
        """
        if not self.epoch.disagrees:
            return
        if self.epoch.recorded:
            self.epoch.drop(ack)
            raise diverged_after_record(ack.operator, ack.epoch, ack.subtask)
        try:
            for acks in self.epoch.stage_runs():
                check_agreement(ack.operator, ack.epoch, acks)
        except BroadcastDivergedError:
            self.epoch.drop(ack)
            raise

    def admit(self, request: BeginRequest, time: JobTime) -> Admitted:
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
            grant = self.bases.grant(request.subtask, durable_epoch, durable_chain, request)
        return Admitted(
            base_epoch=base_epoch,
            durable_epoch=durable_epoch,
            chain=chain,
            first_of_run=request.subtask not in self.acked,
            base_due=what is Due.INLINE,
            grant=grant,
            layer=self.tail.acks[request.subtask] if self.tail is not None else None,
            time=time,
            initial=self.spec.initial.get(request.subtask) if self._is_first else None,
            dropped=tuple(sorted(self.dropping)),
            blobs=self.blobs,
        )

    @property
    def _is_first(self) -> bool:
        """Whether the epoch that runs is the first that the operator ever ran."""
        return self.number == self.lineage.first_epoch

    def time_after(self, acks: Mapping[int, AckRequest] | None = None) -> OperatorTime:
        """Its times at the end of the epoch that runs, by some acks (else those that count)."""
        acks = self.epoch.acks if acks is None else acks
        seen = [self.event_max_ms, *(ack.max_event_ms for ack in acks.values())]
        second = [self.second_max_ms, *(ack.second_event_ms for ack in acks.values())]
        timers = [ack.next_timer_ms for ack in acks.values()]
        return self.spec.time(
            event_max_ms=max((ms for ms in seen if ms is not None), default=None),
            second_max_ms=max((ms for ms in second if ms is not None), default=None),
            next_timer_ms=min((ms for ms in timers if ms is not None), default=None),
        )

    def filled(self, head: Manifest, acks: Mapping[int, AckRequest]) -> Manifest:
        """A record's manifest with all that is this operator's own, but for its slices."""
        spec, after = self.spec, self.time_after(acks)
        return msgspec.structs.replace(
            head,
            first_epoch=self.lineage.first_epoch,
            parallelism=spec.parallelism,
            max_parallelism=spec.max_parallelism,
            schemas=spec.schemas,
            states=spec.states,
            time_mode=spec.time_mode,
            event_max_ms=after.event_max_ms,
            second_max_ms=after.second_max_ms,
            next_timer_ms=after.next_timer_ms,
            dropped_ids=sorted(self.gone | self.dropping),
        )

    def next_epoch(self, epoch: int, *, asynchronous: bool) -> None:
        """``epoch`` begins: the one before is durable, or on its way if that is allowed."""
        # By the record: a repeated epoch has nothing else to go by.
        after = self.time_after(self.epoch.recorded)
        self.event_max_ms, self.second_max_ms = after.event_max_ms, after.second_max_ms
        self.gone, self.dropping = self.gone | self.dropping, frozenset()
        self.blobs = OperatorBlobs.of_acks(self.epoch.recorded)
        on_its_way = self.epoch.on_its_way() if asynchronous else None
        self.tail = _Tail(epoch - 1, on_its_way) if on_its_way else None
        durable_epoch = epoch - (2 if on_its_way else 1)
        self.lineage.prune(durable_epoch - (self.retain_epochs - 1))
        self.number, self.epoch = epoch, EpochState(self.spec.parallelism)

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
        """Objects of acks, bases and the initial state that no record names (yet)."""
        names: set[str] = set()
        if self._is_first or (self.tail and self.tail.epoch == self.lineage.first_epoch):
            names.update(part.name for part in self.spec.initial.values())
        tails = self.tail.acks.values() if self.tail else ()
        for ack in (*self.epoch.all_acks(), *tails):
            parts = (ack.delta, ack.base, ack.operator_state, ack.broadcast)
            names.update(part.name for part in parts if part and part.name)
        names.update(done.part.name for done in self.bases.unnamed() if done.part.name)
        return names
