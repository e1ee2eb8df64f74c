"""Cleaning a job's folder: list, look, decide (see snapshot.retention.deletable), delete.

A running driver costs three listings, a read of each record below `oldest_needed` whose kind it
does not remember, and deletes in bulk. Anybody else reads the live records first.

Below `cleaned_below` the log should hold claims and nothing else, so nothing is read there for its
kind. But a write that its driver took for lost may be delivered late, after retention has deleted
its slot: a checkpoint is back that nobody needs. It does no harm but to stay. So each cleaning
looks again at the few records down there that were written last: one that was delivered late is
among them, because it is newer than the claims around it. A driver that has just started, and knows
none of them, reads that many and no more. `gc` (see `outside_view`) reads them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from blake3 import blake3

from snapshot.formats.file_index import FileIndex, decode_index
from snapshot.formats.history_object import RecordSummary, summary_of
from snapshot.formats.object_names import BASE_PREFIX, DATA_PREFIX
from snapshot.formats.record import (
    LOG_PREFIX,
    Manifest,
    SliceEntry,
    parse_record_name,
    read_manifest,
    record_name,
)
from snapshot.log.commit_log import CommitLog
from snapshot.retention.deletable import (
    PROBE_PREFIX,
    Fate,
    Garbage,
    Kind,
    RecordKind,
    View,
    classify,
    view_of,
)
from snapshot.retention.history_keeping import KnownHistory, keep_history
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from statebackend.errors import (
    CorruptionError,
    FormatError,
    NotRestorableError,
    ObjectNotFoundError,
)
from statebackend.work_done import Progress, WorkDone

__all__ = [
    "ALL_PREFIXES",
    "CleanReport",
    "Tally",
    "clean",
    "outside_view",
    "read_index",
    "read_indexes",
]

_log = logging.getLogger("statebackend.garbage_collection")

# The log last: a record that came meanwhile and is dead already is then in the listing too, and
# goes before what it names.
DRIVER_PREFIXES: Final = (DATA_PREFIX, BASE_PREFIX, LOG_PREFIX)
ALL_PREFIXES: Final = (PROBE_PREFIX, *DRIVER_PREFIXES)
DELETE_BATCH: Final = 1000  # S3's limit on one request
LOOK_AGAIN: Final = 8  # records below `cleaned_below`


@dataclass(frozen=True)
class Tally:
    """How many objects, and their bytes."""

    objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CleanReport:
    """What one cleaning did, or would do.

    Attributes:
        dry_run: nothing was deleted; `removed` is what would have been.
        removed: by kind of object (`records`, `data`, `bases`, `probes`), as `kept` and `drivers`.
        kept: live objects, claims among them.
        young: dead, but not old enough yet.
        waiting: dead records that stay until there are enough for an object of the history.
        drivers: of the tip's generation and not named by a record: its driver may still name them,
            or will delete them itself.
        unknown: names of records below `oldest_needed` that do not read.
        foreign: names that are not this job's objects; never touched.
        files_unknown: a file index does not read, so no file of a base was deleted.
        oldest_needed: as the tip said.
        cleaned_below: what is left of the log before this sequence are claims, and nothing else
            (but for what was delivered late and is not found yet, see above).
        kinds: of the records of the listing below `oldest_needed` that are still there, as far as
            they are known: without claims that are only taken for such.
        history: what is known of it now; None: it is not kept.
        requests: made, by verb of the store.
    """

    dry_run: bool
    removed: dict[str, Tally]
    kept: dict[str, Tally]
    young: dict[str, Tally]
    waiting: dict[str, Tally]
    drivers: dict[str, Tally]
    unknown: list[str]
    foreign: list[str]
    files_unknown: bool
    oldest_needed: int
    cleaned_below: int
    kinds: dict[int, RecordKind] = field(repr=False)
    history: KnownHistory | None = field(default=None, repr=False)
    requests: dict[str, int]

    def remembered(self, kinds: Mapping[int, RecordKind]) -> dict[int, RecordKind]:
        """What a driver knows for the next cleaning, so that no record need be read for its kind.

        Args:
            kinds: of all records that it has read or written, by sequence.
        """
        later = {
            sequence: kind for sequence, kind in kinds.items() if sequence >= self.oldest_needed
        }
        return {**self.kinds, **later}

    @property
    def removed_bytes(self) -> int:
        """Bytes of everything removed."""
        return sum(tally.size_bytes for tally in self.removed.values())


def clean(
    store: ObjectStore,
    look: Callable[[], View],
    *,
    min_age_ms: int = 0,
    dry_run: bool = False,
    prefixes: Sequence[str] = DRIVER_PREFIXES,
    history: KnownHistory | None = None,
    progress: Progress | None = None,
) -> CleanReport:
    """Delete what is dead in a job's folder. May be stopped anywhere, and run by several at once.

    Args:
        store: the job's folder.
        look: the view; asked for once, *after* the listing. A driver takes it under its lock.
        min_age_ms: see `classify`.
        dry_run: decide everything, delete nothing.
        prefixes: what is listed. `ALL_PREFIXES` has the probes too.
        history: keeps summaries of the records that go; None: nobody does.
        progress: told how many objects were deleted, and how many go in all.

    Raises:
        StoreUnreachableError: it was stopped half way; a later cleaning goes on.
    """
    counted = CountingStore(store)
    listing = [info for prefix in prefixes for info in counted.list(prefix)]
    view = look()
    kinds, read, gone, taken_for_claims = _kinds(counted, listing, view)
    there = (info for info in listing if info.name not in gone)
    supposed: dict[int, RecordKind] = dict.fromkeys(taken_for_claims, "claim")
    garbage = classify(there, replace(view, kinds={**kinds, **supposed}), min_age_ms=min_age_ms)
    if history is not None:
        garbage, history = keep_history(counted, garbage, history, read, dry_run=dry_run)
    if not dry_run:
        doomed, work = garbage.deletions(), WorkDone(progress)
        work.expect(sum(map(len, doomed)))
        for names in doomed:
            for batch in _batches(names):
                counted.delete(batch)
                work.add(len(batch))
    report = _report(garbage, counted, kinds, history, dry_run=dry_run)
    if report.removed:
        _log.info(
            "%s %d objects of %d bytes in %s",
            "would remove" if dry_run else "removed",
            sum(tally.objects for tally in report.removed.values()),
            report.removed_bytes,
            store.uri,
        )
    return report


def outside_view(store: ObjectStore, log: CommitLog) -> View:
    """The view of somebody who is not the job's driver: everything is read from the store.

    Its `cleaned_below` is 0: what a power cut brought back below the tip's is looked at again.

    Raises:
        NotRestorableError: there is no log at all, so nothing is known to be dead.
        CorruptionError, UnsupportedFormatError: a live record does not read: `verify` says more.
        StoreUnreachableError: from the store.
    """
    manifests = log.manifests()
    if not manifests:
        raise NotRestorableError(
            f"There is no commit log in {store.uri}.",
            todo="Check the URI and the job's name. Without a log nothing is deleted.",
        )
    view = view_of(manifests, read_indexes(store, manifests), kinds={})
    return replace(view, cleaned_below=0)


def read_indexes(store: ObjectStore, manifests: Iterable[Manifest]) -> dict[str, FileIndex | None]:
    """Every file index that some manifests name, by the slice's digest; None: it does not read."""
    found: dict[str, FileIndex | None] = {}
    for manifest in manifests:
        for entry in manifest.slices:
            if entry.kind != "files" or entry.digest in found:
                continue
            try:
                found[entry.digest] = read_index(store, manifest.sequence, entry)
            except (FormatError, ObjectNotFoundError) as error:
                _log.warning("%s", error)
                found[entry.digest] = None
    return found


