"""Which epochs are lost by damage: those that cannot be put together any more. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from snapshot.formats.record import Manifest, SliceEntry
from snapshot.protocol.lineage import EpochEntry, OperatorLineage, SliceRef, SubtaskLineage
from statebackend.errors import CorruptionError

__all__ = ["Lost", "Needs", "SliceKey", "slice_key", "tolerant_lineages"]

SliceKey: TypeAlias = tuple[int, str, int, str, int]
"""A slice: its record's sequence, operator, subtask, kind, epoch."""


def slice_key(sequence: int, entry: SliceEntry) -> SliceKey:
    """What a slice is known by."""
    return sequence, entry.operator, entry.subtask, entry.kind, entry.epoch


def tolerant_lineages(
    manifests: Iterable[Manifest],
) -> tuple[dict[str, OperatorLineage], list[tuple[int, CorruptionError]]]:
    """As `snapshot.protocol.lineage.resolve`, but going on after a manifest that does not fit.

    Its epoch is then not complete. Returns the lineages by uid, and what did not fit, by sequence.
    """
    operators: dict[str, OperatorLineage] = {}
    breaks: list[tuple[int, CorruptionError]] = []
    for manifest in manifests:
        if manifest.kind != "checkpoint":
            continue
        try:
            lineage = OperatorLineage.following(operators.get(manifest.operator), manifest)
            operators[manifest.operator] = lineage
            lineage.add(manifest)
        except CorruptionError as error:
            breaks.append((manifest.sequence, error))
        except Exception as error:
            problem = CorruptionError(
                f"The manifest of record {manifest.sequence} makes no sense "
                f"({type(error).__name__}: {error}).",
                todo="Restore it from another copy of the store.",
            )
            breaks.append((manifest.sequence, problem))
    return operators, breaks


@dataclass(frozen=True)
class Lost:
    """An epoch that cannot be restored. ``gap``: because a slice is not known at all."""

    operator: str
    subtask: int
    epoch: int
    reason: str
    gap: bool


@dataclass(frozen=True)
class Needs:
    """The operators' lineages, and their epochs that somebody may ask for."""

    lineages: Mapping[str, OperatorLineage]

    def epochs(self) -> dict[str, list[int]]:
        """Of each operator, the newest complete epoch and the one before it, if it is there."""
        return {uid: sorted(lineage.epochs)[-2:] for uid, lineage in self.lineages.items()}

    def lost(self, bad: Collection[SliceKey]) -> list[Lost]:
        """What cannot be restored without these slices."""
        unheld = [_unheld(uid, o.epochs[e], bad) for uid, o, e in self._asked()]
        return [one for one in unheld if one is not None] + [
            found
            for uid, epochs in self.epochs().items()
            for epoch in epochs
            for number, subtask in enumerate(self.lineages[uid].subtasks)
            if (found := _lost(uid, number, subtask, epoch, bad)) is not None
        ]

    def _asked(self) -> list[tuple[str, OperatorLineage, int]]:
        """Operators and their epochs that somebody may ask for."""
        epochs = self.epochs()
        return [(uid, one, e) for uid, one in self.lineages.items() for e in epochs[uid]]

    def meaning(self, key: SliceKey, lost: Iterable[Lost]) -> str:
        """What it means that this slice is damaged, in a sentence or two."""
        uid = key[1]
        gone = {one.epoch for one in lost if one.operator == uid}
        named = []
        for epoch in self.epochs().get(uid, []):
            lineage = self.lineages[uid]
            refs = [ref for one in lineage.subtasks for ref in _newest(one, epoch)]
            refs += lineage.epochs[epoch].operator_refs
            if any(slice_key(ref.sequence, ref.entry) == key for ref in refs):
                named.append(epoch)
        said = []
        if broken := [e for e in named if e in gone]:
            said.append(f"Operator {uid!r} cannot be restored to {_epochs(broken)}.")
        if slower := [e for e in named if e not in gone]:
            said.append(f"A restore to {_epochs(slower)} has to use an older base.")
        return " ".join(said) or "No restore of the last two epochs needs it."


def _epochs(epochs: list[int]) -> str:
    return f"epoch{'s' if len(epochs) > 1 else ''} {', '.join(map(str, epochs))}"


def _unheld(uid: str, entry: EpochEntry, bad: Collection[SliceKey]) -> Lost | None:
    """Why the states that belong to no key cannot be had at an epoch: each is there once."""
    for ref in entry.operator_refs:
        if slice_key(ref.sequence, ref.entry) in bad:
            what = "lists" if ref.entry.kind == "operator" else "broadcast state"
            reason = (
                f"the {what} of subtask {ref.entry.subtask} after epoch {entry.epoch} is damaged"
            )
            return Lost(uid, ref.entry.subtask, entry.epoch, reason, gap=False)
    return None


def _newest(subtask: SubtaskLineage, epoch: int) -> list[SliceRef]:
    """What a restore reads if nothing is damaged; only what is known."""
    found: list[SliceRef] = []
    for one, at in subtask.origins(epoch):
        base = one.base_before(at)
        first = base.entry.epoch + 1 if base else one.start_epoch + 1
        found += [base] if base else []
        found += [one.deltas[e] for e in range(first, at + 1) if e in one.deltas]
    return found


def _lost(
    uid: str,
    number: int,
    subtask: SubtaskLineage,
    epoch: int,
    bad: Collection[SliceKey],
    sound: set[int] | None = None,
) -> Lost | None:
    """Why a subtask cannot be brought to an epoch; None if some base, or none at all, leads there.

    The bases are tried from the newest back, as a restore does.

    Args:
        sound: subtasks of earlier parallelisms that were looked at already, by their ``id``.
    """
    sound = set() if sound is None else sound
    starts = sorted((e for e in subtask.bases if e <= epoch), reverse=True)
    first: Lost | None = None
    for start in [*starts, None]:
        base = None if start is None else subtask.bases[start]
        after = subtask.start_epoch if start is None else start
        if base is not None and slice_key(base.sequence, base.entry) in bad:
            reason, gap = f"the base of epoch {start} of subtask {number} is damaged", False
        else:
            missing = [e for e in range(after + 1, epoch + 1) if e not in subtask.deltas]
            damaged = [
                e
                for e in range(after + 1, epoch + 1)
                if e in subtask.deltas
                and slice_key(subtask.deltas[e].sequence, subtask.deltas[e].entry) in bad
            ]
            if not missing and not damaged:
                lost = None
                if start is None:
                    lost = _parts_lost(uid, number, subtask, epoch, bad, sound)
                if lost is None:
                    return None
                first = first or lost
                continue
            gap = bool(missing)
            which, what = (missing, "not there") if gap else (damaged, "damaged")
            reason = f"what subtask {number} changed in epoch {which[0]} is {what}"
        first = first or Lost(uid, number, epoch, reason, gap)
    return first


def _parts_lost(
    uid: str,
    number: int,
    subtask: SubtaskLineage,
    epoch: int,
    bad: Collection[SliceKey],
    sound: set[int],
) -> Lost | None:
    """Why what a subtask began with cannot be put together from its parents."""
    if not subtask.origin_known:
        reason = f"what subtask {number} began with is not there any more"
        return Lost(uid, number, epoch, reason, gap=True)
    for one in subtask.parents:
        if id(one) in sound:
            continue
        lost = _lost(uid, number, one, subtask.start_epoch, bad, sound)
        if lost is not None:
            return Lost(uid, number, epoch, lost.reason, lost.gap)
        sound.add(id(one))
    return None
