"""One run of a job: the coordinator with its I/O around it, behind the driver's service."""

from __future__ import annotations

import contextlib
import logging
import threading

import msgspec
from blake3 import blake3

from recovery.plan import StepSource, plan_restore
from snapshot.coordinator import Coordinator
from snapshot.epoch import Acked
from snapshot.lineage import SliceRef
from snapshot.log import CommitLog, Tenure
from snapshot.messages import (
    AckReply,
    AckRequest,
    BeginReply,
    BeginRequest,
    RestoreReport,
    RestoreStep,
    SlicePart,
)
from snapshot.operators import CommitWork
from snapshot.record import Manifest, Record, parse_record, record_name
from snapshot.storage.base import ObjectStore
from statebackend.errors import (
    CommitUnknownError,
    CoordinatorUnreachableError,
    FencedError,
    ProtocolError,
    StateBackendError,
)

__all__ = ["RunSession"]

_log = logging.getLogger("statebackend.coordinator")


class _Records:
    """Records read for restores: each once, whole, for as long as the first epochs run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._records: dict[int, Record] = {}
        self._lock = threading.Lock()

    def slice(self, ref: SliceRef) -> bytes:
        """A slice's bytes, digest-checked."""
        with self._lock:
            record = self._records.get(ref.sequence)
            if record is None:
                name = record_name(ref.sequence)
                record = parse_record(self._store.get(name), name)
                self._records[ref.sequence] = record
        return record.slice(ref.entry)

    def forget(self, before: int) -> None:
        """Drop what is older than a sequence: running subtasks need the last record at most."""
        with self._lock:
            self._records = {s: r for s, r in self._records.items() if s >= before}


class RunSession:
    """Answers one run's begins and acks.

    Requests wait at a gate until the driver has checked what it started (:meth:`open`), or refuse.
    """

    def __init__(self, *, store: ObjectStore, log: CommitLog, gate_timeout_s: float) -> None:
        self._store, self._commit_log = store, log
        self._gate_timeout_s = gate_timeout_s
        self._gate = threading.Event()
        self._refusal: StateBackendError | None = None
        self._coordinator: Coordinator | None = None
        self._tenure: Tenure | None = None
        self._state_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._records = _Records(store)
        self.restores: list[RestoreReport] = []

    def open(self, coordinator: Coordinator, tenure: Tenure) -> None:
        """Let requests in."""
        self._coordinator, self._tenure = coordinator, tenure
        self._gate.set()

    def refuse(self, error: StateBackendError) -> None:
        """Answer every request with ``error``."""
        self._refusal = error
        self._gate.set()

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

    @property
    def epoch(self) -> int | None:
        """The epoch that is running."""
        return self._coordinator.epoch if self._coordinator else None

    @property
    def failure(self) -> StateBackendError | None:
        """Why nothing is accepted any more; None while all is well."""
        return self._refusal or (self._coordinator.failure if self._coordinator else None)

    def check_finished(self, epoch: int) -> None:
        """Raise unless every operator has made ``epoch`` durable."""
        coordinator, _ = self._ready()
        with self._state_lock:
            coordinator.check_finished(epoch)

    # --- requests ------------------------------------------------------------------------------

    def begin(self, request: BeginRequest) -> tuple[BeginReply, list[bytes]]:
        """Admit an attempt and say how it gets its state."""
        coordinator, _ = self._ready()
        with contextlib.ExitStack() as locks:
            if request.epoch != coordinator.epoch:
                # A record of the epoch before may be on its way (a twin's ack): it decides what
                # this epoch starts from.
                locks.enter_context(self._commit_lock)
            locks.enter_context(self._state_lock)
            admitted = coordinator.begin(request)
            operator = coordinator.lineage(request.operator)
            lineage = operator.subtasks[request.subtask]
            plan = plan_restore(
                request.copy, lineage, job_id=coordinator.job_id, epoch=admitted.base_epoch
            )
            spec = coordinator.spec(request.operator)
            last = operator.epochs.get(admitted.base_epoch)
        if last is not None and not admitted.first_of_run:
            self._records.forget(last.sequence)
        bodies = [
            self._records.slice(step.ref)
            for step in plan.steps
            if step.source is StepSource.RECORD and step.ref.entry.size_bytes
        ]
        steps = [
            RestoreStep(
                epoch=step.ref.entry.epoch,
                kind=step.ref.entry.kind,
                digest=step.ref.entry.digest,
                chain=step.ref.entry.chain,
                size_bytes=step.ref.entry.size_bytes,
                rows=step.ref.entry.rows,
                source=step.source.value,
                name=step.ref.entry.object or "",
            )
            for step in plan.steps
        ]
        reply = BeginReply(
            job_id=coordinator.job_id,
            base_epoch=admitted.base_epoch,
            chain=admitted.chain,
            key_group_start=lineage.key_groups.start,
            key_group_end=lineage.key_groups.end,
            fresh=plan.fresh,
            reason=plan.reason,
            steps=steps,
            states=spec.states,
            inline_budget_bytes=coordinator.inline_budget_bytes,
            restoring=admitted.first_of_run,
            base_due=admitted.base_due,
        )
        return reply, bodies

    def ack(self, request: AckRequest) -> AckReply:
        """Take in a snapshot; the one that completes its operator answers when that is durable."""
        coordinator, tenure = self._ready()
        for part in (request.delta, request.base):
            _check_part(request, part)
        with self._state_lock:
            outcome = coordinator.ack(request)
            if request.restore is not None:
                self.restores.append(request.restore)
        if outcome is not Acked.COMPLETE:
            return AckReply(durable=False)
        with self._commit_lock:
            with self._state_lock:
                work = coordinator.due_commit(request.operator, request.epoch)
            if work is not None:
                self._commit(coordinator, tenure, work)
        return AckReply(durable=True)

    def _commit(self, coordinator: Coordinator, tenure: Tenure, work: CommitWork) -> None:
        # What is retained never grows backwards, whatever a new operator's lineage says.
        oldest = max(work.manifest.oldest_needed, tenure.oldest_needed)
        manifest = msgspec.structs.replace(work.manifest, oldest_needed=oldest)
        try:
            sequence = self._commit_log.append(tenure, manifest, work.bodies)
        except (FencedError, CommitUnknownError) as error:
            with self._state_lock:
                coordinator.fail(error)
            _log.error("%s", error)
            raise
        with self._state_lock:
            coordinator.committed(work, _placed(manifest, work.bodies, sequence))


def _check_part(request: AckRequest, part: SlicePart | None) -> None:
    """Refuse a slice that was damaged on its way: its sender can send it again, later none can."""
    if part is None or part.name:
        return
    if len(part.data) != part.size_bytes or blake3(part.data).hexdigest() != part.digest:
        raise ProtocolError(
            f"The snapshot of operator {request.operator!r}, subtask {request.subtask}, for epoch "
            f"{request.epoch} is not the bytes that it names.",
            todo="The task is tried again; if it happens again, look at the network.",
        )


def _placed(manifest: Manifest, bodies: list[bytes | None], sequence: int) -> Manifest:
    """The manifest as the record has it: with its sequence, and offsets of inline slices."""
    slices = []
    offset = 0
    for entry, body in zip(manifest.slices, bodies, strict=True):
        slices.append(entry if body is None else msgspec.structs.replace(entry, offset=offset))
        offset += len(body or b"")
    return msgspec.structs.replace(manifest, sequence=sequence, slices=slices)