def read_index(store: ObjectStore, sequence: int, entry: SliceEntry) -> FileIndex:
    """One file index, digest-checked, with one request.

    Args:
        sequence: of the record whose manifest has ``entry``.

    Raises:
        CorruptionError, UnsupportedFormatError, ObjectNotFoundError, StoreUnreachableError
    """
    if entry.object is not None:
        name, data = entry.object, store.get(entry.object)
    else:
        name = record_name(sequence)
        data = store.get_range(name, entry.offset or 0, max(1, entry.size_bytes))
    if blake3(data).hexdigest() != entry.digest:
        raise CorruptionError(
            f"The file index of {entry.operator!r}/{entry.subtask} epoch {entry.epoch} in {name!r} "
            "is not the one that the manifest names.",
            todo="Restore it from another copy of the store.",
        )
    return decode_index(data, name)


def _kinds(
    store: ObjectStore, listing: Iterable[ObjectInfo], view: View
) -> tuple[dict[int, RecordKind], dict[int, RecordSummary], set[str], set[int]]:
    """The kinds of the listing's records below what is needed, read where they are not known.

    And summaries of the checkpoints among those that were read, the names of those that another
    cleaner has deleted since, and the sequences below `cleaned_below` that nobody looks at this
    time.
    """
    found = ((parse_record_name(info.name), info) for info in listing)
    old = {s: info for s, info in found if s is not None and s < view.oldest_needed}
    again = _newest({s: info for s, info in old.items() if s < view.cleaned_below}, view)
    kinds: dict[int, RecordKind] = {}
    read: dict[int, RecordSummary] = {}
    gone: set[str] = set()
    taken_for_claims: set[int] = set()
    for sequence, info in sorted(old.items()):
        if sequence in view.kinds:
            kinds[sequence] = view.kinds[sequence]
        elif sequence < view.cleaned_below and sequence not in again:
            taken_for_claims.add(sequence)
        else:
            try:
                manifest = read_manifest(store, info.name)
            except ObjectNotFoundError:
                gone.add(info.name)
            except FormatError as error:  # it may be a claim, so it stays
                _log.warning("%s", error)
            else:
                if manifest.sequence == sequence:
                    kinds[sequence] = manifest.kind
                    if manifest.kind == "checkpoint":
                        read[sequence] = summary_of(manifest)
    return kinds, read, gone, taken_for_claims


