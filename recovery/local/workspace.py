"""Where a worker puts what it needs for a while: spilled input, spilled changes, fetched files.

``<local_dir>/.work/<id>/`` is one process's, as long as it holds the lock on the ``lease`` in it.
No other user can enter ``.work``. What a killed process left behind is removed by the next one that
starts on the host. A process whose folder was deleted makes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from recovery.local.private_folders import home_of, own_folder, unusable
from statebackend.threads import THREADS

__all__ = ["Workspace"]


class Workspace:
    """One process's folder below a ``local_dir``; made when it is first asked for a path."""

    _known: ClassVar[dict[tuple[int, str], Workspace]] = {}

    def __init__(self, local_dir: str, new_id: Callable[[], str]) -> None:
        self._local_dir = local_dir
        self._root = Path(local_dir, ".work")
        self._new_id = new_id
        self._own: Path | None = None
        self._lease = -1
        self._lock = THREADS.lock()

    @classmethod
    def of_process(cls, local_dir: str, new_id: Callable[[], str]) -> Workspace:
        """This process's; never one inherited over a fork."""
        return cls._known.setdefault((os.getpid(), local_dir), cls(local_dir, new_id))

    def path(self) -> Path:
        """A new path in the folder; whoever asks for it makes and removes what stands there.

        Raises:
            LocalDirError: the directory cannot be used.
        """
        try:
            with self._lock:
                if self._own is None or not self._holds(self._own):
                    self._own = self._make()
                return self._own / self._new_id()
        except OSError as error:
            raise unusable(str(self._root), error) from error

    def _make(self) -> Path:
        self._root = own_folder(home_of(self._local_dir) / self._root.name)
        self._sweep()
        while True:
            own = self._root / self._new_id()
            own.mkdir(mode=stat.S_IRWXU)
            if self._lock_lease(own):  # else another process that starts now has swept it
                return own

    def _holds(self, folder: Path) -> bool:
        """Whether a folder is this process's still; a lease that was deleted is made anew."""
        return _is_current(self._lease, folder) or self._lock_lease(folder)

    def _lock_lease(self, folder: Path) -> bool:
        lease = _locked_lease(folder)
        if lease is None:
            return False
        if self._lease >= 0:
            os.close(self._lease)
        self._lease = lease
        return True

    def _sweep(self) -> None:
        for folder in self._root.iterdir():
            with contextlib.suppress(OSError):
                lease = _locked_lease(folder)
                if lease is not None:
                    try:
                        shutil.rmtree(folder, ignore_errors=True)
                    finally:
                        os.close(lease)


def _locked_lease(folder: Path) -> int | None:
    """The lease in a folder, open and locked; None: another process has it, or the folder is gone.

    It is made if it is missing: the process was killed before that, or somebody deleted it.
    """
    with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as failing:
        lease = os.open(folder / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        failing.callback(os.close, lease)
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_current(lease, folder):  # else it was swept meanwhile, and perhaps made anew
            failing.pop_all()
            return lease
    return None


def _is_current(lease: int, folder: Path) -> bool:
    """Whether an open file is still the lease in a folder."""
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(lease).st_ino == (folder / "lease").stat().st_ino
    return False
