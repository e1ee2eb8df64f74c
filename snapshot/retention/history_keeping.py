"""What cleaning keeps of the records that it deletes: their summaries, in objects of the history.

An object is written when there is enough for one, and before the records go: so about one request
in so many epochs, and no epoch is lost, wherever a cleaning is cut. Until then the records stay.
Of a record that could not be deleted afterwards nobody writes again.
Who cleans need not be the job's driver, and may be one that was fenced: see
`snapshot.formats.history_object` for why that does no harm. Only what is beyond the bounds is ever
deleted, and that is so in every later view as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from snapshot.formats.history_object import (
    HISTORY_PREFIX,
    RecordSummary,
    encode_history,
    parse_history_name,
    summary_of,
)
from snapshot.formats.record import Manifest, parse_record_name, read_manifest, record_name
from snapshot.retention.deletable import Fate, Garbage, Item, Kind
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from statebackend.errors import FormatError, ObjectNotFoundError

__all__ = ["EPOCHS_KEPT", "OBJECTS_KEPT", "KnownHistory", "expired_objects", "keep_history"]

EPOCHS_AN_OBJECT: Final = 64  # at least, where the driver writes it
RECORDS_WAITING: Final = 1000  # a page of a listing; of epochs that are repeated there are many
BYTES_WAITING: Final = 64 << 20
EPOCHS_KEPT: Final = 10_000
OBJECTS_KEPT: Final = 256
_EPOCHS_AT_MOST: Final = 1024  # in one object: whoever reads one epoch reads all of it
_RECORDS_AT_MOST: Final = 16_384  # as well: an epoch has one of each operator


@dataclass(frozen=True, kw_only=True)
class KnownHistory:
    """What one who cleans knows of the history.

    Attributes:
        outside: not a driver that cleans again and again: nothing waits for more.
        known: summaries of records that are not read again, by sequence.
        objects: of the history, as far as known; None: nobody has looked.
        written: sequences of records of which it has written, and that may still be there.
    """

    outside: bool = False
    known: Mapping[int, RecordSummary] = field(default_factory=dict)
    objects: tuple[ObjectInfo, ...] | None = None
    written: set[int] = field(default_factory=set)  # outlives a cleaning that is given up

    def remembering(self, manifests: Iterable[Manifest]) -> KnownHistory:
        """Knowing these, too: a driver's own, which it need not read when they are dead."""
        new = [m for m in manifests if m.kind == "checkpoint" and m.sequence not in self.known]
        return replace(self, known={**self.known, **{m.sequence: summary_of(m) for m in new}})


def keep_history(
    store: ObjectStore,
    garbage: Garbage,
    history: KnownHistory,
    read: Mapping[int, RecordSummary],
    *,
    dry_run: bool,
) -> tuple[Garbage, KnownHistory]:
    """Write the summaries of the records that are about to be deleted, or let these wait.

    Args:
        garbage: as it was judged. read: summaries of records that were read for it.

    Returns:
        the same garbage, with what waits, and what is beyond the bounds; and what is known now.

    Raises:
        StoreUnreachableError: nothing may be deleted.
    """
    there = _records_in(garbage)
    history.written.intersection_update(there)
    history = replace(history, known=_still_there(garbage, there, {**history.known, **read}))
    dead = _dead_records(garbage)
    summaries = _summaries(store, dead - history.written, history.known)
    if summaries and not history.outside and not _enough(garbage, summaries):
        unwritten = dead - history.written
        garbage, dead = _with_fate(garbage, unwritten, Fate.WAITING), dead - unwritten
        summaries = []
    if history.objects is None and (history.outside or _may_expire(garbage, summaries)):
        history = replace(history, objects=tuple(store.list(HISTORY_PREFIX)))
    written = []
    for name, data in () if dry_run else _objects(summaries, garbage.view.newest_epoch):
        store.create(name, [data])  # if it is there, it is the same
        written.append(ObjectInfo(name, len(data)))
    if not dry_run:
        history.written.update(one.sequence for one in summaries)
    known = {s: one for s, one in history.known.items() if s not in dead or dry_run}
    if history.objects is None:
        return garbage, replace(history, known=known)
    objects = {info.name: info for info in (*history.objects, *written)}
    gone = expired_objects(objects, garbage.view.newest_epoch)
    items = [_item(info, gone) for info in objects.values()]
    left = tuple(info for info in objects.values() if dry_run or info.name not in gone)
    return (
        replace(garbage, items=(*garbage.items, *items)),
        replace(history, known=known, objects=left),
    )


