"""Uploading a base in the background: from an open store to objects, under a grant.

The files are hard-linked while the epoch's input is processed (nothing is applied to the store
then), and uploaded by one thread of the worker while later epochs run. What the base before it has
uploaded already is named again and not sent again. A worker that dies on the way leaves objects
that no record names: cleaning finds them by the grant in their names.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from blake3 import blake3

from recovery.local.local_copies import StoreDirectory
from recovery.local.private_folders import in_use, unreadable
from snapshot.formats.delta import encode_delta
from snapshot.formats.file_index import FileEntry, decode_index, encode_index, index_of, reusable
from snapshot.formats.object_names import base_file_name
from snapshot.protocol.messages import BaseGrant, SlicePart
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    FormatError,
    LocalCopyError,
    StaleRequestError,
    StateBackendError,
)
from statebackend.threads import THREADS, Semaphore, Threads

__all__ = ["BaseUpload", "Reporter", "Uploaded"]

_log = logging.getLogger("statebackend.upload")
_INLINE_INDEX_BYTES: Final = 64 << 10
_READ_BYTES: Final = 1 << 20
_TURN_S: Final = 5.0


@dataclass(frozen=True)
class Uploaded:
    """A base whose every object is durable."""

    kind: str
    part: SlicePart
    state_bytes: int
    uploaded_bytes: int
    seconds: float


class Reporter(Protocol):
    """How an upload speaks to the coordinator."""

    def renew(self) -> None:
        """The upload goes on. Raises a typed error if the grant has lapsed."""

    def done(self, uploaded: Uploaded) -> None:
        """Everything is durable."""

    def give_up(self, why: str, *, harmless: bool) -> None:
        """There will be no base under this grant.

        Args:
            why: a sentence for the log.
            harmless: the subtask has moved or was restored anew, or the grant is another's.
        """


class BaseUpload:
    """One upload.

    Args:
        generation: goes into the names of the objects.
        now_s: the worker's clock.
        turn: a worker's, which uploads one base at a time; without one, it waits for nobody.
        bytes_per_s: not to be exceeded over one file and the pause after it, since the upload
            shares the processor with the batches; 0: as fast as it goes.
        of: operator and subtask, as messages name them; by default the local copy's folder.
    """

    def __init__(
        self,
        held: StoreDirectory,
        grant: BaseGrant,
        *,
        store: ObjectStore,
        generation: int,
        reporter: Reporter,
        now_s: Callable[[], float],
        turn: Semaphore | None = None,
        threads: Threads = THREADS,
        bytes_per_s: int = 0,
        of: str = "",
    ) -> None:
        self._held, self._grant = held, grant
        self._store, self._generation = store, generation
        self._reporter, self._now_s = reporter, now_s
        self._threads, self._turn = threads, turn or threads.semaphore(1)
        self._bytes_per_s = bytes_per_s
        self._of = of or str(held.path)
        self._renewed_s = self._started_s = now_s()
        self._sent_bytes = 0
        self._folder = held.path / "work" / f"base-{grant.id}"
        self._files_folder = self._folder / "files"
        self._linked = held.begin_linking()

    def start(self) -> None:
        """Do it in a thread of its own, which dies with the process."""
        try:
            self._threads.start(self.run, "statebackend-upload")
        except BaseException:
            self._linked.set()  # or the store could never be closed
            raise

    def run(self) -> None:
        """Link, wait for the turn, upload, report; what goes wrong costs this base alone."""
        folder = self._folder
        try:
            with in_use(self._held.work_folder(folder.name)):
                finish = self._link(self._files_folder)
                self._linked.set()
                while not self._turn.acquire(timeout=_TURN_S):
                    self._keep_grant()
                try:
                    uploaded = finish()
                finally:
                    self._turn.release()
            self._reporter.done(uploaded)
        except (StateBackendError, OSError) as error:
            self._give_up(error)
        finally:
            self._linked.set()
            shutil.rmtree(folder, ignore_errors=True)

    def _give_up(self, error: StateBackendError | OSError) -> None:
        """Tell the driver, which says it to people; here it is said if that fails."""
        os_error = error.__cause__ if type(error) is LocalCopyError else error
        known = unreadable(os_error, self._held.path) if isinstance(os_error, OSError) else error
        why = (
            f"The base after epoch {self._grant.epoch} of {self._of} was given up, and one of "
            f"a later epoch is tried instead: {known}"
        )
        harmless = isinstance(error, StaleRequestError) or not self._held.is_current
        level = logging.DEBUG
        try:
            self._reporter.give_up(why, harmless=harmless)
        except StateBackendError:
            level = logging.INFO if harmless else logging.WARNING
        _log.log(level, "%s", why)

    def _link(self, folder: Path) -> Callable[[], Uploaded]:
        """Take what the base consists of; the store may go on from here."""
        store = self._held.store
        marker = store.marker() if store else None
        if store is None or marker is None or marker.chain != self._grant.chain:
            raise StaleRequestError("The store does not stand at the epoch that was granted.")
        if store.stored_bytes() <= self._grant.whole_limit_bytes:
            entries = list(store.scan())
            return lambda: self._whole(entries)
        names = store.checkpoint(str(folder))
        sizes = {name: (folder / name).stat().st_size for name in names}
        return lambda: self._files(folder, sizes)

    def _whole(self, entries: list[tuple[bytes, bytes]]) -> Uploaded:
        """Everything as one delta: one request."""
        full = encode_delta([key for key, _ in entries], [value for _, value in entries])
        name = self._name("whole")
        self._store.put(name, [full.data])
        self._sent_bytes = len(full.data)
        digest, rows = full.digest.hex(), full.rows
        part = SlicePart(digest=digest, size_bytes=len(full.data), rows=rows, name=name)
        return self._uploaded("base", part, len(full.data))

    def _files(self, folder: Path, sizes: Mapping[str, int]) -> Uploaded:
        """RocksDB's own files, without those that the base before has uploaded.

        Args:
            sizes: by name, as they were linked: what was cut since must not become a base.
        """
        granted = None
        with contextlib.suppress(FormatError):
            granted = decode_index(self._grant.index) if self._grant.index else None
        known = reusable(granted, self._held.uploaded)
        files = [self._file(folder / name, size, known.get(name)) for name, size in sizes.items()]
        index = index_of(self._held.path.name, files)
        data = encode_index(index)
        self._sent_bytes += len(data)
        digest = blake3(data).hexdigest()
        if len(data) <= _INLINE_INDEX_BYTES:
            part = SlicePart(digest=digest, size_bytes=len(data), rows=0, data=data)
        else:
            name = self._name("index")
            self._store.put(name, [data])
            part = SlicePart(digest=digest, size_bytes=len(data), rows=0, name=name)
        self._held.remember_uploaded(data)
        return self._uploaded("files", part, index.size_bytes)

    def _file(self, path: Path, size_bytes: int, known: FileEntry | None) -> FileEntry:
        before = path.stat()
        if before.st_size != size_bytes:
            raise _changed(path)
        if known is not None and known.size_bytes == size_bytes:
            return known
        hasher, started_s = blake3(), self._now_s()
        with path.open("rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                hasher.update(data)
        self._keep_grant()
        file_name = str(path).removeprefix(f"{self._files_folder}/")
        name = self._name(file_name.replace("/", "-"))
        with self._renewing():
            self._store.put_file(name, path)
        after = path.stat()
        if (after.st_size, after.st_ino) != (before.st_size, before.st_ino):
            raise _changed(path)
        self._sent_bytes += size_bytes
        self._pause(size_bytes, started_s)
        return FileEntry(
            name=file_name, object=name, size_bytes=size_bytes, digest=hasher.hexdigest()
        )

    @contextlib.contextmanager
    def _renewing(self) -> Iterator[None]:
        """Keep the grant while one file is on its way, however slow the store is."""
        ended = self._threads.event()

        def renew() -> None:
            while not ended.wait(self._grant.renew_s):
                try:
                    self._reporter.renew()
                except StateBackendError:
                    return  # the next renewal, or the report, says so

        self._threads.start(renew, "statebackend-renew")
        try:
            yield
        finally:
            ended.set()

    def _pause(self, size_bytes: int, started_s: float) -> None:
        """Leave the processor to the batches, for as long as the limit says."""
        until_s = started_s + size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        while True:
            self._keep_grant()
            left_s = until_s - self._now_s()
            if left_s <= 0:
                return
            self._threads.event().wait(min(left_s, _TURN_S))

    def _keep_grant(self) -> None:
        now_s = self._now_s()
        if now_s - self._renewed_s >= self._grant.renew_s:
            self._reporter.renew()
            self._renewed_s = now_s

    def _name(self, file: str) -> str:
        return base_file_name(self._generation, self._grant.id, file)

    def _uploaded(self, kind: str, part: SlicePart, state_bytes: int) -> Uploaded:
        seconds = self._now_s() - self._started_s
        return Uploaded(kind, part, state_bytes, self._sent_bytes, seconds)


def _changed(path: Path) -> LocalCopyError:
    return LocalCopyError(
        f"The file {path} changed while it was uploaded.",
        todo="Nothing to do: this base is given up. Check the disk behind local_dir.",
    )
