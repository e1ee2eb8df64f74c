"""What an attempt is told: the plan of its restore with the bytes that go along."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from recovery.decide.restore_plan import RestorePlan, Step, StepSource
from snapshot.formats.file_index import decode_index
from snapshot.formats.record import SliceEntry, slice_key
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.lineage import SliceRef, SubtaskLineage
from snapshot.protocol.messages import (
    AncestorCopy,
    BaseGrant,
    BeginReply,
    BeginRequest,
    LocalCopy,
    RestoreStep,
    SlicePart,
    StatePart,
)
from snapshot.protocol.operator_state_slices import Source
from snapshot.protocol.operators import Admitted, OperatorSpec
from snapshot.protocol.running_job import RunningJob
from statebackend.errors import CorruptionError, StateBackendError
from statebackend.keygroups import KeyGroupRange
from statebackend.runtime.driver.restore_records import DamagedSliceError, Records

__all__ = [
    "Admission",
    "admission_of",
    "base_grant",
    "begin_reply",
    "copies_by_groups",
    "layer_steps",
    "plan_steps",
    "state_parts",
]


def copies_by_groups(found: Iterable[AncestorCopy]) -> dict[KeyGroupRange, LocalCopy]:
    """Local copies of other subtasks, as a plan looks them up."""
    return {KeyGroupRange(one.key_group_start, one.key_group_end): one.copy for one in found}


@dataclass(frozen=True)
class Admission:
    """A begin that was admitted, with what was looked up under the lock of its admission.

    Attributes:
        lineage: the subtask's. spec: its operator's.
        durable_chain: the digest of the state after the newest epoch that the log holds.
        previous: the base before the one that the attempt is to upload; None: it is to upload none.
    """

    admitted: Admitted
    plan: RestorePlan
    lineage: SubtaskLineage
    spec: OperatorSpec
    durable_chain: str
    previous: SliceRef | None


def admission_of(
    admitted: Admitted, plan: RestorePlan, lineage: SubtaskLineage, spec: OperatorSpec
) -> Admission:
    """Looks up what an admission needs of a subtask's lineage."""
    epoch = admitted.durable_epoch
    chain = lineage.chain_at(epoch) or admitted.chain
    previous = lineage.base_before(epoch) if admitted.grant else None
    return Admission(admitted, plan, lineage, spec, chain, previous)


def begin_reply(
    admission: Admission,
    run: RunningJob,
    generation: int,
    *,
    steps: list[RestoreStep],
    layers: list[RestoreStep],
    grant: BaseGrant | None,
    operator_parts: list[StatePart],
    broadcast: StatePart | None,
    lookups: bool = False,
) -> BeginReply:
    """The answer to a begin that was admitted; the fields are those of `BeginReply`."""
    admitted, plan, spec = admission.admitted, admission.plan, admission.spec
    key_groups = admission.lineage.key_groups
    return BeginReply(
        job_id=run.job_id,
        generation=generation,
        base_epoch=admitted.base_epoch,
        durable_epoch=admitted.durable_epoch,
        durable_chain=admission.durable_chain,
        chain=admitted.chain,
        key_group_start=key_groups.start,
        key_group_end=key_groups.end,
        fresh=plan.fresh,
        reason=plan.reason,
        steps=steps,
        layers=layers,
        states=spec.states,
        inline_budget_bytes=run.inline_budget_bytes,
        restoring=admitted.first_of_run,
        base_due=admitted.base_due,
        grant=grant,
        watermark_ms=admitted.time.watermark_ms,
        late_watermark_ms=admitted.time.late_watermark_ms,
        initial=[admitted.initial] if admitted.initial is not None else [],
        dropped=list(admitted.dropped),
        versions=spec.versions,
        look_for=[(one.start, one.end) for one in plan.look_for],
        settled=run.settled,
        lookups=lookups,
        operator_parallelism=admitted.blobs.parallelism,
        operator_parts=operator_parts,
        broadcast=broadcast,
    )


