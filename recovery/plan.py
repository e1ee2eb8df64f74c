"""Which copy a subtask comes back from: a pure decision over what is where.

Order: the local store that stands at the epoch, or behind it with local deltas to go on top; the
same with durable deltas; the durable base and deltas alone. A local copy counts if its lineage
digest is the one that the log names; its age, host and name do not matter.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from snapshot.lineage import SliceRef, SubtaskLineage
from snapshot.messages import LocalCopy
from snapshot.record import record_name
from statebackend.errors import CorruptionError, NotRestorableError

__all__ = ["RestorePlan", "Step", "StepSource", "plan_restore"]


class StepSource(enum.Enum):
    """Where a slice is read from."""

    LOCAL = "local"
    RECORD = "record"
    OBJECT = "object"


@dataclass(frozen=True)
class Step:
    """One slice to apply."""

    ref: SliceRef
    source: StepSource


@dataclass(frozen=True)
class RestorePlan:
    """``fresh``: start from an empty store. ``reason``: why the local store does not do."""

    fresh: bool
    reason: str
    steps: tuple[Step, ...]


def _durable(ref: SliceRef) -> Step:
    return Step(ref, StepSource.OBJECT if ref.entry.object else StepSource.RECORD)


def _why_not(copy: LocalCopy, lineage: SubtaskLineage, job_id: str, epoch: int) -> str | None:
    """Why a local store cannot be the start; None if it can."""
    if copy.epoch is None:
        return "there is no local copy on this host"
    if copy.job_id != job_id:
        return f"the local copy belongs to another job ({copy.job_id})"
    if copy.epoch > epoch:
        return f"the local copy stands at epoch {copy.epoch}, after epoch {epoch}"
    if not lineage.holds(copy.epoch, copy.chain):
        return f"the local copy's lineage at epoch {copy.epoch} is not the log's"
    if copy.applying and copy.epoch == epoch:
        return f"the local copy was left half way past epoch {epoch}"
    if copy.applying and not lineage.holds(copy.epoch + 1, copy.applying):
        return f"the local copy was left half way to another epoch {copy.epoch + 1}"
    missing = [e for e in range(copy.epoch + 1, epoch + 1) if e not in lineage.deltas]
    if missing:
        return f"the local copy stands at epoch {copy.epoch}, too old for the deltas that are kept"
    return None


def plan_restore(
    copy: LocalCopy,
    lineage: SubtaskLineage,
    *,
    job_id: str,
    epoch: int,
    avoid: Collection[str] = (),
) -> RestorePlan:
    """How to bring a subtask to the end of ``epoch``.

    Args:
        copy: what the worker found on its host.
        lineage: the subtask's slices; it knows ``epoch`` (see ``OperatorLineage.require``).
        avoid: durable slices (see `slice_key`) that are known to be damaged. An older base with
            the deltas since is as exact as a newer one; an older epoch never is.

    Raises:
        CorruptionError: without a damaged slice there is no exact way.
        NotRestorableError: the lineage does not hold what leads to ``epoch``.
    """
    why_not = _why_not(copy, lineage, job_id, epoch)
    if why_not is None:
        assert copy.epoch is not None
        here = set(copy.deltas)
        steps = []
        for e in range(copy.epoch + 1, epoch + 1):
            ref = lineage.deltas[e]
            local = (e, ref.entry.digest) in here
            steps.append(Step(ref, StepSource.LOCAL) if local else _durable(ref))
        bad = _damaged(steps, avoid)
        if bad is None:
            return RestorePlan(False, "", tuple(steps))
        why_not = f"it needs the delta of epoch {bad.entry.epoch}, which is damaged"
    base = lineage.base_before(epoch, avoid)
    first = base.entry.epoch + 1 if base else lineage.start_epoch + 1
    missing = [e for e in range(first, epoch + 1) if e not in lineage.deltas]
    steps = [_durable(base)] if base else []
    steps += [_durable(lineage.deltas[e]) for e in range(first, epoch + 1) if e not in missing]
    bad = _damaged(steps, avoid)
    if bad is None and missing:
        bad = lineage.base_before(epoch)  # damaged, or there would be no gap
    if bad is not None:
        raise _no_way(bad, epoch)
    if missing:  # an empty way must never be taken for the way to an empty state
        raise NotRestorableError(
            f"What leads to the state after epoch {epoch} is not known (any more): the deltas of "
            f"epochs {missing[:4]} are missing.",
            todo="If a newer attempt took over, nothing; else report this with the driver's log.",
        )
    return RestorePlan(True, why_not, tuple(steps))


def _damaged(steps: Sequence[Step], avoid: Collection[str]) -> SliceRef | None:
    bad = (s.ref for s in steps if s.source is not StepSource.LOCAL and s.ref.key in avoid)
    return next(bad, None)


def _no_way(bad: SliceRef, epoch: int) -> CorruptionError:
    entry = bad.entry
    where = entry.object or record_name(bad.sequence)
    return CorruptionError(
        f"The state of operator {entry.operator!r}, subtask {entry.subtask}, after epoch {epoch} "
        f"cannot be restored: its {entry.kind} of epoch {entry.epoch} in {where!r} is damaged, and "
        f"nothing else leads to that epoch exactly.",
        todo="Bring back a host that has the local copy, or restore the object from another copy "
        "of the store. An older state is never used in its place.",
    )
