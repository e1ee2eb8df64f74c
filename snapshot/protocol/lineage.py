"""Which slices make up a subtask's state at an epoch: read off the commit log's manifests.

A record of epoch *e* replaces what was known of *e* and of everything after it: later epochs stood
on a branch that was given up (a repeated epoch, a rewind). Along a lineage
``chain(n) = H(chain(n - 1), digest(delta n))``; a manifest that breaks this is refused. A base may
come in a record of a later epoch than its own, since it is made while later epochs run.

Where a record has another parallelism than the one before, the operator was *rescaled* after the
epoch in between. A subtask whose key groups stay the same keeps its lineage. Any other begins with
parts of its *parents*: the earlier subtasks that its key groups were in. Its first digest follows
from theirs, and until it has a base of its own, what they need is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from snapshot.formats.lineage_digest import chain, chain_rescaled, chain_start
from snapshot.formats.record import Manifest, SliceEntry, is_operator_slice, slice_key
from statebackend.errors import CorruptionError, NotRestorableError, SettingError
from statebackend.keygroups import KeyGroupRange, key_group_range

__all__ = ["EpochEntry", "OperatorLineage", "SliceRef", "SubtaskLineage", "resolve"]


class SliceRef(msgspec.Struct, frozen=True, gc=False):
    """A slice and the record (by sequence) whose manifest names it."""

    sequence: int
    entry: SliceEntry

    @property
    def key(self) -> str:
        """See `slice_key`."""
        return slice_key(self.entry.kind, self.entry.digest)


@dataclass(frozen=True)
class EpochEntry:
    """A complete epoch of one operator; what its record says of times is in `Manifest`.

    Attributes:
        parallelism: as the record says.
        lists, broadcast: its states that belong to no key, by subtask, and the one copy for all.
    """

    epoch: int
    sequence: int
    stamp_ms: int
    run: str = ""
    watermark_ms: int | None = None
    event_max_ms: int | None = None
    second_max_ms: int | None = None
    next_timer_ms: int | None = None
    dropped_ids: frozenset[int] = frozenset()
    parallelism: int = 0
    lists: Mapping[int, SliceRef] = field(default_factory=dict)
    broadcast: SliceRef | None = None

    @property
    def operator_refs(self) -> list[SliceRef]:
        """Every slice of states that belong to no key."""
        return [*self.lists.values(), *([self.broadcast] if self.broadcast else [])]

    @classmethod
    def of(cls, manifest: Manifest) -> EpochEntry:
        """As a checkpoint record says."""
        apart = filter(is_operator_slice, manifest.slices)
        refs = [SliceRef(manifest.sequence, entry) for entry in apart]
        shared = [ref for ref in refs if ref.entry.kind == "broadcast"]
        return cls(
            epoch=manifest.epoch,
            sequence=manifest.sequence,
            stamp_ms=manifest.stamp_ms,
            run=manifest.run,
            watermark_ms=manifest.watermark_ms,
            event_max_ms=manifest.event_max_ms,
            second_max_ms=manifest.second_max_ms,
            next_timer_ms=manifest.next_timer_ms,
            dropped_ids=frozenset(manifest.dropped_ids),
            parallelism=manifest.parallelism,
            lists={ref.entry.subtask: ref for ref in refs if ref.entry.kind == "operator"},
            broadcast=shared[-1] if shared else None,
        )


@dataclass
class SubtaskLineage:
    """One subtask's slices by epoch.

    Attributes:
        deltas: in the order of their epochs.
        start_epoch, start_chain: what it begins with: nothing, or parts of its parents' states
            (of which the digest may not be known: "").
        rescaled: it begins with parts of its parents' states.
        parents: as they were at the end of ``start_epoch``; forgotten once there is a base.
    """

    key_groups: KeyGroupRange
    start_chain: str
    start_epoch: int
    deltas: dict[int, SliceRef] = field(default_factory=dict)
    bases: dict[int, SliceRef] = field(default_factory=dict)
    rescaled: bool = False
    parents: tuple[SubtaskLineage, ...] = ()

    @property
    def origin_known(self) -> bool:
        """Whether what it begins with can be had without a base: nothing, or its parents."""
        return not self.rescaled or bool(self.parents)

    def until(self, epoch: int) -> SubtaskLineage:
        """A copy that ends with ``epoch``."""
        return replace(
            self,
            deltas={e: ref for e, ref in self.deltas.items() if e <= epoch},
            bases={e: ref for e, ref in self.bases.items() if e <= epoch},
        )

    def chain_at(self, epoch: int) -> str | None:
        """The lineage digest (hex) after ``epoch``; None where that is not known."""
        if epoch == self.start_epoch:
            return self.start_chain or None
        found = self.deltas.get(epoch) or self.bases.get(epoch)
        return found.entry.chain if found else None

    def holds(self, epoch: int, digest: str) -> bool:
        """Whether ``digest`` is the lineage after ``epoch``.

        Where that epoch itself is no longer known, the delta after it decides: only the right
        digest leads to the next one.
        """
        known = self.chain_at(epoch)
        if known is not None:
            return known == digest
        after = self.deltas.get(epoch + 1)
        return after is not None and _after(digest, after.entry) == after.entry.chain

    def base_before(self, epoch: int, avoid: Collection[str] = ()) -> SliceRef | None:
        """The newest base at or before ``epoch`` that is not in ``avoid`` (see `slice_key`)."""
        epochs = [e for e, r in self.bases.items() if e <= epoch and r.key not in avoid]
        return self.bases[max(epochs)] if epochs else None

    def origins(self, epoch: int) -> Iterator[tuple[SubtaskLineage, int]]:
        """The subtask, and all that it begins with parts of, with what epoch of each is wanted.

        Each comes once: after some changes of parallelism many ways lead to one.
        """
        wanted, seen = [(self, epoch)], {id(self)}
        while wanted:
            one, at = wanted.pop()
            yield one, at
            if one.base_before(at) is None:
                new = [parent for parent in one.parents if id(parent) not in seen]
                seen.update(map(id, new))
                wanted += [(parent, one.start_epoch) for parent in new]

    def gap_before(self, epoch: int) -> bool:
        """Whether a slice that restoring ``epoch`` needs is not known."""
        return any(one._lacks(at) for one, at in self.origins(epoch))

    def _lacks(self, epoch: int) -> bool:
        base = self.base_before(epoch)
        first = base.entry.epoch + 1 if base else self.start_epoch + 1
        if any(e not in self.deltas for e in range(first, epoch + 1)):
            return True
        return base is None and not self.origin_known

    def oldest_needed(self, epoch: int) -> int | None:
        """The oldest sequence that restoring ``epoch`` or anything later needs; None for none.

        A base may be named by a much later record than the deltas that follow it: all that is known
        from the base on counts, not only what leads to ``epoch`` itself.
        """
        needed = (one._oldest_own(at) for one, at in self.origins(epoch))
        return min((sequence for sequence in needed if sequence is not None), default=None)

    def _oldest_own(self, epoch: int) -> int | None:
        base = self.base_before(epoch)
        first = base.entry.epoch if base else self.start_epoch
        sequences = [ref.sequence for e, ref in self.deltas.items() if e > first]
        sequences += [ref.sequence for e, ref in self.bases.items() if e >= first]
        return min(sequences, default=None)

    def since_base(self, epoch: int) -> tuple[int, int]:
        """Epochs, and bytes of their deltas, between the newest base and ``epoch``."""
        base = self.base_before(epoch)
        first = base.entry.epoch + 1 if base else self.start_epoch + 1
        deltas = [ref.entry for e, ref in self.deltas.items() if first <= e <= epoch]
        return len(deltas), sum(entry.size_bytes for entry in deltas)

    def breaks_at(self, entry: SliceEntry) -> bool:
        """Whether a slice does not fit between what is known before and after it."""
        if entry.kind == "delta":
            before = self.chain_at(entry.epoch - 1)
            return before is not None and _after(before, entry) != entry.chain
        known = self.chain_at(entry.epoch)
        after = self.deltas.get(entry.epoch + 1)
        return (known is not None and known != entry.chain) or (
            after is not None and _after(entry.chain, after.entry) != after.entry.chain
        )

    def drop_from(self, epoch: int) -> None:
        """Forget ``epoch`` and everything after it."""
        while self.deltas and next(reversed(self.deltas)) >= epoch:
            self.deltas.popitem()
        self.bases = {e: ref for e, ref in self.bases.items() if e < epoch}

    def prune(self, epoch: int) -> None:
        """Forget what restoring ``epoch`` or anything later does not need."""
        for one, at in list(self.origins(epoch)):
            one._prune_own(min(epoch, at))

    def _prune_own(self, epoch: int) -> None:
        base = self.base_before(epoch)
        if base is None:
            return
        self.parents = ()
        for e in [e for e in self.deltas if e < base.entry.epoch]:
            del self.deltas[e]
        for e in [e for e in self.bases if e < base.entry.epoch]:
            del self.bases[e]


@dataclass
class OperatorLineage:
    """One operator's complete epochs.

    Attributes:
        before, scaled_epoch: what it was at another parallelism, up to the end of that epoch.
    """

    uid: str
    job_id: str
    parallelism: int
    max_parallelism: int
    first_epoch: int
    subtasks: list[SubtaskLineage]
    epochs: dict[int, EpochEntry] = field(default_factory=dict)
    before: OperatorLineage | None = None
    scaled_epoch: int | None = None

    @classmethod
    def new(
        cls, uid: str, *, job_id: str, parallelism: int, max_parallelism: int, first_epoch: int
    ) -> OperatorLineage:
        """An operator without state, whose first epoch will be ``first_epoch``."""
        subtasks = []
        for subtask in range(parallelism):
            groups = key_group_range(subtask, parallelism, max_parallelism)
            start = chain_start(job_id, uid, (groups.start, groups.end)).hex()
            subtasks.append(SubtaskLineage(groups, start, first_epoch - 1))
        return cls(uid, job_id, parallelism, max_parallelism, first_epoch, subtasks)

    @property
    def last_epoch(self) -> int:
        """The newest complete epoch; one before the first where there is none."""
        return max(self.epochs, default=self.first_epoch - 1)

    def has(self, epoch: int) -> bool:
        """Whether the state after ``epoch`` can be named."""
        return epoch == self.first_epoch - 1 or epoch in self.epochs

    @classmethod
    def following(cls, known: OperatorLineage | None, manifest: Manifest) -> OperatorLineage:
        """The lineage that a record belongs to, given that of the records before it."""
        if known is None or known.first_epoch != manifest.first_epoch:
            # Dropped once and brought back: what it had before is none of its state.
            return cls.new(
                manifest.operator,
                job_id=manifest.job_id,
                parallelism=manifest.parallelism,
                max_parallelism=manifest.max_parallelism,
                first_epoch=manifest.first_epoch,
            )
        at = known.at(manifest.parallelism, manifest.epoch - 1)
        if at is known:
            return at
        others = known._possible_at(manifest.parallelism, manifest.epoch - 1)
        return max((at, *others), key=lambda one: one._follows(manifest))

    def _possible_at(self, parallelism: int, epoch: int) -> Iterator[OperatorLineage]:
        """All that `at` may have said when more of the log was known: one state, other digests.

        From the epoch of a change of parallelism a run may have gone on by either.
        """
        if self._reaches(epoch):
            yield self if self.parallelism == parallelism else self._rescaled(parallelism, epoch)
        if self.before is not None and (epoch == self.scaled_epoch or not self._reaches(epoch)):
            yield from self.before._possible_at(parallelism, epoch)

    def _follows(self, manifest: Manifest) -> int:
        """How many of a record's deltas are known to follow; -1 if one does not."""
        own = range(len(self.subtasks))
        deltas = [e for e in manifest.slices if e.kind == "delta" and e.subtask in own]
        if any(self.subtasks[e.subtask].breaks_at(e) for e in deltas):
            return -1
        return sum(self.subtasks[e.subtask].chain_at(e.epoch - 1) is not None for e in deltas)

    def _reaches(self, epoch: int) -> bool:
        """Whether its parallelism was in force at the end of ``epoch``; else `before` knows it."""
        return self.scaled_epoch is None or epoch >= self.scaled_epoch

    def at(self, parallelism: int, epoch: int) -> OperatorLineage:
        """The lineage that a run goes on with, at a parallelism, from the state after ``epoch``."""
        before = self.before
        if not self._reaches(epoch):
            # Without an earlier one, whoever asks finds out that this epoch is not known.
            return self if before is None else before.at(parallelism, epoch)
        if parallelism == self.parallelism:
            return self
        if epoch == self.scaled_epoch and before is not None and before.is_known(epoch):
            return before.at(parallelism, epoch)  # the same state, with one change less
        return self._rescaled(parallelism, epoch)

    def is_known(self, epoch: int) -> bool:
        """Whether the state after ``epoch`` can be put together, as far as is known."""
        return self.has(epoch) and not any(one.gap_before(epoch) for one in self.subtasks)

    def _rescaled(self, parallelism: int, epoch: int) -> OperatorLineage:
        """What goes on from it at another parallelism, after ``epoch``."""
        if epoch < self.first_epoch:  # there is nothing to take over yet
            made = OperatorLineage.new(
                self.uid,
                job_id=self.job_id,
                parallelism=parallelism,
                max_parallelism=self.max_parallelism,
                first_epoch=self.first_epoch,
            )
        else:
            made = replace(
                self,
                parallelism=parallelism,
                subtasks=_taken_over(self.subtasks, parallelism, self.max_parallelism, epoch),
                epochs={e: entry for e, entry in self.epochs.items() if e <= epoch},
            )
        made.before, made.scaled_epoch = self, epoch
        return made

    def add(self, manifest: Manifest) -> None:
        """Take in a checkpoint record of this operator.

        Raises:
            CorruptionError: its lineage digests do not follow from what is known.
        """
        epoch = manifest.epoch
        for known in [e for e in self.epochs if e >= epoch]:
            del self.epochs[known]
        for subtask in self.subtasks:
            subtask.drop_from(epoch)
        for entry in manifest.slices:
            apart = is_operator_slice(entry)
            own = apart or entry.kind == "delta"
            misplaced = entry.epoch != epoch if own else entry.epoch > epoch
            if (
                misplaced
                or not 0 <= entry.subtask < len(self.subtasks)
                or (not apart and self.subtasks[entry.subtask].breaks_at(entry))
            ):
                raise CorruptionError(
                    f"Record {manifest.sequence} breaks the lineage of operator "
                    f"{self.uid!r}, subtask {entry.subtask}, at epoch {entry.epoch}.",
                    todo="The log was changed by hand or mixed with another job's; restore "
                    "it from a copy, or start a new job.",
                )
            if apart:
                continue  # the epoch's own: no other epoch is put together from it
            subtask = self.subtasks[entry.subtask]
            slices = subtask.deltas if entry.kind == "delta" else subtask.bases
            slices[entry.epoch] = SliceRef(manifest.sequence, entry)
        self.epochs[epoch] = EpochEntry.of(manifest)

    def oldest_needed(self, epoch: int) -> int | None:
        """The oldest sequence that restoring ``epoch`` or anything later needs."""
        needed = [s.oldest_needed(epoch) for s in self.subtasks]
        if self.before is not None and not self._reaches(epoch):
            needed.append(self.before.oldest_needed(epoch))
        if (entry := self.epochs.get(epoch)) is not None:
            needed.append(entry.sequence)  # that it was complete is said there alone
        return min((s for s in needed if s is not None), default=None)

    def prune(self, epoch: int) -> None:
        """Forget what restoring ``epoch`` or anything later does not need."""
        if self.before is not None and self.scaled_epoch is not None:
            if epoch > self.scaled_epoch:
                self.before = None
            else:
                self.before.prune(epoch)
        for subtask in self.subtasks:
            subtask.prune(epoch)
        for known in [e for e in self.epochs if e < epoch]:
            del self.epochs[known]

    def require(self, epoch: int) -> None:
        """Raise where the state after ``epoch`` cannot be named.

        Raises:
            NotRestorableError: naming what there is instead.
        """
        if self.before is not None and not self._reaches(epoch):
            self.before.require(epoch)
            return
        if not self.is_known(epoch):
            there = f"{min(self.epochs)} to {max(self.epochs)}" if self.epochs else "none"
            raise NotRestorableError(
                f"The state of operator {self.uid!r} after epoch {epoch} is not in the commit log "
                f"(complete epochs: {there}).",
                todo="An older record is never used in its place. Start from the checkpoint "
                "location that belongs to this job.",
            )


