"""A job as its store shows it: read without claiming it, whoever runs it, damaged or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from snapshot.formats.record import Manifest, parse_record_name, read_manifest, record_name
from snapshot.protocol.lineage import OperatorLineage, resolve
from snapshot.retention.deletable import Kind, kind_of
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from statebackend.errors import (
    CorruptionError,
    FormatError,
    NotRestorableError,
    ObjectNotFoundError,
)

__all__ = [
    "BaseInfo",
    "ClaimInfo",
    "JobDescription",
    "LogRead",
    "OperatorInfo",
    "ResolvedOnce",
    "claim_in",
    "describe",
    "live_lineages",
    "named_operators",
    "operators_in",
    "read_log",
    "read_one",
    "require_tip",
]


@dataclass(frozen=True, kw_only=True)
class LogRead:
    """Every record of a job's log, as far as it reads.

    Attributes:
        listing: the whole log folder.
        manifests: by sequence. damaged: why the others do not read, by sequence.
        tip: the newest record that reads; None if none does.
    """

    listing: list[ObjectInfo]
    manifests: dict[int, Manifest]
    damaged: dict[int, FormatError]

    @property
    def tip(self) -> Manifest | None:
        """The newest record that reads."""
        return self.manifests[max(self.manifests)] if self.manifests else None

    @property
    def sequences(self) -> list[int]:
        """Every sequence in the store, ascending."""
        return sorted([*self.manifests, *self.damaged])

    @property
    def oldest_needed(self) -> int:
        """As the tip says."""
        return self.tip.oldest_needed if self.tip else 0

    @property
    def live(self) -> list[Manifest]:
        """What reads of the records that are needed, ascending."""
        return [self.manifests[s] for s in sorted(self.manifests) if s >= self.oldest_needed]

    @property
    def missing(self) -> list[int]:
        """Sequences that are needed and not there at all."""
        there = {*self.manifests, *self.damaged}
        end = max(there, default=-1) + 1
        return [s for s in range(self.oldest_needed, end) if s not in there]


def read_log(store: ObjectStore, job: str) -> LogRead:
    """Read the manifest of every record; one listing, and one or two requests per record.

    Args:
        store: the job's folder. job: its name; a record of another one is damage.

    Raises:
        StoreUnreachableError: a failure that may pass: never taken for damage.
    """
    listing = store.list("log/")
    manifests: dict[int, Manifest] = {}
    damaged: dict[int, FormatError] = {}
    for info in listing:
        sequence = parse_record_name(info.name)
        if sequence is None:
            continue
        try:
            manifests[sequence] = read_one(store, sequence, job)
        except FormatError as error:
            damaged[sequence] = error
        except ObjectNotFoundError:
            continue  # cleaned since the listing
    return LogRead(listing=listing, manifests=manifests, damaged=damaged)


def read_one(store: ObjectStore, sequence: int, job: str) -> Manifest:
    """One record's manifest, checked to be of this slot and job.

    Raises:
        CorruptionError, UnsupportedFormatError, ObjectNotFoundError, StoreUnreachableError
    """
    name = record_name(sequence)
    manifest = read_manifest(store, name)
    if manifest.sequence != sequence or manifest.job != job:
        raise CorruptionError(
            f"The record {name!r} says that it is number {manifest.sequence} of the job "
            f"{manifest.job!r}.",
            todo="Restore it from another copy of the store.",
        )
    return manifest


def named_operators(manifests: Iterable[Manifest]) -> dict[str, int] | None:
    """The operators of the run that wrote last, with their first epochs; None: not said."""
    named = [m.settings["operators"] for m in manifests if "operators" in m.settings]
    return named[-1] if named else None


def live_lineages(manifests: Sequence[Manifest]) -> dict[str, OperatorLineage]:
    """The lineages of a log, without operators that the last run no longer had.

    Raises:
        CorruptionError: the lineage digests do not follow from one another.
    """
    return _without_dropped(resolve(manifests), manifests)


class ResolvedOnce:
    """The lineages of a log that is asked for them again and again, as each start does.

    They are resolved once for as long as the log is the same.
    """

    def __init__(self) -> None:
        self._known: tuple[list[Manifest], dict[str, OperatorLineage]] = [], {}

    def of(self, manifests: Sequence[Manifest]) -> Mapping[str, OperatorLineage]:
        """As `live_lineages`: to be looked at, not to be changed."""
        known = self._known
        if known[0] != manifests:
            known = self._known = list(manifests), live_lineages(manifests)
        return known[1]

    def take(self, manifests: Sequence[Manifest]) -> dict[str, OperatorLineage]:
        """As `live_lineages`: the caller's own, and kept here no longer."""
        taken = dict(self.of(manifests))
        self._known = [], {}
        return taken


def _without_dropped(
    lineages: Mapping[str, OperatorLineage], manifests: Iterable[Manifest]
) -> dict[str, OperatorLineage]:
    named = named_operators(manifests)
    return {
        uid: lineage
        for uid, lineage in lineages.items()
        if named is None or named.get(uid) == lineage.first_epoch
    }


# --- one job in full -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClaimInfo:
    """One takeover by a driver. `stamp_ms` is -1 where it was not said."""

    sequence: int
    generation: int
    writer: str
    run: str
    query_id: str
    stamp_ms: int


@dataclass(frozen=True, kw_only=True)
class BaseInfo:
    """The base that a restore of a subtask's newest epoch starts from.

    Attributes:
        kind: `base` (in or beside a record) or `files` (RocksDB's own files).
        size_bytes: what a restore reads of it.
        deltas: how many follow it, with `delta_bytes` in all.
    """

    subtask: int
    epoch: int
    kind: str
    size_bytes: int
    deltas: int
    delta_bytes: int


