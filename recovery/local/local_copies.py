"""Task-local copies: where they lie on a host, and who may touch them.

``<local_dir>/<job>/<operator>/<first key group>-<last key group>/``, for one user alone
    ``current``              the store directory that counts (a pointer, swapped atomically)
    ``<store directory>/lease``  locked (flock) by the process that has the store open
    ``<store directory>/db/``    RocksDB: confirmed epochs only
    ``<store directory>/deltas/<epoch>-<digest>``  deltas that were acked here, confirmed or not
    ``<store directory>/holder`` the hand-over socket of the process that keeps it open (see
    recovery.local.store_pool)
    ``<store directory>/reached``  the epoch up to which deltas were forgotten: the store holds them
    ``<store directory>/uploaded``  index of the base whose files this store shares
    ``<store directory>/work/``  what an epoch or an upload needs for a while; swept at open
    ``<store directory>/BAD``    the reason why this copy must not be used again

A store directory's path is never made twice. A process that froze while it held a store and thaws
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
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

from recovery.local.private_folders import home_of, own_file_text, own_folder, remove, unusable
from recovery.local.store_directory import HOLDER, RecentDelta, StoreDirectory
from recovery.local.store_pool import Clock, StorePool, StorePoolSettings, ask_for
from statebackend.errors import LocalDirError
from statebackend.keygroups import KeyGroupRange, key_group_range
from statebackend.rocks.parted import Opener, open_database

__all__ = ["LocalSubtask", "RecentDelta", "StoreDirectory", "copies_seen"]

_log = logging.getLogger("statebackend.recovery")
_POLL_S: Final = 0.01
_POINTER: Final = ".current."  # and a store directory's name: a pointer that is being written
_MARKED_BAD: Final = "the local copy was marked bad"
_NAME: Final = re.compile(rb"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")


class LocalSubtask:
    """One subtask's copies on this host.

    They lie by key groups and not by index: at another parallelism, a subtask that has the same key
    groups finds its store, and no two subtasks meet in one folder.

    Args:
        local_dir: the host's directory for copies.
        job: a name that no other job of this host has; what a store holds is said by its marker.
        key_groups: the subtask's.
        new_id: unique names for store directories.
        ask: asks the holder of a store directory, in so many seconds, to let it go.
        opener: opens a database that a store consists of.

    Attributes:
        gone_bad: the copy that was here turned out to be damaged.
    """

    def __init__(
        self,
        local_dir: str,
        *,
        job: str,
        operator: str,
        key_groups: KeyGroupRange,
        new_id: Callable[[], str],
        clock: Clock,
        store_pool: StorePool | None = None,
        store_pool_settings: StorePoolSettings | None = None,
        ask: Callable[[Path, float], bool] = ask_for,
        opener: Opener = open_database,
    ) -> None:
        try:
            folder = _operator_folder(home_of(local_dir), job, operator)
            own_folder(folder.parent)
            self.path = folder / _folder(key_groups)
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(local_dir, error) from error
        self.key_groups = key_groups
        self.gone_bad = False
        self._new_id = new_id
        self._clock = clock
        self._ask, self._opener = ask, opener
        self._store_pool, self._store_pool_settings = store_pool, store_pool_settings

    def acquire(self, timeout_s: float) -> tuple[StoreDirectory, str]:
        """The current store directory, or a new one where it is bad, absent or held too long.

        Returns:
            the store directory, leased; and why it is a new one ("" if it is not).
        """
        held, reason = self._take(self.path, timeout_s)
        self.gone_bad = reason.startswith(_MARKED_BAD)
        return (held, "") if held is not None else (self.create(), reason)

    def acquire_other(
        self, key_groups: KeyGroupRange, timeout_s: float
    ) -> tuple[StoreDirectory | None, str]:
        """The current store directory of a subtask of another parallelism; or None, and why not.

        Where there is nothing at all, there is no reason either.

        It is released when it has been read: nobody will want it open.
        """
        path = self.path.parent / _folder(key_groups)
        return self._take(path, timeout_s) if path.is_dir() else (None, "")

    def _take(self, path: Path, timeout_s: float) -> tuple[StoreDirectory | None, str]:
        """What the pointer in a subtask's folder names, leased; or None, and why not."""
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            name = _current(path)
            if name is None:
                return None, "there is no local copy on this host"
            kept = self._store_pool.take(path, name) if self._store_pool else None
            if kept is not None:
                kept.opened_here = kept.orphaned = False
                return kept, ""
            try:
                held = self._lease(path / name)
            except FileNotFoundError:
                return None, "the local copy was deleted"
            if held is None:
                left_s = deadline_s - self._clock.now_s()
                if left_s <= 0:
                    return None, f"the local copy was held by another process ({name})"
                if not self._ask(path / name, left_s):
                    self._clock.sleep_s(_POLL_S)
                continue
            if _current(path) != name:  # another took over while we waited
                held.release()
                continue
            if (reason := held.bad) is not None:
                held.release()
                return None, f"{_MARKED_BAD}: {reason}"
            return held, ""

    def kept_elsewhere(self) -> tuple[Path, str] | None:
        """The current store directory and the hand-over socket of the process that keeps it open.

        None where that is this process, or nobody says so.
        """
        name = _current(self.path)
        if name is None or self._store_pool is None or self._store_pool.keeps(self.path / name):
            return None
        address = own_file_text(self.path / name / HOLDER)
        return None if address in (None, self._store_pool.address) else (self.path / name, address)

    def give_back(self, held: StoreDirectory) -> None:
        """Done for this epoch: keep the store open, or let it go."""
        if self._store_pool is None or held.bad is not None:
            held.release()
        else:
            self._store_pool.keep(held, self._store_pool_settings)

    def create(self) -> StoreDirectory:
        """A new, empty store directory, made the current one."""
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

    def sweep(self, keep: StoreDirectory) -> None:
        """Remove the store directories that nobody holds and the pointer does not name."""
        if _current(self.path) != keep.path.name:
            return  # another has taken over: what is left behind is its business
        for path in list(self.path.iterdir()):
            name = path.name.removeprefix(_POINTER)  # made after its directory
            if name != path.name and not (self.path / name).exists():
                remove(path)
            if path != keep.path and path.name != _current(self.path) and path.is_dir():
                self._remove_free(path)

    def sweep_others(self, parallelism: int, max_parallelism: int, *, run: str) -> None:
        """Remove what subtasks of another parallelism left, as far as nobody holds it.

        To be called once every subtask of this one has its state. A process does it once in a
        ``run`` of the query.
        """
        swept = self._store_pool.swept if self._store_pool else {}
        if swept.get(str(self.path.parent)) == run:
            return
        ranges = (key_group_range(i, parallelism, max_parallelism) for i in range(parallelism))
        wanted = {_folder(one) for one in ranges}
        try:
            folders = [one for one in self.path.parent.iterdir() if one.is_dir()]
            gone = [self._remove_subtask(one) for one in folders if one.name not in wanted]
            if all(gone):  # else again, in a later epoch
                swept[str(self.path.parent)] = run
        except OSError as error:  # housekeeping: the next process does it
            _log.warning("old local copies in %s were left (%s)", self.path.parent, error)

    def _remove_subtask(self, folder: Path) -> bool:
        """Remove a subtask's copies, unless somebody holds one; whether nothing is left.

        What the pointer names goes first: a driver that has not heard that it was fenced may try
        this on a store that is in use.
        """
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            name = _current(folder)
            if name is not None and not self._remove_free(folder / name):
                return False
            for path in list(folder.iterdir()):
                if not path.is_dir():
                    remove(path)
                elif not self._remove_free(path):
                    return False
        with contextlib.suppress(OSError):  # somebody is making one
            folder.rmdir()
        return not folder.exists()

    def _remove_free(self, path: Path) -> bool:
        """Remove a store directory, unless somebody holds it; whether it is gone."""
        try:
            held = self._lease(path)
        except FileNotFoundError:
            return True
        if held is None:
            return False
        shutil.rmtree(path, ignore_errors=True)
        remove(path.parent / f"{_POINTER}{path.name}")
        held.release()
        return True

    def _lease(self, path: Path) -> StoreDirectory | None:
        """Lock a store directory without waiting; None where another process has it.

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
        return StoreDirectory(path, lease, threads=self._clock.threads, opener=self._opener)


def copies_seen(local_dir: str, *, job: str, operator: str) -> dict[KeyGroupRange, int]:
    """What copies of an operator's state are on this host: a look at names, nothing is opened.

    Returns:
        by key groups, the newest epoch that something is there of; -1: nothing says.
    """
    found: dict[KeyGroupRange, int] = {}
    with contextlib.suppress(OSError, LocalDirError):
        of_operator = _operator_folder(home_of(local_dir), job, operator)
        if not of_operator.is_dir():
            return found
        own_folder(of_operator.parent)
        for folder in of_operator.iterdir():
            first, _, last = folder.name.partition("-")
            if not (first.isdecimal() and last.isdecimal()):
                continue
            with contextlib.suppress(OSError, LocalDirError):
                name = _current(folder)
                if name is None or not (folder / name / "lease").exists():
                    continue
                held = StoreDirectory(folder / name, None)
                if held.bad is None:
                    found[KeyGroupRange(int(first), int(last))] = held.newest_epoch
    return found


def _operator_folder(home: Path, job: str, operator: str) -> Path:
    # Quoting keeps dots, and "." and ".." would not be folders of their own.
    folders = [quote(name, safe="").replace(".", "%2E") for name in (job, operator)]
    return Path(home, *folders)


def _folder(key_groups: KeyGroupRange) -> str:
    return f"{key_groups.start}-{key_groups.end}"


def _current(subtask: Path) -> str | None:
    """The store directory that a subtask's pointer names."""
    try:
        found = (subtask / "current").read_bytes().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(str(subtask), error) from error
    return found.decode() if _NAME.fullmatch(found) else None  # it is not synced
