"""What may be deleted from a job's folder: decided whole, from plain data, before anything is.

Whoever looks, looks from a *view*: a tip of the log, what is live as of that tip, and who is
looking. A view may be old by the time it is acted on, and its driver may have been fenced since.
That does no harm, because what is dead in a view stays dead:

* the `oldest_needed` of a job never falls, so a record below it is never needed again;
* a generation before the tip's commits nothing any more (the claim holds the slot that its next
  append would take), so what it made and no live record names, no record ever will;
* a new base takes over files of its lineage's newest base only, and that one is live;
* within its own generation, a driver says itself what it may still name.

The listing is taken before the view: what is made in between is then not in it, and what is in it
has had its grant, ack or record seen by the view.

Deletion goes records first, ascending, then what they named. So wherever it is cut, the log is
without gaps from its first checkpoint on, no record that is needed names an object that is gone,
and what is left over is found again by its name alone. A dead record that waits for the history
(`snapshot.retention.history_keeping`) is read for its figures alone: what it named goes before it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from snapshot.formats.file_index import FileIndex
from snapshot.formats.history_object import HISTORY_PREFIX, parse_history_name
from snapshot.formats.object_names import BASE_PREFIX, DATA_PREFIX, parse_base_name, parse_data_name
from snapshot.formats.record import LOG_PREFIX, Manifest, parse_record_name
from snapshot.storage.object_store import ObjectInfo
from statebackend.errors import SettingError

__all__ = [
    "PROBE_PREFIX",
    "Fate",
    "Garbage",
    "Item",
    "Kind",
    "RecordKind",
    "View",
    "classify",
    "kind_of",
    "view_of",
]

PROBE_PREFIX: Final = "probe/"

FORMAT_WITH_GENERATIONS: Final = (
    2  # of records whose writer names its objects as snapshot.formats.object_names
)

RecordKind: TypeAlias = Literal["claim", "checkpoint"]


class Kind(enum.Enum):
    """What an object is, by its name; in the order in which garbage goes."""

    RECORD = "records"
    HISTORY = "history"
    DATA = "data"
    BASE = "bases"
    PROBE = "probes"
    OTHER = "others"


_PREFIXES: Final = {
    LOG_PREFIX: Kind.RECORD,
    HISTORY_PREFIX: Kind.HISTORY,
    DATA_PREFIX: Kind.DATA,
    BASE_PREFIX: Kind.BASE,
    PROBE_PREFIX: Kind.PROBE,
}


class Fate(enum.Enum):
    """What becomes of an object."""

    LIVE = "live"  # somebody needs it, or it is kept for good
    DEAD = "dead"  # nobody will ever need it
    WAITING = "waiting"  # a dead record, and too few are dead for an object of the history
    YOUNG = "young"  # dead, but not old enough (or of unknown age, where age alone decides)
    DRIVERS = "drivers"  # the tip's driver may still name it, or will delete it itself
    UNKNOWN = "unknown"  # a record that does not read: never deleted
    FOREIGN = "foreign"  # not a name of ours: never touched


@dataclass(frozen=True)
class Item:
    """An object of the listing, and what becomes of it."""

    info: ObjectInfo
    kind: Kind
    fate: Fate


@dataclass(frozen=True, kw_only=True)
class View:
    """A job as of one tip of its log, and who is looking.

    Attributes:
        generation: of the tip.
        oldest_needed, cleaned_below: as the tip says.
        newest_epoch: of the records that are needed; -1: none.
        named: every object that a live record, or an index that one names, refers to.
        files_unknown: an index does not read, so any file of a base may be live.
        old_names: the tip is of a release that gave its objects names without a generation.
        kinds: of records below `oldest_needed`, by sequence, as far as they are known.
        own_generation: of the driver that looks; None for anybody else.
        confirmed_epoch: this driver accepts no ack of an earlier epoch; None = nothing is said.
        open_grants: of this driver: uploads of bases that go on, or wait for their record.
        pending: names that were acked and that no record names yet.
    """

    generation: int
    oldest_needed: int
    cleaned_below: int
    newest_epoch: int = -1
    named: frozenset[str]
    files_unknown: bool = False
    old_names: bool = False
    kinds: Mapping[int, RecordKind]
    own_generation: int | None = None
    confirmed_epoch: int | None = None
    open_grants: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()

    @property
    def is_driver(self) -> bool:
        """Whether the one who looks holds the tip's generation."""
        return self.own_generation == self.generation


