"""Records and objects of a job whose folder is cleaned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from snapshot.formats.record import Manifest, SliceEntry
from snapshot.storage.object_store import ObjectInfo

JOB = "clicks"


def info(name: str, modified_ms: int | None = None) -> ObjectInfo:
    return ObjectInfo(name, 10, modified_ms)


def digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def entry(epoch: int, kind: str = "delta", subtask: int = 0, **named: Any) -> SliceEntry:
    values: dict[str, Any] = {
        "operator": "op",
        "subtask": subtask,
        "kind": kind,
        "epoch": epoch,
        "key_group_start": 0,
        "key_group_end": 7,
        "attempt": 0,
        "rows": 0,
        "size_bytes": 0,
        "digest": digest(f"{kind} {epoch} {subtask}"),
        "chain": digest("chain"),
    }
    return SliceEntry(**(values | named))


def manifest(
    sequence: int,
    kind: Any = "checkpoint",
    *,
    generation: int = 1,
    oldest_needed: int = 0,
    slices: Sequence[SliceEntry] = (),
    epoch: int = -1,
) -> Manifest:
    return Manifest(
        kind=kind,
        job=JOB,
        job_id="id",
        generation=generation,
        sequence=sequence,
        writer="w",
        write_id=f"w{sequence}",
        oldest_needed=oldest_needed,
        epoch=epoch,
        slices=list(slices),
    )
