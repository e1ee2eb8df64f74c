"""Records that a driver has read, so that no start reads one of them twice."""

from __future__ import annotations

from typing import Final

from snapshot.formats.record import Manifest, Record
from snapshot.storage.object_store import ObjectInfo
from statebackend.threads import THREADS, Threads

__all__ = ["RecordCache"]

KEPT_BYTES: Final = 128 << 20  # of whole records, until they are taken


class RecordCache:
    """Records that were read: they never change, so none need be read twice. Thread-safe.

    Unless somebody deletes the job and begins it anew: so a record counts as known only while the
    listing shows the object that was read, by its size and time.
    """

    def __init__(self, threads: Threads = THREADS) -> None:
        self._manifests: dict[int, tuple[ObjectInfo, Manifest]] = {}
        self._records: dict[int, Record] = {}
        self._kept_bytes = 0
        self._lock = threads.lock()

    def get(self, sequence: int, listed: ObjectInfo | None) -> Manifest | None:
        """What was read of the object that the listing shows."""
        info, manifest = self._manifests.get(sequence, (None, None))
        if info is None or listed is None or info.size_bytes != listed.size_bytes:
            return None
        return manifest if info.modified_ms == listed.modified_ms else None

    def add(self, listed: ObjectInfo, manifest: Manifest, record: Record | None) -> None:
        """Keep a manifest, and the whole record if it came along and there is room."""
        with self._lock:
            self._manifests[manifest.sequence] = listed, manifest
            if record is not None and manifest.slices and self._kept_bytes < KEPT_BYTES:
                self._kept_bytes += len(record.body)
                self._records[manifest.sequence] = record

    def take_records(self) -> dict[int, Record]:
        """The whole records, which are kept no longer."""
        with self._lock:
            taken, self._records, self._kept_bytes = self._records, {}, 0
            return taken

    def trim(self, oldest_needed: int) -> None:
        """Forget what nobody asks for any more."""
        with self._lock:
            self._manifests = {s: m for s, m in self._manifests.items() if s >= oldest_needed}
            self._records = {s: r for s, r in self._records.items() if s >= oldest_needed}
