"""Commit logs on stores of the test, one of which fails as it is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from snapshot.formats.record import Manifest, SliceEntry
from snapshot.log.commit_log import CommitLog
from snapshot.storage import CreateOutcome, LocalStore, MemoryStore, ObjectStore
from snapshot.storage.object_store import Buffer
from statebackend.errors import StoreCapabilityError, StoreUnreachableError

__all__ = ["store"]

_counter = itertools.count()


def new_id() -> str:
    return f"id{next(_counter)}"


def log_on(store: ObjectStore, writer: str = "a", job: str = "clicks") -> CommitLog:
    return CommitLog(store, job=job, writer=writer, new_id=new_id)


def checkpoint(
    epoch: int = 0, oldest_needed: int = 0, slices: Sequence[SliceEntry] = ()
) -> Manifest:
    return Manifest(
        kind="checkpoint",
        job="",
        job_id="",
        generation=0,
        sequence=0,
        writer="",
        write_id="",
        oldest_needed=oldest_needed,
        epoch=epoch,
        slices=list(slices),
    )


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    return LocalStore(tmp_path, new_id=new_id)


class Failing(MemoryStore):
    """Does to the next create what it is told: `lose_ack`, `lose`, `interrupt`, `refuse`."""

    def __init__(self) -> None:
        super().__init__()
        self.next_create = ""
        self.before_create: Callable[[], None] = lambda: None
        self.unreadable = False

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        self.before_create, before = (lambda: None), self.before_create
        before()
        how, self.next_create = self.next_create, ""
        if how == "lose":
            raise StoreUnreachableError("The request was lost.")
        if how == "refuse":
            raise StoreCapabilityError("No hard links.")
        outcome = super().create(name, parts)
        if how == "lose_ack":
            raise StoreUnreachableError("The answer was lost.")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "repeat":
            return super().create(name, parts)
        return outcome

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        if self.unreadable:
            raise StoreUnreachableError("The store is down.")
        return super().get_tail(name, length)