def _newest(cleaned: Mapping[int, ObjectInfo], view: View) -> set[int]:
    """Those that were written last, by the store's clock, of the records that should be claims.

    Where the store tells no times: some whose kind is not known, others each time.
    """
    if any(info.modified_ms is None for info in cleaned.values()):
        return set(sorted(set(cleaned) - set(view.kinds))[-LOOK_AGAIN:])
    by_age = sorted(cleaned, key=lambda s: (cleaned[s].modified_ms, s))
    return set(by_age[-LOOK_AGAIN:])


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + DELETE_BATCH] for start in range(0, len(names), DELETE_BATCH))


def _report(
    garbage: Garbage,
    counted: CountingStore,
    known: Mapping[int, RecordKind],
    history: KnownHistory | None,
    *,
    dry_run: bool,
) -> CleanReport:
    tallies: dict[Fate, dict[str, Tally]] = {fate: {} for fate in Fate}
    for item in garbage.items:
        old = tallies[item.fate].get(item.kind.value, Tally())
        new = Tally(old.objects + 1, old.size_bytes + item.info.size_bytes)
        tallies[item.fate][item.kind.value] = new
    gone = set() if dry_run else {info.name for info in garbage.of(Fate.DEAD, Kind.RECORD)}
    view = garbage.view
    kinds = {seq: kind for seq, kind in known.items() if record_name(seq) not in gone}
    return CleanReport(
        dry_run=dry_run,
        removed=tallies[Fate.DEAD],
        kept=tallies[Fate.LIVE],
        young=tallies[Fate.YOUNG],
        waiting=tallies[Fate.WAITING],
        drivers=tallies[Fate.DRIVERS],
        unknown=[info.name for info in garbage.of(Fate.UNKNOWN)],
        foreign=[info.name for info in garbage.of(Fate.FOREIGN)],
        files_unknown=view.files_unknown,
        oldest_needed=view.oldest_needed,
        cleaned_below=view.cleaned_below if dry_run else garbage.cleaned_below(),
        kinds=kinds,
        history=history,
        requests={verb: count.requests for verb, count in counted.counts.items()},
    )
