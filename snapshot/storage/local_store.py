"""A store in a folder of a local (or honestly shared) file system.

An object is one file. It is written under `.tmp/`, synced, and given its name in one step, so a
reader sees all of it or nothing. What a crash can leave behind is a file under `.tmp/`, which no
listing shows, and which the first write of a later store object removes when it is a day old.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from snapshot.storage.call_texts import call_text
from snapshot.storage.files_to_upload import file_chunks
from snapshot.storage.leftovers import mark_used, sweep
from snapshot.storage.object_store import (
    CHUNK_BYTES,
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_chunk,
    check_name,
    check_prefix,
    check_range,
    checked_names,
)
from statebackend.errors import (
    ObjectNotFoundError,
    SettingError,
    StorageError,
    StoreCapabilityError,
    StoreUnreachableError,
)

__all__ = ["LocalStore"]

TEMP_FOLDER = ".tmp"  # no object's name has a part that starts with '.'
TEMP_ATTEMPTS = 10

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
_TODO = {
    errno.ENOSPC: "Free space on that file system.",
    errno.EDQUOT: "Free space or raise the quota.",
    errno.EACCES: "Give this user read and write permission there.",
    errno.EPERM: "Give this user read and write permission there.",
    errno.EROFS: "Mount it writable, or choose another place.",
    errno.ENOTDIR: "A part of the path is a file: choose another path, or move the file away.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
}


class LocalStore(ObjectStore):
    """Objects as files below `path`, which is made when first written to.

    Durability, byte by byte. `put` and `create` write the bytes to `.tmp/<id>`, fsync that file,
    give it its name (rename, or hard link, which fails if the name is taken), and fsync the folder
    that the name is in. A folder is made when first needed, and its parent synced once per folder
    and store object, also if somebody else made it, since that somebody may have died before its
    own sync. When the sync of a folder fails after the name was given, nobody can say whether the
    name survives a power cut: the call raises `StoreUnreachableError`, and so does every later
    read of that name through this object, so that a read-back never takes it for durable.

    `delete` is not synced. Folders are never removed, because that would race with a writer.

    If the root was there and has gone, its disk is not mounted any more. The root is not made anew,
    and no object counts as missing: every call raises `StoreUnreachableError`, until the root is
    back.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, new_id: Callable[[], str], there: bool = False
    ) -> None:
        """Open, without touching the disk.

        Args:
            path: an absolute path.
            new_id: gives a new id on every call; names the temporary files.
            there: the root was made before; if it is missing, it has gone away.

        Raises:
            SettingError: the path is relative.
        """
        self._root = Path(path)
        if not self._root.is_absolute():
            raise SettingError(
                f"The store path {os.fspath(path)!r} is relative.", todo="Give an absolute path."
            )
        self._new_id = new_id
        self._there, self._identity = there, (0, 0)
        self._synced: set[Path] = set()  # folders whose own entry is known to be on disk
        self._swept = False
        self._unsure: set[str] = set()  # names given, but whose folder failed to sync

    @property
    def uri(self) -> str:
        """`file:///...`, percent-encoded."""
        return self._root.as_uri()

    @property
    def capabilities(self) -> Capabilities:
        """Everything; a file system without hard links shows at the first `create`."""
        return Capabilities(create_if_absent=True, ranged_read=True)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write to a temporary file, sync, rename over the name, sync the folder."""
        check_name(name)
        with self._typed_errors("write", name):
            self._publish(name, parts, os.replace)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """As `put`; the bytes are copied, a chunk at a time."""
        check_name(name)
        with self._typed_errors("write", name):
            self._publish(name, file_chunks(path, CHUNK_BYTES), os.replace)

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """Write to a temporary file, sync, hard-link to the name, sync the folder.

        Raises:
            StoreCapabilityError: the file system refuses hard links.
        """
        check_name(name)
        with self._typed_errors("create", name):
            try:
                self._publish(name, parts, self._link)
            except FileExistsError:
                return CreateOutcome.EXISTS
            return CreateOutcome.CREATED

    def get(self, name: str) -> bytes:
        """The whole file."""
        with self._opened(name) as handle:
            return _read(handle, 0, os.fstat(handle).st_size)

    def get_chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The file in pieces, from one open file: a replacement cannot mix in."""
        check_name(name)
        check_chunk(chunk_bytes)
        return self._chunks(name, chunk_bytes)

    def _chunks(self, name: str, chunk_bytes: int) -> Iterator[bytes]:
        with self._opened(name) as handle:
            start = 0
            while chunk := _read(handle, start, chunk_bytes):
                yield chunk
                start += len(chunk)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """A part of the file."""
        check_range(start, length)
        with self._opened(name) as handle:
            return _read(handle, start, min(length, max(0, os.fstat(handle).st_size - start)))

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of the file and its size, from one open file: a replacement cannot mix in."""
        check_range(0, length)
        with self._opened(name) as handle:
            total_bytes = os.fstat(handle).st_size
            start = max(0, total_bytes - length)
            return _read(handle, start, total_bytes - start), total_bytes

    def list(self, prefix: str) -> Listing:
        """Files below the prefix's folder, whatever else is put there by hand included."""
        check_prefix(prefix)
        folders, _, _ = prefix.rpartition("/")
        with self._typed_errors("list", prefix):
            walked = _walk(self._root / folders, f"{folders}/" if folders else "")
            found = sorted(info for info in walked if info.name.startswith(prefix))
            if not found:
                self._check_root()
            return found

    def delete(self, names: Iterable[str]) -> None:
        """Unlink files; not synced, so a crash may bring them back."""
        for name in checked_names(names):
            with self._typed_errors("delete", name):
                try:
                    self._unlink_object(name)
                except FileNotFoundError:
                    self._check_root()

    def _unlink_object(self, name: str) -> None:
        with contextlib.suppress(IsADirectoryError):  # a folder is no object
            os.unlink(self._root / name)
        self._unsure.discard(name)

    # --- writing -----------------------------------------------------------------------------

    def _publish(
        self, name: str, parts: Iterable[Buffer], give_name: Callable[[Path, Path], None]
    ) -> None:
        temp, handle = self._open_temp()
        try:
            mark_used(handle)
            self._publish_from(temp, handle, name, parts, give_name)
        finally:
            os.close(handle)

    def _publish_from(
        self,
        temp: Path,
        handle: int,
        name: str,
        parts: Iterable[Buffer],
        give_name: Callable[[Path, Path], None],
    ) -> None:
        target = self._root / name
        try:
            for part in parts:
                _write(handle, memoryview(part).cast("B"))
            os.fsync(handle)
            self._sweep_once(handle)
            self._ensure_folder(target.parent)
            try:
                give_name(temp, target)
            except FileNotFoundError:  # somebody removed the folder since we made it
                self._check_root()
                self._synced.clear()
                self._ensure_folder(target.parent)
                give_name(temp, target)
        except BaseException:
            _unlink_quietly(temp)
            raise
        try:
            _sync_folder(target.parent)
        except BaseException:
            self._unsure.add(name)
            raise
        finally:
            _unlink_quietly(temp)
        self._unsure.discard(name)

    def _link(self, temp: Path, target: Path) -> None:
        try:
            os.link(temp, target)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise StoreCapabilityError(
                f"The file system of {self.uri} refuses a hard link ({_errno_name(error)} at "
                f"{target}), so an object cannot be created only if it is absent.",
                todo="Use a file system with hard links, in one piece.",
            ) from error

    def _sweep_once(self, just_written: int) -> None:
        if not self._swept:
            self._swept = True
            sweep(self._root / TEMP_FOLDER, os.fstat(just_written).st_mtime_ns)

    def _open_temp(self) -> tuple[Path, int]:
        folder = self._root / TEMP_FOLDER
        for _ in range(TEMP_ATTEMPTS):
            new_id = self._new_id()
            check_name(new_id)
            temp = folder / new_id.replace("/", "_")
            # Ids that repeat (a forked counter, a leftover) must not share a file: O_EXCL.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                return temp, os.open(temp, flags, 0o666)
            except FileExistsError:
                continue
            except FileNotFoundError:
                self._check_root()
                self._synced.clear()
                self._ensure_folder(folder)
        raise SettingError(
            f"{TEMP_ATTEMPTS} ids in a row were taken in {folder}.",
            todo="Pass a new_id that is unique over processes, such as uuid4.",
        )

    def _ensure_folder(self, folder: Path) -> None:
        if folder in self._synced:
            return
        if folder != self._root:
            self._ensure_folder(folder.parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            _sync_folder(folder.parent)
        else:
            self._check_root()
            _make_root(folder)
            self._know_root()
        self._synced.add(folder)

    # --- the root --------------------------------------------------------------------------------

    def _know_root(self) -> None:
        """Remember that the root is there, and which folder it is."""
        found = os.stat(self._root)
        self._there, self._identity = True, (found.st_dev, found.st_ino)

    def _check_root(self) -> None:
        """To be called where something is missing: checks that the root itself is not.

        Raises:
            StoreUnreachableError: the root was there and has gone, or is an empty mount point now.
        """
        if not self._there:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(self._root)
            known = self._identity in ((0, 0), (found.st_dev, found.st_ino))
            # A disk that was mounted anew has another device number, but holds what it held.
            if known or (self._root / TEMP_FOLDER).exists():
                return
        raise StoreUnreachableError(
            f"The folder {self._root} of the store {self.uri} has gone away.",
            todo="Check that its disk is mounted on this host. Nothing was written in its place, "
            "and no object counts as missing.",
        )

    # --- reading and errors ------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        check_name(name)
        if name in self._unsure:
            raise StoreUnreachableError(
                f"The object {name!r} in {self.uri} was named, but its folder failed to sync: "
                "nobody knows whether it would survive a power cut.",
                todo="Look at the disk's health, then start again.",
            )
        with self._typed_errors("read", name):
            try:
                handle = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if stat.S_ISDIR(os.fstat(handle).st_mode):
                        raise IsADirectoryError  # a folder is no object
                    if not any(self._identity):
                        self._know_root()
                    yield handle
                finally:
                    os.close(handle)
            except (FileNotFoundError, IsADirectoryError):
                self._check_root()
                raise ObjectNotFoundError(f"There is no object {name!r} in {self.uri}.") from None

    @contextlib.contextmanager
    def _typed_errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._typed(error, verb, name) from error

    def _typed(self, error: OSError, verb: str, name: str) -> StorageError:
        code = error.errno or 0
        path = error.filename or self._root / name
        return StoreUnreachableError(
            f"Could not {call_text(verb, name, self.uri)}: {_errno_name(error)} "
            f"({os.strerror(code)}) at {os.fspath(path)}.",
            todo=_TODO.get(code, "Check that the place is there, mounted and healthy."),
        )


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, f"errno {error.errno}")


def _make_root(root: Path) -> None:
    """Make the store's own folder and what is missing above it; sync the entries made."""
    missing = [root]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        # A folder above the root that was there before may be closed to us: not ours to sync.
        with contextlib.suppress(PermissionError):
            _sync_folder(folder.parent)
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(root))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unlink_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _write(handle: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(handle, view) :]


def _read(handle: int, start: int, length: int) -> bytes:
    chunks = []
    while length > 0:
        chunk = os.pread(handle, length, start)
        if not chunk:
            break
        chunks.append(chunk)
        start, length = start + len(chunk), length - len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _walk(folder: Path, prefix: str) -> Iterator[ObjectInfo]:
    """Every object below a folder; what vanishes meanwhile was deleted and is left out."""
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        with contextlib.suppress(FileNotFoundError):
            if entry.is_dir():
                yield from _walk(folder / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file():
                found = entry.stat()
                yield ObjectInfo(prefix + entry.name, found.st_size, found.st_mtime_ns // 10**6)
