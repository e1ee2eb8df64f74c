"""A state, copied from one job's folder into another.

A copy is a log of its own: one claim, then those records that lead to the epoch, in their order,
each with those of its slices that are needed. What lies in objects of its own is copied to new
names, which belong to the tenure that writes the copy. Lineage digests stay what they are, and so
does the job's id, which they start from. A copy and its original have equal digests where they have
equal state, and nowhere else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from recovery.savepoints.state_at_epoch import KeptRecord, Needed, StateAt, needed_key
from snapshot.formats.file_index import FileIndex, decode_index, encode_index
from snapshot.formats.object_names import base_file_name, data_name
from snapshot.formats.record import FORMAT_VERSION, Record, SliceEntry, parse_record, record_name
from snapshot.log.commit_log import CommitLog, Tenure
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, LocalDirError
from statebackend.threads import THREADS, Threads
from statebackend.work_done import Progress, WorkDone

__all__ = ["Copied", "copy_object", "copy_state", "scratch_folder"]

_AT_A_TIME: Final = 4
_IN_MEMORY_BYTES: Final = 8 << 20  # larger objects go through a temporary file
_TRIES: Final = 2  # a bit that flipped on its way is not flipped the next time


@dataclass(frozen=True)
class Copied:
    """What was written: ``size_bytes`` of slices and files, by operator."""

    objects: int
    size_bytes: dict[str, int]


class _Copier:
    """Copies what lies in objects of its own, each once; says under which names it is now."""

    def __init__(
        self,
        source: ObjectStore,
        target: ObjectStore,
        *,
        generation: int,
        new_id: Callable[[], str],
        scratch: Path,
        tick: Callable[[int], None],
        work: WorkDone,
        threads: Threads,
    ) -> None:
        self._source, self._target = source, target
        self._generation, self._new_id = generation, new_id
        self._scratch, self._tick, self._work = scratch, tick, work
        self._records: dict[int, Record] = {}
        self.indexes: dict[tuple[int, str], FileIndex] = {}
        self.objects: dict[str, str] = {}
        self._threads = threads
        self._lock = threads.lock()

    def record(self, sequence: int) -> Record:
        """A record, whole; the last few are kept."""
        record = self._records.get(sequence)
        if record is None:
            name = record_name(sequence)
            record = parse_record(self._source.get(name), name)
            self._records = {**dict(list(self._records.items())[-1:]), sequence: record}
        return record

    def body(self, one: Needed) -> bytes:
        """A slice's bytes, checked; for what is small enough to be held."""
        entry = one.entry
        if entry.object is None:
            return self.record(one.sequence).slice(entry)
        for _ in range(_TRIES):
            data = self._source.get(entry.object)
            if len(data) == entry.size_bytes and blake3(data).hexdigest() == entry.digest:
                return data
        raise _damaged(self._source, entry.object, len(data), entry.size_bytes)

    def copy_all(self, records: Iterable[KeptRecord]) -> None:
        """Every object that the slices name, and every file that their indexes name."""
        wanted: dict[str, tuple[str, int, str]] = {}
        for one in (one for kept in records for one in kept.slices):
            entry = one.entry
            if entry.kind == "files":
                index = decode_index(self.body(one), entry.object or record_name(one.sequence))
                self.indexes[one.sequence, needed_key(entry)] = index
                grant = self._new_id()
                for file in index.files:
                    name = base_file_name(self._generation, grant, file.name)
                    wanted.setdefault(file.object, (name, file.size_bytes, file.digest))
            elif entry.object is not None:
                name = data_name(self._generation, entry.epoch, self._new_id())
                wanted.setdefault(entry.object, (name, entry.size_bytes, entry.digest))
        self._work.expect(sum(size_bytes for _, size_bytes, _ in wanted.values()))
        largest_first = sorted(wanted.items(), key=lambda item: -item[1][1])
        with self._threads.pool(_AT_A_TIME, "statebackend-savepoint") as pool:
            copies = [pool.submit(self._copy, name, *to) for name, to in largest_first]
            try:
                for copied in copies:
                    copied.result()
            except BaseException:
                for copied in copies:
                    copied.cancel()
                raise
        self.objects = {name: to[0] for name, to in wanted.items()}

    def _copy(self, name: str, to: str, size_bytes: int, digest: str) -> None:
        copy_object(
            self._source.get_chunks,
            name,
            self._target,
            to,
            size_bytes=size_bytes,
            digest=digest,
            scratch=self._scratch,
            where=self._source.uri,
        )
        with self._lock:
            self._tick(size_bytes)
            self._work.add(size_bytes)

    def rewritten(self, one: Needed) -> tuple[SliceEntry, bytes | None]:
        """A slice as the copy names it, with its body where that goes into the record."""
        entry = one.entry
        if entry.kind != "files":
            if entry.object is None:
                return entry, self.record(one.sequence).slice(entry)
            return msgspec.structs.replace(entry, object=self.objects[entry.object]), None
        index = self.indexes[one.sequence, needed_key(entry)]
        files = [
            msgspec.structs.replace(file, object=self.objects[file.object]) for file in index.files
        ]
        data = encode_index(msgspec.structs.replace(index, files=files))
        entry = msgspec.structs.replace(
            entry, size_bytes=len(data), digest=blake3(data).hexdigest()
        )
        if entry.object is None:
            return entry, data
        name = data_name(self._generation, entry.epoch, self._new_id())
        self._target.put(name, [data])
        return msgspec.structs.replace(entry, object=name), None


