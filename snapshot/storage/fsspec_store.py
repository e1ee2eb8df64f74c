"""A store in any place that fsspec reaches: Google's and Azure's object stores, SFTP, and others.

Which of them can keep a commit log says `snapshot.storage.fsspec_protocols`. Credentials are what
each fsspec package finds by itself in this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from snapshot.storage.call_texts import call_text
from snapshot.storage.files_to_upload import opened_file
from snapshot.storage.fsspec_protocols import Protocol, Publish, protocol_named
from snapshot.storage.object_store import (
    CHUNK_BYTES,
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    byte_views,
    check_chunk,
    check_name,
    check_prefix,
    check_range,
    checked_names,
    is_name,
)
from snapshot.storage.uris import refuse_secrets
from statebackend.errors import (
    EnvironmentMissingError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
    StoreCapabilityError,
    StoreUnreachableError,
)

__all__ = ["FilesystemStore"]

TEMP_FOLDER = ".tmp"
READ_ATTEMPTS = 100
# What may be shown of a foreign error: no signed URL, and no credentials.
_HARMLESS = re.compile(r"[\w .,:'()-]{1,160}")
# Under these keys the packages give the time of the last write, as a date, a text or seconds.
_MODIFIED_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FilesystemStore(ObjectStore):
    """Objects as files of an fsspec file system below the URL's path.

    The file system is made anew in each process that this object reaches by fork: fsspec's event
    loop does not survive one. Its listing cache is off. A ranged read costs two requests, as the
    packages disagree on ranges past the end.
    """

    def __init__(
        self,
        url: str,
        *,
        new_id: Callable[[], str],
        make: Callable[[], tuple[Any, str]] | None = None,
        protocol: Protocol | None = None,
    ) -> None:
        """Open; some protocols (SFTP, HDFS) connect here, the others with the first request.

        Args:
            url: of the folder, as fsspec takes it.
            new_id: gives a new id on every call; names temporary files.
            make: gives the file system and the path in it; fsspec's choice for the URL if absent.
            protocol: what is known of it; the table's word if absent.

        Raises:
            SettingError: the URL holds a password, or fsspec knows no such protocol.
            EnvironmentMissingError: the package for the protocol is not installed.
            StoreUnreachableError: the connection failed.
        """
        refuse_secrets(url)
        self._uri = url.rstrip("/")
        scheme = url.partition(":")[0]
        if "::" in url or not scheme:
            raise SettingError(
                f"The store {url!r} is a chain of file systems.", todo="Name a single one."
            )
        self._new_id = new_id
        self._make = make or (lambda: _filesystem(url, scheme))
        self._protocol = protocol or protocol_named(scheme)
        self._processes: dict[int, _InProcess] = {}
        self._fs()

    @property
    def uri(self) -> str:
        """The URL, as given."""
        return self._uri

    @property
    def capabilities(self) -> Capabilities:
        """What the table of protocols says."""
        torn = self._protocol.publish is Publish.TORN
        reasons = [
            self._protocol.why,
            "an object shows before it is whole" if torn else "",
            "a ranged read asks for the size first",
        ]
        return Capabilities(
            create_if_absent=self._protocol.creates,
            ranged_read=False,
            atomic_put=not torn,
            reason="; ".join(filter(None, reasons)),
        )

    # --- writing -----------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write at once, or beside and then move, as the protocol has it."""
        path = self._path(name)
        body = b"".join(byte_views(parts))
        with self._typed_errors("write", name):
            self._publish(path, lambda fs, place: fs.pipe_file(place, body))

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """As `put`; the package copies the file in pieces of its own."""
        target = self._path(name)
        with opened_file(path) as (_, size_bytes), self._typed_errors("write", name):

            def send(fs: Any, place: str) -> None:
                fs.put_file(os.fspath(path), place)
                sent_bytes = fs.info(place)["size"]
                if sent_bytes != size_bytes:
                    raise OSError(errno.EIO, f"{sent_bytes} of {size_bytes} bytes arrived")

            self._publish(target, send)

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """One conditional request.

        Raises:
            StoreCapabilityError: the protocol has none.
        """
        path = self._path(name)
        if not self._protocol.creates:
            raise StoreCapabilityError(
                f"The store {self._uri} cannot create {name!r} only if it is absent: "
                f"{self._protocol.why}.",
                todo="Use another place for the durable copies.",
            )
        body = b"".join(byte_views(parts))
        with self._typed_errors("create", name):
            try:
                self._fs().pipe_file(path, body, mode="create")
            except FileExistsError:
                return CreateOutcome.EXISTS
            return CreateOutcome.CREATED

    def _publish(self, path: str, write: Callable[[Any, str], None]) -> None:
        fs = self._fs()
        if self._protocol.publish is Publish.AT_ONCE:
            write(fs, path)
            return
        _make_folder(fs, path)
        if self._protocol.publish is Publish.TORN:
            write(fs, path)
            return
        temp = f"{self._root()}/{TEMP_FOLDER}/{self._new_id().replace('/', '_')}"
        _make_folder(fs, temp)
        try:
            write(fs, temp)
            fs.mv(temp, path)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(temp)
            raise

    # --- reading -----------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        """The whole object."""
        path = self._path(name)
        with self._typed_errors("read", name):
            body: bytes = self._fs().cat_file(path)
            return bytes(body)

    def get_chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """A ranged read for each piece.

        A replacement is noticed if it changes the size or the time of the last write.
        """
        check_chunk(chunk_bytes)
        return self._chunks(name, self._path(name), chunk_bytes)

    def _chunks(self, name: str, path: str, chunk_bytes: int) -> Iterator[bytes]:
        before = self._info(name, path)
        for start in range(0, before["size"], chunk_bytes):
            chunk = self._cut(name, path, start, min(chunk_bytes, before["size"] - start))
            yield chunk
        if before["size"] > chunk_bytes and _version(self._info(name, path)) != _version(before):
            raise self._replaced(name)

    def _replaced(self, name: str) -> StoreUnreachableError:
        return StoreUnreachableError(
            f"The object {name!r} in {self._uri} was replaced while it was read.",
            todo="Read it again.",
        )

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """The size, then a ranged read."""
        check_range(start, length)
        path = self._path(name)
        return self._cut(name, path, start, min(length, self._info(name, path)["size"] - start))

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """The size, then a ranged read; both again if the object was replaced in between."""
        check_range(0, length)
        path = self._path(name)
        for _ in range(READ_ATTEMPTS):
            before = self._info(name, path)
            size_bytes = before["size"]
            start = max(0, size_bytes - length)
            body = self._cut(name, path, start, size_bytes - start)
            if _version(self._info(name, path)) == _version(before):
                return body, size_bytes
        raise self._replaced(name)

    def _info(self, name: str, path: str) -> dict[str, Any]:
        with self._typed_errors("read", name):
            found: dict[str, Any] = self._fs().info(path)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            return found

    def _cut(self, name: str, path: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        with self._typed_errors("read", name):
            body = bytes(self._fs().cat_file(path, start=start, end=start + length))
            if len(body) != length:
                raise OSError(errno.EIO, f"{len(body)} of {length} bytes came")
            return body

    # --- listing and deleting ----------------------------------------------------------------

    def list(self, prefix: str) -> Listing:
        """Files below the prefix's folder; what has no name of ours is left out."""
        check_prefix(prefix)
        folders, _, _ = prefix.rpartition("/")
        root = self._root()
        with self._typed_errors("list", prefix):
            fs = self._fs()
            fs.invalidate_cache()
            try:
                found = fs.find(f"{root}/{folders}" if folders else root, detail=True)
            except FileNotFoundError:
                return []
            start = len(fs._strip_protocol(root).rstrip("/")) + 1
            named = ((fs._strip_protocol(path)[start:], info) for path, info in found.items())
            return sorted(
                ObjectInfo(name, info["size"], _modified_ms(info))
                for name, info in named
                if name.startswith(prefix) and is_name(name) and info["type"] == "file"
            )

    def delete(self, names: Iterable[str]) -> None:
        """One by one: the bulk calls of fsspec take names for patterns."""
        for name in checked_names(names):
            path = self._path(name)
            with (
                self._typed_errors("delete", name),
                contextlib.suppress(FileNotFoundError, IsADirectoryError),
            ):
                self._fs().rm_file(path)

    # --- the file system ---------------------------------------------------------------------

    def _mine(self) -> _InProcess:
        # As in s3_client: no lock here that a fork could leave locked.
        found = self._processes.get(os.getpid())
        return found or self._processes.setdefault(os.getpid(), _InProcess())

    def _fs(self) -> Any:
        mine = self._mine()
        with mine.lock:
            if mine.found is None:
                mine.found = self._make()
            return mine.found[0]

    def _root(self) -> str:
        self._fs()
        found = self._mine().found
        assert found is not None
        return found[1]

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._root()}/{name}"

    @contextlib.contextmanager
    def _typed_errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except StateBackendError:
            raise
        except (FileNotFoundError, IsADirectoryError) as error:
            if verb == "read":
                raise ObjectNotFoundError(f"There is no object {name!r} in {self._uri}.") from None
            raise self._failed(verb, name, error) from error
        except Exception as error:  # every package raises errors of its own
            raise self._failed(verb, name, error) from error

    def _failed(self, verb: str, name: str, error: Exception) -> StoreUnreachableError:
        # Only the kind: the text of a foreign error may hold a signed URL.
        code = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
        reason = f"{type(error).__name__}{f' {code}' if code else ''}"
        return StoreUnreachableError(
            f"Could not {call_text(verb, name, self._uri)}: {reason}.",
            todo="Check that the place is there, and the credentials that its package uses.",
        )


