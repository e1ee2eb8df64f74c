"""Makes, checks and sweeps the folders of task-local copies.

They hold a job's state, and a worker believes what it reads there. So only its user can enter a
folder of ours (0700, whatever the umask). A folder of another user, or a symbolic link, is refused.
The files in it need no rights of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from statebackend import system
from statebackend.errors import LocalCopyError, LocalDirError

__all__ = [
    "home_of",
    "in_use",
    "make_folder",
    "open_above",
    "own_file_text",
    "own_folder",
    "remove",
    "sweep_work",
    "try_folder",
    "unreadable",
    "unusable",
]

_log = logging.getLogger("statebackend.recovery")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_TO_BE_LOOKED_AT: Final = stat.S_IRWXU | _OTHERS_WRITE  # who may not enter cannot write either
_SMALL_BYTES: Final = 4096


def home_of(local_dir: str) -> Path:
    """The folder of this user's copies; makes it if it is missing.

    It is ``local_dir`` itself if this user owns that. Otherwise it is a folder below, named after
    the user: several users of a host may share one ``local_dir``.

    Raises:
        LocalDirError: another user owns it, or may have put something there.
        OSError: the disk failed.
    """
    path = Path(local_dir)
    if (above := open_above(path)) is not None:
        _say_once(above)
    if path.name == system.user_folder_name():
        _make_above(path)
        return own_folder(path)
    try:
        found = _followed(path)
    except FileNotFoundError:
        _make_above(path)
        return own_folder(path)
    if not stat.S_ISDIR(found.st_mode):
        _refuse(path, "it is not a folder", "Move what is there, or give another local_dir=.")
    open_to_all = bool(found.st_mode & _OTHERS_WRITE) and not found.st_mode & stat.S_ISVTX
    if found.st_uid == os.geteuid():
        if open_to_all:  # who can write here can put a folder in the place of ours
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
            _log.warning("other users could write to %s, and cannot any more", path)
        return path
    if open_to_all:
        _say_once(path)
    return own_folder(path / system.user_folder_name())


def try_folder(local_dir: str) -> None:
    """Find out whether copies can be kept in a directory, before any is.

    Raises:
        LocalDirError: they cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=home_of(local_dir)) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise unusable(local_dir, error) from error


def open_above(path: Path) -> Path | None:
    """The nearest folder above in which every user may rename: one of theirs can take our place.

    Looked for along the path as it is given, and as it is without links.
    """
    real = Path(os.path.realpath(path))  # unlike resolve(), also of links in a circle
    for above in dict.fromkeys([*path.absolute().parents, *real.parents]):
        with contextlib.suppress(OSError):  # to be made, for this user alone
            found = above.stat().st_mode
            if found & stat.S_IWOTH and not found & stat.S_ISVTX:
                return above
    return None


_said: set[Path] = set()


def _say_once(path: Path) -> None:
    if path not in _said:
        _said.add(path)
        _log.warning(
            "other users can rename what lies in %s: set its sticky bit (chmod +t), or give "
            "local_dir= a folder in which only this user can write",
            path,
        )


def _followed(path: Path) -> os.stat_result:
    """The status of a path; follows a symbolic link if root or this user made it."""
    found = path.lstat()
    if not stat.S_ISLNK(found.st_mode):
        return found
    if found.st_uid not in (0, os.geteuid()):
        _refuse(
            path,
            f"it is a symbolic link of another user (uid {found.st_uid})",
            "Give local_dir= the folder itself, or have the link removed.",
        )
    return path.stat()


def _make_above(path: Path) -> None:
    """Makes the missing folders above one of ours, for this user alone."""
    missing = []
    for above in path.parents:
        if above.exists():
            break
        missing.append(above)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)


