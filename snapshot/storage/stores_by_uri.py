"""From a URI to a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import unquote

from snapshot.storage.local_store import LocalStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.uris import parse_s3_uri, refuse_secrets
from statebackend.errors import EnvironmentMissingError, SettingError
from statebackend.texts import install_extra

__all__ = ["S3_SCHEMES", "open_store"]

# s3a and s3n are Hadoop's names. They never go to s3fs: it cannot be installed beside a current
# boto3, and an old one that gets installed instead overwrites where it should create.
S3_SCHEMES = ("s3", "s3a", "s3n")

_memory_lock = threading.Lock()
_memory_stores: dict[str, MemoryStore] = {}


def open_store(
    uri: str,
    *,
    new_id: Callable[[], str],
    options: StoreOptions | None = None,
    there: bool = False,
) -> ObjectStore:
    """The store at `uri`; nothing is read or written yet (`probe` does that).

    Args:
        uri: `file:///abs/path` (percent-encoded), a bare absolute path, `memory://name` (one
            store per name and process), `s3://bucket/prefix`, or any URL that fsspec opens.
        new_id: gives a new id, unique over all processes, on every call.
        options: how S3 is reached.
        there: it was written to before. If its folder is missing then, it has gone away.

    Raises:
        SettingError: a relative path, a URI that is malformed or holds credentials, a scheme that
            nobody knows, or options that mean nothing for this store.
        EnvironmentMissingError: a package that this kind of store needs is not installed.
    """
    options = options or StoreOptions()
    if uri.startswith("/"):
        options.refuse_s3_only(uri)
        return LocalStore(uri, new_id=new_id, there=there)
    scheme, colon, rest = uri.partition(":")
    if not colon or "/" in scheme:
        raise SettingError(
            f"The store {uri!r} is a relative path, which every process would read differently.",
            todo="Give an absolute path, file:///path or s3://bucket/path.",
        )
    refuse_secrets(uri)
    if scheme in S3_SCHEMES:
        return _s3_store(uri, new_id, options)
    options.refuse_s3_only(uri)
    if scheme == "file":
        return LocalStore(_file_path(uri, rest), new_id=new_id, there=there)
    if scheme == "memory":
        return _memory_store(uri, rest)
    from snapshot.storage.fsspec_store import FilesystemStore

    return FilesystemStore(uri, new_id=new_id)


def _s3_store(uri: str, new_id: Callable[[], str], options: StoreOptions) -> ObjectStore:
    bucket, prefix = parse_s3_uri(uri)
    try:
        from snapshot.storage.s3.s3_store import S3Store
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("boto3", "botocore", "urllib3"):
            raise
        raise EnvironmentMissingError(
            f"The store {uri!r} needs boto3, which is not installed.",
            todo=install_extra("s3", "on the driver and on every executor"),
        ) from error
    return S3Store(bucket, prefix, new_id=new_id, options=options)


def _file_path(uri: str, rest: str) -> str:
    # 'file:/path' is how Hadoop and Spark print what others write 'file:///path'.
    path = rest[2:] if rest.startswith("//") else rest
    if not path.startswith("/"):
        raise SettingError(
            f"The store {uri!r} does not name an absolute path on this host.",
            todo="Use three slashes: file:///abs/path.",
        )
    return unquote(path)


def _memory_store(uri: str, rest: str) -> MemoryStore:
    name = rest.removeprefix("//")
    if not name or name == rest:
        raise SettingError(f"The store {uri!r} has no name.", todo="Use memory://name.")
    with _memory_lock:
        return _memory_stores.setdefault(name, MemoryStore(name))
