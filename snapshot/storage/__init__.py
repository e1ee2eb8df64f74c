"""Object stores: one small interface, several places to keep bytes.

`snapshot.storage.testing.StoreTests` is the suite that every store passes; it needs pytest, so it
is not imported here.
"""

from __future__ import annotations

from snapshot.storage.base import (
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_name,
)
from snapshot.storage.counting import CountingStore, VerbCount
from snapshot.storage.local import LocalStore
from snapshot.storage.memory import MemoryStore
from snapshot.storage.open import open_store, probe

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
    "VerbCount",
    "check_name",
    "open_store",
    "probe",
]