def copy_state(
    state: StateAt,
    source: ObjectStore,
    target: ObjectStore,
    *,
    log: CommitLog,
    tenure: Tenure,
    query_id: str,
    run: str,
    new_id: Callable[[], str],
    scratch: Path,
    tick: Callable[[int], None] = lambda size_bytes: None,
    progress: Progress | None = None,
    threads: Threads = THREADS,
) -> Copied:
    """Write a state into another job's folder: first the objects, then the records.

    Every byte is checked against its digest on the way.

    Args:
        source: the folder that `state` was read from. target: the other one; `log` is of it.
        tenure: from its claim. query_id, run: what the records say.
        scratch: a folder on this host, for large objects. progress: see `Making`.
        tick: told the bytes of each object that was copied; what it raises ends the copying.

    Raises:
        CorruptionError: an object or record is damaged; nothing refers to what was copied.
        ObjectNotFoundError: the source has been cleaned meanwhile.
        FencedError, StoreUnreachableError, CommitUnknownError: from the target's log.
    """
    copier = _Copier(
        source,
        target,
        generation=tenure.generation,
        new_id=new_id,
        scratch=scratch,
        tick=tick,
        work=WorkDone(progress),
        threads=threads,
    )
    copier.copy_all(state.records)
    sizes: dict[str, int] = {}
    for kept in state.records:
        rewritten = [copier.rewritten(one) for one in kept.slices]
        slices = [entry for entry, _ in rewritten]
        uid = kept.manifest.operator
        sizes[uid] = sizes.get(uid, 0) + sum(_size_bytes(entry) for entry in slices)
        manifest = msgspec.structs.replace(
            kept.manifest,
            format=FORMAT_VERSION,  # whatever was read
            oldest_needed=tenure.sequence,
            query_id=query_id,
            run=run,
            slices=slices,
            settings=dict(state.settings),
            figures=msgspec.UNSET,  # the history is of the job that they were taken in
        )
        log.append(tenure, manifest, [body for _, body in rewritten])
        tick(0)
    return Copied(objects=len(copier.objects), size_bytes=sizes)


def _size_bytes(entry: SliceEntry) -> int:
    """Of what a restore reads."""
    return entry.size_bytes + (entry.state_bytes if entry.kind == "files" else 0)


def copy_object(
    read: Callable[[str], Iterable[bytes]],
    name: str,
    target: ObjectStore,
    to: str,
    *,
    size_bytes: int | None,
    digest: str,
    scratch: Path,
    where: str,
) -> tuple[int, str]:
    """One object to another place: at most some megabytes in memory, the rest on this host's disk.

    Args:
        read: gives the object in pieces.
        size_bytes, digest: what it must be; None and "" where that is not known.

    Returns:
        its size and digest.

    Raises:
        CorruptionError: it is not the bytes that it should be, read twice.
    """
    found = 0
    for _ in range(_TRIES):
        hasher, found = blake3(), 0
        held: list[bytes] = []
        path = scratch / blake3(to.encode()).hexdigest()[:32]
        try:
            with path.open("wb") as file:
                for piece in read(name):
                    hasher.update(piece)
                    found += len(piece)
                    if size_bytes is not None and found > size_bytes:
                        break  # too long is wrong, however long it is
                    if found > _IN_MEMORY_BYTES:
                        file.writelines(held)
                        file.write(piece)
                        held = []
                    else:
                        held.append(piece)
            right = size_bytes is None or (found == size_bytes and hasher.hexdigest() == digest)
            if right and found > _IN_MEMORY_BYTES:
                target.put_file(to, path)
            elif right:
                target.put(to, held)
        finally:
            path.unlink(missing_ok=True)
        if right:
            return found, hasher.hexdigest()
    raise CorruptionError(
        f"The object {name!r} in {where} is {found} bytes with the digest {hasher.hexdigest()}, "
        f"expected {size_bytes} with {digest}.",
        todo="Restore it from another copy of the store; `statebackend verify` says what it means.",
    )


def _damaged(store: ObjectStore, name: str, found: int, expected: int) -> CorruptionError:
    return CorruptionError(
        f"The object {name!r} in {store.uri} is not the {expected} bytes that its record names "
        f"({found} were read).",
        todo="Restore it from another copy of the store.",
    )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder on this host, for objects that are too large to be held in memory.

    Raises:
        LocalDirError: the host's temporary directory failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="statebackend-savepoint-") as folder:
            yield Path(folder)
    except OSError as error:
        raise LocalDirError(
            f"The temporary directory {tempfile.gettempdir()} failed ({error}).",
            todo="Set TMPDIR to a directory with room for the largest object.",
        ) from error
