"""Uploads of small bases, and a reporter that writes down what becomes of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from recovery.local.local_copies import StoreDirectory
from snapshot.formats.file_index import FileIndex, decode_index
from snapshot.protocol.messages import BaseGrant
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CoordinatorUnreachableError, StaleRequestError
from statebackend.runtime.worker.background_upload import BaseUpload, Uploaded
from tests.recovery.local.open_stores import subtask as subtask_of
from tests.recovery.local.small_copies import SMALL, marker

LONG_S = 30.0


class Voice:
    """A reporter that writes down what it is told, or refuses."""

    def __init__(self, lapsed_after: int = 10**9) -> None:
        self.told: list[Uploaded] = []
        self.renewals, self.lapsed_after = 0, lapsed_after
        self.given_up = 0
        self.why: list[str] = []
        self.harmless: list[bool] = []
        self.unreached = False
        self.at_end = threading.Event()

    def give_up(self, why: str, *, harmless: bool) -> None:
        if self.unreached:
            raise CoordinatorUnreachableError("Nobody answers.")
        self.why.append(why)
        self.harmless.append(harmless)
        self.given_up += 1

    def renew(self) -> None:
        self.renewals += 1
        if self.renewals > self.lapsed_after:
            raise StaleRequestError("It has lapsed.")

    def done(self, uploaded: Uploaded) -> None:
        self.told.append(uploaded)
        self.at_end.set()


class Clock:
    """A second per look."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        self.time_s += 1
        return self.time_s


def opened(path: Path) -> StoreDirectory:
    held = subtask_of(path).create()
    held.open_store(SMALL)
    return held


def wrote(held: StoreDirectory, epoch: int, chain: str = "") -> None:
    """An epoch, in a table file of its own."""
    store = held.open_store(SMALL)
    rows = [b"\0\0%d-%d" % (epoch, n) for n in range(20)]
    store.apply(rows, [os.urandom(50) for _ in rows], marker(epoch, chain or f"c{epoch}"))
    store.flush()


def grant_of(epoch: int, *, index: bytes = b"", whole: int = 0, chain: str = "") -> BaseGrant:
    return BaseGrant(
        id=f"g{epoch}",
        epoch=epoch,
        chain=chain or f"c{epoch}",
        index=index,
        whole_limit_bytes=whole,
        renew_s=0.5,
    )


def upload(
    held: StoreDirectory, grant: BaseGrant, store: ObjectStore, voice: Voice | None = None
) -> BaseUpload:
    return BaseUpload(
        held, grant, store=store, generation=1, reporter=voice or Voice(), now_s=Clock()
    )


def uploaded(
    held: StoreDirectory, epoch: int, store: ObjectStore, index: bytes = b""
) -> tuple[FileIndex, bytes, int]:
    """The index, its bytes, and what was sent."""
    voice = Voice()
    upload(held, grant_of(epoch, index=index), store, voice).run()
    (one,) = voice.told
    assert one.kind == "files"
    assert not left_over(held)
    return decode_index(one.part.data), one.part.data, one.uploaded_bytes


def left_over(held: StoreDirectory) -> list[Path]:
    work = held.path / "work"
    return list(work.iterdir()) if work.exists() else []


def tables(index: FileIndex) -> dict[str, str]:
    return {file.name: file.object for file in index.files if file.name.endswith(".sst")}


class Gate(MemoryStore):
    """Uploads wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.gate = threading.Event(), threading.Event()

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        self.there.set()
        assert self.gate.wait(LONG_S)
        super().put_file(name, path)