def expired_objects(names: Iterable[str], newest_epoch: int) -> set[str]:
    """Objects of the history that are beyond its bounds: too old, or too many."""
    found = {name: known for name in names if (known := parse_history_name(name)) is not None}
    by_age = sorted(found, key=lambda name: found[name], reverse=True)
    old = (n for n in by_age if found[n].last_epoch <= newest_epoch - EPOCHS_KEPT)
    return {*by_age[OBJECTS_KEPT:], *old}


def _may_expire(garbage: Garbage, summaries: Sequence[RecordSummary]) -> bool:
    """Whether a driver looks for what is beyond the bounds: where it writes, in a long history.

    Or of a few epochs: there may be many such objects.
    """
    few = _epochs(summaries) < EPOCHS_AN_OBJECT
    return bool(summaries) and (few or garbage.view.newest_epoch >= EPOCHS_KEPT)


def _enough(garbage: Garbage, summaries: Sequence[RecordSummary]) -> bool:
    """Whether a driver writes of these, rather than let their records wait for more."""
    if _epochs(summaries) >= EPOCHS_AN_OBJECT or len(summaries) >= RECORDS_WAITING:
        return True
    names = {record_name(one.sequence) for one in summaries}
    waiting = (item.info.size_bytes for item in garbage.items if item.info.name in names)
    return sum(waiting) >= BYTES_WAITING


def _epochs(summaries: Sequence[RecordSummary]) -> int:
    return len({one.epoch for one in summaries})


def _records_in(garbage: Garbage) -> set[int]:
    found = (parse_record_name(item.info.name) for item in garbage.items)
    return {sequence for sequence in found if sequence is not None}


def _still_there(
    garbage: Garbage, there: Collection[int], known: Mapping[int, RecordSummary]
) -> dict[int, RecordSummary]:
    """Without the records that another cleaner has deleted."""
    needed = garbage.view.oldest_needed
    return {s: one for s, one in known.items() if s >= needed or s in there}


def _dead_records(garbage: Garbage) -> set[int]:
    dead = (parse_record_name(info.name) for info in garbage.of(Fate.DEAD, Kind.RECORD))
    return {sequence for sequence in dead if sequence is not None}


def _summaries(
    store: ObjectStore, dead: Iterable[int], known: Mapping[int, RecordSummary]
) -> list[RecordSummary]:
    """Of those records that read; a cleaner that has deleted one has written of it."""
    found = []
    for sequence in sorted(dead):
        one = known.get(sequence)
        if one is None:
            with suppress(FormatError, ObjectNotFoundError):
                one = summary_of(read_manifest(store, record_name(sequence)))
        if one is not None and one.epoch >= 0:
            found.append(one)
    return found


def _objects(summaries: Sequence[RecordSummary], newest_epoch: int) -> Iterator[tuple[str, bytes]]:
    """Names and bytes; what is beyond the bounds already is left out."""
    kept = [one for one in summaries if one.epoch > newest_epoch - EPOCHS_KEPT]
    part: list[RecordSummary] = []
    epochs: set[int] = set()
    for one in kept:
        full = len(epochs) == _EPOCHS_AT_MOST or len(part) >= _RECORDS_AT_MOST
        if one.epoch not in epochs and full:
            yield encode_history(part)
            part, epochs = [], set()
        part.append(one)
        epochs.add(one.epoch)
    if part:
        yield encode_history(part)


def _with_fate(garbage: Garbage, sequences: Iterable[int], fate: Fate) -> Garbage:
    names = {record_name(sequence) for sequence in sequences}
    items = [replace(i, fate=fate) if i.info.name in names else i for i in garbage.items]
    return replace(garbage, items=tuple(items))


def _item(info: ObjectInfo, gone: set[str]) -> Item:
    if parse_history_name(info.name) is None:
        return Item(info, Kind.HISTORY, Fate.FOREIGN)
    return Item(info, Kind.HISTORY, Fate.DEAD if info.name in gone else Fate.LIVE)
