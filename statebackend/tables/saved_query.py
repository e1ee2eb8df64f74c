"""Where a streaming query stood whose state is written as a savepoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from recovery.savepoints.savepoint import SPARK_FOLDER, SavepointFile
from snapshot.storage.object_store import ObjectStore
from statebackend.system import System
from statebackend.tables.savepoint_writer import SavepointHead

__all__ = ["SavedQuery"]


@dataclass(frozen=True)
class SavedQuery:
    """A query after one of its batches; without arguments one that has run nothing.

    Attributes:
        epoch: the batch that the state is of.
        stamp_ms: that batch's own time; None: now.
        watermark_ms: in force in it. next_watermark_ms: in the batch after it, where that is known.
        query_id: the query's. location: its checkpoint location.
        files: of the location that the query is to go on with, by name.
        check: called before the savepoint is whole; what it raises keeps it from becoming one.
    """

    epoch: int = 0
    stamp_ms: int | None = None
    watermark_ms: int | None = None
    next_watermark_ms: int | None = None
    query_id: str = ""
    location: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None

    def named(self, head: SavepointHead) -> SavepointHead:
        """What the savepoint says of itself, with the epoch and the query."""
        return replace(
            head,
            epoch=self.epoch,
            stamp_ms=head.stamp_ms if self.stamp_ms is None else self.stamp_ms,
            watermark_ms=self.watermark_ms,
            next_watermark_ms=self.next_watermark_ms,
            query_id=self.query_id,
            location=self.location,
        )

    def copy(self, target: ObjectStore, scratch: Path, system: System) -> list[SavepointFile]:
        """Write the files into a savepoint's folder.

        Raises:
            StoreUnreachableError: from the store.
        """
        described = []
        for name, body in self.files.items():
            target.put(f"{SPARK_FOLDER}{name}", [body])
            digest = blake3(body).hexdigest()
            described.append(SavepointFile(name=name, size_bytes=len(body), digest=digest))
        return described
