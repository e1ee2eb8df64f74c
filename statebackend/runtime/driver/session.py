"""One run of a job: the coordinator with its I/O around it, behind the driver's service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from recovery.decide.restore_plan import RestorePlan, plan_restore
from snapshot.barriers.job_watermark import NextDue
from snapshot.log.commit_log import CommitLog, Tenure
from snapshot.log.progress_book import ProgressBook
from snapshot.protocol.ack_checks import check_part
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.initial_state_checks import check_initial
from snapshot.protocol.lineage import SubtaskLineage
from snapshot.protocol.messages import (
    AckReply,
    AckRequest,
    BaseDone,
    BaseRenewal,
    BaseReply,
    BeginReply,
    BeginRequest,
    RestoreReport,
    RestoreStep,
)
from snapshot.protocol.operators import CommitWork
from snapshot.protocol.refusal_texts import interrupted, stale_attempt
from snapshot.protocol.running_job import RunningJob
from snapshot.protocol.stamps import Stamps
from snapshot.retention.garbage_collection import CleanReport, clean
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CoordinatorUnreachableError,
    CorruptionError,
    NotRestorableError,
    StateBackendError,
)
from statebackend.runtime.driver.attempt_timeouts import Attempts
from statebackend.runtime.driver.background_cleaning import Cleaner
from statebackend.runtime.driver.begin_replies import (
    Admission,
    admission_of,
    base_grant,
    begin_reply,
    copies_by_groups,
    layer_steps,
    plan_steps,
    state_parts,
)
from statebackend.runtime.driver.job import overtaken
from statebackend.runtime.driver.pending_lookups import LookupDesk
from statebackend.runtime.driver.restore_records import DamagedSliceError, Records
from statebackend.runtime.driver.unchecked_batches import BatchChecks
from statebackend.system import SYSTEM, System
from statebackend.threads import Future
from statebackend.work_queue import WorkQueue

__all__ = ["RunSession"]

_log = logging.getLogger("statebackend.coordinator")
_SETTLE_S: Final = 30.0
T = TypeVar("T")


class RunSession:
    """Answers one run's begins and acks.

    Requests wait at a gate until the driver has checked what it started (:meth:`open`), or refuse.

    Args:
        store: the job's folder. log: its commit log. gate_timeout_s: how long requests wait there.
        whole_limit_bytes: state up to this size has bases of one object.
        progress: collects events. attempts: told of begins and acks, if somebody watches them.
        clean_every_epochs: 0 for never. clean_min_age_s: younger objects stay.
        on_epoch_acked: told what is due next when the last operator has acked an epoch in full
            (with synchronous commits: and all of it is durable), once more if a later attempt
            changes that, and when the run begins. It is called in a request's thread, without a
            lock; it must not wait. What it raises is logged.
        system: the driver's. clean: deletes what nobody needs; see `Cleaner`.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        log: CommitLog,
        gate_timeout_s: float,
        whole_limit_bytes: int = 8 << 20,
        progress: ProgressBook | None = None,
        attempts: Attempts | None = None,
        clean_every_epochs: int = 0,
        clean_min_age_s: float = 0.0,
        on_epoch_acked: Callable[[NextDue], None] | None = None,
        system: System = SYSTEM,
        clean: Callable[..., CleanReport] = clean,
    ) -> None:
        self._store, self._commit_log = store, log
        self._system, threads = system, system.threads
        self._on_epoch_acked = on_epoch_acked
        self._published_due: NextDue | None = None
        self._gate_timeout_s = gate_timeout_s
        self._whole_limit_bytes = whole_limit_bytes
        self.progress = progress or ProgressBook(threads=threads)
        self.attempts = attempts
        self._gate = threads.event()
        self._refusal: StateBackendError | None = None
        self._coordinator: Coordinator | None = None
        self._check_plan: Callable[[int, int], None] | None = None
        self._tenure: Tenure | None = None
        self._state_lock = threads.lock()
        self._commit_lock = threads.lock()
        self._publish_lock = threads.lock()
        self._records = Records(store, threads)
        self._damaged: set[str] = set()
        self._writer = WorkQueue("statebackend-commit", threads)
        self._in_flight: dict[str, Future[None]] = {}
        self._before: dict[str, Future[None]] = {}  # by operator: the record before that
        self._due_epochs: dict[str, int] = {}
        self.cleaner = Cleaner(
            store,
            log,
            self._records,
            self._state_lock,
            every_epochs=clean_every_epochs,
            min_age_ms=int(clean_min_age_s * 1000),
            threads=threads,
            clean=clean,
        )
        self.restores: list[RestoreReport] = []
        self.checks = BatchChecks()
        self.lookups = LookupDesk(system)

    def open(
        self,
        coordinator: Coordinator,
        tenure: Tenure,
        check_plan: Callable[[int, int], None] | None = None,
    ) -> None:
        """Let requests in.

        Args:
            check_plan: given the run's first epoch and its stamp, before it begins; whatever it
                raises refuses it.

        Raises:
            ProtocolError: initial state lies where it is not kept from cleaning.
        """
        check_initial(coordinator.run.specs.values(), tenure.generation)
        self._coordinator, self._tenure = coordinator, tenure
        self._check_plan = check_plan
        self._records.seed(self._commit_log.take_records())
        self._gate.set()
        self._publish_due(coordinator)

    def _publish_due(self, coordinator: Coordinator) -> None:
        """Say what is due next, if that is known and was not said already."""
        tell = self._on_epoch_acked
        if tell is None:
            return
        with self._publish_lock:  # not the state's: a file is written
            with self._state_lock:
                due = coordinator.run.next_due()
            if due is None or due == self._published_due:
                return
            self._published_due = due
            try:
                tell(due)
            except Exception:
                _log.exception("what is due after epoch %d was not taken in", due.epoch)

    def query_ended(self) -> None:
        """Let go of what holds the query: nobody needs to know what is due in it."""
        self._on_epoch_acked = self._check_plan = None
        self.lookups.close()

    def drain(self, timeout_s: float) -> bool:
        """Wait for the records on their way, also of an ended query; whether none is left."""
        return self._writer.drain(timeout_s)

    def refuse(self, error: StateBackendError) -> None:
        """Answer every request with ``error``."""
        self._refusal = error
        self._gate.set()
        self.lookups.close()

    def _ready(self) -> tuple[Coordinator, Tenure]:
        if not self._gate.wait(self._gate_timeout_s):
            raise CoordinatorUnreachableError(
                f"The driver had not finished its checks {self._gate_timeout_s:g} s after the "
                f"query was started.",
                todo="With `with backend.starting():`, start the query inside the block and leave "
                "it at once.",
            )
        if self._refusal is not None:
            raise self._refusal
        assert self._coordinator is not None
        assert self._tenure is not None
        return self._coordinator, self._tenure

    def identity(self) -> tuple[str, str]:
        """The job's id, and the query's. Waits for the driver's checks, and raises as a request."""
        return (run := self._ready()[0].run).job_id, run.query_id

    @property
    def epoch(self) -> int | None:
        """The epoch that is running."""
        return self._coordinator.run.epoch if self._coordinator else None

    @property
    def stamps(self) -> Stamps | None:
        """The stamps that it has seen."""
        return self._coordinator.run.stamps if self._coordinator else None

    @property
    def failure(self) -> StateBackendError | None:
        """Why nothing is accepted any more; None while all is well."""
        return self._refusal or (self._coordinator.run.failure if self._coordinator else None)

    def check_finished(self, epoch: int) -> None:
        """Raise unless every operator has made ``epoch`` durable."""
        coordinator, _ = self._ready()
        if coordinator.run.asynchronous:
            self._settle()
        with self._state_lock:
            coordinator.check_finished(epoch)
            self.checks.passed(epoch)

    def _settle(self) -> None:
        """Wait a while for all records but the newest: they may land in a moment."""
        self._system.threads.wait(list(self._before.values()), _SETTLE_S)

    def looked_at(self, look: Callable[[RunningJob], T]) -> T | None:
        """What is seen of the run while nothing of it changes; None: it has not begun."""
        with self._state_lock:
            return look(self._coordinator.run) if self._coordinator is not None else None

    # --- requests ------------------------------------------------------------------------------

    def begin(self, request: BeginRequest) -> tuple[BeginReply, list[bytes]]:
        """Admit an attempt and say how it gets its state."""
        coordinator, tenure = self._ready()
        with self._state_lock:
            coordinator.check_asker(request)
            self.checks.require(coordinator.run.epoch, request.epoch)
        check_plan = self._check_plan
        if coordinator.run.epoch is None and check_plan is not None:
            check_plan(request.epoch, request.stamp_ms)  # no lock: it reads a file
        try:
            answer = self._begin(coordinator, tenure, request)
        except (CorruptionError, NotRestorableError) as error:
            fenced = overtaken(self._commit_log, tenure)
            if fenced is None:
                raise
            raise fenced from error
        if self.attempts is not None:
            self.attempts.begun(
                request.operator,
                request.subtask,
                request.epoch,
                request.attempt,
                self._system.monotonic_s(),
            )
        return answer

    def _begin(
        self, coordinator: Coordinator, tenure: Tenure, request: BeginRequest
    ) -> tuple[BeginReply, list[bytes]]:
        if coordinator.run.asynchronous and request.epoch != coordinator.run.epoch:
            self._settle()
        admission = self._admit(coordinator, request)
        self.progress.begun(request, self._system.monotonic_s())
        admission, steps, bodies = self._steps(coordinator, request, admission)
        layers, of_layers = layer_steps(admission, request.copy)
        policy, whole_bytes = coordinator.uploads.policy, self._whole_limit_bytes
        grant = base_grant(admission, self._records, policy, whole_bytes)
        lists, broadcast, of_state = state_parts(admission, request, self._records)
        reply = begin_reply(
            admission,
            coordinator.run,
            tenure.generation,
            steps=steps,
            layers=layers,
            grant=grant,
            operator_parts=lists,
            broadcast=broadcast,
            lookups=self.lookups.wanted,
        )
        return reply, [*bodies, *of_layers, *of_state]

    def _admit(self, coordinator: Coordinator, request: BeginRequest) -> Admission:
        """Admit an attempt, and plan its restore under the same lock.

        When the epoch moves on, what leads to it is pruned.
        """
        with contextlib.ExitStack() as locks:
            if request.epoch != coordinator.run.epoch:
                # A record of the epoch before may be on its way (a twin's ack): it decides what
                # this epoch starts from.
                locks.enter_context(self._commit_lock)
            locks.enter_context(self._state_lock)
            before = coordinator.run.epoch
            admitted = coordinator.begin(request)
            if coordinator.run.epoch != before:
                self._published_due = None  # what was due before may have fired in it
            operator = coordinator.run.operators[request.operator].lineage
            last = operator.epochs.get(admitted.durable_epoch)
            lineage = operator.subtasks[request.subtask]
            plan = self._plan(coordinator, lineage, request, admitted.durable_epoch)
            spec = coordinator.run.specs[request.operator]
            admission = admission_of(admitted, plan, lineage, spec)
            if plan.look_for and admitted.grant is not None:
                # Given when it asks again.
                coordinator.uploads.withdraw(request.operator, admitted.grant)
        if last is not None and not admitted.first_of_run:
            self._records.forget(last.sequence)
        return admission

    def _steps(
        self, coordinator: Coordinator, request: BeginRequest, admission: Admission
    ) -> tuple[Admission, list[RestoreStep], list[bytes]]:
        """The steps of a plan with their bytes, or of another one where a slice is damaged."""
        lineage, epoch = admission.lineage, admission.admitted.durable_epoch
        while True:
            try:
                return admission, *plan_steps(admission.plan, self._records)
            except DamagedSliceError as damaged:
                _log.error("%s", damaged.error)
                self._damaged.add(damaged.ref.key)
            with self._state_lock:
                plan = self._plan(coordinator, lineage, request, epoch)
            admission = replace(admission, plan=plan)

    def _plan(
        self,
        coordinator: Coordinator,
        lineage: SubtaskLineage,
        request: BeginRequest,
        epoch: int,
    ) -> RestorePlan:
        """The nearest exact way to the state after ``epoch`` that is not known to be damaged."""
        if coordinator.run.epoch != request.epoch:
            raise stale_attempt(f"Epoch {request.epoch} ended while its attempt was being planned.")
        found = request.ancestors
        return plan_restore(
            request.copy,
            lineage,
            job_id=coordinator.run.job_id,
            epoch=epoch,
            avoid=self._damaged.union(request.copy.damaged),
            ancestors=None if found is None else copies_by_groups(found),
        )

    def ack(self, request: AckRequest) -> AckReply:
        """Take in a snapshot; the one that completes its operator answers when that is durable."""
        if self.attempts is not None:
            self.attempts.over(request.operator, request.subtask, request.attempt)
        coordinator, tenure = self._ready()
        for part in (request.delta, request.base, request.operator_state, request.broadcast):
            check_part(request, part)
        before = None
        with self._state_lock:
            outcome = coordinator.ack(request)
            if request.restore is not None:
                self.restores.append(request.restore)
            if outcome is Acked.COMPLETE and coordinator.run.asynchronous:
                before = self._commit_behind(coordinator, tenure, request)
        self.progress.acked(request, self._system.monotonic_s())
        if before is not None:
            before.result()
        if outcome is not Acked.COMPLETE:
            return AckReply(durable=False)
        if not coordinator.run.asynchronous:
            with self._commit_lock:
                with self._state_lock:
                    work = coordinator.records.take_due(request.operator, request.epoch)
                if work is not None:
                    self._commit(coordinator, tenure, work)
        self._publish_due(coordinator)
        return AckReply(durable=not coordinator.run.asynchronous)

    def _commit_behind(
        self, coordinator: Coordinator, tenure: Tenure, ack: AckRequest
    ) -> Future[None] | None:
        """Have a record written while the next epoch runs; the one before, to be waited for.

        Under the lock: records are written in the order in which they were due.
        """
        before = self._in_flight.get(ack.operator)
        again = self._due_epochs.get(ack.operator) == ack.epoch
        # Of an earlier run, at whatever parallelism, where the epoch is repeated.
        again = again or coordinator.run.was_recorded(ack.operator, ack.epoch)
        work = coordinator.records.take_due(ack.operator, ack.epoch)
        if work is None:
            return before
        try:
            written = self._writer.submit(lambda: self._commit(coordinator, tenure, work))
        except BaseException as error:  # it was taken for due, and never will be again
            coordinator.run.fail(interrupted(work.operator, work.epoch, error))
            raise
        if before is not None and self._due_epochs[ack.operator] < ack.epoch:
            self._before[ack.operator] = before
        self._in_flight[ack.operator], self._due_epochs[ack.operator] = written, ack.epoch
        # The log holds another state of this epoch, or will: Spark may commit the batch only once
        # that is replaced. Else a crash would leave this output with that state.
        return written if again else before

    def _commit(self, coordinator: Coordinator, tenure: Tenure, work: CommitWork) -> None:
        # What is retained never grows backwards, whatever a new operator's lineage says.
        oldest = max(work.manifest.oldest_needed, tenure.oldest_needed)
        started_s = self._system.monotonic_s()
        figures = self.progress.figures.of(work, started_s, self._system.wall_ms())
        manifest = msgspec.structs.replace(work.manifest, oldest_needed=oldest, figures=figures)
        self.progress.commit_begins(work, started_s)
        try:
            with self._state_lock:
                coordinator.records.check_follows(work)
            sequence = self._commit_log.append(tenure, manifest, work.bodies)
            with self._state_lock:
                coordinator.records.committed(work, self._commit_log.known(sequence))
        except BaseException as error:
            failure = error if isinstance(error, StateBackendError) else tenure.ended
            with self._state_lock:
                coordinator.run.fail(failure or interrupted(work.operator, work.epoch, error))
            self.progress.figures.gave_up(work, str(error))
            _log.error("%s", error)
            self.progress.commit_failed(work)
            raise
        self.progress.committed(work, sequence, started_s, self._system.monotonic_s())
        self.cleaner.after_commit(coordinator, tenure, work.epoch)

    def call(self, kind: str, body: bytes) -> bytes:
        """A worker asks for lookups; see `LookupDesk.call`."""
        return self.lookups.call(kind, body)

    # --- bases ---------------------------------------------------------------------------------

    def base_done(self, request: BaseDone) -> BaseReply:
        """A base is durable; the operator's next record names it."""
        coordinator, _ = self._ready()
        check_part(request, request.part)
        files = self._records.learn_index(request.part).files if request.kind == "files" else []
        with self._state_lock:
            coordinator.uploads.done(request, [file.object for file in files])
        self.progress.base_done(request)
        return BaseReply(lease_s=coordinator.uploads.policy.lease_s)

    def base_renewed(self, request: BaseRenewal) -> BaseReply:
        """An upload goes on."""
        coordinator, _ = self._ready()
        if request.given_up and request.why:
            _log.log(logging.INFO if request.harmless else logging.WARNING, "%s", request.why)
        with self._state_lock:
            return BaseReply(lease_s=coordinator.uploads.renewed(request))
