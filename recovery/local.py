"""Task-local copies: where they lie on a host, and who may touch them.

``<local_dir>/<job>/<operator>/<subtask>/``
    ``current``              the name of the incarnation that counts (a pointer, swapped atomically)
    ``<incarnation>/lease``  locked (flock) by the process that has the store open
    ``<incarnation>/db/``    RocksDB: confirmed epochs only
    ``<incarnation>/deltas/<epoch>-<digest>``  deltas that were acked here, confirmed or not
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
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from snapshot.messages import LocalCopy
from statebackend.errors import LocalCopyError, LocalDeltaError, LocalDirError
from statebackend.rocks.store import RocksSettings, RocksStore

__all__ = ["Clock", "Incarnation", "LocalSubtask"]

_log = logging.getLogger("statebackend.recovery")
_POLL_S: Final = 0.01
_BAD: Final = "BAD"


class Clock:
    """Time as this module needs it; tests pass their own."""

    def __init__(self, now_s: Callable[[], float], sleep_s: Callable[[float], None]) -> None:
        self.now_s = now_s
        self.sleep_s = sleep_s


class Incarnation:
    """One directory with one store, held by this process until :meth:`release`."""

    def __init__(self, path: Path, lease: int) -> None:
        self.path = path
        self._lease: int | None = lease
        self.store: RocksStore | None = None

    @property
    def bad(self) -> str | None:
        """Why this copy must not be used; None if nothing is known against it."""
        try:
            return (self.path / _BAD).read_text() or "marked bad"
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
            self.store = RocksStore.open(str(self.path / "db"), settings)
        return self.store

    def describe(self, without: Collection[tuple[int, str]] = ()) -> LocalCopy:
        """What is here, for the coordinator; the store must be open.

        Args:
            without: deltas (epoch, digest) that are known to be damaged.
        """
        found = ((epoch, digest) for epoch, digest, _ in self._deltas())
        deltas = [delta for delta in found if delta not in without]
        marker = self.store.marker() if self.store else None
        if marker is None:
            return LocalCopy(deltas=deltas)
        return LocalCopy(
            job_id=marker.job_id,
            epoch=marker.epoch,
            chain=marker.chain,
            applying=marker.applying,
            deltas=deltas,
        )

    def _deltas(self) -> Iterator[tuple[int, str, Path]]:
        with contextlib.suppress(FileNotFoundError):
            for path in sorted((self.path / "deltas").iterdir()):
                epoch, _, digest = path.name.partition("-")
                if epoch.isdigit() and digest:
                    yield int(epoch), digest, path

    def read_delta(self, epoch: int, digest: str) -> bytes:
        """A local delta's bytes, unchecked."""
        try:
            return (self.path / "deltas" / f"{epoch}-{digest}").read_bytes()
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
            temporary.rename(folder / f"{epoch}-{digest}")
        except OSError as error:
            raise unusable(str(folder), error) from error

    def forget_delta(self, epoch: int, digest: str) -> None:
        """Remove a delta that turned out to be damaged."""
        _remove(self.path / "deltas" / f"{epoch}-{digest}")

    def drop_deltas(self, up_to_epoch: int) -> None:
        """Forget the deltas that the store holds on disk."""
        for epoch, _, path in list(self._deltas()):
            if epoch <= up_to_epoch:
                _remove(path)

    def release(self) -> None:
        """Close the store and let others have it."""
        store, self.store = self.store, None
        lease, self._lease = self._lease, None
        try:
            if store is not None:
                store.close()
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
    ) -> None:
        # Quoting keeps dots, and "." and ".." would not be folders of their own.
        folders = [quote(name, safe="").replace(".", "%2E") for name in (job, operator)]
        self.path = Path(local_dir, *folders, str(subtask))
        self._new_id = new_id
        self._clock = clock
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
            try:
                held = self._lease(self.path / name)
            except FileNotFoundError:
                return self.create(), "the local copy was deleted"
            if held is None:
                if self._clock.now_s() >= deadline_s:
                    return self.create(), f"the local copy was held by another process ({name})"
                self._clock.sleep_s(_POLL_S)
                continue
            if self._current() != name:  # another took over while we waited
                held.release()
                continue
            if (reason := held.bad) is not None:
                held.release()
                return self.create(), f"the local copy was marked bad: {reason}"
            return held, ""

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
                pointer = self.path / f".current.{name}"
                pointer.write_text(name)
                pointer.replace(self.path / "current")
                return held
        except OSError as error:
            raise unusable(str(self.path), error) from error

    def sweep(self, keep: Incarnation) -> None:
        """Remove the incarnations that nobody holds and the pointer does not name."""
        if self._current() != keep.path.name:
            return  # another has taken over: what is left behind is its business
        for path in self.path.iterdir():
            if path == keep.path or path.name == self._current() or not path.is_dir():
                continue
            held = None
            with contextlib.suppress(FileNotFoundError):
                held = self._lease(path)
            if held is not None:
                shutil.rmtree(path, ignore_errors=True)
                held.release()

    def _current(self) -> str | None:
        try:
            return (self.path / "current").read_text().strip() or None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unusable(str(self.path), error) from error

    def _lease(self, path: Path) -> Incarnation | None:
        """Lock an incarnation without waiting; None where another process has it.

        Its directory is never made here: a path that was removed stays removed.
        """
        try:
            lease = os.open(path / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise
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


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # it is only in the way: nobody takes it for what it is not
        _log.warning("%s could not be removed (%s)", path, error)


def unusable(path: str, error: OSError) -> LocalDirError:
    """The typed error for a directory that cannot be used."""
    return LocalDirError(
        f"The directory for task-local copies, {path}, cannot be used ({error.strerror or error}).",
        todo="Give local_dir= (or spark.statebackend.localDir) a directory that every executor's "
        "user can write, on a local disk with room.",
    )
