"""A disk that remembers what was synced, and what it may hold after a power cut.

The rules are POSIX's, read strictly. Bytes count only once their file was synced. A name that was
given or taken away counts only once its folder was synced, whatever came later. Names of one folder
that were not synced may reach the disk in any order. A rename is one step.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

__all__ = ["ROOT", "Image", "Op", "Pending", "Tear", "Tree", "pending", "write_image"]

ROOT: Final = 0
_OLD_S: Final = 2 * 24 * 3600

Tear = Literal["lost", "torn", "zeros"]
Image = Mapping[str, bytes | None]


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        kind: create, mkdir, link, unlink, rmdir, rename: they change a folder's names; write,
            truncate: they change a file's bytes; sync; foreign: RocksDB made a file, or removed it
            (`data` is None), and synced it.
        inode: the file or folder that it is about.
        folder, name: the name that is given or taken; of a rename the new one.
        old_folder, old_name: of a rename.
        offset, data: of a write; the length, of a truncate, is its offset.
        step: the step of the protocol that it belongs to.
        path: for people.
    """

    kind: str
    inode: int
    step: str
    path: str
    folder: int = -1
    name: str = ""
    old_folder: int = -1
    old_name: str = ""
    offset: int = 0
    data: bytes | None = b""


_NAMING: Final = ("create", "mkdir", "link", "unlink", "rmdir", "rename")


@dataclass
class Tree:
    """Files and folders by inode."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    def find(self, path: str) -> int | None:
        """The inode at a path relative to the root."""
        at = ROOT
        for part in path.split("/") if path else ():
            inside = self.folders.get(at, {})
            if part not in inside:
                return None
            at = inside[part]
        return at

    def apply(self, op: Op) -> None:
        """One operation; what it rests on may have been lost, then it does what is left of it."""
        if op.kind == "write":
            _write(self.files.setdefault(op.inode, bytearray()), op)
        elif op.kind == "truncate":
            del self.files.setdefault(op.inode, bytearray())[op.offset :]
        elif op.kind == "foreign":
            self._foreign(op)
        elif op.kind in _NAMING:
            self._name(op)

    def _foreign(self, op: Op) -> None:
        inside = self.folders.setdefault(op.folder, {})
        if op.data is None:
            inside.pop(op.name, None)
            return
        inside[op.name] = op.inode
        if op.name and op.path.endswith("/"):
            self.folders.setdefault(op.inode, {})
        else:
            self.files[op.inode] = bytearray(op.data)

    def _name(self, op: Op) -> None:
        inside = self.folders.setdefault(op.folder, {})
        if op.kind in ("unlink", "rmdir"):
            inside.pop(op.name, None)
            return
        if op.kind == "rename":
            before = self.folders.setdefault(op.old_folder, {})
            if before.get(op.old_name) == op.inode:
                del before[op.old_name]
        elif op.kind == "mkdir":
            self.folders.setdefault(op.inode, {})
        elif op.kind == "create":
            self.files.setdefault(op.inode, bytearray())
        inside[op.name] = op.inode

    def image(self) -> dict[str, bytes | None]:
        """What is reachable: bytes by path; None for a folder."""
        found: dict[str, bytes | None] = {}
        waiting = [("", ROOT)]
        while waiting:
            at, folder = waiting.pop()
            for name, inode in self.folders.get(folder, {}).items():
                path = f"{at}{name}"
                if inode in self.folders:
                    found[path] = None
                    waiting.append((f"{path}/", inode))
                else:
                    found[path] = bytes(self.files.get(inode, b""))
        return found


def _write(file: bytearray, op: Op) -> None:
    data = op.data or b""
    if len(file) < op.offset:
        file.extend(bytes(op.offset - len(file)))
    file[op.offset : op.offset + len(data)] = data


@dataclass(frozen=True)
class Pending:
    """What a disk need not hold yet: operations on names, by their number; and files' bytes."""

    names: tuple[int, ...]
    files: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.names or self.files)


def pending(ops: Sequence[Op]) -> Pending:
    """What was not synced after these operations."""
    names: list[int] = []
    files: dict[int, None] = {}
    for number, op in enumerate(ops):
        if op.kind in _NAMING:
            names.append(number)
        elif op.kind in ("write", "truncate"):
            files[op.inode] = None
        elif op.kind == "sync":
            names = [n for n in names if op.inode not in (ops[n].folder, ops[n].old_folder)]
            files.pop(op.inode, None)
    return Pending(tuple(names), tuple(files))


def after_a_cut(
    ops: Sequence[Op], lost_names: Collection[int] = (), torn: Mapping[int, Tear] | None = None
) -> dict[str, bytes | None]:
    """What the disk holds if the power fails after these operations.

    Args:
        lost_names: numbers of operations on names that did not reach it; they must be pending.
        torn: what became of files' bytes that were not synced.
    """
    torn = torn or {}
    tree, synced = Tree(), dict.fromkeys(torn, b"")
    for number, op in enumerate(ops):
        if number not in lost_names:
            tree.apply(op)
        elif op.kind == "mkdir":  # what is in it is there, and out of reach
            tree.folders.setdefault(op.inode, {})
        if op.kind == "sync" and op.inode in synced:
            synced[op.inode] = bytes(tree.files.get(op.inode, b""))
    for inode, how in torn.items():
        if inode in tree.files:
            tree.files[inode] = bytearray(_torn(synced[inode], bytes(tree.files[inode]), how))
    return tree.image()


def _torn(synced: bytes, written: bytes, how: Tear) -> bytes:
    more = len(written) - len(synced)
    if how == "lost" or (more <= 0 and how == "torn"):
        return synced
    if how == "torn":
        return written[: len(synced) + more // 2]
    return synced[: len(written)] + bytes(max(0, more))


def write_image(image: Image, folder: Path, aged: Iterable[str] = (".tmp/",)) -> None:
    """Put an image into an empty folder.

    Args:
        aged: files with this in their path are made two days old.
    """
    folder.mkdir(parents=True)
    old = tuple(aged)
    for path in sorted(image):
        data, target = image[path], folder / path
        if data is None:
            target.mkdir(exist_ok=True)
            continue
        target.write_bytes(data)
        if any(part in path for part in old):
            stat = target.stat()
            os.utime(target, (stat.st_atime - _OLD_S, stat.st_mtime - _OLD_S))
