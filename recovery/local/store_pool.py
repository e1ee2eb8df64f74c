"""Stores that a worker keeps open between epochs, and their hand-over to other workers of the host.

Opening a store for each task costs a flush at its end and starves compaction. So a worker keeps its
stores open, leased, and any worker of the host may ask for one at the holder's *hand-over socket*,
a local socket whose path lies in the store directory. A store that is not in use is closed
and let go at once; one that is in use is not. A holder that does not answer (frozen, or a twin that
is still working) is not waited for beyond a bounded time: the asker makes a store directory of its
own. Only processes of one user talk to each other there. The hand-over thread also closes what
nobody used for a while, and flushes what has many epochs in memory only: their local deltas are
needed until then. If somebody deletes the socket (it may lie in another job's ``local_dir``, or in
a folder for temporary files), the thread opens another and names that in the store directories: in
a temporary folder, so that it never makes what is being deleted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from recovery.local.local_sockets import Listener, connect
from recovery.local.private_folders import own_file_text
from recovery.local.store_directory import HOLDER, StoreDirectory
from statebackend.errors import LocalCopyError, StateBackendError
from statebackend.system import System
from statebackend.threads import THREADS, Lock, Threads

__all__ = ["Clock", "StorePool", "StorePoolSettings", "ask_for"]

_log = logging.getLogger("statebackend.recovery")
_TICK_S: Final = 0.5
_SWITCH_S: Final = 0.001
_LINE_BYTES: Final = 8192


class Clock:
    """Time, and threads, as local stores and the store pool need them; tests pass their own."""

    def __init__(
        self,
        now_s: Callable[[], float],
        sleep_s: Callable[[float], None],
        threads: Threads = THREADS,
    ) -> None:
        self.now_s = now_s
        self.sleep_s = sleep_s
        self.threads = threads

    @classmethod
    def of(cls, system: System) -> Clock:
        """A process's."""
        return cls(system.monotonic_s, system.sleep_s, system.threads)


@dataclass(frozen=True)
class StorePoolSettings:
    """What a worker keeps.

    Attributes:
        open_limit: stores that stay open. idle_close_s: for how long without being used.
        unflushed_epochs: how many a store may hold in memory only (their deltas are on disk).
        recent_bytes: of newest deltas that are remembered, over all stores.
    """

    open_limit: int = 32
    idle_close_s: float = 30.0
    unflushed_epochs: int = 16
    recent_bytes: int = 64 << 20


@dataclass
class _Kept:
    held: StoreDirectory
    since_s: float
    settings: StorePoolSettings


def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sb-"))


