"""Folders of input and output files: local ones by the operating system, others by fsspec.

Credentials are what each fsspec package finds by itself in the process. Arrow's client reaches S3
where fsspec's package for it is not installed.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator
from typing import IO, Any, Final

import fsspec

from snapshot.storage.uris import refuse_secrets
from statebackend.errors import ConnectorError, EnvironmentMissingError, SettingError
from statebackend.system import s3_endpoint

__all__ = ["Place"]

_BY_ARROW: Final = ("s3://", "s3a://")
_TODO: Final = "Check that the place is there, and that this user may read and write it."


class Place:
    """A folder, named by a path or an fsspec URL; picklable, opened when first used.

    Names of files are relative to it, with ``/`` between their parts.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        """Name a folder; nothing is opened.

        Raises:
            SettingError: the URL holds a password, chains file systems, or is empty.
        """
        text = os.fspath(url)
        refuse_secrets(text)
        if not text or "::" in text:
            raise SettingError(
                f"The place {text!r} is none.", todo="Name one folder, by a path or an fsspec URL."
            )
        scheme, marked, rest = text.partition("://")
        self.local = not marked or scheme in ("file", "local")
        self.url = os.path.abspath(rest if marked else text) if self.local else text.rstrip("/")
        self._opened: tuple[int, Any, str] | None = None
        self._durable: set[str] = set()  # local folders whose own entry is known to be on disk

    def __repr__(self) -> str:
        return f"Place({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_durable": set()}

    @property
    def _fs(self) -> tuple[Any, str]:
        # fsspec's event loop does not survive a fork.
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                fs, root = fsspec.url_to_fs(
                    f"file://{self.url}" if self.local else self.url,
                    **({} if self.local else {"use_listings_cache": False}),
                )
            except ImportError as error:
                if not self.url.startswith(_BY_ARROW):
                    raise EnvironmentMissingError(
                        f"The package for {self.url.partition(':')[0]!r} is missing: {error}.",
                        todo="Install it on the driver and on every executor.",
                    ) from error
                fs, root = _arrow_s3(self.url)
            except ValueError as error:
                raise SettingError(
                    f"fsspec knows no place like {self.url!r}: {error}.",
                    todo="Name a folder, by a path or an fsspec URL.",
                ) from error
            self._opened = (os.getpid(), fs, str(root).rstrip("/"))
        return self._opened[1:]

    def shown(self, name: str = "") -> str:
        """A file of it, for people."""
        return f"{self.url}/{name}" if name else self.url

    @contextlib.contextmanager
    def errors(self, what: str, name: str = "") -> Iterator[None]:
        """Turns what a file system raises into a `ConnectorError` that names the file."""
        try:
            yield
        except (OSError, TimeoutError) as error:
            said = error.strerror or str(error) or type(error).__name__
            raise ConnectorError(
                f"{what.capitalize()} {self.shown(name)} failed: {said}.", todo=_TODO
            ) from error

    def _path(self, name: str) -> str:
        root = self._fs[1]
        return f"{root}/{name}" if name else root

    # --- reading ---

    def files(self) -> list[tuple[str, int]]:
        """Every visible file in it or below, with its size in bytes, by name.

        A name with a part that starts with ``.`` or ``_`` is hidden. A place that is itself a
        file has that one, under the name ""; a place that is not there has none.
        """
        fs, root = self._fs
        with self.errors("listing"):
            fs.invalidate_cache()
            found = fs.find(root, detail=True, withdirs=False)
        listed = []
        for path, info in found.items():
            name = path.removeprefix(root).lstrip("/")
            if not any(part[0] in "._" for part in name.split("/") if part):
                listed.append((name, int(info["size"])))
        return sorted(listed)

    def size(self, name: str) -> int | None:
        """A file's size in bytes; None: there is none of that name."""
        fs, _ = self._fs
        with self.errors("looking for", name):
            fs.invalidate_cache()
            try:
                info = fs.info(self._path(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return int(info["size"]) if info["type"] == "file" else None

    def open(self, name: str) -> IO[bytes]:
        """A file, to read from any place in it."""
        fs, _ = self._fs
        with self.errors("opening", name):
            handle: IO[bytes] = fs.open(self._path(name), "rb")
        return handle

    # --- writing ---

    def create(self, name: str) -> IO[bytes]:
        """A new file, in folders that are made; replaces one of that name."""
        fs, _ = self._fs
        path = self._path(name)
        with self.errors("creating", name):
            self._make_folder(posixpath.dirname(path))
            handle: IO[bytes] = open(path, "wb") if self.local else fs.open(path, "wb")  # noqa: SIM115
        return handle

    def _make_folder(self, path: str) -> None:
        if self.local:
            self._make_durable(path)
        else:
            self._fs[0].makedirs(path, exist_ok=True)

    def _make_durable(self, folder: str) -> None:
        """A local folder whose entry, and that of each above it, survives a crash of the machine.

        One that is there is synced as well, once: whoever made it may have died before, or failed.
        """
        if folder in self._durable and os.path.isdir(folder):
            return
        above = posixpath.dirname(folder)
        ours = folder.startswith(f"{self._fs[1]}/")
        if ours or not os.path.isdir(above):
            self._make_durable(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        # A folder above the place that was there before may be closed to us: not ours to sync.
        with contextlib.suppress(*(() if ours else (PermissionError,))):
            _sync_folder(above)
        self._durable.add(folder)

    def close(self, handle: IO[bytes], name: str) -> None:
        """Close a file that was created; afterwards it survives a crash of the machine."""
        with self.errors("writing", name):
            if not self.local:
                handle.close()
                return
            try:
                handle.flush()
                os.fsync(handle.fileno())
            finally:
                handle.close()
            _sync_folder(posixpath.dirname(self._path(name)))

    def write(self, name: str, body: bytes) -> None:
        """A whole small file."""
        handle = self.create(name)
        with self.errors("writing", name):
            handle.write(body)
        self.close(handle, name)

    def move(self, name: str, to: str) -> None:
        """Give a file another name, replacing what has it: at once on a local file system.

        Elsewhere it is as atomic as the package's own move; where that is a copy, the new name
        shows up whole, and a crash can leave the old one beside it.
        """
        fs, _ = self._fs
        old, new = self._path(name), self._path(to)
        with self.errors("moving", name):
            self._make_folder(posixpath.dirname(new))
            if self.local:
                os.replace(old, new)
                _sync_folder(posixpath.dirname(new))
            else:
                fs.mv(old, new)

    def remove(self, name: str) -> None:
        """Delete a file or a folder with all in it; one that is not there is no error."""
        fs, _ = self._fs
        path = self._path(name)
        with self.errors("deleting", name), contextlib.suppress(FileNotFoundError):
            if fs.exists(path):
                fs.rm(path, recursive=True)

    def children(self, name: str) -> list[str]:
        """The names of what lies right in a folder; none if it is not there."""
        fs, _ = self._fs
        with self.errors("listing", name):
            fs.invalidate_cache()
            try:
                found = fs.ls(self._path(name), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(posixpath.basename(str(path).rstrip("/")) for path in found)


def _arrow_s3(url: str) -> tuple[Any, str]:
    """S3 by Arrow's own client: s3fs cannot be installed beside a current boto3.

    It takes credentials and region from the environment, as other clients do.
    """
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import S3FileSystem

    endpoint = s3_endpoint()
    return ArrowFSWrapper(S3FileSystem(endpoint_override=endpoint)), url.partition("://")[2]


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
