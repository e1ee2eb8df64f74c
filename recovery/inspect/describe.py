"""A job as its store shows it: read without claiming it, whoever runs it, damaged or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recovery.decide.live_lineages import without_dropped
from recovery.inspect.tolerant_log import read_log, require_tip
from snapshot.formats.record import Manifest, record_name
from snapshot.protocol.lineage import OperatorLineage, resolve
from snapshot.retention.deletable import Kind, kind_of
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError

__all__ = [
    "BaseInfo",
    "ClaimInfo",
    "JobDescription",
    "OperatorInfo",
    "claim_in",
    "describe",
    "operators_in",
]


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
    live = without_dropped(lineages, manifests)
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