def view_of(
    manifests: Sequence[Manifest],
    indexes: Mapping[str, FileIndex | None],
    *,
    kinds: Mapping[int, RecordKind],
    own_generation: int | None = None,
    confirmed_epoch: int | None = None,
    open_grants: Collection[str] = (),
    pending: Collection[str] = (),
) -> View:
    """The view from the last of some manifests.

    Args:
        manifests: every record from the tip's `oldest_needed` to the tip, ascending.
        indexes: of every slice of kind `files` in them, by the slice's digest; None for one that
            does not read.
        kinds, own_generation, confirmed_epoch, open_grants, pending: see `View`. A driver takes
            all of this under the lock that its acks and commits take.

    Raises:
        SettingError: a manifest or an index is missing: nothing may be decided without it.
    """
    if not manifests:
        raise SettingError("Without a tip nothing can be said to be dead.")
    tip = manifests[-1]
    expected = list(range(tip.oldest_needed, tip.sequence + 1))
    if [manifest.sequence for manifest in manifests] != expected:
        raise SettingError(
            f"The tip {tip.sequence} needs every record from {tip.oldest_needed} on, and not all "
            "were given."
        )
    named, files_unknown = _named(manifests, indexes)
    return View(
        generation=tip.generation,
        oldest_needed=tip.oldest_needed,
        cleaned_below=tip.cleaned_below,
        newest_epoch=max(manifest.epoch for manifest in manifests),
        named=named,
        files_unknown=files_unknown,
        old_names=tip.format < FORMAT_WITH_GENERATIONS,
        kinds=dict(kinds),
        own_generation=own_generation,
        confirmed_epoch=confirmed_epoch,
        open_grants=frozenset(open_grants),
        pending=frozenset(pending),
    )


def _named(
    manifests: Iterable[Manifest], indexes: Mapping[str, FileIndex | None]
) -> tuple[frozenset[str], bool]:
    """Every object that some records refer to, and whether an index among them does not read."""
    named: set[str] = set()
    files_unknown = False
    for entry in (entry for manifest in manifests for entry in manifest.slices):
        if entry.object is not None:
            named.add(entry.object)
        if entry.kind != "files":
            continue
        if entry.digest not in indexes:
            raise SettingError(
                f"The file index of {entry.operator!r}/{entry.subtask} epoch {entry.epoch} was "
                "not given."
            )
        index = indexes[entry.digest]
        if index is None:
            files_unknown = True
        else:
            named.update(file.object for file in index.files)
    return frozenset(named), files_unknown


@dataclass(frozen=True)
class Garbage:
    """A whole listing, judged."""

    view: View
    items: tuple[Item, ...]

    def of(self, fate: Fate, kind: Kind | None = None) -> list[ObjectInfo]:
        """The objects of one fate, by name."""
        return [i.info for i in self.items if i.fate is fate and (kind is None or i.kind is kind)]

    def deletions(self) -> list[list[str]]:
        """What to delete, in this order: a list for each kind, names ascending (see above).

        What is beyond the bounds of the history goes with the records, in the same request.
        """
        found = {kind: [info.name for info in self.of(Fate.DEAD, kind)] for kind in Kind}
        found[Kind.RECORD] += found.pop(Kind.HISTORY)
        return [names for names in found.values() if names]

    def cleaned_below(self) -> int:
        """The sequence below which nothing but claims is left, once all of this is deleted."""
        left = (
            sequence
            for item in self.items
            if item.kind is Kind.RECORD
            and item.fate is not Fate.DEAD
            and (sequence := parse_record_name(item.info.name)) is not None
            and self.view.kinds.get(sequence) != "claim"
        )
        return min([*left, self.view.oldest_needed])


