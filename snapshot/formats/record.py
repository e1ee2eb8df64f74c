"""A record: one object of the commit log, with its slices, its manifest, and a footer.

Format version 3, in this order:

    slices     the bodies of the inline slices, packed, in the order of the manifest
    manifest   JSON (`Manifest`), UTF-8, in one zstd frame (version 1: the JSON as it is)
               (version 2 has no slices of the kinds operator and broadcast)
    footer     56 bytes, little-endian:
                 0  magic            8 bytes  b"SBRECORD"
                 8  format version   u32      3
                12  manifest offset  u64      where the manifest starts = where the slices end
                20  manifest length  u32
                24  manifest digest  16 bytes the first 16 bytes of blake3 over the manifest,
                                              as it is stored
                40  total length     u64      of the whole object, footer included
                48  magic again      8 bytes  b"DROCERBS"

Nothing in a footer is believed: offset + length + footer must be the total, and the total must be
the size that the store gives, so every field is either what it must be or refused. A slice is
checked against its length and digest when it is taken out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from blake3 import blake3

from snapshot.formats.zstd_frame import PackedError, pack, unpack
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, SettingError, UnsupportedFormatError

__all__ = [
    "FOOTER_BYTES",
    "FORMAT_VERSION",
    "LOG_PREFIX",
    "OPERATOR_SLICES",
    "Manifest",
    "Record",
    "SliceEntry",
    "encode_record",
    "is_operator_slice",
    "parse_record",
    "parse_record_name",
    "place",
    "read_manifest",
    "read_record",
    "record_name",
    "slice_key",
]

FORMAT_VERSION = 3
LOG_PREFIX = "log/"
OPERATOR_SLICES: Final = ("operator", "broadcast")
TAIL_BYTES = 64 * 1024
MANIFEST_LIMIT_BYTES = 256 << 20  # unpacked: 32,768 subtasks need some 12 MB

_MAGIC = b"SBRECORD"
_END_MAGIC = b"DROCERBS"
_FOOTER = struct.Struct("<8sIQI16sQ8s")
FOOTER_BYTES = _FOOTER.size
_SEQUENCE_LIMIT = 10**20
_RECORD_NAME = re.compile(r"log/([0-9]{20})\.ckpt")


class SliceEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=False):
    """One subtask's part of a checkpoint.

    Attributes:
        operator: the operator's uid.
        subtask: index, from 0.
        kind: `delta` (what changed in the epoch), `base` (everything, as one delta) or `files`
            (everything, as RocksDB's own files: the slice is their index, see
            snapshot.formats.file_index); or, beside the lineage, `operator` (a subtask's states of
            no key) or `broadcast` (the operator's, from subtask 0), see
            statebackend.state.operator_state.
        epoch: the epoch at whose end this is the state. A base may be of an earlier epoch than
            the record: it is made while later ones run.
        key_group_start, key_group_end: the range it covers, both inclusive.
        attempt: the task attempt that made it.
        rows: rows in it.
        size_bytes: length of its bytes as stored.
        digest: blake3 over those bytes, 64 hex digits.
        chain: the subtask's lineage digest after this epoch, 64 hex digits.
        offset: where it starts in the record, when inline; else None.
        object: the name of its own object, when it has one; else None.
        state_bytes: of a base: what a restore from it reads.
        timings_ms: how long each phase took, by name.
    """

    operator: str
    subtask: int
    kind: Literal["delta", "base", "files", "operator", "broadcast"]
    epoch: int
    key_group_start: int
    key_group_end: int
    attempt: int
    rows: int
    size_bytes: int
    digest: str
    chain: str
    offset: int | None = None
    object: str | None = None
    state_bytes: int = 0
    timings_ms: dict[str, float] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What a record says. Fields that a later release adds are ignored by an earlier one.

    Attributes:
        format: format version of the record.
        kind: `claim` (a driver takes over) or `checkpoint`.
        job, job_id: the job's name, and its identity for life.
        generation: the tenure of the driver that wrote it, from 1.
        sequence: its number in the log, from 0; also in its name.
        writer, write_id: who wrote it, and in which one write.
        oldest_needed: the oldest sequence that anyone still needs, this one or before.
        cleaned_below: what is left of the log before this sequence are claims, and nothing else.
        query_id, run: of the streaming query, and of its start.
        operator, epoch: what it is a checkpoint of; epoch -1 = none.
        stamp_ms: the epoch's own time; -1 = none.
        watermark_ms: in force in the epoch, for the whole job; None = none.
        event_max_ms: the largest event time that the operator ever saw, up to the epoch's end.
        second_max_ms: the same of a connected operator's right side.
        next_timer_ms: its earliest timer after the epoch; None = none.
        time_mode: which time its timers run on: none, processing, event; "" = not said.
        dropped_ids: states that were deleted; nothing of them is left after the epoch.
        parallelism, max_parallelism: of the operator; 0 = not said.
        first_epoch: the first epoch that the operator ever ran.
        schemas: what is declared of each state, by name, with the value schemas it had before; the
            key's schema under "".
        states: state ids (part of every key) by name.
        slices: this record's own slices.
        settings: those that must stay as they are for the job to be restored.
        figures: what the checkpoint was like (see `snapshot.formats.epoch_figures`); no restore
            reads it. Left out where there are none.
    """

    format: int = FORMAT_VERSION
    kind: Literal["claim", "checkpoint"]
    job: str
    job_id: str
    generation: int
    sequence: int
    writer: str
    write_id: str
    oldest_needed: int
    cleaned_below: int = 0
    query_id: str = ""
    run: str = ""
    operator: str = ""
    epoch: int = -1
    stamp_ms: int = -1
    watermark_ms: int | None = None
    event_max_ms: int | None = None
    second_max_ms: int | None = None
    next_timer_ms: int | None = None
    time_mode: str = ""
    dropped_ids: list[int] = []
    parallelism: int = 0
    max_parallelism: int = 0
    first_epoch: int = 0
    schemas: dict[str, str] = {}
    states: dict[str, int] = {}
    slices: list[SliceEntry] = []
    settings: dict[str, Any] = {}
    figures: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def is_operator_slice(entry: SliceEntry) -> bool:
    """Whether a slice holds states of no key, and is no part of its subtask's lineage."""
    return entry.kind in OPERATOR_SLICES


def slice_key(kind: str, digest: str) -> str:
    """Names a slice as something that may be damaged: a base may be the very bytes of a delta."""
    return f"{kind}:{digest}"


_decoder = msgspec.json.Decoder(Manifest)


@dataclass(frozen=True)
class Record:
    """A whole record in memory.

    Attributes:
        name: the object it was read from.
        manifest: what it says.
        body: the packed slices.
    """

    name: str
    manifest: Manifest
    body: memoryview

    def slice(self, entry: SliceEntry) -> bytes:
        """The bytes of one inline slice, checked against its length and digest.

        Raises:
            CorruptionError: out of bounds, or other bytes than the manifest names.
            SettingError: the slice is in an object of its own.
        """
        if entry.object is not None or entry.offset is None:
            raise SettingError(
                f"The slice {_slice_name(entry)} is not in {self.name!r}.",
                todo=f"Read it from {entry.object!r}.",
            )
        end = entry.offset + entry.size_bytes
        if not 0 <= entry.offset <= end <= len(self.body):
            raise _damaged(
                self.name,
                f"its slice {_slice_name(entry)} would be bytes {entry.offset} to {end} "
                f"of {len(self.body)}",
            )
        data = bytes(self.body[entry.offset : end])
        _check_slice(entry, data, self.name)
        return data


def record_name(sequence: int) -> str:
    """`log/` and the sequence in 20 digits, so that names sort as numbers do.

    Raises:
        SettingError: negative, or over 20 digits.
    """
    if not 0 <= sequence < _SEQUENCE_LIMIT:
        raise SettingError(f"A record cannot have the sequence {sequence}.")
    return f"{LOG_PREFIX}{sequence:020d}.ckpt"


def parse_record_name(name: str) -> int | None:
    """The sequence in a record's name; None for a name that is no record's."""
    match = _RECORD_NAME.fullmatch(name)
    return int(match[1]) if match else None


def encode_record(manifest: Manifest, bodies: Sequence[bytes | None] = ()) -> list[bytes]:
    """The parts of a record, to be written one after the other as one object.

    Args:
        manifest: its inline slices get their offsets here.
        bodies: aligned with `manifest.slices`; None for a slice that has an object of its own.

    Raises:
        SettingError: bodies and slices do not match, or the manifest would not read back equal
            (a NaN, for one, does not survive JSON).
        CorruptionError: a body is not the bytes that its slice names.
    """
    placed = place(manifest, bodies)
    offset = sum(len(body or b"") for body in bodies)
    text = _encode_manifest(placed)
    footer = _FOOTER.pack(
        _MAGIC,
        FORMAT_VERSION,
        offset,
        len(text),
        _manifest_digest(text),
        offset + len(text) + FOOTER_BYTES,
        _END_MAGIC,
    )
    return [*(body for body in bodies if body), text, footer]


def place(manifest: Manifest, bodies: Sequence[bytes | None]) -> Manifest:
    """The manifest with the offsets that `encode_record` gives its inline slices. Raises as it."""
    if len(bodies) != len(manifest.slices):
        raise SettingError(
            f"A record of {len(manifest.slices)} slices was given {len(bodies)} bodies."
        )
    where = record_name(manifest.sequence)
    offset = 0
    slices = []
    for entry, body in zip(manifest.slices, bodies, strict=True):
        slices.append(_placed(entry, body, offset, where))
        offset += len(body or b"")
    return msgspec.structs.replace(manifest, slices=slices)


def read_manifest(store: ObjectStore, name: str) -> Manifest:
    """A record's manifest, with one request unless it is over some 64 KB, then two.

    Raises:
        CorruptionError: truncated, flipped or foreign bytes.
        UnsupportedFormatError: a later format.
        ObjectNotFoundError, StoreUnreachableError: from the store.
    """
    tail, total_bytes = store.get_tail(name, TAIL_BYTES)
    return _manifest_in_tail(store, name, tail, total_bytes)


def _manifest_in_tail(store: ObjectStore, name: str, tail: bytes, total_bytes: int) -> Manifest:
    footer = _parse_footer(tail, total_bytes, name)
    start = footer.manifest_offset - (total_bytes - len(tail))
    if start >= 0:
        text = tail[start : start + footer.manifest_length]
    else:
        text = store.get_range(name, footer.manifest_offset, footer.manifest_length)
    return _parse_manifest(text, footer, name)


def parse_record(data: bytes, name: str) -> Record:
    """A whole record, its slices unchecked until they are taken out.

    Raises:
        CorruptionError: truncated, flipped or foreign bytes.
        UnsupportedFormatError: a later format.
    """
    footer = _parse_footer(data, len(data), name)
    end = footer.manifest_offset + footer.manifest_length
    manifest = _parse_manifest(data[footer.manifest_offset : end], footer, name)
    return Record(name, manifest, memoryview(data)[: footer.manifest_offset])


def read_record(store: ObjectStore, name: str, tail_bytes: int) -> tuple[Manifest, Record | None]:
    """A record's manifest; and the whole record, if it is no larger than ``tail_bytes``.

    One request (two where the manifest alone is larger). Raises as :func:`read_manifest`.
    """
    tail, total_bytes = store.get_tail(name, tail_bytes)
    if len(tail) == total_bytes:
        record = parse_record(tail, name)
        return record.manifest, record
    return _manifest_in_tail(store, name, tail, total_bytes), None


@dataclass(frozen=True)
class _Footer:
    version: int
    manifest_offset: int
    manifest_length: int
    manifest_digest: bytes


def _parse_footer(tail: bytes, total_bytes: int, name: str) -> _Footer:
    if len(tail) < FOOTER_BYTES:
        raise _damaged(name, f"{total_bytes} bytes cannot hold a footer of {FOOTER_BYTES}")
    fields = _FOOTER.unpack(tail[-FOOTER_BYTES:])
    magic, version, offset, length, digest, stated_bytes, end_magic = fields
    if magic != _MAGIC or end_magic != _END_MAGIC:
        raise _damaged(name, "it does not end in a record's footer (cut short, or no record)")
    if version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"The record {name!r} has the format version {version}; "
            f"this release reads up to {FORMAT_VERSION}.",
            todo="Use a release that is at least as new as the one that wrote it.",
        )
    if version < 1:
        raise _damaged(name, f"there is no format version {version}")
    if stated_bytes != total_bytes:
        raise _damaged(name, f"it is {total_bytes} bytes and its footer says {stated_bytes}")
    if offset + length + FOOTER_BYTES != total_bytes:
        raise _damaged(name, f"its manifest cannot be {length} bytes at {offset}")
    return _Footer(version, offset, length, digest)