def state_parts(
    admission: Admission, request: BeginRequest, records: Records
) -> tuple[list[StatePart], StatePart | None, list[bytes]]:
    """States that belong to no key: lists, the broadcast map, and the bytes that go along.

    Raises:
        CorruptionError: a record does not hold what it names.
    """
    blobs, parallelism = admission.admitted.blobs, admission.spec.parallelism
    bodies: list[bytes] = []

    def part(source: Source, subtask: int) -> StatePart:
        said = source.entry if isinstance(source, SliceRef) else source
        name = (said.object if isinstance(said, SliceEntry) else said.name) or ""
        where = "object" if name else "record"
        if said.digest in request.held:
            where = "held"
        if where == "record":
            bodies.append(_state_bytes(source, records))
        return StatePart(
            digest=said.digest,
            size_bytes=said.size_bytes,
            source=where,
            name=name,
            subtask=subtask,
        )

    wanted = sorted(blobs.lists)
    if blobs.parallelism == parallelism:
        wanted = [subtask for subtask in wanted if subtask == request.subtask]
    lists = [part(blobs.lists[subtask], subtask) for subtask in wanted]
    broadcast = None if blobs.broadcast is None else part(blobs.broadcast, 0)
    return lists, broadcast, bodies


def _state_bytes(source: Source, records: Records) -> bytes:
    if not isinstance(source, SliceRef):
        return source.data
    try:
        return records.slice(source)
    except DamagedSliceError as damaged:
        raise damaged.error from damaged


def plan_steps(plan: RestorePlan, records: Records) -> tuple[list[RestoreStep], list[bytes]]:
    """The steps of a plan, and the bytes of those that come with the reply.

    Raises:
        DamagedSliceError: the plan cannot be carried out.
    """
    bodies = [
        records.slice(step.ref)
        for step in plan.steps
        if step.source is StepSource.RECORD and step.ref and step.ref.entry.size_bytes
    ]
    return [_step(step) for step in plan.steps], bodies


def _step(step: Step) -> RestoreStep:
    keep = (step.keep.start, step.keep.end) if step.keep else None
    at = (step.found_at.start, step.found_at.end) if step.found_at else None
    if step.ref is None:
        return RestoreStep(
            epoch=step.epoch,
            kind="store",
            digest="",
            chain=step.chain,
            size_bytes=0,
            rows=0,
            source=step.source.value,
            keep=keep,
            found_at=at,
        )
    entry = step.ref.entry
    return RestoreStep(
        epoch=entry.epoch,
        kind=entry.kind,
        digest=entry.digest,
        chain=entry.chain,
        size_bytes=entry.size_bytes,
        rows=entry.rows,
        source=step.source.value,
        name=entry.object or "",
        keep=keep,
        found_at=at,
    )


def layer_steps(admission: Admission, copy: LocalCopy) -> tuple[list[RestoreStep], list[bytes]]:
    """What a subtask acked and no record holds yet: from its own disk, or from the ack.

    Raises:
        CorruptionError: it cannot be read.
    """
    ack = admission.admitted.layer
    if ack is None or admission.plan.look_for:
        return [], []
    deltas = [] if admission.plan.fresh else copy.deltas  # beside a new store lies nothing
    part: SlicePart = ack.delta
    if slice_key("delta", part.digest) in copy.damaged:
        raise CorruptionError(
            f"The changes of operator {ack.operator!r}, subtask {ack.subtask}, in epoch "
            f"{ack.epoch} cannot be read from {part.name!r}, and no record holds them yet.",
            todo="Start the query again: it goes back to the epoch before.",
        )
    bodies: list[bytes] = []
    if (ack.epoch, part.digest) in deltas:
        source = StepSource.LOCAL
    elif part.name:
        source = StepSource.OBJECT
    else:
        source = StepSource.RECORD
        bodies = [part.data] if part.size_bytes else []
    step = RestoreStep(
        epoch=ack.epoch,
        kind="delta",
        digest=part.digest,
        chain=ack.chain,
        size_bytes=part.size_bytes,
        rows=part.rows,
        source=source.value,
        name=part.name,
    )
    return [step], bodies


def base_grant(
    admission: Admission, records: Records, policy: BasePolicy, whole_limit_bytes: int
) -> BaseGrant | None:
    """A grant as the worker gets it: with the index of the base before, whose files are kept."""
    given, previous = admission.admitted.grant, admission.previous
    if given is None or admission.plan.look_for:
        return None
    index = b""
    if previous is not None and previous.entry.kind == "files":
        # Where it cannot be read, nothing of it is named again: the state does not need it.
        with contextlib.suppress(DamagedSliceError, StateBackendError):
            found = records.index(previous)
            given.given = frozenset(file.object for file in decode_index(found).files)
            index = found
    return BaseGrant(
        id=given.id,
        epoch=given.epoch,
        chain=given.chain,
        index=index,
        whole_limit_bytes=whole_limit_bytes,
        renew_s=policy.lease_s / 4,
    )
