"""A directory with one store of a subtask, held by this process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recovery.local.private_folders import make_folder, remove, sweep_work, unreadable, unusable
from snapshot.formats.file_index import FileIndex, decode_index
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import FormatError, LocalCopyError, LocalDeltaError
from statebackend.rocks.parted import Opener, Store, open_database, open_store
from statebackend.rocks.store import RocksSettings
from statebackend.threads import THREADS, Event, Threads

__all__ = ["HOLDER", "RecentDelta", "StoreDirectory"]

HOLDER: Final = "holder"  # the hand-over socket of the process that keeps the store open
_BAD: Final = "BAD"
_REACHED: Final = "reached"
_log = logging.getLogger("statebackend.recovery")


@dataclass(frozen=True)
class RecentDelta:
    """The delta of the newest epoch, still in memory: it need not be read and decoded again."""

    epoch: int
    digest: str
    keys: Sequence[bytes]
    values: Sequence[bytes | None]

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        if not self.keys:
            return 0
        step = max(1, len(self.keys) // 64)
        sampled = range(0, len(self.keys), step)
        taken = sum(len(self.keys[i]) + len(self.values[i] or b"") for i in sampled)
        return len(self.keys) * (120 + taken // len(sampled))


class StoreDirectory:
    """One directory with one store, held by this process until :meth:`release`.

    Without a lease it may be looked at, and nothing else.

    Args:
        opener: opens a database that its store consists of.

    Attributes:
        opened_here: whether the store was opened by this acquisition, and not kept open.
        orphaned: whether the process that kept it open before ended without letting it go.
        unflushed_epochs: written to the store since it was last flushed.
    """

    def __init__(
        self,
        path: Path,
        lease: int | None,
        *,
        threads: Threads = THREADS,
        opener: Opener = open_database,
    ) -> None:
        self.path = path
        self._lease: int | None = lease
        self.store: Store | None = None
        self.recent: RecentDelta | None = None
        self._threads, self.opener = threads, opener
        self._closing = threads.lock()  # a flush from another thread is not cut off
        self._linking: Event | None = None
        self.opened_here = True
        self.orphaned = (path / HOLDER).exists()
        self.unflushed_epochs = 0
        self._address = ""

    @property
    def bad(self) -> str | None:
        """Why this copy must not be used; None if nothing is known against it."""
        try:
            return (self.path / _BAD).read_text(errors="replace") or "marked bad"
        except FileNotFoundError:
            return None

    def mark_bad(self, reason: str) -> None:
        """Keep anybody from using this copy again; survives this process."""
        try:
            (self.path / _BAD).write_text(reason)
        except OSError as error:
            # The damage is found again by whoever opens it next; the first error must not be lost.
            _log.warning("%s could not be marked bad (%s)", self.path, error)

    @property
    def is_current(self) -> bool:
        """Whether it is still the one that counts for its subtask."""
        try:
            name = (self.path.parent / "current").read_bytes()
        except OSError:
            return False
        return name.strip() == self.path.name.encode()

    def open_store(self, settings: RocksSettings) -> Store:
        """Open the store, once."""
        if self.store is None:
            sweep_work(self.path / "work")
            for torn in (self.path / "deltas").glob(".*"):  # whose writer was killed
                remove(torn)
            self.store = open_store(str(self.path / "db"), settings, opener=self.opener)
        return self.store

    def adopt_store(self, store: Store) -> Store:
        """Take a store that was made in this store directory's place for one."""
        self.store = store
        return store

    def work_folder(self, name: str) -> Path:
        """A folder for what is needed for a while; whoever asks for it removes it."""
        try:
            return make_folder(self.path / "work" / name)
        except FileNotFoundError as error:  # somebody has removed the whole copy
            raise unreadable(error, self.path) from error
        except OSError as error:
            raise unusable(str(self.path), error) from error

    def flush(self) -> None:
        """Bring the store to disk, and forget the local deltas that it then holds there."""
        with self._closing:
            if self.store is None:
                return
            marker = self.store.marker()
            self.store.flush()
            self.unflushed_epochs = 0
        if marker is not None:
            self.drop_deltas(marker.epoch)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Store | None]:
        """The store for another thread; None: it is not open. It is not closed meanwhile."""
        with self._closing:
            yield self.store

    def begin_linking(self) -> Event:
        """The store is being read as a whole by another thread, until the event is set."""
        self._linking = self._threads.event()
        return self._linking

    def settle(self) -> None:
        """Wait until nobody reads the store as a whole: before it is written to, or closed."""
        if self._linking is not None:
            self._linking.wait()
            self._linking = None

    def say_holder(self, address: str) -> None:
        """Tell the host where to ask for this store while it is kept open."""
        if address != self._address:
            try:
                (self.path / HOLDER).write_text(address)
                self._address = address
            except OSError as error:
                _log.warning("%s cannot be handed over (%s)", self.path, error)

    @property
    def uploaded(self) -> FileIndex | None:
        """The base whose files this store shares: restored from it, or uploaded as it."""
        try:
            return decode_index((self.path / "uploaded").read_bytes())
        except (OSError, FormatError):
            return None

    def remember_uploaded(self, index: bytes) -> None:
        """Keep the index of a base; without it the next one is uploaded whole."""
        try:
            temporary = self.path / ".uploaded"
            temporary.write_bytes(index)
            temporary.replace(self.path / "uploaded")
        except OSError as error:
            _log.warning("%s: %s", self.path, error)

    def describe(self, damaged: Collection[str] = (), *, deltas: bool = True) -> LocalCopy:
        """What is here, for the coordinator; the store must be open.

        Args:
            damaged: digests of durable slices that are known to be damaged, to be passed on.
            deltas: whether the local deltas are to be trusted.
        """
        found = [(epoch, digest) for epoch, digest, _ in self._deltas()] if deltas else []
        marker = self.store.marker() if self.store else None
        if marker is None:
            return LocalCopy(deltas=found, damaged=sorted(damaged))
        return LocalCopy(
            damaged=sorted(damaged),
            job_id=marker.job_id,
            epoch=marker.epoch,
            chain=marker.chain,
            applying=marker.applying,
            applying_epoch=marker.applying_epoch,
            deltas=found,
        )

    def _deltas(self) -> Iterator[tuple[int, str, Path]]:
        with contextlib.suppress(FileNotFoundError):
            for path in sorted((self.path / "deltas").iterdir()):
                epoch, _, digest = path.name.partition("-")
                if epoch.isascii() and epoch.isdigit() and digest:
                    yield int(epoch), digest, path

    @property
    def newest_epoch(self) -> int:
        """The newest that something is here of, as far as files say; -1: they say nothing."""
        epochs = [epoch for epoch, _, _ in self._deltas()]
        with contextlib.suppress(OSError, ValueError):
            epochs.append(int((self.path / _REACHED).read_text()))
        return max(epochs, default=-1)

    def delta_path(self, epoch: int, digest: str) -> Path:
        """Where a local delta lies."""
        return self.path / "deltas" / f"{epoch}-{digest}"

    def read_delta(self, epoch: int, digest: str) -> bytes:
        """A local delta's bytes, unchecked."""
        try:
            return self.delta_path(epoch, digest).read_bytes()
        except OSError as error:
            raise LocalDeltaError(f"A local delta cannot be read ({error}).") from error

    def write_delta(self, epoch: int, digest: str, data: bytes) -> None:
        """Keep a delta next to the store, until the store holds it.

        Complete or absent after a crash of the process; a torn one (power loss) has another digest.
        """
        folder = self.path / "deltas"
        try:
            folder.mkdir(exist_ok=True)
            temporary = folder / f".{epoch}.{os.getpid()}"
            temporary.write_bytes(data)
            temporary.rename(self.delta_path(epoch, digest))
        except OSError as error:
            raise unusable(str(folder), error) from error

    def adopt_delta(self, epoch: int, digest: str, path: Path) -> Path:
        """As :meth:`write_delta`, of a file that is moved here; where it lies then."""
        folder = self.path / "deltas"
        try:
            folder.mkdir(exist_ok=True)
            return path.rename(self.delta_path(epoch, digest))
        except OSError as error:
            raise unusable(str(folder), error) from error

    def forget_delta(self, epoch: int, digest: str) -> None:
        """Remove a delta that turned out to be damaged."""
        remove(self.path / "deltas" / f"{epoch}-{digest}")

    def drop_deltas(self, up_to_epoch: int) -> None:
        """Forget the deltas that the store holds on disk."""
        held = [path for epoch, _, path in self._deltas() if epoch <= up_to_epoch]
        if held:
            with contextlib.suppress(OSError):  # a hint: see `newest_epoch`
                (self.path / _REACHED).write_text(str(up_to_epoch))
        for path in held:
            remove(path)

    def release(self) -> None:
        """Close the store and let others have it."""
        self.settle()
        with self._closing:
            store, self.store = self.store, None
            lease, self._lease = self._lease, None
        try:
            if store is not None:
                store.close()
            if lease is not None:
                remove(self.path / HOLDER)
        except LocalCopyError as error:
            self.mark_bad(error.what)
            raise
        finally:
            if lease is not None:
                os.close(lease)