def _parse_manifest(text: bytes, footer: _Footer, name: str) -> Manifest:
    found = _manifest_digest(text)
    if found != footer.manifest_digest:
        raise _damaged(
            name,
            f"its manifest has the digest {found.hex()}, expected {footer.manifest_digest.hex()}",
        )
    try:
        if footer.version > 1:
            text = unpack(text, MANIFEST_LIMIT_BYTES)
        manifest = _decoder.decode(text)
    except (PackedError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(name, f"its manifest does not read ({error})") from error
    if manifest.format != footer.version:
        raise _damaged(name, f"its manifest says format {manifest.format}, its footer another")
    if not 0 <= manifest.oldest_needed <= manifest.sequence:
        raise _damaged(
            name, f"sequence {manifest.sequence} cannot need {manifest.oldest_needed} or later"
        )
    if manifest.figures is not msgspec.UNSET:  # a view: it would keep the whole text
        return msgspec.structs.replace(manifest, figures=manifest.figures.copy())
    return manifest


def _placed(entry: SliceEntry, body: bytes | None, offset: int, where: str) -> SliceEntry:
    if (body is None) != (entry.object is not None):
        raise SettingError(
            f"The slice {_slice_name(entry)} needs either a body or an object of its own."
        )
    if body is None:
        return msgspec.structs.replace(entry, offset=None)
    _check_slice(entry, body, where)
    return msgspec.structs.replace(entry, offset=offset)


def _check_slice(entry: SliceEntry, data: bytes, where: str) -> None:
    found = blake3(data).hexdigest()
    if len(data) != entry.size_bytes or found != entry.digest:
        raise _damaged(
            where,
            f"its slice {_slice_name(entry)} is {len(data)} bytes of digest {found}, "
            f"expected {entry.size_bytes} of {entry.digest}",
        )


def _encode_manifest(manifest: Manifest) -> bytes:
    """JSON that is known to read back as what it was: an unreadable record is found too late."""
    if manifest.format != FORMAT_VERSION:
        raise SettingError(f"Records of format {manifest.format} cannot be written.")
    if not 0 <= manifest.oldest_needed <= manifest.sequence:
        raise SettingError(
            f"The record {manifest.sequence} cannot name {manifest.oldest_needed} as the oldest."
        )
    try:
        text = msgspec.json.encode(manifest)
        same = _decoder.decode(text) == manifest
    except (msgspec.MsgspecError, RecursionError, UnicodeError, TypeError) as error:
        raise SettingError(f"The manifest of {manifest.sequence} is not JSON: {error}.") from error
    if not same:
        raise SettingError(
            f"The manifest of {manifest.sequence} would not read back as it is.",
            todo="Put plain JSON values into settings and timings (no NaN, no tuples).",
        )
    return pack(text)


def _manifest_digest(text: bytes) -> bytes:
    return blake3(text).digest(length=16)


def _slice_name(entry: SliceEntry) -> str:
    return f"{entry.operator!r}/{entry.subtask} epoch {entry.epoch} ({entry.kind})"


def _damaged(name: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"The record {name!r} is damaged or foreign: {reason}.",
        todo="Restore it from another copy of the store.",
    )