def own_folder(path: Path) -> Path:
    """Makes a folder that no other user can enter, or checks and closes the one that is there.

    Earlier releases made folders that everybody could read; such a folder is closed. If others
    could write to it, all that lies in it must belong to this user.

    Raises:
        LocalDirError: it is a link, or belongs to another user, or something in it does.
        OSError: the disk failed.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=stat.S_IRWXU)
    found = path.lstat()
    if _closed(found):
        return path
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        _refuse(path, f"it is {kind}", "Remove it, or give another local_dir=.")
    if found.st_uid != os.geteuid():
        _refuse_owner(path, found.st_uid)
    # By its descriptor, so that nobody swaps the folder between the check and the change.
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid():
            _refuse_owner(path, found.st_uid)
        if found.st_mode & _OTHERS_WRITE:
            # Nobody else can enter it from here on, so its content is looked at once. It is marked
            # as open until that is done: if this process is killed, or finds something, the next
            # start looks again.
            os.fchmod(handle, _TO_BE_LOOKED_AT)
            _refuse_foreign_content(path)
        os.fchmod(handle, stat.S_IRWXU)
    finally:
        os.close(handle)
    return path


def _closed(found: os.stat_result) -> bool:
    """Whether it is a folder of this user's that nobody else can enter."""
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & _OTHERS


def _refuse_foreign_content(folder: Path) -> None:
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(above, name)
            with contextlib.suppress(FileNotFoundError):  # swept meanwhile
                if (uid := path.lstat().st_uid) != os.geteuid():
                    _refuse_owner(path, uid)


def _refuse_owner(path: Path, uid: int) -> NoReturn:
    _refuse(
        path,
        f"it belongs to another user (uid {uid}; this process is uid {os.geteuid()})",
        "Have it removed, if nobody needs it; else give each user that runs executors a local_dir= "
        "of its own, as in local_dir='/data/$USER'.",
    )


def _refuse(path: Path, why: str, todo: str) -> NoReturn:
    raise LocalDirError(f"{path} is not used for task-local copies: {why}.", todo=todo)


def own_file_text(path: Path) -> str | None:
    """A small file's text; None if it cannot be opened, or belongs to another user."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            _log.warning("%s belongs to another user, and is not believed", path)
            return None
        try:
            return file.read(_SMALL_BYTES).decode()
        except (OSError, ValueError):
            return None


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Nobody sweeps a folder of a store directory's ``work`` meanwhile; OSError if it is in use."""
    lease = os.open(folder / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lease)


def sweep_work(work: Path) -> None:
    """Remove what was left behind; an upload may outlive the store that it was taken from."""
    with contextlib.suppress(OSError):
        for folder in list(work.iterdir()):
            with contextlib.suppress(OSError), in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def make_folder(path: Path) -> Path:
    """A folder, with those above it but the store directory's own: that is never made twice."""
    path.parent.mkdir(exist_ok=True)
    path.mkdir(exist_ok=True)
    return path


def remove(path: Path) -> None:
    """Remove a file that may be gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # it is only in the way: nobody takes it for what it is not
        _log.warning("%s could not be removed (%s)", path, error)


def unreadable(error: OSError, copy: Path) -> LocalCopyError:
    """The typed error for a file or folder of a local copy that is gone, or cannot be read."""
    gone = isinstance(error, FileNotFoundError)
    how = "is gone" if gone else f"cannot be read ({error.strerror or error})"
    # A call on an open file names none.
    which = f"in {copy}" if error.filename is None else os.fsdecode(error.filename)
    return LocalCopyError(
        f"The local copy's file {which} {how}.",
        todo="Nothing to do if the subtask has moved, or was restored since. If this comes again "
        "and again, find out who deletes files in local_dir, and check the disk behind it.",
    )


def unusable(path: str, error: OSError) -> LocalDirError:
    """The typed error for a directory that cannot be used."""
    return LocalDirError(
        f"The directory for task-local copies, {path}, cannot be used ({error.strerror or error}).",
        todo="Give local_dir= (or spark.statebackend.localDir) a directory that every executor's "
        "user can write, on a local disk with room.",
    )
