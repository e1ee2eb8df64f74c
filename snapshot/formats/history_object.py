"""An object of a job's history: what records were like that cleaning has deleted since.

    history/<newest sequence, 20 digits>-<first epoch, 20 digits>-<last epoch, 20 digits>-<digest>

It is JSON (`_Content`) in one zstd frame; the digest in the name is the first 32 hex digits of
blake3 over the object's bytes. A summary follows from its record alone, which never changes, and
the name from the content. So whoever writes one, however late, says what is so: two cleaners may
both have written of a record, and the same object twice is the same object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from blake3 import blake3

from snapshot.formats.epoch_figures import RecordFigures, decode_figures
from snapshot.formats.record import Manifest
from snapshot.formats.zstd_frame import PackedError, pack, unpack
from statebackend.errors import CorruptionError, UnsupportedFormatError

__all__ = [
    "HISTORY_PREFIX",
    "HistoryName",
    "RecordSummary",
    "decode_history",
    "encode_history",
    "parse_history_name",
    "summary_of",
]

HISTORY_PREFIX: Final = "history/"
FORMAT_VERSION: Final = 1
_LIMIT_BYTES: Final = 256 << 20  # unpacked
_NAME: Final = re.compile(r"history/([0-9]{20})-([0-9]{20})-([0-9]{20})-([0-9a-f]{32})")
_DIGEST_DIGITS: Final = 32


class RecordSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record: what a history tells of it when it is gone.

    Attributes:
        operators: how many operators have a record of the epoch when it is complete.
        parallelism: of the operator.
        query_id: of the streaming query; `continuous` for a continuous job.
    """

    sequence: int
    generation: int
    operator: str
    epoch: int
    operators: int = 1
    parallelism: int = 0
    query_id: str = ""
    stamp_ms: int = -1
    watermark_ms: int | None = None
    next_timer_ms: int | None = None
    figures: RecordFigures = RecordFigures()


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT_VERSION
    records: list[RecordSummary]


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    format: int


def summary_of(manifest: Manifest) -> RecordSummary:
    """What is kept of a checkpoint's record. Constant time where it has figures."""
    figures = decode_figures(manifest.figures)
    firsts = manifest.settings.get("operators", {})
    begun = [one for one in firsts.values() if one <= manifest.epoch]
    return RecordSummary(
        sequence=manifest.sequence,
        generation=manifest.generation,
        operator=manifest.operator,
        epoch=manifest.epoch,
        operators=max(1, len(begun)),
        parallelism=manifest.parallelism,
        query_id=manifest.query_id,
        stamp_ms=manifest.stamp_ms,
        watermark_ms=manifest.watermark_ms,
        next_timer_ms=manifest.next_timer_ms,
        figures=figures.totals() if figures is not None else _by_slices(manifest),
    )


def _by_slices(manifest: Manifest) -> RecordFigures:
    """What a record without figures says: of an earlier release, or a savepoint's."""
    deltas = [entry for entry in manifest.slices if entry.kind == "delta"]
    bases = [entry for entry in manifest.slices if entry.kind in ("base", "files")]
    phases: dict[str, float] = {}
    for entry in deltas:
        for name, ms in entry.timings_ms.items():
            phases[name] = max(ms, phases.get(name, 0.0))
    return RecordFigures(
        record_bytes=sum(e.size_bytes for e in manifest.slices if e.object is None),
        delta_bytes=sum(entry.size_bytes for entry in deltas),
        delta_rows=sum(entry.rows for entry in deltas),
        bases=len(bases),
        base_bytes=sum(max(entry.size_bytes, entry.state_bytes) for entry in bases),
        phases_ms=phases,
    )


@dataclass(frozen=True, order=True)
class HistoryName:
    """What the name of an object of the history says."""

    newest_sequence: int
    first_epoch: int
    last_epoch: int
    digest: str


def parse_history_name(name: str) -> HistoryName | None:
    """What a name under ``history/`` says; None for one of another form."""
    match = _NAME.fullmatch(name)
    return HistoryName(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None


def encode_history(summaries: Sequence[RecordSummary]) -> tuple[str, bytes]:
    """The name and the bytes of an object that holds these (at least one)."""
    records = sorted(summaries, key=lambda one: one.sequence)
    epochs = [one.epoch for one in records]
    data = pack(msgspec.json.encode(_Content(records=records)))
    digest = blake3(data).hexdigest()[:_DIGEST_DIGITS]
    name = f"{records[-1].sequence:020d}-{max(0, min(epochs)):020d}-{max(0, *epochs):020d}-{digest}"
    return f"{HISTORY_PREFIX}{name}", data


def decode_history(name: str, data: bytes) -> list[RecordSummary]:
    """Back from :func:`encode_history`.

    Raises:
        CorruptionError: other bytes than the name says.
        UnsupportedFormatError: of a later format.
    """
    known = parse_history_name(name)
    found = blake3(data).hexdigest()[:_DIGEST_DIGITS]
    if known is None or found != known.digest:
        raise _damaged(name, f"its digest is {found}")
    try:
        text = unpack(data, _LIMIT_BYTES)
        version = msgspec.json.decode(text, type=_Version).format
        if version > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"The object {name!r} has the format version {version}; this release reads up to "
                f"{FORMAT_VERSION}.",
                todo="Use a release that is at least as new as the one that wrote it.",
            )
        return msgspec.json.decode(text, type=_Content).records
    except (PackedError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(name, f"it does not read ({error})") from error


def _damaged(name: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"The object {name!r} of the job's history is damaged: {reason}.",
        todo="Nothing that a job needs is in it: delete it, or restore it from another copy.",
    )
