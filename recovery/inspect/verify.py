"""Reading everything that a job keeps, and saying what of it is not what it should be.

Nothing is trusted: each record's footer and manifest, each slice's digest and decoding, each file
of each base, the lineage's chain, and that the last two epochs of every operator could be put
together. It never stops at a finding. Memory: one record of at most `WHOLE_BYTES`, or one chunk.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from recovery.decide.live_lineages import without_dropped
from recovery.decide.lost_epochs import Lost, Needs, slice_key, tolerant_lineages
from recovery.inspect.tolerant_log import LogRead, read_log, require_tip
from snapshot.formats.delta_in_pieces import iter_delta
from snapshot.formats.file_index import FileEntry, decode_index
from snapshot.formats.history_object import HISTORY_PREFIX, decode_history, parse_history_name
from snapshot.formats.record import (
    Manifest,
    Record,
    SliceEntry,
    is_operator_slice,
    parse_record,
    read_manifest,
    record_name,
)
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CorruptionError,
    FormatError,
    LocalDirError,
    ObjectNotFoundError,
    StateBackendError,
)
from statebackend.work_done import Progress

__all__ = ["Finding", "VerifyReport", "verify"]

WHOLE_BYTES: Final = 32 << 20  # larger records are read slice by slice
READ_ATTEMPTS: Final = 5
SPOOL_BYTES: Final = 32 << 20  # larger slices go through a temporary file
_STOPS: Final = "The job cannot be started: every record from the oldest needed on is read then."


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: of the error that a reader would get (see errors.md).
        object: its name in the job's folder; empty where no one object is at fault.
        operator, subtask, epoch: of the slice; None where it is not about one.
        problem: what is wrong. means: what cannot be done because of it.
    """

    code: str
    object: str
    problem: str
    means: str
    operator: str | None = None
    subtask: int | None = None
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was read, and what was found.

    Attributes:
        records, slices, files: how many were checked (a file of a base once, whoever names it).
        size_bytes: read of slices and files.
        startable: whether all records read that a start reads. If not, put those back first.
        restorable: for each operator, those of its last two epochs that can be restored once the
            job is startable.
        lost: for each operator, those that cannot.
        findings: empty if all is well.
    """

    job: str
    uri: str
    records: int
    slices: int
    files: int
    size_bytes: int
    startable: bool
    restorable: dict[str, list[int]]
    lost: dict[str, list[int]]
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


@dataclass
class _Raw:
    """A finding before it is known what it means. ``sequence``: of the record it hangs on."""

    error: StateBackendError
    object: str
    sequence: int
    entry: SliceEntry | None = None
    means: str = ""


@dataclass
class _Walk:
    store: ObjectStore
    log: LogRead
    scratch: Path
    progress: Progress | None
    total_bytes: int = 0
    read_bytes: int = 0
    slices: int = 0
    raw: list[_Raw] = field(default_factory=list)
    files: dict[tuple[str, str, int], StateBackendError | None] = field(default_factory=dict)

    def step(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes
        if self.progress is not None:
            self.progress(self.read_bytes, max(self.total_bytes, self.read_bytes))

    # --- slices ------------------------------------------------------------------------------

    def record(self, manifest: Manifest, size_bytes: int) -> None:
        """All slices of one record."""
        name = record_name(manifest.sequence)
        inline = [entry for entry in manifest.slices if entry.object is None]
        record: Record | None = None
        if inline and size_bytes <= WHOLE_BYTES:
            try:
                record = parse_record(self.store.get(name), name)
            except (FormatError, ObjectNotFoundError) as error:
                for entry in inline:
                    self.fail(error, name, manifest.sequence, entry)
                inline = []
        for entry in inline:
            whole = partial(record.slice, entry) if record else partial(self.ranged, name, entry)
            self.slice(manifest, entry, whole)
        for entry in manifest.slices:
            if entry.object is not None:
                self.slice(manifest, entry, partial(self.spooled, entry))

    def slice(
        self, manifest: Manifest, entry: SliceEntry, read: Callable[[], bytes | Path]
    ) -> None:
        """One slice: its digest, then what is in it."""
        self.slices += 1
        name = entry.object or record_name(manifest.sequence)
        try:
            source = read()
            if entry.kind == "files":
                self.base_files(manifest, entry, _whole(source))
            elif is_operator_slice(entry):
                self.operator_state(entry, _whole(source), name)
            elif entry.size_bytes:
                self.delta(entry, source, name)
        except (FormatError, ObjectNotFoundError) as error:
            self.fail(error, name, manifest.sequence, entry)
        finally:
            self.step(entry.size_bytes)
            (self.scratch / "slice").unlink(missing_ok=True)

    def delta(self, entry: SliceEntry, source: bytes | Path, name: str) -> None:
        rows = sum(len(piece.keys) for piece in iter_delta(source, name=name))
        if rows != entry.rows:
            raise _other(entry, name, f"has {rows} rows, and its manifest says {entry.rows}")

    def operator_state(self, entry: SliceEntry, data: bytes, name: str) -> None:
        """States that belong to no key, down to every row."""
        # Schemas bring pyspark along, which other jobs need not wait for.
        from statebackend.schema.codec import codec_for
        from statebackend.schema.keys.key_codec import KeyCodec
        from statebackend.schema.types import schema_from_json
        from statebackend.state.operator_state import decode_lists, decode_maps

        if entry.kind == "operator":
            lists = decode_lists(data, name)
            rows = [(one.schema, one.version, list(one.rows)) for one in lists.values()]
        else:
            maps = decode_maps(data, name)
            rows = [(o.schema, o.version, list(o.entries.values())) for o in maps.values()]
            for one in maps.values():
                codec = KeyCodec(schema_from_json(one.key_schema), allow_all_null=True)
                for key in one.entries:
                    codec.decode(key)
        for schema, version, some in rows:
            codec_for(schema_from_json(schema), version).decode_many(some)
        found = sum(len(some) for _, _, some in rows)
        if found != entry.rows:
            raise _other(entry, name, f"has {found} rows, and its manifest says {entry.rows}")

    def ranged(self, name: str, entry: SliceEntry) -> bytes | Path:
        """An inline slice of a large record."""
        start, end = entry.offset or 0, (entry.offset or 0) + entry.size_bytes
        step = SPOOL_BYTES // 4
        pieces = (
            self.store.get_range(name, at, min(step, end - at)) for at in range(start, end, step)
        )
        return self.spool(pieces, entry, name)

    def spooled(self, entry: SliceEntry) -> bytes | Path:
        """A slice that is an object of its own."""
        assert entry.object is not None
        return self.spool(self.store.get_chunks(entry.object), entry, entry.object)

    def spool(self, pieces: Iterator[bytes], entry: SliceEntry, name: str) -> bytes | Path:
        """The bytes, digest-checked; in a temporary file where there are many."""
        hasher, size_bytes = blake3(), 0
        path = self.scratch / "slice"
        file: BinaryIO = path.open("wb") if entry.size_bytes > SPOOL_BYTES else io.BytesIO()
        with file:
            for piece in pieces:
                hasher.update(piece)
                size_bytes += len(piece)
                if size_bytes > entry.size_bytes:
                    break  # too long is wrong, however long it is
                file.write(piece)
            kept = file.getvalue() if isinstance(file, io.BytesIO) else path
        if size_bytes != entry.size_bytes:
            raise _other(entry, name, f"is not of the {entry.size_bytes} bytes it should be")
        if hasher.hexdigest() != entry.digest:
            raise _other(entry, name, f"has the digest {hasher.hexdigest()}, not {entry.digest}")
        return kept

    # --- files of bases ----------------------------------------------------------------------

    def base_files(self, manifest: Manifest, entry: SliceEntry, data: bytes) -> None:
        index = decode_index(data, entry.object or record_name(manifest.sequence))
        for file in index.files:
            key = (file.object, file.digest, file.size_bytes)
            if key not in self.files:
                self.total_bytes += file.size_bytes
                self.files[key] = self.file(file)
                self.step(file.size_bytes)
            error = self.files[key]
            if error is not None:
                self.fail(error, file.object, manifest.sequence, entry)

    def file(self, file: FileEntry) -> StateBackendError | None:
        """What is wrong with a file; None if nothing."""
        hasher, size_bytes = blake3(), 0
        try:
            for piece in self.store.get_chunks(file.object):
                hasher.update(piece)
                size_bytes += len(piece)
        except ObjectNotFoundError as error:
            return error
        if size_bytes == file.size_bytes and hasher.hexdigest() == file.digest:
            return None
        return CorruptionError(
            f"The file {file.name!r} of a base, {file.object!r}, is {size_bytes} bytes of digest "
            f"{hasher.hexdigest()}, expected {file.size_bytes} of {file.digest}.",
            todo="Restore it from another copy of the store.",
        )

    def fail(
        self, error: StateBackendError, name: str, sequence: int, entry: SliceEntry | None = None
    ) -> None:
        self.raw.append(_Raw(error, name, sequence, entry))


def verify(store: ObjectStore, job: str, *, progress: Progress | None = None) -> VerifyReport:
    """Read and check everything that a job keeps. Changes nothing; may run beside the job.

    Args:
        store: the job's folder. job: its name.
        progress: told the bytes that were read, and those to read in all.

    Raises:
        NotRestorableError: there is no log, or none of its records reads.
        LocalDirError: the temporary directory, through which large slices go, failed.
        StoreUnreachableError: a failure that may pass: it is no finding.
    """
    log = _read_whole(store, job)
    require_tip(log, store)
    walk = _walked(store, log, progress)
    lineages, breaks = tolerant_lineages(log.live)
    walk.raw += [_Raw(error, record_name(seq), seq) for seq, error in breaks]
    walk.raw += [*_log_findings(log), *_history_findings(store)]
    needs = Needs(without_dropped(lineages, log.live))
    raw = _still_there(store, log, walk.raw)
    lost = needs.lost({slice_key(one.sequence, one.entry) for one in raw if one.entry})
    findings = [_finding(one, needs, lost) for one in raw] + [
        Finding(
            code="SB7001",
            object="",
            problem=f"Epoch {one.epoch} of operator {one.operator!r} is not whole: {one.reason}.",
            means="It cannot be restored.",
            operator=one.operator,
            subtask=one.subtask,
            epoch=one.epoch,
        )
        for one in lost
        if one.gap
    ]
    epochs = needs.epochs()
    gone = {uid: sorted({o.epoch for o in lost if o.operator == uid}) for uid in epochs}
    return VerifyReport(
        job=job,
        uri=store.uri,
        records=len(log.sequences),
        slices=walk.slices,
        files=len(walk.files),
        size_bytes=walk.read_bytes,
        startable=not any(one.means == _STOPS for one in findings),
        restorable={uid: [e for e in epochs[uid] if e not in gone[uid]] for uid in epochs},
        lost={uid: found for uid, found in gone.items() if found},
        findings=findings,
    )


def _walked(store: ObjectStore, log: LogRead, progress: Progress | None) -> _Walk:
    """Every slice and file read."""
    try:
        with tempfile.TemporaryDirectory(prefix="statebackend-verify-") as scratch:
            walk = _Walk(store, log, Path(scratch), progress)
            sizes = {info.name: info.size_bytes for info in log.listing}
            walk.total_bytes = sum(e.size_bytes for m in log.live for e in m.slices)
            for manifest in log.live:
                walk.record(manifest, sizes[record_name(manifest.sequence)])
    except OSError as error:
        raise LocalDirError(
            f"The temporary directory {tempfile.gettempdir()} failed ({error}).",
            todo="Set TMPDIR to a directory with room for the largest slice.",
        ) from error
    return walk


def _read_whole(store: ObjectStore, job: str) -> LogRead:
    """The log; read again while it moves on, since what is cleaned meanwhile is no gap."""
    log = read_log(store, job)
    for _ in range(READ_ATTEMPTS):
        again = read_log(store, job) if log.missing else log
        if again.sequences[-1:] == log.sequences[-1:]:
            return again
        log = again
    return log


def _log_findings(log: LogRead) -> list[_Raw]:
    """Records that do not read, are not there, or do not follow from one another."""
    found = []
    for sequence, error in sorted(log.damaged.items()):
        below = sequence < log.oldest_needed
        means = (
            "Nothing that is needed is in it. It is kept: it may be a claim." if below else _STOPS
        )
        found.append(_Raw(error, record_name(sequence), sequence, means=means))
    for sequence in log.missing:
        gap = ObjectNotFoundError(f"The record {record_name(sequence)!r} is needed and not there.")
        found.append(_Raw(gap, record_name(sequence), sequence, means=_STOPS))
    for older, newer in zip(log.live, log.live[1:], strict=False):
        if older.job_id == newer.job_id and older.generation <= newer.generation:
            continue
        error = CorruptionError(
            f"Record {newer.sequence} is of the job {newer.job_id!r}, generation "
            f"{newer.generation}, after {older.job_id!r}, generation {older.generation}."
        )
        found.append(_Raw(error, record_name(newer.sequence), newer.sequence, means=_STOPS))
    return found


def _history_findings(store: ObjectStore) -> Iterator[_Raw]:
    """Objects of the history that do not read."""
    for info in store.list(HISTORY_PREFIX):
        known = parse_history_name(info.name)
        if known is None:
            continue
        means = (
            f"The history lacks epochs {known.first_epoch} to {known.last_epoch}. Nothing that "
            "the job needs is in it."
        )
        try:
            decode_history(info.name, store.get(info.name))
        except FormatError as error:
            yield _Raw(error, info.name, known.newest_sequence, means=means)
        except ObjectNotFoundError:
            continue  # beyond the bounds since


def _still_there(store: ObjectStore, log: LogRead, raw: list[_Raw]) -> list[_Raw]:
    """Without what was only missing because the job went on and cleaned up meanwhile."""
    if not any(isinstance(one.error, ObjectNotFoundError) for one in raw):
        return raw
    oldest = log.oldest_needed
    for info in reversed(store.list("log/")):
        try:
            oldest = max(oldest, read_manifest(store, info.name).oldest_needed)
        except (FormatError, ObjectNotFoundError):
            continue
        break
    return [
        one
        for one in raw
        if not isinstance(one.error, ObjectNotFoundError) or one.sequence >= oldest
    ]


def _finding(raw: _Raw, needs: Needs, lost: list[Lost]) -> Finding:
    entry = raw.entry
    means = raw.means
    if not means and entry is None:
        means = "The epochs from there on cannot be trusted."
    elif entry is not None:
        means = needs.meaning(slice_key(raw.sequence, entry), lost)
    return Finding(
        code=raw.error.code,
        object=raw.object,
        problem=raw.error.what,
        means=means,
        operator=entry.operator if entry else None,
        subtask=entry.subtask if entry else None,
        epoch=entry.epoch if entry else None,
    )


def _whole(source: bytes | Path) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def _other(entry: SliceEntry, name: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"The slice {entry.operator!r}/{entry.subtask} epoch {entry.epoch} ({entry.kind}) in "
        f"{name!r} {reason}.",
        todo="Restore it from another copy of the store.",
    )
