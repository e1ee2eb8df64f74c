"""Object stores: one small interface, several places to keep bytes.

`snapshot.storage.testing.StoreTests` is the suite that every store passes; it needs pytest, so it
is not imported here. Nor are `snapshot.storage.s3.s3_store` and `snapshot.storage.fsspec_store`,
which take time to load and packages of their own: `open_store` imports them when a URI asks for
them.
"""

from __future__ import annotations

from snapshot.storage.counting_store import CountingStore, VerbCount
from snapshot.storage.local_store import LocalStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import (
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_name,
)
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.store_probe import probe
from snapshot.storage.stores_by_uri import open_store

__all__ = [
    "Buffer",
    "Capabilities",
    "CountingStore",
    "CreateOutcome",
    "Listing",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "ObjectStore",
    "StoreOptions",
    "VerbCount",
    "check_name",
    "open_store",
    "probe",
]
