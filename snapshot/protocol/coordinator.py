"""The coordinator of one run: a state machine over begins and acks, without I/O.

Invariants (the tests in tests/snapshot/test_coordinator.py have their names):

* an epoch begins only when the one before is durable in every operator: ``begin(n + 1)``
  confirms n. With asynchronous commits it begins when the one before was acked by every subtask,
  and is acked in full only when the one before is durable: never more than one epoch ahead;
* a stamp belongs to one epoch: a frame of another batch is refused, whatever the clock says;
* a snapshot names only objects that were made for it or given to it;
* a record is of the latest whole evaluation, if there is one; within it the newest attempt that
  acked wins, until the next epoch begins;
* acks of different stage runs complete an epoch only if they came to one broadcast state;
* the ack that completes an operator answers when a record with all of its subtasks is durable;
* after the first failed commit nothing is accepted any more;
* an epoch's watermark follows from the epochs before it, and is the same when it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from snapshot.barriers.job_watermark import JobTime, NextDue, next_due
from snapshot.formats.record import Manifest
from snapshot.protocol.bases import BaseBook, BasePolicy, Grant
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.keyless_state import check_sent
from snapshot.protocol.known_objects import check_ack_objects, check_base_objects
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import AckRequest, BaseDone, BaseRenewal, BeginRequest
from snapshot.protocol.operators import Admitted, CommitWork, OperatorSpec, operators_setting
from snapshot.protocol.record_assembly import assemble
from snapshot.protocol.refusals import planned_anew, stale_attempt, unfinished, wrong_batch
from snapshot.protocol.running_operator import RunningOperator, resumed_time
from snapshot.protocol.stamps import Stamps
from statebackend.errors import (
    IncompleteEpochError,
    ProtocolError,
    StateBackendError,
    WrongBatchError,
)

__all__ = ["Coordinator"]


class Coordinator:
    """One run (one start of the query) of one job.

    Args:
        job: the job's name. job_id: its identity, from its first claim. generation: the driver's.
        run: names this start of the query. query_id: Spark's id of the query.
        operators: by uid. lineages: by uid, as resolved from the log.
        inline_budget_bytes: what an ack may carry; more becomes an object of its own.
        bases: when a subtask writes its full state.
        now_s, new_id: the driver's clock, and ids for grants.
        first_epoch: the batch that Spark will run first, as its checkpoint location says; None
            where that is not known.
        first_stamp_ms: of its plan, if the location had one already; another plan is refused.
        asynchronous: an epoch may begin while the record of the one before is being written.
        retain_epochs: confirmed epochs that stay restorable.
        stamps: those of the run before, in the same process.
    """

    def __init__(
        self,
        *,
        job: str,
        job_id: str,
        generation: int,
        run: str,
        query_id: str,
        operators: Mapping[str, OperatorSpec],
        lineages: Mapping[str, OperatorLineage],
        inline_budget_bytes: int,
        bases: BasePolicy,
        now_s: Callable[[], float],
        new_id: Callable[[], str],
        first_epoch: int | None = None,
        first_stamp_ms: int | None = None,
        asynchronous: bool = False,
        retain_epochs: int = 1,
        stamps: Stamps | None = None,
    ) -> None:
        self.job, self.job_id, self.run, self.query_id = job, job_id, run, query_id
        self._generation = generation
        self.inline_budget_bytes = inline_budget_bytes
        self.asynchronous = asynchronous
        self.base_policy, self._now_s, self._new_id = bases, now_s, new_id
        self._retain_epochs = retain_epochs
        self._expected_epoch, self._expected_stamp_ms = first_epoch, first_stamp_ms
        self._specs = dict(operators)
        self._lineages = dict(lineages)
        # As the log had them: a lineage at another parallelism ends where this run begins.
        self._recorded = {uid: dict(one.epochs) for uid, one in lineages.items()}
        self._begins_with: int | None = None
        self._operators: dict[str, RunningOperator] = {}
        self._failure: StateBackendError | None = None
        self.epoch: int | None = None
        self._time = JobTime()
        self.stamps = Stamps(stamps)

    # --- begin ---------------------------------------------------------------------------------

    def begin(self, request: BeginRequest) -> Admitted:
        """Admit an attempt to an epoch, confirming the epoch before if it is the first.

        Raises:
            IncompleteEpochError: Spark went on before the operator had finished the last epoch.
            WrongBatchError: the frame belongs to another batch.
            StaleRequestError: the epoch is over.
            NotRestorableError: the log does not hold what the epoch starts from.
        """
        self.check_asker(request)
        if self.epoch is None:
            self._first_epoch(request)
        elif request.epoch < self.epoch:
            raise stale_attempt(
                f"Epoch {request.epoch} of operator {request.operator!r} is over, epoch "
                f"{self.epoch} is running."
            )
        elif request.epoch > self.epoch:
            self._next_epoch(request)
        if not self.stamps.admit(request.stamp_ms, *request.plan):
            raise wrong_batch(request.epoch)
        operator = self._operators[request.operator]
        if not 0 <= request.subtask < operator.spec.parallelism:
            raise ProtocolError(f"Operator {request.operator!r} has no subtask {request.subtask}.")
        return operator.admit(request, self._time)

    def check_asker(self, request: BeginRequest) -> None:
        """Refuse an attempt of another query's, or of no operator of the job."""
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

    def _first_epoch(self, request: BeginRequest) -> None:
        base_epoch = request.epoch - 1
        expected = self._expected_epoch
        if expected is not None and request.epoch < expected:
            raise wrong_batch(request.epoch)
        if expected is not None and request.epoch > expected and not self._finished(base_epoch):
            raise unfinished(expected, dict.fromkeys(self._specs, ()), request.epoch)
        if request.epoch == expected and self._expected_stamp_ms not in (None, request.stamp_ms):
            raise planned_anew(request.epoch)
        operators: dict[str, RunningOperator] = {}
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
            lineage = lineage.at(spec.parallelism, base_epoch)
            lineage.require(base_epoch)
            book = BaseBook(self.base_policy, self._now_s, self._new_id)
            book.remember(lineage, base_epoch, self.inline_budget_bytes)
            recorded = self._recorded.get(uid, {})
            operators[uid] = RunningOperator.resumed(
                spec, lineage, request.epoch, book, self._retain_epochs, recorded
            )
        self._begins_with = request.epoch
        self._bind(request)
        self._operators = operators
        self._time, _ = resumed_time(self._specs, self._lineages, request.epoch)

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
            raise unfinished(self.epoch + 1, dict.fromkeys(self._specs, ()), request.epoch)
        self._bind(request)
        for operator in self._operators.values():
            operator.next_epoch(request.epoch, asynchronous=self.asynchronous)
        self._time = self._time.following(
            one.spec.time(one.event_max_ms, None, one.second_max_ms)
            for one in self._operators.values()
        )

    def _check_complete(self, epoch: int) -> None:
        missing = {
            uid: operator.epoch.missing()
            for uid, operator in self._operators.items()
            if not (operator.epoch.scheduled if self.asynchronous else operator.epoch.complete)
        }
        if missing:
            disagreeing = [uid for uid in missing if self._operators[uid].epoch.disagrees]
            raise unfinished(epoch, missing, epoch + 1, disagreeing)
        late = [uid for uid, operator in self._operators.items() if operator.tail is not None]
        if late:
            # The last ack of this epoch waits for that record: its task was ended meanwhile.
            raise unfinished(epoch, dict.fromkeys(late, ()), epoch + 1)

    def _bind(self, request: BeginRequest) -> None:
        if not self.stamps.bind(request.stamp_ms, *request.plan):
            raise wrong_batch(request.epoch)
        self.epoch = request.epoch

    # --- ack -----------------------------------------------------------------------------------

    def ack(self, ack: AckRequest) -> Acked:
        """Take in a snapshot.

        Raises:
            StaleRequestError: a newer attempt of its task has acked, or the epoch is over.
            WrongBatchError, ProtocolError: it does not belong to what was begun.
            BroadcastDivergedError: see `RunningOperator.check_agreement`.
        """
        self._check_alive()
        operator = self._operators.get(ack.operator)
        if operator is None or self.epoch is None or ack.epoch != self.epoch:
            raise stale_attempt(
                f"An ack of operator {ack.operator!r}, subtask {ack.subtask}, for epoch "
                f"{ack.epoch} came while epoch {self.epoch} is running."
            )
        if ack.stamp_ms != self.stamps.current:
            raise wrong_batch(ack.epoch)
        if not operator.follows(ack):
            raise ProtocolError(
                f"The snapshot of operator {ack.operator!r}, subtask {ack.subtask}, for epoch "
                f"{ack.epoch} does not follow from epoch {ack.epoch - 1}.",
                todo="Report this: an attempt worked on another state than it was given.",
            )
        check_sent(ack)
        check_ack_objects(ack, self._generation, operator.blobs)
        outcome = operator.epoch.take(ack)
        if outcome is Acked.STALE:
            raise stale_attempt(
                f"A newer attempt of operator {ack.operator!r}, subtask {ack.subtask}, has acked "
                f"epoch {ack.epoch} already."
            )
        operator.check_agreement(ack)
        operator.acked.add(ack.subtask)
        if ack.large_bytes:
            operator.bases.large_bytes[ack.subtask] = ack.large_bytes
        return outcome

    def base_done(self, done: BaseDone, objects: Collection[str] = ()) -> None:
        """A base was uploaded (its files: ``objects``); the operator's next record names it.

        Raises:
            StaleRequestError: its grant has lapsed. ForeignObjectError: see
                `snapshot.protocol.known_objects`.
            ProtocolError: there is no such operator.
        """
        book = self._book(done.operator)
        check_base_objects(done, objects, self._generation, book.given(done.subtask, done.grant))
        book.finish(done)
        if done.state_bytes <= self.inline_budget_bytes:
            book.large_bytes.pop(done.subtask, None)  # it has shrunk, or was never large

    def base_renewed(self, renewal: BaseRenewal) -> float:
        """An upload goes on: how long its grant stands now. Raises as :meth:`base_done`."""
        book = self._book(renewal.operator)
        if renewal.given_up:
            book.give_up(renewal.subtask, renewal.grant)
        else:
            book.renew(renewal.subtask, renewal.grant)
        return self.base_policy.lease_s

    def withdraw(self, uid: str, grant: Grant) -> None:
        """A grant that its worker has not been told of."""
        self._book(uid).give_up(grant.subtask, grant.id)

    def _book(self, uid: str) -> BaseBook:
        self._check_alive()
        operator = self._operators.get(uid)
        if operator is None:
            raise ProtocolError(f"No operator {uid!r} of job {self.job!r} is running.")
        return operator.bases

    def due_commit(self, uid: str, epoch: int) -> CommitWork | None:
        """The record that must be written now for an operator; None where nothing is due.

        With synchronous commits no other epoch may begin between this and :meth:`committed`: the
        caller holds a lock. In any case records are written in the order in which they were due.
        """
        self._check_alive()
        operator = self._operators[uid]
        if epoch != self.epoch or self.stamps.current is None:
            return None
        acks = operator.epoch.take_due()
        if acks is None:
            return None
        head = Manifest(
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
            stamp_ms=self.stamps.current,
            watermark_ms=self._watermark_ms,
            oldest_needed=self._oldest_needed(),
            settings=operators_setting(
                {one: running.lineage.first_epoch for one, running in self._operators.items()},
                [one for one, running in self._operators.items() if running.spec.initial],
            ),
        )
        return assemble(
            operator.filled(head, acks),
            acks,
            operator.bases.take(),
            [subtask.key_groups for subtask in operator.lineage.subtasks],
        )

    @property
    def _watermark_ms(self) -> int | None:
        """What records say: nothing in a job that has never had a watermark."""
        timed = any(spec.time_mode == "event" for spec in self._specs.values())
        return self._time.watermark_ms if timed or self._time.watermark_ms else None

    def _oldest_needed(self) -> int:
        assert self.epoch is not None
        needed = [o.oldest_needed(self.epoch) for o in self._operators.values()]
        return min((sequence for sequence in needed if sequence is not None), default=0)

    def check_follows(self, work: CommitWork) -> None:
        """Refuse to write a record whose epoch does not follow what the log holds.

        Raises:
            ProtocolError: it would make a gap that no restart could get over.
        """
        lineage = self._operators[work.operator].lineage
        if any(subtask.chain_at(work.epoch - 1) is None for subtask in lineage.subtasks):
            raise ProtocolError(
                f"The record of operator {work.operator!r} for epoch {work.epoch} would leave a "
                f"gap: epoch {work.epoch - 1} is not in the log.",
                todo="Start again: the query goes back to what the log holds.",
            )

    def committed(self, work: CommitWork, manifest: Manifest) -> None:
        """The record of ``work`` is durable; ``manifest`` as written (sequence and offsets)."""
        assert self.epoch is not None
        self._operators[work.operator].committed(self.epoch, work, manifest)

    def fail(self, error: StateBackendError) -> None:
        """Accept nothing any more: this driver was fenced, or cannot know whether it was."""
        self._failure = self._failure or error

    # --- what others ask -----------------------------------------------------------------------

    def was_recorded(self, uid: str, epoch: int) -> bool:
        """Whether the log has had this epoch of an operator since before this run."""
        return epoch in self._recorded.get(uid, ())

    @property
    def settled(self) -> bool:
        """Whether every subtask has had its state in this run: an epoch of it is over."""
        return self.epoch is not None and self.epoch != self._begins_with

    @property
    def failure(self) -> StateBackendError | None:
        """Why nothing is accepted any more."""
        return self._failure

    @property
    def confirmed_epoch(self) -> int | None:
        """The newest epoch that nobody can ask to be repeated; None before there is one."""
        if self.epoch is None:
            return None
        late = any(operator.tail is not None for operator in self._operators.values())
        return self.epoch - (2 if late else 1)

    def next_due(self) -> NextDue | None:
        """What waits for the next epoch; None while an epoch runs, or once nothing is accepted.

        Before the first epoch of the run the records say it: those of the newest epoch that every
        operator has finished, or of the one that the run starts from.
        """
        if self._failure is not None:
            return None
        if self.epoch is None:
            last = [self._lineages[uid].last_epoch for uid in self._specs if uid in self._lineages]
            finished = min(last, default=-1) if len(last) == len(self._specs) else -1
            epoch = max(finished, -1 if self._expected_epoch is None else self._expected_epoch - 1)
            return next_due(epoch, *resumed_time(self._specs, self._lineages, epoch + 1))
        if not all(operator.epoch.acked for operator in self._operators.values()):
            return None
        operators = [operator.time_after() for operator in self._operators.values()]
        return next_due(self.epoch, self._time.following(operators), operators)

    def lineages(self) -> dict[str, OperatorLineage]:
        """The lineages of all running operators, by uid."""
        return {uid: operator.lineage for uid, operator in self._operators.items()}

    def open_grants(self) -> set[str]:
        """Grants under which bases are being uploaded, or wait for a record."""
        return set().union(*(o.bases.open_grants() for o in self._operators.values()))

    def pending_names(self) -> set[str]:
        """Objects of acks and bases that no record names yet."""
        return set().union(*(o.pending_names() for o in self._operators.values()))

    def lineage(self, uid: str) -> OperatorLineage:
        """The lineage of a running operator."""
        return self._operators[uid].lineage

    def spec(self, uid: str) -> OperatorSpec:
        """The operator's spec."""
        return self._specs[uid]

    def specs(self) -> list[OperatorSpec]:
        """Every operator of the run."""
        return list(self._specs.values())

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
