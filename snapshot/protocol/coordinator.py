"""The coordinator of one run: a state machine over begins and acks, without I/O.

Invariants (the tests in tests/snapshot/test_coordinator*.py have their names):

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

from collections.abc import Callable

from snapshot.protocol.ack_checks import check_ack_objects
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.base_uploads import BaseUploads
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import AckRequest, BeginRequest
from snapshot.protocol.operator_state_slices import check_sent
from snapshot.protocol.operators import Admitted
from snapshot.protocol.record_commits import RecordCommits
from snapshot.protocol.refusal_texts import stale_attempt, unfinished, wrong_batch
from snapshot.protocol.running_job import RunningJob
from snapshot.protocol.running_operator import RunningOperator, resumed_time
from statebackend.errors import IncompleteEpochError, ProtocolError, WrongBatchError

__all__ = ["Coordinator"]


class Coordinator:
    """Admits a run's begins and takes in its acks.

    Args:
        run: the run as it starts.
        bases: when a subtask writes its full state.
        now_s, new_id: the driver's clock, and ids for upload leases.
        retain_epochs: confirmed epochs that stay restorable.

    Attributes:
        run: as it stands. uploads: of its bases. records: of its epochs.
    """

    def __init__(
        self,
        run: RunningJob,
        *,
        bases: BasePolicy,
        now_s: Callable[[], float],
        new_id: Callable[[], str],
        retain_epochs: int = 1,
    ) -> None:
        self.run = run
        self.uploads = BaseUploads(run, bases, now_s, new_id)
        self.records = RecordCommits(run)
        self._retain_epochs = retain_epochs

    # --- begin ---------------------------------------------------------------------------------

    def begin(self, request: BeginRequest) -> Admitted:
        """Admit an attempt to an epoch, confirming the epoch before if it is the first.

        Raises:
            IncompleteEpochError: Spark went on before the operator had finished the last epoch.
            WrongBatchError: the frame belongs to another batch.
            StaleRequestError: the epoch is over.
            NotRestorableError: the log does not hold what the epoch starts from.
        """
        run = self.run
        self.check_asker(request)
        if run.epoch is None:
            self._first_epoch(request)
        elif request.epoch < run.epoch:
            raise stale_attempt(
                f"Epoch {request.epoch} of operator {request.operator!r} is over, epoch "
                f"{run.epoch} is running."
            )
        elif request.epoch > run.epoch:
            self._next_epoch(request)
        if not run.stamps.admit(request.stamp_ms, *request.plan):
            raise wrong_batch(request.epoch)
        operator = run.operators[request.operator]
        if not 0 <= request.subtask < operator.spec.parallelism:
            raise ProtocolError(f"Operator {request.operator!r} has no subtask {request.subtask}.")
        return operator.admit(request, run.time)

    def check_asker(self, request: BeginRequest) -> None:
        """Refuse an attempt of another query's, or of no operator of the job."""
        run = self.run
        run.check_alive()
        if request.operator not in run.specs:
            raise ProtocolError(
                f"Operator {request.operator!r} is not one of job {run.job!r}'s "
                f"({', '.join(sorted(run.specs)) or 'none'}).",
                todo="Start the frame with the backend that made it.",
            )
        if request.query_id != run.query_id:
            raise WrongBatchError(
                f"Operator {request.operator!r} was evaluated by query {request.query_id}, but job "
                f"{run.job!r} is run by query {run.query_id}.",
                todo="Do not start another query on the frame, also not inside foreachBatch.",
            )

    def _first_epoch(self, request: BeginRequest) -> None:
        run = self.run
        base_epoch = request.epoch - 1
        expected = run.first_epoch
        if expected is not None and request.epoch < expected:
            raise wrong_batch(request.epoch)
        if expected is not None and request.epoch > expected and not run.was_finished(base_epoch):
            raise unfinished(expected, dict.fromkeys(run.specs, ()), request.epoch)
        operators: dict[str, RunningOperator] = {}
        for uid, spec in run.specs.items():
            lineage = run.lineages.get(uid)
            if lineage is None:
                lineage = OperatorLineage.new(
                    uid,
                    job_id=run.job_id,
                    parallelism=spec.parallelism,
                    max_parallelism=spec.max_parallelism,
                    first_epoch=request.epoch,
                )
            lineage = lineage.at(spec.parallelism, base_epoch)
            lineage.require(base_epoch)
            book = self.uploads.book(lineage, base_epoch)
            recorded = run.recorded.get(uid, {})
            operators[uid] = RunningOperator.resumed(
                spec, lineage, request.epoch, book, self._retain_epochs, recorded
            )
        run.begins_with = request.epoch
        self._bind(request)
        run.operators = operators
        run.time, _ = resumed_time(run.specs, run.lineages, request.epoch)

    def _next_epoch(self, request: BeginRequest) -> None:
        run = self.run
        assert run.epoch is not None
        self._check_complete(run.epoch, run.epoch + 1)
        if request.epoch != run.epoch + 1:
            raise unfinished(run.epoch + 1, dict.fromkeys(run.specs, ()), request.epoch)
        self._bind(request)
        for operator in run.operators.values():
            operator.next_epoch(request.epoch, asynchronous=run.asynchronous)
        run.time = run.time.following(
            one.spec.time(one.event_max_ms, None, one.second_max_ms)
            for one in run.operators.values()
        )

    def _check_complete(self, epoch: int, following: int | None) -> None:
        run = self.run
        missing = {
            uid: operator.epoch.missing()
            for uid, operator in run.operators.items()
            if not (operator.epoch.scheduled if run.asynchronous else operator.epoch.complete)
        }
        if missing:
            disagreeing = [uid for uid in missing if run.operators[uid].epoch.disagrees]
            raise unfinished(epoch, missing, following, disagreeing)
        late = [uid for uid, operator in run.operators.items() if operator.tail is not None]
        if late:
            # The last ack of this epoch waits for that record: its task was ended meanwhile.
            raise unfinished(epoch, dict.fromkeys(late, ()), following)

    def _bind(self, request: BeginRequest) -> None:
        if not self.run.stamps.bind(request.stamp_ms, *request.plan):
            raise wrong_batch(request.epoch)
        self.run.epoch = request.epoch

    # --- ack -----------------------------------------------------------------------------------

    def ack(self, ack: AckRequest) -> Acked:
        """Take in a snapshot.

        Raises:
            StaleRequestError: a newer attempt of its task has acked, or the epoch is over.
            WrongBatchError, ProtocolError: it does not belong to what was begun.
            BroadcastDivergedError: see `RunningOperator.check_agreement`.
        """
        run = self.run
        run.check_alive()
        operator = run.operators.get(ack.operator)
        if operator is None or run.epoch is None or ack.epoch != run.epoch:
            raise stale_attempt(
                f"An ack of operator {ack.operator!r}, subtask {ack.subtask}, for epoch "
                f"{ack.epoch} came while epoch {run.epoch} is running."
            )
        if ack.stamp_ms != run.stamps.current:
            raise wrong_batch(ack.epoch)
        if not operator.follows(ack):
            raise ProtocolError(
                f"The snapshot of operator {ack.operator!r}, subtask {ack.subtask}, for epoch "
                f"{ack.epoch} does not follow from epoch {ack.epoch - 1}.",
                todo="Report this: an attempt worked on another state than it was given.",
            )
        check_sent(ack)
        check_ack_objects(ack, run.generation, operator.blobs)
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

    def check_finished(self, epoch: int) -> None:
        """Raise unless every operator has made ``epoch`` durable (what ``checked`` asks).

        Raises:
            IncompleteEpochError: naming operator and subtasks.
        """
        run = self.run
        run.check_alive()
        if run.epoch is None and run.was_finished(epoch):
            return  # the function knew that it had written this batch already
        if run.epoch != epoch:
            raise IncompleteEpochError(
                f"No operator of job {run.job!r} ran in batch {epoch}: the foreachBatch function "
                f"did not use its frame.",
                todo="Use every row of the frame within the function.",
            )
        self._check_complete(epoch, None)
