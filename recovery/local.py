"""Task-local copies: where they lie on a host, and who may touch them.

``<local_dir>/<job>/<operator>/<subtask>/``
    ``current``              the name of the incarnation that counts (a pointer, swapped atomically)
    ``<incarnation>/lease``  locked (flock) by the process that has the store open
    ``<incarnation>/db/``    RocksDB: confirmed epochs only
    ``<incarnation>/deltas/<epoch>-<digest>``  deltas that were acked here, confirmed or not
    ``<incarnation>/holder`` the door of the process that keeps it open (see recovery.keeper)
    ``<incarnation>/uploaded``  index of the base whose files this store shares
    ``<incarnation>/work/``  what an epoch or an upload needs for a while; swept at open
    ``<incarnation>/BAD``    the reason why this copy must not be used again

An incarnation's path is never made twice. A process that froze while it held a store and thaws
after its successor has taken over writes into its own grave: RocksDB was seen to rewrite CURRENT in
the successor's directory when a path was re-used.

Durability: none is promised. A copy counts only if its lineage digest is the log's.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from recovery.folders import make_folder, remove, sweep_work, unusable
from recovery.keeper import HOLDER, Keeper, KeeperSettings, ask_for
from snapshot.base import FileIndex, decode_index
from snapshot.messages import LocalCopy
from statebackend.errors import FormatError, LocalCopyError, LocalDeltaError
from statebackend.rocks.store import RocksSettings, RocksStore

__all__ = ["Clock", "Incarnation", "LocalSubtask", "RecentDelta"]

_log = logging.getLogger("statebackend.recovery")
_POLL_S: Final = 0.01
_BAD: Final = "BAD"
_POINTER: Final = ".current."  # and an incarnation's name: a pointer that is being written
_NAME: Final = re.compile(rb"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")


class Clock:
    """Time as this module needs it; tests pass their own."""

    def __init__(self, now_s: Callable[[], float], sleep_s: Callable[[float], None]) -> None:
        self.now_s = now_s
        self.sleep_s = sleep_s


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


class Incarnation:
    """One directory with one store, held by this process until :meth:`release`.

    Attributes:
        opened_here: whether the store was opened by this acquisition, and not kept open.
        orphaned: whether the process that kept it open before ended without letting it go.
        unflushed_epochs: written to the store since it was last flushed.
    """

    def __init__(self, path: Path, lease: int) -> None:
        self.path = path
        self._lease: int | None = lease
        self.store: RocksStore | None = None
        self.recent: RecentDelta | None = None
        self._closing = threading.Lock()  # a flush from another thread is not cut off
        self._linking: threading.Event | None = None
        self.opened_here = True
        self.orphaned = (path / HOLDER).exists()
        self.unflushed_epochs = 0
        self._door = ""

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

    def open_store(self, settings: RocksSettings) -> RocksStore:
        """Open the store, once."""
        if self.store is None:
            sweep_work(self.path / "work")
            for torn in (self.path / "deltas").glob(".*"):  # whose writer was killed
                remove(torn)
            self.store = RocksStore.open(str(self.path / "db"), settings)
        return self.store

    def work_folder(self, name: str) -> Path:
        """A folder for what is needed for a while; whoever asks for it removes it."""
        try:
            return make_folder(self.path / "work" / name)
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

    def begin_linking(self) -> threading.Event:
        """The store is being read as a whole by another thread, until the event is set."""
        self._linking = threading.Event()
        return self._linking

    def settle(self) -> None:
        """Wait until nobody reads the store as a whole: before it is written to, or closed."""
        if self._linking is not None:
            self._linking.wait()
            self._linking = None

    def say_holder(self, door: str) -> None:
        """Tell the host where to ask for this store while it is kept open."""
        if door != self._door:
            try:
                (self.path / HOLDER).write_text(door)
                self._door = door
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
            deltas=found,
        )

    def _deltas(self) -> Iterator[tuple[int, str, Path]]:
        with contextlib.suppress(FileNotFoundError):
            for path in sorted((self.path / "deltas").iterdir()):
                epoch, _, digest = path.name.partition("-")
                if epoch.isascii() and epoch.isdigit() and digest:
                    yield int(epoch), digest, path

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
        for epoch, _, path in list(self._deltas()):
            if epoch <= up_to_epoch:
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


class LocalSubtask:
    """One subtask's copies on this host.

    Args:
        local_dir: the host's directory for copies.
        job: a name that no other job of this host has; what a store holds is said by its marker.
        new_id: unique names for incarnations.
    """

    def __init__(
        self,
        local_dir: str,
        *,
        job: str,
        operator: str,
        subtask: int,
        new_id: Callable[[], str],
        clock: Clock,
        keeper: Keeper | None = None,
        keeper_settings: KeeperSettings | None = None,
    ) -> None:
        # Quoting keeps dots, and "." and ".." would not be folders of their own.
        folders = [quote(name, safe="").replace(".", "%2E") for name in (job, operator)]
        self.path = Path(local_dir, *folders, str(subtask))
        self._new_id = new_id
        self._clock = clock
        self._keeper, self._keeper_settings = keeper, keeper_settings
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(local_dir, error) from error

    def acquire(self, timeout_s: float) -> tuple[Incarnation, str]:
        """The current incarnation, or a new one where it is bad, absent or held too long.

        Returns:
            the incarnation, leased; and why it is a new one ("" if it is not).
        """
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            name = self._current()
            if name is None:
                return self.create(), "there is no local copy on this host"
            kept = self._keeper.take(self.path, name) if self._keeper else None
            if kept is not None:
                kept.opened_here = kept.orphaned = False
                return kept, ""
            try:
                held = self._lease(self.path / name)
            except FileNotFoundError:
                return self.create(), "the local copy was deleted"
            if held is None:
                left_s = deadline_s - self._clock.now_s()
                if left_s <= 0:
                    return self.create(), f"the local copy was held by another process ({name})"
                if not ask_for(self.path / name, left_s):
                    self._clock.sleep_s(_POLL_S)
                continue
            if self._current() != name:  # another took over while we waited
                held.release()
                continue
            if (reason := held.bad) is not None:
                held.release()
                return self.create(), f"the local copy was marked bad: {reason}"
            return held, ""

    def give_back(self, held: Incarnation) -> None:
        """Done for this epoch: keep the store open, or let it go."""
        if self._keeper is None or held.bad is not None:
            held.release()
        else:
            self._keeper.keep(held, self._keeper_settings)

    def create(self) -> Incarnation:
        """A new, empty incarnation, made the current one."""
        try:
            while True:
                name = self._new_id()
                path = self.path / name
                path.mkdir()
                try:
                    held = self._lease(path)
                except FileNotFoundError:  # swept between the two calls
                    continue
                if held is None:
                    continue
                pointer = self.path / f"{_POINTER}{name}"
                try:
                    pointer.write_text(name)
                    pointer.replace(self.path / "current")
                except OSError:
                    shutil.rmtree(path, ignore_errors=True)
                    remove(pointer)
                    held.release()
                    raise
                return held
        except OSError as error:
            raise unusable(str(self.path), error) from error

    def sweep(self, keep: Incarnation) -> None:
        """Remove the incarnations that nobody holds and the pointer does not name."""
        if self._current() != keep.path.name:
            return  # another has taken over: what is left behind is its business
        for path in list(self.path.iterdir()):
            name = path.name.removeprefix(_POINTER)  # made after its incarnation
            if name != path.name and not (self.path / name).exists():
                remove(path)
            if path == keep.path or path.name == self._current() or not path.is_dir():
                continue
            held = None
            with contextlib.suppress(FileNotFoundError):
                held = self._lease(path)
            if held is not None:
                shutil.rmtree(path, ignore_errors=True)
                remove(self.path / f"{_POINTER}{path.name}")
                held.release()

    def _current(self) -> str | None:
        try:
            found = (self.path / "current").read_bytes().strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unusable(str(self.path), error) from error
        return found.decode() if _NAME.fullmatch(found) else None  # it is not synced

    def _lease(self, path: Path) -> Incarnation | None:
        """Lock an incarnation without waiting; None where another process has it.

        Its directory is never made here: a path that was removed stays removed.
        """
        try:
            lease = os.open(path / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, NotADirectoryError) as error:  # this: by a damaged pointer
            raise FileNotFoundError(path) from error
        except OSError as error:
            raise unusable(str(path), error) from error
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lease)
            return None
        try:
            swept = os.fstat(lease).st_ino != (path / "lease").stat().st_ino
        except FileNotFoundError:
            swept = True
        if swept:  # between the two calls: what we hold is a file without a name
            os.close(lease)
            raise FileNotFoundError(path)
        return Incarnation(path, lease)
