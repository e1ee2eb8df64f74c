"""The state of all operators at one epoch: which records of a log lead to it, and which slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from recovery.decide.live_lineages import live_lineages, named_operators
from recovery.savepoints.savepoint import Savepoint
from snapshot.formats.record import Manifest, SliceEntry
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import OperatorLineage, SubtaskLineage, resolve
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, NotRestorableError

__all__ = [
    "KeptRecord",
    "Needed",
    "StateAt",
    "last_epochs",
    "needed_key",
    "saved_state",
    "state_at",
]

_BASES: Final = ("base", "files")
_LINEAGE_KINDS: Final = ("delta", *_BASES)  # the others are whole in every record


@dataclass(frozen=True)
class Needed:
    """A slice, and the sequence of the record that it is read from."""

    sequence: int
    entry: SliceEntry


@dataclass(frozen=True)
class KeptRecord:
    """A record of the copy, with the slices that are kept of it."""

    manifest: Manifest
    slices: tuple[Needed, ...]


@dataclass(frozen=True)
class StateAt:
    """What makes up the state after ``epoch``. ``settings``: what the records say of operators."""

    epoch: int
    records: tuple[KeptRecord, ...]
    lineages: Mapping[str, OperatorLineage]
    settings: dict[str, object]

    def last(self, uid: str) -> Manifest | None:
        """An operator's record of the epoch; None where it had not begun yet."""
        return next(
            (k.manifest for k in reversed(self.records) if k.manifest.operator == uid), None
        )


# --- what is needed ------------------------------------------------------------------------------


def last_epochs(
    manifests: Sequence[Manifest], lineages: Mapping[str, OperatorLineage] | None = None
) -> dict[str, int]:
    """By operator, the newest epoch that a restart would go on from.

    Where a later run began to repeat the newest epoch and not every operator finished it again, the
    others' records are of the run before: for them it is the epoch before. A run that the user made
    go back (`go_back_to=`) leaves records of later epochs, too.

    Args:
        lineages: the live ones of these manifests, where they are known.
    """
    lineages = live_lineages(manifests) if lineages is None else lineages
    entries = {uid: one.epochs[one.last_epoch] for uid, one in lineages.items() if one.epochs}
    newest = max(entries.values(), key=lambda entry: entry.sequence, default=None)
    found = {uid: one.last_epoch for uid, one in lineages.items()}
    for uid, entry in entries.items():
        if newest and entry.epoch >= newest.epoch and entry.run != newest.run:
            found[uid] = newest.epoch - 1
    for uid, first_epoch in (named_operators(manifests) or {}).items():
        found.setdefault(uid, first_epoch - 1)
    return found


def state_at(
    manifests: Sequence[Manifest], epoch: int, live: Mapping[str, OperatorLineage] | None = None
) -> StateAt:
    """What the state of all operators after ``epoch`` needs of a log.

    Args:
        manifests: every record that is needed, ascending, as `CommitLog.manifests` gives them.
        live: their live lineages, where they are known.

    Raises:
        NotRestorableError: the log does not hold all of it (any more).
        CorruptionError: its lineage digests do not follow from one another.
    """
    live = live_lineages(manifests) if live is None else live
    records = _with_late_bases(manifests, _begun(live, epoch), epoch)
    lineages = resolve(kept.manifest for kept in records)
    oldest = {uid: _pruned(lineage, epoch) for uid, lineage in lineages.items()}
    operators = named_operators(manifests)
    settings: dict[str, object] = {} if operators is None else {"operators": operators}
    return StateAt(epoch, _only_needed(records, lineages, oldest), lineages, settings)


def _begun(live: Mapping[str, OperatorLineage], epoch: int) -> dict[str, OperatorLineage]:
    """The operators that had begun by an epoch; the log leads to the state of each."""
    begun = {uid: one for uid, one in live.items() if epoch >= one.first_epoch}
    for lineage in begun.values():
        lineage.require(epoch)
    if not begun:
        raise NotRestorableError(
            f"No operator has finished epoch {epoch}, or any before it.",
            todo="Let the query finish a batch first.",
        )
    return begun


def _pruned(lineage: OperatorLineage, epoch: int) -> int:
    """Leaves of a lineage what an epoch needs; returns the oldest epoch that it can tell then."""
    _require(lineage, epoch)
    oldest = _prune_to(lineage, epoch)
    lineage.prune(oldest)
    return oldest


