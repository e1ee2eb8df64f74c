"""Writes down what this process does to the files below a folder, and fails it on purpose.

Python's own calls are seen one by one: `os`, `pathlib`, `shutil` and `open`. RocksDB writes from
C++, past them: what it changed is found by comparing, before each call, and taken for synced (a
"foreign" operation). That is a true picture of a killed process; of a power cut it is what RocksDB
promises of its files, not what we have seen.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.crash.disk import ROOT, Op, Tree

__all__ = ["Recorder"]

_FOREIGN: Final = ("db", "files")  # folders that RocksDB writes into
_NOISE: Final = ("LOG", "OPTIONS-")  # RocksDB's own notes, never read back

Fail = Callable[[str, str], OSError | None]
Classify = Callable[[str, str], str]


class Recorder:
    """Records while it is entered; one at a time. Thread-safe.

    Args:
        root: what lies below it is recorded; it must be empty.
        classify: from kind and relative path to the step that an operation belongs to.
        fail: asked before each operation with its kind and relative path; what it gives is raised.
    """

    def __init__(self, root: Path, classify: Classify, fail: Fail | None = None) -> None:
        self.ops: list[Op] = []
        self.tree = Tree()
        self._root, self._prefix = root, f"{root}/"
        self._classify, self._fail = classify, fail
        self._next = ROOT + 1
        self._handles: dict[int, int] = {}  # of files and folders below the root: their inode
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._lock = threading.RLock()
        self._restore = contextlib.ExitStack()
        self._real: dict[str, Any] = {}

    def __enter__(self) -> Recorder:
        names = "open close write fsync fdatasync rename replace link unlink remove mkdir rmdir"
        for name in [*names.split(), "ftruncate"]:
            self._put(os, name, getattr(self, f"_{name}"))
        self._real["io.open"] = io.open
        self._put(io, "open", self._io_open)
        self._put(builtins, "open", self._io_open)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore.close()
        self.look()

    def _put(self, module: Any, name: str, with_what: Any) -> None:
        real = getattr(module, name)
        self._real.setdefault(name, real)
        setattr(module, name, with_what)
        self._restore.callback(setattr, module, name, real)

    # --- what is where -------------------------------------------------------------------------

    def _relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path below the root; None for what is elsewhere."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(os.fspath(path))
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return f"{text}/"[len(self._prefix) :].rstrip("/") if self._is_below(text) else None

    def _is_below(self, text: str) -> bool:
        return f"{text}/".startswith(self._prefix)

    def _place(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        inode = self.tree.find(folder)
        assert inode is not None, f"nobody was seen to make {folder!r}"
        return inode, name

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _add(self, kind: str, inode: int, path: str, **more: Any) -> None:
        op = Op(kind=kind, inode=inode, step=self._classify(kind, path), path=path, **more)
        self.tree.apply(op)
        self.ops.append(op)

    def _before(self, kind: str, path: str) -> None:
        self.look()
        error = self._fail(kind, path) if self._fail else None
        if error is not None:
            raise error

    # --- what others did -----------------------------------------------------------------------

    def look(self) -> None:
        """Take in what RocksDB has done since the last look."""
        with self._lock:
            for path in self._foreign_folders(self._root, ""):
                self._compare(path)

    def _foreign_folders(self, folder: Path, at: str) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as scan:
            for entry in list(scan):
                if at == "" and entry.name == "store":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    path = f"{at}{entry.name}"
                    if entry.name in _FOREIGN:
                        yield path
                    yield from self._foreign_folders(folder / entry.name, f"{path}/")

    def _compare(self, path: str) -> None:
        inode = self.tree.find(path)
        if inode is None:
            parent, name = self._place(path)
            inode = self._new()
            step = self._classify("foreign", path)
            op = Op("foreign", inode, step, f"{path}/", folder=parent, name=name, data=b"")
            self.tree.apply(op)
            self.ops.append(op)
        here: set[str] = set()
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / path) as scan:
            for entry in list(scan):
                if entry.name.startswith(_NOISE) or entry.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    self._compare_file(inode, f"{path}/{entry.name}", entry.stat())
                    here.add(entry.name)
        for name in set(self.tree.folders[inode]) - here:
            self._add("foreign", -1, f"{path}/{name}", folder=inode, name=name, data=None)

    def _compare_file(self, folder: int, path: str, stat: os.stat_result) -> None:
        sign = stat.st_ino, stat.st_size, stat.st_mtime_ns
        known = self.tree.folders[folder].get(path.rpartition("/")[2])
        if self._seen.get(path) == sign and known is not None:
            return
        self._seen[path] = sign
        with self._real["io.open"](self._root / path, "rb") as file:
            data = file.read()
        if known is None or bytes(self.tree.files.get(known, b"")) != data:
            name = path.rpartition("/")[2]
            self._add("foreign", self._new(), path, folder=folder, name=name, data=data)

    # --- calls ---------------------------------------------------------------------------------

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        below = self._relative(path, dir_fd)
        if below is None:
            found: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            return found
        with self._lock:
            inode = self.tree.find(below)
            if flags & os.O_CREAT and inode is None:
                self._before("create", below)
            handle: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT and inode is None:
                folder, name = self._place(below)
                inode = self._new()
                self._add("create", inode, below, folder=folder, name=name)
            if flags & os.O_TRUNC and inode is not None and self.tree.files.get(inode):
                self._add("truncate", inode, below)
            if inode is not None:
                self._handles[handle] = inode
            return handle

    def _close(self, handle: int) -> None:
        with self._lock:
            self._handles.pop(handle, None)
            self._real["close"](handle)

    def _path_of(self, handle: int) -> str:
        return self._relative(os.readlink(f"/proc/self/fd/{handle}")) or ""

    def _write(self, handle: int, data: Any) -> int:
        inode = self._handles.get(handle)
        if inode is None:
            plain: int = self._real["write"](handle, data)
            return plain
        with self._lock:
            path = self._path_of(handle)
            self._before("write", path)
            appending = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_APPEND
            offset = os.lseek(handle, 0, os.SEEK_END if appending else os.SEEK_CUR)
            written: int = self._real["write"](handle, data)
            self._add("write", inode, path, offset=offset, data=bytes(data)[:written])
            return written

    def _ftruncate(self, handle: int, length: int) -> None:
        self._real["ftruncate"](handle, length)
        if handle in self._handles:
            self._add("truncate", self._handles[handle], self._path_of(handle), offset=length)

    def _fsync(self, handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        if number not in self._handles:
            self._real["fsync"](handle)
            return
        with self._lock:  # nothing is synced: the disk is a simulated one
            path = self._path_of(number)
            self._before("sync", path)
            self._add("sync", self._handles[number], path)

    _fdatasync = _fsync

    def _rename(self, source: Any, target: Any, **folders: Any) -> None:
        before, after = self._relative(source), self._relative(target)
        if before is None or after is None:
            self._real["rename"](source, target, **folders)
            return
        with self._lock:
            self._before("rename", after)
            if self.tree.find(before) is None:  # a store that RocksDB made under another name
                self._compare(before)
            self._real["rename"](source, target, **folders)
            inode = self.tree.find(before)
            assert inode is not None
            old_folder, old_name = self._place(before)
            folder, name = self._place(after)
            names = {"old_folder": old_folder, "old_name": old_name}
            self._add("rename", inode, after, folder=folder, name=name, **names)

    _replace = _rename

    def _link(self, source: Any, target: Any, **options: Any) -> None:
        before, after = self._relative(source), self._relative(target)
        if before is None or after is None:
            self._real["link"](source, target, **options)
            return
        with self._lock:
            self._before("link", after)
            self._real["link"](source, target, **options)
            inode = self.tree.find(before)
            assert inode is not None
            folder, name = self._place(after)
            self._add("link", inode, after, folder=folder, name=name)

    def _gone(self, kind: str, path: Any, dir_fd: int | None) -> None:
        below = self._relative(path, dir_fd)
        if below is None:
            self._real[kind](path, dir_fd=dir_fd)
            return
        with self._lock:
            self._before(kind, below)
            self._real[kind](path, dir_fd=dir_fd)
            folder, name = self._place(below)
            if name in self.tree.folders[folder]:
                self._add(kind, -1, below, folder=folder, name=name)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("unlink", path, dir_fd)

    _remove = _unlink

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("rmdir", path, dir_fd)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        below = self._relative(path, dir_fd)
        if below is None:
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            return
        with self._lock:
            if self.tree.find(below) is None:
                self._before("mkdir", below)
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            folder, name = self._place(below)
            self._add("mkdir", self._new(), below, folder=folder, name=name)

    def _io_open(
        self, file: Any, mode: str = "r", buffering: int = -1, *more: Any, **o: Any
    ) -> Any:
        below = self._relative(file)
        if below is None or mode.replace("b", "").replace("t", "") == "r":
            return self._real["io.open"](file, mode, buffering, *more, **o)
        plain = mode.replace("b", "").replace("t", "")
        flags = {"w": os.O_TRUNC, "x": os.O_EXCL, "a": os.O_APPEND}[plain]
        handle = self._open(file, os.O_WRONLY | os.O_CREAT | flags, 0o666)
        raw = _Written(handle, "w", closefd=True, recorder=self)
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *more, **o)


class _Written(io.FileIO):
    """A file that is written by way of the recorder."""

    def __init__(self, handle: int, mode: str, *, closefd: bool, recorder: Recorder) -> None:
        super().__init__(handle, mode, closefd)
        self._recorder = recorder

    def write(self, data: Any) -> int:
        return self._recorder._write(self.fileno(), data)

    def close(self) -> None:
        if not self.closed:
            self._recorder._handles.pop(self.fileno(), None)
        super().close()