@dataclass(frozen=True, kw_only=True)
class OperatorInfo:
    """One operator.

    Attributes:
        dropped: the last run no longer had it; it is not restored, and cleaned in time.
        epochs: complete ones that the log still names.
        key_groups: of each subtask, first and last, both inclusive.
        schemas: of its states, by name, as they were written last.
        bases: one for each subtask that has one.
    """

    uid: str
    dropped: bool
    parallelism: int
    max_parallelism: int
    first_epoch: int
    epochs: list[int]
    key_groups: list[tuple[int, int]]
    states: dict[str, int]
    schemas: dict[str, str]
    bases: list[BaseInfo]


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """One job.

    Attributes:
        sequence, generation, writer, stamp_ms: of the newest record.
        records: how many are there. oldest_needed, cleaned_below: as the newest says.
        claims: every one that reads, ascending.
        objects, size_bytes: by kind: `records`, `data`, `bases`, `probes`, `others`.
        problems: what does not read or fit; `verify` says more.
    """

    job: str
    uri: str
    job_id: str
    query_id: str
    sequence: int
    generation: int
    writer: str
    stamp_ms: int
    records: int
    oldest_needed: int
    cleaned_below: int
    operators: list[OperatorInfo]
    claims: list[ClaimInfo]
    objects: dict[str, int]
    size_bytes: dict[str, int]
    problems: list[str] = field(default_factory=list)


def describe(store: ObjectStore, job: str) -> JobDescription:
    """Everything that the log and a listing say of a job.

    Raises:
        NotRestorableError: there is no record that reads.
        StoreUnreachableError: from the store.
    """
    listing = store.list("")
    log = read_log(store, job)
    tip = require_tip(log, store)
    problems = [error.what for error in log.damaged.values()]
    problems += [f"The record {record_name(s)!r} is not there." for s in log.missing]
    lineages: dict[str, OperatorLineage] = {}
    try:
        lineages = resolve(log.live)
    except CorruptionError as error:
        problems.append(error.what)
    objects: dict[str, int] = {kind.value: 0 for kind in Kind}
    size_bytes = dict(objects)
    for info in listing:
        kind = kind_of(info.name).value
        objects[kind] += 1
        size_bytes[kind] += info.size_bytes
    manifests = [log.manifests[s] for s in sorted(log.manifests)]
    return JobDescription(
        job=job,
        uri=store.uri,
        job_id=tip.job_id,
        query_id=next((m.query_id for m in reversed(manifests) if m.query_id), ""),
        sequence=tip.sequence,
        generation=tip.generation,
        writer=tip.writer,
        stamp_ms=tip.stamp_ms,
        records=len(log.sequences),
        oldest_needed=tip.oldest_needed,
        cleaned_below=tip.cleaned_below,
        operators=operators_in(manifests, lineages),
        claims=[claim_in(m) for m in manifests if m.kind == "claim"],
        objects=objects,
        size_bytes=size_bytes,
        problems=problems,
    )


def require_tip(log: LogRead, store: ObjectStore) -> Manifest:
    """The tip.

    Raises:
        NotRestorableError: there is no log, or nothing in it reads.
    """
    if log.tip is not None:
        return log.tip
    if log.damaged:
        raise NotRestorableError(
            f"None of the {len(log.damaged)} records in {store.uri} reads.",
            todo="Restore the folder from another copy, or use the release that wrote it.",
        )
    raise NotRestorableError(
        f"There is no job in {store.uri}: it has no commit log.",
        todo="Check the URI and the job's name (statebackend list shows what is there).",
    )


def claim_in(manifest: Manifest) -> ClaimInfo:
    """What a claim says."""
    return ClaimInfo(
        sequence=manifest.sequence,
        generation=manifest.generation,
        writer=manifest.writer,
        run=manifest.run,
        query_id=manifest.query_id,
        stamp_ms=manifest.stamp_ms,
    )


def operators_in(
    manifests: Sequence[Manifest], lineages: Mapping[str, OperatorLineage]
) -> list[OperatorInfo]:
    """Every operator of a log, those that the last run no longer had among them.

    Args:
        lineages: resolved of these manifests.
    """
    live = _without_dropped(lineages, manifests)
    return [
        _operator(lineage, manifests, dropped=uid not in live)
        for uid, lineage in sorted(lineages.items())
    ]


def _operator(
    lineage: OperatorLineage, manifests: Sequence[Manifest], *, dropped: bool
) -> OperatorInfo:
    states: dict[str, int] = {}
    schemas: dict[str, str] = {}
    for manifest in manifests:
        if manifest.operator == lineage.uid and manifest.first_epoch == lineage.first_epoch:
            states.update(manifest.states)
            schemas.update(manifest.schemas)
    bases = []
    for number, subtask in enumerate(lineage.subtasks):
        ref = subtask.base_before(lineage.last_epoch)
        if ref is None:
            continue
        base = ref.entry
        after = [r.entry for e, r in subtask.deltas.items() if e > base.epoch]
        bases.append(
            BaseInfo(
                subtask=number,
                epoch=base.epoch,
                kind=base.kind,
                size_bytes=max(base.size_bytes, base.state_bytes),
                deltas=len(after),
                delta_bytes=sum(entry.size_bytes for entry in after),
            )
        )
    return OperatorInfo(
        uid=lineage.uid,
        dropped=dropped,
        parallelism=lineage.parallelism,
        max_parallelism=lineage.max_parallelism,
        first_epoch=lineage.first_epoch,
        epochs=sorted(lineage.epochs),
        key_groups=[(s.key_groups.start, s.key_groups.end) for s in lineage.subtasks],
        states=states,
        schemas=schemas,
        bases=bases,
    )