class _InProcess:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: tuple[Any, str] | None = None


def _filesystem(url: str, scheme: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise EnvironmentMissingError(
            f"The store {url!r} needs a package that is not installed: {error}.",
            todo="Install it on the driver and on every executor.",
        ) from error
    except ValueError as error:
        raise SettingError(
            f"The store {url!r} cannot be opened: fsspec does not know {scheme!r}, or not so.",
            todo="Use file, memory, s3, or a protocol that fsspec knows.",
        ) from error
    except Exception as error:  # some connect here already
        line = str(error).partition("\n")[0]
        said = f" ({line})" if _HARMLESS.fullmatch(line) else ""
        raise StoreUnreachableError(
            f"The store {url!r} cannot be reached: {type(error).__name__}{said}.",
            todo="Check that the place is there, and the credentials that its package uses.",
        ) from None  # Hadoop's is a hundred lines
    return fs, str(path).rstrip("/")


def _make_folder(fs: Any, path: str) -> None:
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def _version(info: dict[str, Any]) -> tuple[object, ...]:
    keys = ("size", "etag", "ETag", "generation", "ino", *_MODIFIED_KEYS)
    return tuple(info.get(key) for key in keys)


def _modified_ms(info: dict[str, Any]) -> int | None:
    said = next((info[key] for key in _MODIFIED_KEYS if info.get(key) is not None), None)
    if isinstance(said, str):
        try:
            said = datetime.fromisoformat(said)
        except ValueError:
            return None
    if isinstance(said, datetime):
        said = (said if said.tzinfo else said.replace(tzinfo=UTC)).timestamp()
    return round(said * 1000) if isinstance(said, int | float) else None
