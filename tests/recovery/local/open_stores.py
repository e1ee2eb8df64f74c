"""Stores that stay open in a pool of their own, and what a test sees of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.store_pool import Clock, StorePool, StorePoolSettings
from snapshot.storage.local_store import LocalStore
from statebackend.keygroups import KeyGroupRange
from tests.recovery.driver import new_id
from tests.recovery.local.small_copies import SMALL, marker

REAL = Clock(time.monotonic, time.sleep)
AT_ONCE_S = 30.0  # of a machine under load; without a hand-over it is the whole timeout
TIMEOUT_S = 60.0


@contextmanager
def keeping(clock: Clock = REAL, **settings: Any) -> Iterator[StorePool]:
    store_pool = StorePool(clock, StorePoolSettings(**settings))
    try:
        yield store_pool
    finally:
        store_pool.close()


def subtask(path: Path, store_pool: StorePool | None = None, number: int = 0) -> LocalSubtask:
    return LocalSubtask(
        str(path),
        job="job",
        operator="op",
        key_groups=KeyGroupRange(8 * number, 8 * number + 7),
        new_id=lambda: f"{os.getpid()}-{new_id()}",
        clock=REAL,
        store_pool=store_pool,
    )


def written(held: StoreDirectory, *epochs: int) -> None:
    """Epochs, as a task applies them: in memory, with a local delta each."""
    store = held.open_store(SMALL)
    for epoch in epochs:
        held.write_delta(epoch, f"d{epoch}", b"delta")
        store.apply([b"\0\0k"], [b"%d" % epoch], marker(epoch))
        held.unflushed_epochs += 1


def seen(held: StoreDirectory) -> tuple[int | None, bytes | None]:
    found = held.open_store(SMALL).marker()
    return found.epoch if found else None, held.open_store(SMALL).get(b"\0\0k")


def deltas(held: StoreDirectory) -> list[int]:
    return [epoch for epoch, _, _ in held._deltas()]


def store_of(root: Path) -> LocalStore:
    return LocalStore(root / "durable", new_id=lambda: f"{os.getpid()}-{new_id()}")