class StorePool:
    """The stores of this process that are open and not in use. Thread-safe.

    One per process: `of_process` makes it anew after a fork, since neither threads nor RocksDB
    survive one.
    """

    _instance: ClassVar[tuple[int, StorePool] | None] = None
    _making: ClassVar[Lock] = THREADS.lock()  # of this process, as the instance is

    def __init__(
        self,
        clock: Clock,
        settings: StorePoolSettings,
        folder: Callable[[], Path] = _temporary_folder,
    ) -> None:
        self._clock, self._settings = clock, settings
        self._kept: dict[Path, _Kept] = {}  # by the subtask's folder
        self.swept: dict[str, str] = {}  # in which run a folder was looked through for old copies
        self._lock = clock.threads.lock()
        self._closed = clock.threads.event()
        self._said_unreachable = False
        self._open_socket(folder())
        # A hand-over takes the interpreter a dozen times from a task that computes: at the usual
        # 5 ms each that was 40 ms, and is 15 at this.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._thread = clock.threads.start(self._serve, "statebackend-handover")

    @classmethod
    def of_process(
        cls,
        clock: Clock,
        settings: StorePoolSettings,
        folder: Callable[[], Path] = _temporary_folder,
    ) -> StorePool:
        """This process's store pool; a store goes by the settings that it is kept with.

        Args:
            folder: names a new folder for a socket, which is swept when the process has ended.
        """
        with cls._making:
            known = cls._instance
            if known is None or known[0] != os.getpid():
                known = cls._instance = (os.getpid(), cls(clock, settings, folder))
                # A thread that comes back from RocksDB when the interpreter has ended aborts the
                # process.
                atexit.register(_at_exit, *known)
            return known[1]

    def take(self, subtask: Path, name: str) -> StoreDirectory | None:
        """The open store of a subtask, if its directory is the current one; another is let go.

        Args:
            subtask: the subtask's folder. name: the store directory that counts.
        """
        with self._lock:
            kept = self._kept.pop(subtask, None)
        if kept is None:
            return None
        if kept.held.path.name == name and kept.held.bad is None:
            return kept.held
        _let_go(kept.held)
        return None

    def keeps(self, path: Path, at_least_bytes: int = 0) -> bool:
        """Whether a store directory is open here, good, not in use, and about so large on disk."""
        with self._lock:  # so that it is not closed meanwhile
            kept = self._kept.get(path.parent)
            if kept is None or kept.held.path != path or kept.held.bad is not None:
                return False
            if not at_least_bytes:
                return True
            store = kept.held.store
            return store is not None and store.live_bytes() >= at_least_bytes

    def keep(self, held: StoreDirectory, settings: StorePoolSettings | None = None) -> None:
        """Keep a store open; the one that was unused for longest makes room.

        Args:
            settings: of the job that it belongs to; else the store pool's.
        """
        settings = settings or self._settings
        if held.unflushed_epochs >= 2 * settings.unflushed_epochs:
            # The hand-over thread did not get to it: batch follows batch.
            try:
                held.flush()
            except BaseException as error:
                if isinstance(error, LocalCopyError):
                    held.mark_bad(error.what)
                with contextlib.suppress(StateBackendError):
                    held.release()
                raise
        reopened = held.store is not None and held.store.give_up_whole_filters()
        if self._closed.is_set() or settings.open_limit < 1 or reopened:
            held.release()
            return
        subtask = held.path.parent
        with self._lock:
            held.say_holder(self.address)
            before = self._kept.pop(subtask, None)
            self._kept[subtask] = _Kept(held, self._clock.now_s(), settings)
            over = self._over(held.path, settings.open_limit)
            self._forget_deltas(settings.recent_bytes)
        for one in (before, *over):
            if one is not None:
                _let_go(one.held)

    def _over(self, path: Path, limit: int) -> list[_Kept]:
        """What a job keeps beyond its limit, unused for longest first; other jobs' stores stay."""
        job = path.parents[2]
        own = [subtask for subtask in self._kept if subtask.parents[1] == job]
        return [self._kept.pop(subtask) for subtask in own[: max(0, len(own) - limit)]]

    def _forget_deltas(self, left_bytes: int) -> None:
        """Bound what is remembered of newest epochs; their deltas are on disk besides."""
        for kept in reversed(self._kept.values()):
            recent = kept.held.recent
            if recent is not None:
                left_bytes -= recent.size_bytes
                if left_bytes < 0:
                    kept.held.recent = None

    def close(self) -> None:
        """Let everything go and close the socket; for tests and at exit."""
        self._closed.set()
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        for one in kept:
            _let_go(one.held)
        self._listener.wake()
        self._thread.join(10 * _TICK_S)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with self._making:
            if self._instance is not None and self._instance[1] is self:
                StorePool._instance = None

    # --- the hand-over thread ---------------------------------------------------------------------

    def _open_socket(self, folder: Path) -> None:
        """Listen in a new folder.

        Raises:
            OSError: it cannot be made, or not listened in.
        """
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        path = folder / "door"
        try:
            listener = Listener(
                path, "asked for a local store", tick_s=_TICK_S, closed=self._closed
            )
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._folder, self._listener, self.address = folder, listener, str(path)

    def _replace_socket(self) -> None:
        gone, before = self.address, self._listener
        try:
            self._open_socket(_temporary_folder())
        except OSError as error:
            if not self._said_unreachable:
                _log.warning("%s was deleted, and no other can be made (%s)", gone, error)
            self._said_unreachable = True
            return
        self._said_unreachable = False
        _log.warning("%s was deleted: local stores are handed over at %s", gone, self.address)
        before.close()
        with self._lock:
            for kept in self._kept.values():
                kept.held.say_holder(self.address)

    def _serve(self) -> None:
        tidied_s = self._clock.now_s()
        while not self._closed.is_set():
            if self._clock.now_s() - tidied_s >= _TICK_S:
                try:
                    if not os.path.lexists(self.address):
                        self._replace_socket()
                    self._tidy()
                except Exception:
                    _log.exception("local stores could not be tidied")
                tidied_s = self._clock.now_s()
            asker = self._listener.accept()
            if asker is None:
                continue
            with asker, contextlib.suppress(OSError, ValueError):  # whatever was said to us
                asker.settimeout(_TICK_S)
                path = Path(asker.recv(_LINE_BYTES).decode())
                asker.sendall(b"free" if self._hand_over(path) else b"busy")

    def _hand_over(self, path: Path) -> bool:
        """Close a store that somebody asked for; False where it is in use, or not ours."""
        with self._lock:
            kept = self._kept.get(path.parent)
            if kept is None or kept.held.path != path:
                return False
            del self._kept[path.parent]
        _let_go(kept.held)
        return True

    def _tidy(self) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            idle = [
                subtask
                for subtask, kept in self._kept.items()
                if now_s - kept.since_s >= kept.settings.idle_close_s
            ]
            closing = [self._kept.pop(subtask) for subtask in idle]
            flushing = [
                kept.held
                for kept in self._kept.values()
                if kept.held.unflushed_epochs >= kept.settings.unflushed_epochs
            ]
        for one in closing:
            _let_go(one.held)
        for held in flushing:
            if self._closed.is_set():
                return
            try:
                held.flush()
            except StateBackendError as error:
                held.mark_bad(error.what)


def _at_exit(pid: int, store_pool: StorePool) -> None:
    if pid == os.getpid():  # a fork has threads and stores of its own
        store_pool.close()


def _let_go(held: StoreDirectory) -> None:
    try:
        held.release()
    except StateBackendError as error:  # a damaged one is marked bad by release()
        _log.warning("a local store could not be closed well: %s", error)
    except Exception:  # its lease is free, and the others are let go nevertheless
        _log.exception("a local store could not be closed")


def ask_for(path: Path, timeout_s: float) -> bool:
    """Ask the holder of a store directory to let it go; True if it did.

    False where there is nobody to ask, it is in use, or no answer came in time.
    """
    try:
        address = own_file_text(path / HOLDER)
        if address is None:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(max(0.01, timeout_s))
            if not connect(asking, Path(address)):
                return False
            asking.sendall(str(path).encode())
            return asking.recv(16) == b"free"
    except (OSError, ValueError):  # nobody there, or no path at all
        return False