def _taken_over(
    subtasks: Iterable[SubtaskLineage], parallelism: int, max_parallelism: int, epoch: int
) -> list[SubtaskLineage]:
    """The subtasks of another parallelism, which begin with the states of these after ``epoch``."""
    ended = [one.until(epoch) for one in subtasks]
    same = {one.key_groups: one for one in ended}

    def beginning(groups: KeyGroupRange) -> SubtaskLineage:
        parents = tuple(one for one in ended if len(one.key_groups.intersection(groups)))
        start = _start_of(groups, parents, epoch)
        return SubtaskLineage(groups, start, epoch, rescaled=True, parents=parents)

    every = (key_group_range(index, parallelism, max_parallelism) for index in range(parallelism))
    return [same.get(groups) or beginning(groups) for groups in every]


def _start_of(groups: KeyGroupRange, parents: Iterable[SubtaskLineage], epoch: int) -> str:
    """The first digest (hex) of what begins with parts of others; "" where one is not known."""
    chains = []
    for one in parents:
        known = one.chain_at(epoch)
        if known is None:
            return ""
        chains.append(((one.key_groups.start, one.key_groups.end), bytes.fromhex(known)))
    return chain_rescaled((groups.start, groups.end), chains).hex()


def _after(before: str, entry: SliceEntry) -> str:
    """The lineage digest (hex) once a delta follows; no digest at all gives none."""
    try:
        return chain(bytes.fromhex(before), bytes.fromhex(entry.digest)).hex()
    except (ValueError, SettingError):
        return ""


def resolve(manifests: Iterable[Manifest]) -> dict[str, OperatorLineage]:
    """The lineages that a log holds, by operator uid; manifests in the order of their sequences."""
    operators: dict[str, OperatorLineage] = {}
    for manifest in manifests:
        if manifest.kind != "checkpoint":
            continue
        lineage = OperatorLineage.following(operators.get(manifest.operator), manifest)
        operators[manifest.operator] = lineage
        lineage.add(manifest)
    return operators
