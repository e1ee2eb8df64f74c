"""A host's disk in memory: as much of ``pathlib``, ``os``, ``fcntl`` and ``shutil`` as local copies
ask for. Quicker than a temporary file system, and the order of a folder is always the same.
"""

from __future__ import annotations

import fnmatch
import io
import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

from greenlet import getcurrent

from tests.sim.kernel import Actor

__all__ = ["Disk", "MemPath"]


class _File:
    """An inode; ``lock`` is the descriptor that has locked it."""

    __slots__ = ("data", "ino", "lock")

    def __init__(self, ino: int, data: bytes) -> None:
        self.ino, self.data = ino, data
        self.lock: int | None = None


class Disk:
    """Files and folders of one world, and what its processes have open.

    `os`, `fcntl` and `shutil` stand in for the modules of these names.

    No two worlds of a process have the same descriptors: what the garbage collector ends of a world
    that is over closes its own, while these stand-ins are another world's already.
    """

    _fds: ClassVar[Iterator[int]] = itertools.count(101)

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self.folders: dict[str, dict[str, None]] = {"": {}}
        self._open: dict[int, _File] = {}
        self._given: set[int] = set()
        self._inos = 0
        self.os = SimpleNamespace(
            O_RDWR=os.O_RDWR,
            O_CREAT=os.O_CREAT,
            O_CLOEXEC=os.O_CLOEXEC,
            open=self._os_open,
            close=self._os_close,
            fstat=lambda fd: self._stat(self._open[fd]),
            getpid=lambda: 1,
            PathLike=os.PathLike,
            fsdecode=os.fsdecode,
        )
        self.fcntl = SimpleNamespace(LOCK_EX=2, LOCK_NB=4, flock=self._flock)
        self.os.mkdir = lambda path: MemPath(path).mkdir()
        self.os.path = SimpleNamespace(
            join=os.path.join, exists=lambda path: MemPath(path).exists()
        )
        self.shutil = SimpleNamespace(rmtree=self._rmtree)

    def root(self) -> MemPath:
        MemPath.disk = self
        return MemPath("")

    def write(self, path: str, data: bytes) -> None:
        known = self.files.get(path)
        if known is not None:
            known.data = data
            return
        self.add(path, self._new(data))

    def _new(self, data: bytes) -> _File:
        self._inos += 1
        return _File(self._inos, data)

    def add(self, path: str, file: _File) -> None:
        """Give a file a name; one that had it loses it."""
        folder, _, name = path.rpartition("/")
        if folder not in self.folders:
            raise FileNotFoundError(2, "No such file or directory", path)
        self.files[path] = file
        self.folders[folder][name] = None

    def remove(self, path: str) -> _File:
        file = self.files.pop(path, None)
        if file is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        folder, _, name = path.rpartition("/")
        del self.folders[folder][name]
        return file

    def _rmtree(self, path: object, ignore_errors: bool = True) -> None:
        if not _is_dead():
            self.rmtree(path)

    def rename_folder(self, path: str, target: str) -> None:
        """All below a folder, and it."""
        MemPath(target).mkdir()
        for name in list(self.folders[path]):
            below = f"{path}/{name}"
            if below in self.folders:
                self.rename_folder(below, f"{target}/{name}")
            else:
                self.add(f"{target}/{name}", self.remove(below))
        self.rmtree(path)

    def rmtree(self, path: object) -> None:
        """All below a folder, and it."""
        top = str(path)
        if top not in self.folders:
            return
        for name in list(self.folders[top]):
            below = f"{top}/{name}"
            if below in self.folders:
                self.rmtree(below)
            else:
                self.remove(below)
        del self.folders[top]
        folder, _, name = top.rpartition("/")
        self.folders[folder].pop(name, None)

    @staticmethod
    def _stat(file: _File) -> Any:
        return SimpleNamespace(st_ino=file.ino, st_size=len(file.data))

    def stat(self, path: str) -> Any:
        file = self.files.get(path)
        if file is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self._stat(file)

    # --- descriptors and locks -----------------------------------------------------------------

    def _os_open(self, path: object, flags: int, mode: int = 0) -> int:
        name = str(path)
        if name not in self.files:
            self.write(name, b"")
        fd = next(self._fds)
        self._open[fd] = self.files[name]
        self._given.add(fd)
        return fd

    def _os_close(self, fd: int) -> None:
        if fd not in self._given:  # another world's, which is over
            return
        file = self._open.pop(fd, None)
        if file is None:
            raise OSError(9, "Bad file descriptor")
        if file.lock == fd:
            file.lock = None

    def _flock(self, fd: int, how: int) -> None:
        file = self._open[fd]
        if file.lock not in (None, fd):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        file.lock = fd