def _only_needed(
    records: Sequence[KeptRecord],
    lineages: Mapping[str, OperatorLineage],
    oldest: Mapping[str, int],
) -> tuple[KeptRecord, ...]:
    """The records with those of their slices that are needed; the last of an operator even bare.

    Args:
        lineages: pruned. oldest: the first epoch of each.
    """
    refs = {key for one in lineages.values() for sub in one.subtasks for key in _refs(sub)}
    last = {kept.manifest.operator: kept.manifest.sequence for kept in records}
    newest = {(k.manifest.operator, k.manifest.epoch): k.manifest.sequence for k in records}

    def is_needed(record: Manifest, entry: SliceEntry) -> bool:
        if entry.kind in _LINEAGE_KINDS:
            return (record.sequence, needed_key(entry)) in refs
        # States that belong to no key are whole in the record of each epoch.
        uid, epoch = record.operator, record.epoch
        return epoch >= oldest[uid] and newest[uid, epoch] == record.sequence

    chosen = []
    for kept in records:
        record = kept.manifest
        slices = tuple(one for one in kept.slices if is_needed(record, one.entry))
        if slices or last[record.operator] == record.sequence:
            chosen.append(KeptRecord(record, slices))
    return tuple(chosen)


def _require(lineage: OperatorLineage, epoch: int) -> None:
    try:
        lineage.require(epoch)
    except NotRestorableError as error:  # half of it only by way of records of later epochs
        raise NotRestorableError(
            f"The state of operator {lineage.uid!r} after epoch {epoch} cannot be told from what "
            f"came later: its parallelism was changed in the epoch after it.",
            todo="Let the query finish one more batch, and try again.",
        ) from error


def _prune_to(lineage: OperatorLineage, epoch: int) -> int:
    """One epoch before, where that costs little: what reads a log reads its last two epochs."""
    try:
        lineage.require(epoch - 1)
    except NotRestorableError:
        return epoch
    return epoch - 1 if epoch - 1 in lineage.epochs else epoch


def needed_key(entry: SliceEntry) -> str:
    """Names a slice among those of its record."""
    return f"{entry.subtask}:{entry.epoch}:{entry.kind}:{entry.digest}"


def _refs(subtask: SubtaskLineage) -> Iterator[tuple[int, str]]:
    """Every slice of a pruned lineage, and of its parents where they are still needed."""
    for ref in (*subtask.deltas.values(), *subtask.bases.values()):
        yield ref.sequence, needed_key(ref.entry)
    for parent in subtask.parents:
        yield from _refs(parent)


def _with_late_bases(
    manifests: Sequence[Manifest], live: Mapping[str, OperatorLineage], epoch: int
) -> list[KeptRecord]:
    """The records up to the epoch; bases that later ones name move into the epoch's own.

    A base is made while later epochs run. Once its record is there, older ones may be gone.
    """
    records: list[KeptRecord] = []
    at: dict[str, int] = {}
    for manifest in manifests:
        lineage = live.get(manifest.operator) if manifest.kind == "checkpoint" else None
        if lineage is None or manifest.first_epoch != lineage.first_epoch:
            continue
        if manifest.epoch <= epoch:
            slices = tuple(Needed(manifest.sequence, entry) for entry in manifest.slices)
            if manifest.epoch == epoch:
                at[manifest.operator] = len(records)
            records.append(KeptRecord(manifest, slices))
    for uid, lineage in live.items():
        if uid not in at:
            raise NotRestorableError(
                f"The record of operator {uid!r} for epoch {epoch} is not in the log.",
                todo="Let the query finish one more batch, and try again.",
            )
        kept = records[at[uid]]
        late = [
            Needed(ref.sequence, ref.entry)
            for subtask in lineage.subtasks
            for ref in subtask.bases.values()
            if ref.entry.epoch <= epoch and ref.sequence > kept.manifest.sequence
        ]
        if late and lineage.parallelism == kept.manifest.parallelism:
            records[at[uid]] = _with(kept, late)
    return records


def _with(kept: KeptRecord, late: Sequence[Needed]) -> KeptRecord:
    replaced = {(one.entry.subtask, one.entry.epoch) for one in late}
    stays = tuple(
        one
        for one in kept.slices
        if one.entry.kind not in _BASES or (one.entry.subtask, one.entry.epoch) not in replaced
    )
    slices = (*stays, *late)
    entries = [one.entry for one in slices]
    return KeptRecord(msgspec.structs.replace(kept.manifest, slices=entries), slices)


def saved_state(store: ObjectStore, savepoint: Savepoint, log: CommitLog) -> StateAt:
    """A savepoint's state, as its log has it, checked to be what `savepoint.json` says.

    Raises:
        CorruptionError, NotRestorableError: it is not all there.
    """
    manifests = log.manifests()
    state = state_at(manifests, savepoint.epoch)
    there = {uid: one.parallelism for uid, one in state.lineages.items()}
    said = {one.uid: one.parallelism for one in savepoint.operators}
    if there != said or any(m.job_id != savepoint.job_id for m in manifests):
        raise CorruptionError(
            f"The log in {store.uri} is not the savepoint's: it holds the operators {there}, and "
            f"savepoint.json names {said}.",
            todo="Restore the folder from another copy, or use another savepoint.",
        )
    return state
