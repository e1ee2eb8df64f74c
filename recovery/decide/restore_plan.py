"""Which copy a subtask comes back from: a pure decision over what is where.

Order: the local store that stands at the epoch, or behind it with local deltas to go on top; the
same with durable deltas; the durable base and deltas alone. A local copy counts if its lineage
digest is the one that the log names; its age, host and name do not matter.

After a change of parallelism a subtask without a base of its own is put together from its parents,
for each of which the same order holds; and what was changed since goes on top.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from snapshot.formats.record import record_name
from snapshot.protocol.lineage import SliceRef, SubtaskLineage
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import CorruptionError, NotRestorableError
from statebackend.keygroups import KeyGroupRange

__all__ = ["RestorePlan", "Step", "StepSource", "plan_restore"]


class StepSource(enum.Enum):
    """Where a slice is read from."""

    LOCAL = "local"
    RECORD = "record"
    OBJECT = "object"


@dataclass(frozen=True)
class Step:
    """One slice to apply, or (``ref`` is None) a local store to start from.

    Attributes:
        keep: the key groups to take of it; None: all.
        found_at: whose folder it lies in, if not the subtask's own.
        epoch, chain: of the slice, or where the store stands.
    """

    ref: SliceRef | None
    source: StepSource
    keep: KeyGroupRange | None = None
    found_at: KeyGroupRange | None = None
    epoch: int = 0
    chain: str = ""


@dataclass(frozen=True)
class RestorePlan:
    """``fresh``: start from an empty store. ``reason``: why the local store does not do.

    ``look_for``: nothing is decided yet: local copies of these key groups must be looked for first.
    """

    fresh: bool
    reason: str
    steps: tuple[Step, ...]
    look_for: tuple[KeyGroupRange, ...] = ()


@dataclass(frozen=True)
class _Known:
    """What the search goes by: local copies by key groups, and what is damaged."""

    job_id: str
    copies: Mapping[KeyGroupRange, LocalCopy]
    avoid: Collection[str]


def _slice(
    ref: SliceRef,
    source: StepSource | None = None,
    keep: KeyGroupRange | None = None,
    found_at: KeyGroupRange | None = None,
) -> Step:
    if source is None:
        source = StepSource.OBJECT if ref.entry.object else StepSource.RECORD
        found_at = None
    return Step(ref, source, keep, found_at, ref.entry.epoch, ref.entry.chain)


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
    reached = copy.applying_epoch or copy.epoch + 1
    if copy.applying and epoch < reached:
        return f"the local copy was left half way past epoch {epoch}"
    if copy.applying and not lineage.holds(reached, copy.applying):
        return f"the local copy was left half way to another epoch {reached}"
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
    ancestors: Mapping[KeyGroupRange, LocalCopy] | None = None,
) -> RestorePlan:
    """How to bring a subtask to the end of ``epoch``.

    Args:
        copy: what the worker found on its host.
        lineage: the subtask's slices; it knows ``epoch`` (see ``OperatorLineage.require``).
        avoid: durable slices (see `slice_key`) that are known to be damaged. An older base with
            the deltas since is as exact as a newer one; an older epoch never is.
        ancestors: what it found of subtasks of an earlier parallelism; None: not looked yet.

    Raises:
        CorruptionError: without a damaged slice there is no exact way.
        NotRestorableError: the lineage does not hold what leads to ``epoch``.
    """
    why_not = _why_not(copy, lineage, job_id, epoch)
    if why_not is None:
        assert copy.epoch is not None
        steps = _after(copy, lineage, epoch, None, None)
        bad = _damaged(steps, avoid)
        if bad is None:
            return RestorePlan(False, "", tuple(steps))
        why_not = f"it needs the delta of epoch {bad.entry.epoch}, which is damaged"
    if copy.epoch is None and lineage.rescaled:
        ranges = (f"{one.key_groups.start}-{one.key_groups.end}" for one in lineage.parents)
        why_not = f"it is made of key groups {', '.join(ranges)}" if lineage.parents else why_not
    if ancestors is None:
        if lineage.parents and lineage.base_before(epoch, avoid) is None:
            origins = (one for parent in lineage.parents for one in parent.origins(epoch))
            wanted = {one.key_groups for one, _ in origins} - {lineage.key_groups}
            return RestorePlan(True, why_not, (), tuple(sorted(wanted)))
        ancestors = {}
    steps = _without_copy(lineage, epoch, None, _Known(job_id, ancestors, avoid))
    return RestorePlan(True, why_not, tuple(steps))


def _after(
    copy: LocalCopy,
    lineage: SubtaskLineage,
    epoch: int,
    keep: KeyGroupRange | None,
    found_at: KeyGroupRange | None,
) -> list[Step]:
    """The deltas on top of a local copy, each from the nearest place."""
    here = set(copy.deltas)
    steps = []
    for e in range((copy.epoch or 0) + 1, epoch + 1):
        ref = lineage.deltas[e]
        local = StepSource.LOCAL if (e, ref.entry.digest) in here else None
        steps.append(_slice(ref, local, keep, found_at))
    return steps


def _without_copy(
    lineage: SubtaskLineage, epoch: int, keep: KeyGroupRange | None, known: _Known
) -> list[Step]:
    """The durable base, or else the parents, and the deltas since."""
    base = lineage.base_before(epoch, known.avoid)
    first = base.entry.epoch + 1 if base else lineage.start_epoch + 1
    missing = [e for e in range(first, epoch + 1) if e not in lineage.deltas]
    since = [
        _slice(lineage.deltas[e], keep=keep) for e in range(first, epoch + 1) if e not in missing
    ]
    steps = [_slice(base, keep=keep)] if base else []
    bad = _damaged([*steps, *since], known.avoid)
    gap = bool(missing) or (base is None and not lineage.origin_known)
    if bad is None and gap:
        bad = lineage.base_before(epoch)  # damaged, or there would be no gap
    if bad is not None:
        raise _no_way(bad, epoch)
    if gap:  # an empty way must never be taken for the way to an empty state
        raise NotRestorableError(
            f"What leads to the state after epoch {epoch} is not known (any more): the deltas of "
            f"epochs {missing[:4] or [lineage.start_epoch]} are missing.",
            todo="If a newer attempt took over, nothing; else report this with the driver's log.",
        )
    if base is None:
        for parent in lineage.parents:
            part = parent.key_groups.intersection(keep or lineage.key_groups)
            if len(part):
                steps += _part(parent, lineage.start_epoch, part, known)
    return steps + since


def _part(lineage: SubtaskLineage, epoch: int, keep: KeyGroupRange, known: _Known) -> list[Step]:
    """Some key groups of another subtask's state: from its local copy, or as a restore of it."""
    copy = known.copies.get(lineage.key_groups)
    if copy is not None and _why_not(copy, lineage, known.job_id, epoch) is None:
        at = lineage.key_groups
        after = _after(copy, lineage, epoch, keep, at)
        if _damaged(after, known.avoid) is None:
            assert copy.epoch is not None
            return [Step(None, StepSource.LOCAL, keep, at, copy.epoch, copy.chain), *after]
    return _without_copy(lineage, epoch, keep, known)


def _damaged(steps: Sequence[Step], avoid: Collection[str]) -> SliceRef | None:
    refs = (s.ref for s in steps if s.ref is not None and s.source is not StepSource.LOCAL)
    return next((ref for ref in refs if ref.key in avoid), None)


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