class MemPath:
    """As ``pathlib.Path``, on the disk of the world that runs."""

    __slots__ = ("_path",)
    disk: ClassVar[Disk]

    def __init__(self, path: object, *more: str) -> None:
        self._path = "/".join((str(path), *more))

    def __str__(self) -> str:
        return self._path

    __repr__ = __fspath__ = __str__

    def __truediv__(self, name: str) -> MemPath:
        return MemPath(f"{self._path}/{name}")

    def __hash__(self) -> int:
        return hash(self._path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemPath) and other._path == self._path

    def __lt__(self, other: MemPath) -> bool:
        return self._path < other._path

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> MemPath:
        return MemPath(self._path.rpartition("/")[0])

    @property
    def parents(self) -> list[MemPath]:
        found, one = [], self.parent
        while one._path:
            found.append(one)
            one = one.parent
        return found

    def with_name(self, name: str) -> MemPath:
        return self.parent / name

    def rmdir(self) -> None:
        """Remove an empty folder."""
        if self.disk.folders.get(self._path):
            raise OSError(39, "Directory not empty", self._path)
        self.disk.rmtree(self._path)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        folders = self.disk.folders
        if self._path in folders:
            if not exist_ok:
                raise FileExistsError(17, "File exists", self._path)
            return
        folder, _, name = self._path.rpartition("/")
        if folder not in folders:
            if not parents:
                raise FileNotFoundError(2, "No such file or directory", self._path)
            self.parent.mkdir(parents=True)
        folders[folder][name] = None
        folders[self._path] = {}

    def iterdir(self) -> Iterator[MemPath]:
        folder = self.disk.folders.get(self._path)
        if folder is None:
            raise FileNotFoundError(2, "No such file or directory", self._path)
        return iter([MemPath(f"{self._path}/{name}") for name in folder])

    def glob(self, pattern: str) -> Iterator[MemPath]:
        """What is in the folder by that pattern, which names no other; nothing without a folder."""
        names = self.disk.folders.get(self._path, ())
        return iter([self / name for name in names if fnmatch.fnmatchcase(name, pattern)])

    def files_below(self) -> list[MemPath]:
        """Every file in the folder and those in it."""
        start = f"{self._path}/"
        return [MemPath(path) for path in sorted(self.disk.files) if path.startswith(start)]

    def is_dir(self) -> bool:
        return self._path in self.disk.folders

    def exists(self) -> bool:
        return self._path in self.disk.files or self.is_dir()

    def stat(self) -> Any:
        return self.disk.stat(self._path)

    def read_bytes(self) -> bytes:
        file = self.disk.files.get(self._path)
        if file is None:
            raise FileNotFoundError(2, "No such file or directory", self._path)
        return file.data

    def read_text(self, errors: str = "strict") -> str:
        return self.read_bytes().decode(errors=errors)

    def write_bytes(self, data: bytes) -> None:
        self.disk.write(self._path, bytes(data))

    def write_text(self, text: str) -> None:
        self.disk.write(self._path, text.encode())

    def rename(self, target: MemPath) -> MemPath:
        folder = target._path.rpartition("/")[0]
        if folder not in self.disk.folders:
            raise FileNotFoundError(2, "No such file or directory", target._path)
        if self.is_dir():
            self.disk.rename_folder(self._path, target._path)
        else:
            self.disk.add(target._path, self.disk.remove(self._path))
        return target

    replace = rename

    def link_to(self, target: MemPath) -> None:
        """A hard link."""
        file = self.disk.files.get(self._path)
        if file is None:
            raise FileNotFoundError(2, "No such file or directory", self._path)
        self.disk.add(target._path, file)

    def unlink(self, missing_ok: bool = False) -> None:
        if not _is_dead() and (not missing_ok or self._path in self.disk.files):
            self.disk.remove(self._path)

    def open(self, mode: str = "rb", buffering: int = -1) -> io.BytesIO:
        return io.BytesIO(self.read_bytes()) if "r" in mode else _Written(self)


def _is_dead() -> bool:
    """Whether who runs was killed: what it would still tidy up stays."""
    actor = getcurrent()
    return isinstance(actor, Actor) and actor.process.dead


class _Written(io.BytesIO):
    """A file that is being written: its bytes are there when it is closed."""

    def __init__(self, path: MemPath) -> None:
        super().__init__()
        self._path = path
        path.write_bytes(b"")

    def close(self) -> None:
        if not self.closed:
            self._path.write_bytes(self.getvalue())
        super().close()
