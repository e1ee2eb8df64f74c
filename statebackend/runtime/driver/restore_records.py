"""What the driver reads of the log for restores: records, each once and whole, and file indexes."""

from __future__ import annotations

import logging
from typing import Final

from blake3 import blake3

from snapshot.formats.file_index import FileIndex, decode_index
from snapshot.formats.record import Record, SliceEntry, parse_record, record_name
from snapshot.protocol.lineage import SliceRef
from snapshot.protocol.messages import SlicePart
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, FormatError
from statebackend.threads import THREADS, Lock, Threads

__all__ = ["DamagedSliceError", "Records"]

_INDEXES_KEPT: Final = 1024
_log = logging.getLogger("statebackend.coordinator")


class DamagedSliceError(Exception):
    """A durable slice is not the bytes that its record names; ``ref`` says which."""

    def __init__(self, ref: SliceRef, error: FormatError) -> None:
        super().__init__(error.what)
        self.ref, self.error = ref, error


class Records:
    """Records for as long as the first epochs run; indexes for as long as they are asked for."""

    def __init__(self, store: ObjectStore, threads: Threads = THREADS) -> None:
        self._store, self._threads = store, threads
        self._records: dict[int, Record] = {}
        self._indexes: dict[str, bytes] = {}
        self._reading: dict[int, Lock] = {}
        self._lock = threads.lock()

    def seed(self, records: dict[int, Record]) -> None:
        """Take over what reading the manifests came by."""
        with self._lock:
            self._records.update(records)

    def slice(self, ref: SliceRef) -> bytes:
        """An inline slice's bytes, checked; what reads damaged is read once more.

        Raises:
            DamagedSliceError: damaged twice.
        """
        with self._lock:
            record = self._records.get(ref.sequence)
            reading = self._reading.get(ref.sequence)
            if reading is None:
                reading = self._reading[ref.sequence] = self._threads.lock()
        with reading:  # one read of each record, and none while others wait for another
            try:
                record = record or self._records.get(ref.sequence) or self._read(ref.sequence)
                return record.slice(ref.entry)
            except FormatError as error:
                _log.warning("%s It is read again.", error)
            try:
                return self._read(ref.sequence).slice(ref.entry)
            except FormatError as error:
                raise DamagedSliceError(ref, error) from error

    def _read(self, sequence: int) -> Record:
        name = record_name(sequence)
        record = parse_record(self._store.get(name), name)
        with self._lock:
            self._records[sequence] = record
        return record

    def index(self, ref: SliceRef) -> bytes:
        """The file index of a base, checked. Raises `DamagedSliceError`."""
        entry = ref.entry
        known = self._indexes.get(entry.digest)
        if known is None:
            try:
                known = self.slice(ref) if entry.object is None else self._own_object(ref.entry)
            except FormatError as error:
                raise DamagedSliceError(ref, error) from error
            self._keep_index(entry.digest, known)
        return known

    def _own_object(self, said: SliceEntry | SlicePart) -> bytes:
        name = (said.object if isinstance(said, SliceEntry) else said.name) or ""
        data = self._store.get(name)
        if blake3(data).hexdigest() != said.digest:
            data = self._store.get(name)
        if blake3(data).hexdigest() != said.digest:
            raise CorruptionError(
                f"The object {name!r} in {self._store.uri} is not what its record names.",
                todo="Restore it from another copy of the store.",
            )
        return data

    def learn_index(self, part: SlicePart) -> FileIndex:
        """Keep an index that a worker has just made, so that no restore reads it again.

        Raises:
            CorruptionError, UnsupportedFormatError: it cannot be decoded.
        """
        data = part.data or self._own_object(part)
        found = decode_index(data, part.name)
        self._keep_index(part.digest, data)
        return found

    def _keep_index(self, digest: str, data: bytes) -> None:
        self._indexes[digest] = data
        while len(self._indexes) > _INDEXES_KEPT:
            self._indexes.pop(next(iter(self._indexes)), None)

    def forget(self, before: int) -> None:
        """Drop what is older than a sequence: running subtasks need the last record at most."""
        with self._lock:
            self._records = {s: r for s, r in self._records.items() if s >= before}
            self._reading = {s: lock for s, lock in self._reading.items() if s >= before}
