"""The coordinator of one run: a state machine over begins and acks, without I/O.

Invariants (the tests in tests/snapshot/test_coordinator.py have their names):

* an epoch begins only when the one before is durable in every operator: ``begin(n + 1)``
  confirms n;
* a stamp belongs to one epoch: a frame of another batch is refused;
* the newest attempt that acked wins, and only until the next epoch begins;
* the ack that completes an operator answers when a record with all of its subtasks is durable;
* after the first failed commit nothing is accepted any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from snapshot.delta import DIGEST_BYTES, chain
from snapshot.epoch import Acked, EpochState
from snapshot.lineage import OperatorLineage
from snapshot.messages import AckRequest, BeginRequest, SlicePart
from snapshot.operators import Admitted, CommitWork, OperatorSpec, operators_setting
from snapshot.record import Manifest, SliceEntry
from statebackend.errors import (
    IncompleteEpochError,
    ProtocolError,
    StaleRequestError,
    StateBackendError,
    WrongBatchError,
)

__all__ = ["Coordinator"]

# Stamps of past epochs that are known again: days of batches, in a few megabytes.
_STAMPS_KEPT: Final = 65_536


@dataclass
class _Operator:
    spec: OperatorSpec
    lineage: OperatorLineage
    epoch: EpochState
    acked: set[int] = field(default_factory=set)  # in this run


class Coordinator:
    """One run (one start of the query) of one job.

    Args:
        job: the job's name. job_id: its identity, from its first claim.
        run: names this start of the query. query_id: Spark's id of the query.
        operators: by uid. lineages: by uid, as resolved from the log.
        inline_budget_bytes: what an ack may carry; more becomes an object of its own.
        base_every_epochs: a subtask sends its full state at least this often (staggered).
        first_epoch: the batch that Spark will run first, as its checkpoint location says; None
            where that is not known.
    """

    def __init__(
        self,
        *,
        job: str,
        job_id: str,
        run: str,
        query_id: str,
        operators: Mapping[str, OperatorSpec],
        lineages: Mapping[str, OperatorLineage],
        inline_budget_bytes: int,
        base_every_epochs: int,
        first_epoch: int | None = None,
    ) -> None:
        self.job, self.job_id, self.run, self.query_id = job, job_id, run, query_id
        self.inline_budget_bytes = inline_budget_bytes
        self._base_every = base_every_epochs
        self._expected_epoch = first_epoch
        self._specs = dict(operators)
        self._lineages = dict(lineages)
        self._operators: dict[str, _Operator] = {}
        self._failure: StateBackendError | None = None
        self.epoch: int | None = None
        self._stamp_ms: int | None = None
        # In the order of their epochs; a frame may be kept for as long as the query runs.
        self._older_stamps: dict[int, None] = {}
        for lineage in self._lineages.values():
            self._older_stamps.update((e.stamp_ms, None) for e in lineage.epochs.values())

    # --- begin ---------------------------------------------------------------------------------

    def begin(self, request: BeginRequest) -> Admitted:
        """Admit an attempt to an epoch, confirming the epoch before if it is the first.

        Raises:
            IncompleteEpochError: Spark went on before the operator had finished the last epoch.
            WrongBatchError: the frame belongs to another batch.
            StaleRequestError: the epoch is over.
            NotRestorableError: the log does not hold what the epoch starts from.
        """
        self._check_alive()
        if request.operator not in self._specs:
            raise ProtocolError(
                f"Operator {request.operator!r} is not one of job {self.job!r}'s "
                f"({', '.join(sorted(self._specs)) or 'none'}).",
                todo="Start the frame with the backend that made it.",
            )
        if request.query_id != self.query_id:
            raise WrongBatchError(
                f"Operator {request.operator!r} was evaluated by query {request.query_id}, but job "
                f"{self.job!r} is run by query {self.query_id}.",
                todo="Do not start another query on the frame, also not inside foreachBatch.",
            )
        if self.epoch is None:
            self._first_epoch(request)
        elif request.epoch < self.epoch:
            raise StaleRequestError(
                f"Epoch {request.epoch} of operator {request.operator!r} is over, epoch "
                f"{self.epoch} is running.",
                todo="Nothing to do: the attempt was superseded (a frozen or lost worker).",
            )
        elif request.epoch > self.epoch:
            self._next_epoch(request)
        if request.stamp_ms != self._stamp_ms:
            raise self._wrong_batch(request.epoch)
        operator = self._operators[request.operator]
        if not 0 <= request.subtask < operator.spec.parallelism:
            raise ProtocolError(f"Operator {request.operator!r} has no subtask {request.subtask}.")
        first = request.subtask not in operator.acked
        base_epoch = request.epoch - 1
        lineage = operator.lineage.subtasks[request.subtask]
        known = lineage.chain_at(base_epoch)
        if known is None:
            raise ProtocolError(f"No lineage of {request.operator!r} at epoch {base_epoch}.")
        return Admitted(base_epoch, known, first, self._base_due(operator, request))

    def _base_due(self, operator: _Operator, request: BeginRequest) -> bool:
        # Staggered, so that no epoch carries the bases of all subtasks.
        spread = request.subtask * self._base_every // operator.spec.parallelism
        since_first = request.epoch - operator.lineage.first_epoch
        return since_first > 0 and (since_first + spread) % self._base_every == 0

    def _first_epoch(self, request: BeginRequest) -> None:
        base_epoch = request.epoch - 1
        expected = self._expected_epoch
        if expected is not None and request.epoch < expected:
            raise self._wrong_batch(request.epoch)
        if expected is not None and request.epoch > expected and not self._finished(base_epoch):
            raise self._unfinished(expected, dict.fromkeys(self._specs, ()), request.epoch)
        operators: dict[str, _Operator] = {}
        for uid, spec in self._specs.items():
            lineage = self._lineages.get(uid)
            if lineage is None:
                lineage = OperatorLineage.new(
                    uid,
                    job_id=self.job_id,
                    parallelism=spec.parallelism,
                    max_parallelism=spec.max_parallelism,
                    first_epoch=request.epoch,
                )
            lineage.require(base_epoch)
            operators[uid] = _Operator(spec, lineage, EpochState(spec.parallelism))
        # Stamps of the epoch that is repeated, or of later ones given up, are not older ones.
        repeated = {
            entry.stamp_ms
            for lineage in self._lineages.values()
            for epoch, entry in lineage.epochs.items()
            if epoch >= request.epoch
        }
        for stamp_ms in repeated:
            self._older_stamps.pop(stamp_ms, None)
        self._bind(request)
        self._operators = operators

    def _finished(self, epoch: int) -> bool:
        """Whether an earlier run finished ``epoch``.

        Then Spark may commit it without evaluating it again: a file sink, or a foreachBatch
        function that keeps account of its batches, skips the batch that it has written already.
        """
        return all(
            uid in self._lineages and epoch in self._lineages[uid].epochs for uid in self._specs
        )

    def _next_epoch(self, request: BeginRequest) -> None:
        assert self.epoch is not None
        self._check_complete(self.epoch)
        if request.epoch != self.epoch + 1:
            raise self._unfinished(self.epoch + 1, dict.fromkeys(self._specs, ()), request.epoch)
        self._bind(request, confirm=True)
        for operator in self._operators.values():
            operator.lineage.prune(request.epoch - 1)
            operator.epoch = EpochState(operator.spec.parallelism)

    def _check_complete(self, epoch: int) -> None:
        unfinished = {
            uid: operator.epoch.missing()
            for uid, operator in self._operators.items()
            if not operator.epoch.complete
        }
        if unfinished:
            raise self._unfinished(epoch, unfinished, epoch + 1)

    def _unfinished(
        self, epoch: int, missing: Mapping[str, Sequence[int]], following: int
    ) -> IncompleteEpochError:
        who = ", ".join(
            f"{uid!r} ({_few(subtasks)})" if subtasks else repr(uid)
            for uid, subtasks in missing.items()
        )
        return IncompleteEpochError(
            f"Batch {following} followed although batch {epoch} was not finished by operator(s) "
            f"{who} (in brackets: subtasks without a snapshot). The output was read in part or not "
            f"at all: isEmpty(), take(), first(), limit() or a foreachBatch that does not use its "
            f"frame.",
            todo="Use every row of the frame (wrap the function in backend.checked() to be told "
            "within the batch), then start the query again with backend.start(): it goes back by "
            "this one batch and repeats it exactly. An operator whose output the query does not "
            "use at all must not be made: build the query with a new StateBackend without it.",
        )

    def _bind(self, request: BeginRequest, *, confirm: bool = False) -> None:
        if request.stamp_ms in self._older_stamps or (
            confirm and request.stamp_ms == self._stamp_ms
        ):
            raise self._wrong_batch(request.epoch)
        if self._stamp_ms is not None:
            self._older_stamps[self._stamp_ms] = None
            if len(self._older_stamps) > _STAMPS_KEPT:
                del self._older_stamps[next(iter(self._older_stamps))]
        self.epoch, self._stamp_ms = request.epoch, request.stamp_ms

    def _wrong_batch(self, epoch: int) -> WrongBatchError:
        return WrongBatchError(
            f"A frame that belongs to another batch was evaluated in batch {epoch}.",
            todo="Do not keep the frame of a foreachBatch beyond its call; collect or write what "
            "you need of it, or persist() it, within the call.",
        )

    # --- ack -----------------------------------------------------------------------------------

    def ack(self, ack: AckRequest) -> Acked:
        """Take in a snapshot.

        Raises:
            StaleRequestError: a newer attempt has acked, or the epoch is over.
            WrongBatchError, ProtocolError: it does not belong to what was begun.
        """
        self._check_alive()
        operator = self._operators.get(ack.operator)
        if operator is None or self.epoch is None or ack.epoch != self.epoch:
            raise StaleRequestError(
                f"An ack of operator {ack.operator!r}, subtask {ack.subtask}, for epoch "
                f"{ack.epoch} came while epoch {self.epoch} is running.",
                todo="Nothing to do: the attempt was superseded (a frozen or lost worker).",
            )
        if ack.stamp_ms != self._stamp_ms:
            raise self._wrong_batch(ack.epoch)
        if not self._follows(operator, ack):
            raise ProtocolError(
                f"The snapshot of operator {ack.operator!r}, subtask {ack.subtask}, for epoch "
                f"{ack.epoch} does not follow from epoch {ack.epoch - 1}.",
                todo="Report this: an attempt worked on another state than it was given.",
            )
        outcome = operator.epoch.take(ack)
        if outcome is Acked.STALE:
            raise StaleRequestError(
                f"A newer attempt of operator {ack.operator!r}, subtask {ack.subtask}, has acked "
                f"epoch {ack.epoch} already.",
                todo="Nothing to do: this attempt was superseded.",
            )
        operator.acked.add(ack.subtask)
        return outcome

    def _follows(self, operator: _Operator, ack: AckRequest) -> bool:
        """Whether an ack's lineage is that of its subtask before the epoch and its delta."""
        if not 0 <= ack.subtask < operator.spec.parallelism:
            return False
        before = operator.lineage.subtasks[ack.subtask].chain_at(ack.epoch - 1)
        try:
            digest = bytes.fromhex(ack.delta.digest)
        except ValueError:
            return False
        if before is None or len(digest) != DIGEST_BYTES:
            return False
        return chain(bytes.fromhex(before), digest).hex() == ack.chain

    def due_commit(self, uid: str, epoch: int) -> CommitWork | None:
        """The record that must be written now for an operator; None where nothing is due.

        Between this and :meth:`committed` no other epoch may begin: the caller holds a lock.
        """
        self._check_alive()
        operator = self._operators[uid]
        if epoch != self.epoch or self._stamp_ms is None:
            return None
        acks = operator.epoch.undurable()
        if acks is None:
            return None
        slices: list[SliceEntry] = []
        bodies: list[bytes | None] = []
        for subtask in sorted(acks):
            ack = acks[subtask]
            for kind, part in (("delta", ack.delta), ("base", ack.base)):
                if part is not None:
                    slices.append(self._entry(operator, ack, kind, part))
                    bodies.append(None if part.name else part.data)
        manifest = Manifest(
            kind="checkpoint",
            generation=0,  # this and the next three are filled in when it is appended
            sequence=0,
            writer="",
            write_id="",
            job=self.job,
            job_id=self.job_id,
            query_id=self.query_id,
            run=self.run,
            operator=uid,
            epoch=self.epoch,
            first_epoch=operator.lineage.first_epoch,
            stamp_ms=self._stamp_ms,
            parallelism=operator.spec.parallelism,
            max_parallelism=operator.spec.max_parallelism,
            schemas=operator.spec.schemas,
            states=operator.spec.states,
            slices=slices,
            oldest_needed=self._oldest_needed(),
            settings=operators_setting(
                {one: running.lineage.first_epoch for one, running in self._operators.items()}
            ),
        )
        return CommitWork(uid, self.epoch, acks, manifest, bodies)

    def _entry(
        self, operator: _Operator, ack: AckRequest, kind: str, part: SlicePart
    ) -> SliceEntry:
        groups = operator.lineage.subtasks[ack.subtask].key_groups
        return SliceEntry(
            operator=ack.operator,
            subtask=ack.subtask,
            kind="base" if kind == "base" else "delta",
            epoch=ack.epoch,
            key_group_start=groups.start,
            key_group_end=groups.end,
            attempt=ack.attempt,
            rows=part.rows,
            size_bytes=part.size_bytes,
            digest=part.digest,
            chain=ack.chain,
            offset=None,
            object=part.name or None,
            timings_ms=ack.timings_ms if kind == "delta" else {},
        )

    def _oldest_needed(self) -> int:
        # Until epoch n is confirmed the state before it may be asked for: n - 1 counts.
        assert self.epoch is not None
        needed = [
            sequence
            for lineage in (*(o.lineage for o in self._operators.values()),)
            if (sequence := lineage.oldest_needed(self.epoch - 1)) is not None
        ]
        return min(needed, default=0)

    def committed(self, work: CommitWork, manifest: Manifest) -> None:
        """The record of ``work`` is durable; ``manifest`` as written (sequence and offsets)."""
        if work.epoch != self.epoch:
            raise AssertionError(f"epoch {self.epoch} began while {work.epoch} was written")
        operator = self._operators[work.operator]
        operator.lineage.add(manifest)
        operator.epoch.made_durable(work.acks)

    def fail(self, error: StateBackendError) -> None:
        """Accept nothing any more: this driver was fenced, or cannot know whether it was."""
        self._failure = self._failure or error

    # --- what others ask -----------------------------------------------------------------------

    @property
    def failure(self) -> StateBackendError | None:
        """Why nothing is accepted any more."""
        return self._failure

    def lineage(self, uid: str) -> OperatorLineage:
        """The lineage of a running operator."""
        return self._operators[uid].lineage

    def spec(self, uid: str) -> OperatorSpec:
        """The operator's spec."""
        return self._specs[uid]

    def check_finished(self, epoch: int) -> None:
        """Raise unless every operator has made ``epoch`` durable (what ``checked`` asks).

        Raises:
            IncompleteEpochError: naming operator and subtasks.
        """
        self._check_alive()
        if self.epoch is None and self._finished(epoch):
            return  # the function knew that it had written this batch already
        if self.epoch != epoch:
            raise IncompleteEpochError(
                f"No operator of job {self.job!r} ran in batch {epoch}: the foreachBatch function "
                f"did not use its frame.",
                todo="Use every row of the frame within the function.",
            )
        self._check_complete(epoch)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown or "none"
