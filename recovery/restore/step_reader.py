"""The bytes of a restore's steps: from beside a store, out of the reply, or from the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from blake3 import blake3

from recovery.local.ancestor_copies import Ancestors
from recovery.local.store_directory import StoreDirectory
from recovery.restore.fetch import fetch_file, fetch_index
from snapshot.formats.delta import DeltaRows
from snapshot.formats.delta_in_pieces import iter_delta
from snapshot.formats.file_index import decode_index
from snapshot.protocol.messages import RestoreStep
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CorruptionError,
    FormatError,
    LocalDeltaError,
    ObjectNotFoundError,
    StateBackendError,
)
from statebackend.threads import THREADS, Threads

__all__ = ["DamagedStep", "StepReader", "Tally"]

_IN_MEMORY_BYTES: Final = 64 << 20


@dataclass
class Tally:
    """What a restore read, for its report."""

    local_bytes: int = 0
    durable_bytes: int = 0
    durable_reads: int = 0
    local_parts: int = 0  # linked from the stores of subtasks of another parallelism
    reasons: list[str] = field(default_factory=list)


class DamagedStep(Exception):
    """A durable slice is damaged or gone; ``torn``: the store that it went into is half made."""

    def __init__(self, step: RestoreStep, error: StateBackendError, *, torn: bool = False) -> None:
        super().__init__(error.what)
        self.step, self.error, self.torn = step, error, torn


class StepReader:
    """Reads what steps name, checks it, and keeps account of it.

    Args:
        store: the durable one. ancestors: where other subtasks' local deltas lie.
    """

    def __init__(
        self, store: ObjectStore, ancestors: Ancestors, threads: Threads = THREADS
    ) -> None:
        self._store, self._ancestors, self._threads = store, ancestors, threads
        self.tally = Tally()

    def fetch_files(
        self, held: StoreDirectory, step: RestoreStep, bodies: Iterator[bytes], folder: Path
    ) -> bytes:
        """Fetch the files of a base into a folder, which is made; their index, as stored."""
        data = self._read(held, step, bodies)
        try:
            if blake3(data).hexdigest() != step.digest:
                raise CorruptionError(f"The file index of epoch {step.epoch} is not what is named.")
            index = decode_index(data, step.name)
            fetched_bytes = fetch_index(self._store, index, folder, self._threads)
        except (FormatError, ObjectNotFoundError) as error:
            raise DamagedStep(step, error, torn=True) from error
        self.tally.durable_bytes += fetched_bytes
        self.tally.durable_reads += len(index.files)
        return data

    def rows(
        self, held: StoreDirectory, step: RestoreStep, bodies: Iterator[bytes]
    ) -> Iterator[DeltaRows]:
        """A delta's rows, in pieces; its digest is checked before this returns."""
        digest = bytes.fromhex(step.digest)
        tries = 2 if step.source == "object" else 1  # a bit that flipped on its way
        while True:
            tries -= 1
            rows = iter_delta(self._source(held, step, bodies), digest=digest, name=step.name)
            try:
                first = next(rows, None)
                return iter(()) if first is None else chain((first,), rows)
            except CorruptionError as error:
                if step.source == "local":
                    self._forget(held, step)
                    raise LocalDeltaError(error.what, todo=error.todo) from error
                if not tries:
                    raise DamagedStep(step, error) from error

    def _source(
        self, held: StoreDirectory, step: RestoreStep, bodies: Iterator[bytes]
    ) -> bytes | Path:
        """Where a delta's bytes are: in memory, or in a file if they are many."""
        if step.size_bytes <= _IN_MEMORY_BYTES:
            return self._read(held, step, bodies)
        if step.source == "local":
            self.tally.local_bytes += step.size_bytes
            return self._place(held, step).delta_path(step.epoch, step.digest)
        path = held.work_folder("fetch") / step.digest
        try:
            fetch_file(self._store, step.name, path, size_bytes=step.size_bytes, digest=step.digest)
        except (FormatError, ObjectNotFoundError) as error:
            raise DamagedStep(step, error) from error
        self.tally.durable_bytes += step.size_bytes
        self.tally.durable_reads += 1
        return path

    def _read(self, held: StoreDirectory, step: RestoreStep, bodies: Iterator[bytes]) -> bytes:
        tally = self.tally
        if step.source == "local":
            try:
                data = self._place(held, step).read_delta(step.epoch, step.digest)
            except LocalDeltaError:
                self._forget(held, step)
                raise
            tally.local_bytes += len(data)
            return data
        if step.source == "record":
            data = next(bodies)
        else:
            try:
                data = self._store.get(step.name)
            except ObjectNotFoundError as error:
                raise DamagedStep(step, error) from error
        tally.durable_bytes += len(data)
        tally.durable_reads += 1
        return data

    def _forget(self, held: StoreDirectory, step: RestoreStep) -> None:
        self._place(held, step).forget_delta(step.epoch, step.digest)

    def _place(self, held: StoreDirectory, step: RestoreStep) -> StoreDirectory:
        """Beside which store a step's local delta lies."""
        return held if step.found_at is None else self._ancestors.directory(step.found_at)
