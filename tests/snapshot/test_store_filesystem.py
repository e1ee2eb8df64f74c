"""Stores through fsspec: the public suite, and what is claimed of protocols."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from snapshot.storage import ObjectStore, open_store, probe
from snapshot.storage.fsspec_protocols import Protocol, Publish, protocol_named
from snapshot.storage.fsspec_store import FilesystemStore
from snapshot.storage.testing import StoreTests
from statebackend.errors import (
    EnvironmentMissingError,
    ObjectNotFoundError,
    SettingError,
    StoreCapabilityError,
    StoreUnreachableError,
)


def new_id() -> str:
    return uuid.uuid4().hex


class Bucket(MemoryFileSystem):
    """As an object store behaves: creating is one step, and nothing lasts beyond the test."""

    cachable = False
    protocol = "bucket"

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.one_step = threading.RLock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("bucket://").strip("/") if path.strip("/") else ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.one_step:
            super().pipe_file(path, value, mode=mode, **kwargs)

    def find(self, path: str, **kwargs: Any) -> Any:
        with self.one_step:
            return super().find(path, **kwargs)


CREATING = Protocol(Publish.AT_ONCE, creates=True)


def on_bucket(fs: Bucket, protocol: Protocol = CREATING) -> FilesystemStore:
    return FilesystemStore(
        "bucket://b/place", new_id=new_id, make=lambda: (fs, "/b/place"), protocol=protocol
    )


class TestAnObjectStoreOfFsspec(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return on_bucket(Bucket())


class TestFsspecsMemory(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return FilesystemStore(f"memory://{new_id()}", new_id=new_id)


class TestFsspecsLocalFiles(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return FilesystemStore((tmp_path / "made when needed").as_uri(), new_id=new_id)


class TestAProtocolThatNobodyKnows(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return FilesystemStore(
            tmp_path.joinpath("place").as_uri(),
            new_id=new_id,
            make=lambda: (LocalFileSystem(), str(tmp_path / "place")),
            protocol=protocol_named("nosuch"),
        )


def test_only_a_protocol_that_creates_in_one_step_may_keep_a_log(tmp_path: Path) -> None:
    probe(on_bucket(Bucket()), new_id=new_id)
    for uri in (f"memory://{new_id()}", tmp_path.as_uri()):
        with pytest.raises(StoreCapabilityError, match="cannot keep a commit log"):
            probe(FilesystemStore(uri, new_id=new_id), new_id=new_id)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["gs", "gcs", "abfs", "abfss", "az"])
def test_google_and_azure_create_if_absent(name: str) -> None:
    assert protocol_named(name).creates
    assert protocol_named(name).publish is Publish.AT_ONCE


@pytest.mark.parametrize("name", ["sftp", "hdfs", "oss", "file", "memory", "http", "anything"])
def test_every_other_protocol_says_why_it_does_not(name: str) -> None:
    assert not protocol_named(name).creates
    assert protocol_named(name).why


class Overwriting(Bucket):
    """An old package: it takes the mode and ignores it."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, **kwargs)


def test_a_package_that_ignores_the_condition_is_found_by_the_probe() -> None:
    with pytest.raises(StoreCapabilityError, match="twice"):
        probe(on_bucket(Overwriting()), new_id=new_id)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(EnvironmentMissingError, match="gcsfs"):
        open_store("gs://bucket/x", new_id=new_id)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Unable to load libjvm\n" + "dlopen failed\n" * 99, " (Unable to load libjvm)"),
     ("https://h/x?sig=SECRET refused", "")],
)  # fmt: skip
def test_a_place_that_cannot_be_connected_to_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(text)

    monkeypatch.setattr("fsspec.core.url_to_fs", fails)
    with pytest.raises(StoreUnreachableError) as raised:
        open_store("hdfs://h/x", new_id=lambda: uuid.uuid4().hex)
    assert f"cannot be reached: OSError{shown}. Check" in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_move_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Stuck(LocalFileSystem):
        cachable = False

        def mv(self, *args: Any, **kwargs: Any) -> None:
            raise PermissionError(13, "secret=topsecret")

    store = FilesystemStore(tmp_path.as_uri(), new_id=new_id, make=lambda: (Stuck(), str(tmp_path)))
    with pytest.raises(StoreUnreachableError, match="EACCES") as caught:
        store.put("data/a", [b"x"])
    assert "topsecret" not in str(caught.value)
    assert os.listdir(tmp_path / ".tmp") == []
    assert store.list("") == []
    with pytest.raises(ObjectNotFoundError):
        store.get("data/a")


def test_an_object_that_is_replaced_between_two_pieces_is_not_mixed() -> None:
    store = on_bucket(Bucket())
    store.put("a", [b"old."])
    chunks = store.get_chunks("a", 2)
    next(chunks)
    store.put("a", [b"new and longer"])
    with pytest.raises(StoreUnreachableError, match="replaced"):
        list(chunks)


def test_what_others_put_there_is_not_listed_under_names_we_cannot_read() -> None:
    fs = Bucket()
    fs.pipe_file("/b/place/.hidden", b"x")
    fs.pipe_file("/b/place/data/ok", b"x")
    fs.pipe_file("/b/placebo", b"x")
    assert [info.name for info in on_bucket(fs).list("")] == ["data/ok"]


def test_a_file_system_is_made_anew_after_a_fork() -> None:
    made: list[int] = []

    def make() -> tuple[Any, str]:
        made.append(os.getpid())
        return Bucket(), "/b"

    store = FilesystemStore("bucket://b", new_id=new_id, make=make)
    store.put("a", [b"x"])
    mine = os.getpid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: mine + 1)
        store.list("")
        store.list("")
    store.get("a")
    assert made == [mine, mine + 1]


def test_a_chain_of_file_systems_is_refused() -> None:
    with pytest.raises(SettingError, match="chain"):
        FilesystemStore("simplecache::memory://x", new_id=new_id)
