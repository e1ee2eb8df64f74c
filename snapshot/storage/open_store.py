"""From a URI to a store, and a check that the store does what a commit needs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from urllib.parse import unquote

from snapshot.storage.local_store import LocalStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import CreateOutcome, ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.uris import parse_s3_uri, refuse_secrets
from statebackend.errors import (
    EnvironmentMissingError,
    ObjectNotFoundError,
    SettingError,
    StorageError,
    StoreCapabilityError,
)

__all__ = ["PROBE_DEADLINE_S", "S3_SCHEMES", "open_store", "probe"]

# s3a and s3n are Hadoop's names. They never go to s3fs: it cannot be installed beside a current
# boto3, and an old one that gets installed instead overwrites where it should create.
S3_SCHEMES = ("s3", "s3a", "s3n")

PROBE_DEADLINE_S = 10.0  # somebody waits, and the endpoint may be wrong
PROBE_REMOVAL_S = 1.0  # after a failure

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
            todo="Give an absolute path or a file:/// URI.",
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
            todo="Run: pip install 'statebackend[s3]', on the driver and on every executor.",
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


def probe(store: ObjectStore, *, new_id: Callable[[], str]) -> None:
    """Check that the store creates only what is absent, and reads back what it created.

    Writes one object of a few bytes, `probe/<id>`, reads its tail as readers of records do, and
    removes it: four requests. That a deletion works is seen only by its answer. A store that
    does not answer is given up sooner than by other calls: after 10 s for each request.

    Raises:
        StoreUnreachableError: the place cannot be reached, written, read or cleaned.
        StoreCapabilityError: it can, but not in the way that commits need.
    """
    if not store.capabilities.create_if_absent:
        raise _incapable(store, store.capabilities.reason or "it cannot create if absent")
    first, second = new_id().encode(), new_id().encode()
    name = f"probe/{first.decode()}"
    with store.limited(PROBE_DEADLINE_S):
        try:
            _probe_create(store, name, first, second)
        except BaseException:
            # The failure says more than another would; what is left is cleaned as a probe is.
            with contextlib.suppress(StorageError), store.limited(PROBE_REMOVAL_S):
                store.delete([name])
            raise
        store.delete([name])


def _probe_create(store: ObjectStore, name: str, first: bytes, second: bytes) -> None:
    store.create(name, [first])  # EXISTS is no news yet: a client that repeats a lost request
    if store.create(name, [second]) is not CreateOutcome.EXISTS:
        raise _incapable(store, "creating one name twice succeeded twice")
    for last in (False, True):  # once more where a bit may have flipped on its way
        try:
            # More than there is, as for every small record: not all servers agree on such a range.
            found, size_bytes = store.get_tail(name, len(first) + 1)
        except ObjectNotFoundError:
            raise _incapable(store, "an object that was just written is not there") from None
        if found == first and size_bytes == len(first):
            return
        if last:
            raise _incapable(store, "an object reads back with other bytes than were written")


def _incapable(store: ObjectStore, reason: str) -> StoreCapabilityError:
    return StoreCapabilityError(
        f"The store {store.uri} cannot keep a commit log: {reason}.",
        todo="Use another place for the durable copies.",
    )
