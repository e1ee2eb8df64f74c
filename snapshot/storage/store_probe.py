"""Checks that a store does what a commit log needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from snapshot.storage.object_store import CreateOutcome, ObjectStore
from statebackend.errors import ObjectNotFoundError, StorageError, StoreCapabilityError

__all__ = ["PROBE_DEADLINE_S", "probe"]

PROBE_DEADLINE_S = 10.0  # somebody waits, and the endpoint may be wrong
PROBE_REMOVAL_S = 1.0  # after a failure


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