def classify(listing: Iterable[ObjectInfo], view: View, *, min_age_ms: int = 0) -> Garbage:
    """Judge every object of a listing of the job's folder.

    Args:
        listing: of the whole folder or of some of its prefixes; taken before the view.
        min_age_ms: younger objects stay. Age is counted back from the newest object of the
            listing, that is by the store's clock; where the store names no times it is not asked
            for, except for probes, which go by age alone.
    """
    infos = sorted(listing)
    newest_ms = max((i.modified_ms for i in infos if i.modified_ms is not None), default=None)
    items = []
    for info in infos:
        kind = kind_of(info.name)
        fate = _fate(info.name, kind, view)
        if fate is Fate.DEAD and _too_young(info, kind, newest_ms, min_age_ms):
            fate = Fate.YOUNG
        items.append(Item(info, kind, fate))
    return Garbage(view, tuple(items))


def kind_of(name: str) -> Kind:
    """What an object is, by where it lies."""
    return next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), Kind.OTHER)


def _fate(name: str, kind: Kind, view: View) -> Fate:
    match kind:
        case Kind.RECORD:
            return _record_fate(name, view)
        case Kind.HISTORY:
            return Fate.FOREIGN if parse_history_name(name) is None else Fate.LIVE
        case Kind.DATA:
            return _data_fate(name, view)
        case Kind.BASE:
            return _base_fate(name, view)
        case Kind.PROBE:
            return _probe_fate(name)
        case Kind.OTHER:
            return Fate.FOREIGN


def _too_young(info: ObjectInfo, kind: Kind, newest_ms: int | None, min_age_ms: int) -> bool:
    if info.modified_ms is None or newest_ms is None:
        return kind is Kind.PROBE
    return newest_ms - info.modified_ms < min_age_ms


def _record_fate(name: str, view: View) -> Fate:
    """Checkpoints below what the tip needs are dead.

    Claims stay for ever: a fenced driver must find the slot of its next append taken, however long
    it slept. What does not read may be a claim. The tip is never below its own `oldest_needed`.
    """
    sequence = parse_record_name(name)
    if sequence is None:
        return Fate.FOREIGN
    if sequence >= view.oldest_needed:
        return Fate.LIVE
    kind = view.kinds.get(sequence)
    if kind is None:
        return Fate.UNKNOWN
    return Fate.LIVE if kind == "claim" else Fate.DEAD


def _data_fate(name: str, view: View) -> Fate:
    """A slice's own object is dead if no record names it and none ever will.

    Of an earlier generation (or, by its name, of a release that no longer runs the job): nobody
    commits for it any more. Of the tip's: only its driver knows which acks may still come; it takes
    none of an epoch before the confirmed one. Of a later one: the view is old, and knows nothing
    of it.
    """
    found = parse_data_name(name)
    if found is not None:
        generation, epoch = found.generation, found.epoch
    elif name.count("/") == 1:  # data/<id>, as the first release named them
        generation, epoch = (view.generation if view.old_names else 0), 0
    else:
        return Fate.FOREIGN
    if name in view.named:
        return Fate.LIVE
    if generation < view.generation:
        return Fate.DEAD
    if generation > view.generation or not view.is_driver or view.confirmed_epoch is None:
        return Fate.DRIVERS
    settled = epoch < view.confirmed_epoch and name not in view.pending
    return Fate.DEAD if settled else Fate.DRIVERS


def _base_fate(name: str, view: View) -> Fate:
    """A file of a base is dead if no live index names it and none ever will.

    As for slices; within the tip's generation it is the grant that says whether an upload goes on,
    or waits for its record. A grant that has ended is never given again.
    """
    found = parse_base_name(name)
    if found is None:
        return Fate.FOREIGN
    if name in view.named or view.files_unknown:
        return Fate.LIVE
    if found.generation < view.generation:
        return Fate.DEAD
    if found.generation > view.generation or not view.is_driver:
        return Fate.DRIVERS
    settled = found.grant not in view.open_grants and name not in view.pending
    return Fate.DEAD if settled else Fate.DRIVERS


def _probe_fate(name: str) -> Fate:
    """A probe is gone at once, unless its driver died in it: past the minimum age it is dead."""
    return Fate.DEAD if name.count("/") == 1 else Fate.FOREIGN
