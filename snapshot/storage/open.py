"""From a URI to a store, and a check that the store does what a commit needs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from urllib.parse import unquote

from snapshot.storage.base import CreateOutcome, ObjectStore
from snapshot.storage.local import LocalStore
from snapshot.storage.memory import MemoryStore
from statebackend.errors import (
    ObjectNotFoundError,
    SettingError,
    StorageError,
    StoreCapabilityError,
)

__all__ = ["SCHEMES", "open_store", "probe"]

SCHEMES = ("file", "memory")

_memory_lock = threading.Lock()
_memory_stores: dict[str, MemoryStore] = {}


def open_store(uri: str, *, new_id: Callable[[], str]) -> ObjectStore:
    """The store at `uri`; nothing is read or written yet (`probe` does that).

    Args:
        uri: `file:///abs/path` (percent-encoded), a bare absolute path, or `memory://name` (one
            store per name and process).
        new_id: gives a new id, unique over all processes, on every call.

    Raises:
        SettingError: a relative path, or a scheme that this release does not have.
    """
    if uri.startswith("/"):
        return LocalStore(uri, new_id=new_id)
    scheme, colon, rest = uri.partition(":")
    if not colon or "/" in scheme:
        raise SettingError(
            f"The store {uri!r} is a relative path, which every process would read differently.",
            todo="Give an absolute path or a file:/// URI.",
        )
    if scheme == "file":
        return LocalStore(_file_path(uri, rest), new_id=new_id)
    if scheme == "memory":
        return _memory_store(uri, rest)
    raise SettingError(
        f"The store {uri!r} has the scheme {scheme!r}, which this release does not have.",
        todo=f"Use one of: {', '.join(SCHEMES)}.",
    )


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
    """Check that the store creates only what is absent, reads back, and deletes.

    Writes one object of a few bytes, `probe/<id>`, and removes it.

    Raises:
        StoreUnreachableError: the place cannot be reached, written, read or cleaned.
        StoreCapabilityError: it can, but not in the way that commits need.
    """
    if not store.capabilities.create_if_absent:
        raise _incapable(store, store.capabilities.reason or "it cannot create if absent")
    first, second = new_id().encode(), new_id().encode()
    name = f"probe/{first.decode()}"
    try:
        _probe_create(store, name, first, second)
    finally:
        # A failure here must not hide the one above; a success is checked below.
        with contextlib.suppress(StorageError):
            store.delete([name])
    store.delete([name])
    try:
        store.get(name)
    except ObjectNotFoundError:
        return
    raise _incapable(store, "a deleted object can still be read")


def _probe_create(store: ObjectStore, name: str, first: bytes, second: bytes) -> None:
    store.create(name, [first])  # EXISTS is no news yet: a client that repeats a lost request
    if store.create(name, [second]) is not CreateOutcome.EXISTS:
        raise _incapable(store, "creating one name twice succeeded twice")
    try:
        found = store.get(name)
    except ObjectNotFoundError:
        raise _incapable(store, "an object that was just written is not there") from None
    if found != first:
        raise _incapable(store, "an object reads back with other bytes than were written")


def _incapable(store: ObjectStore, reason: str) -> StoreCapabilityError:
    return StoreCapabilityError(
        f"The store {store.uri} cannot keep a commit log: {reason}.",
        todo="Use another place for the durable copies.",
    )
