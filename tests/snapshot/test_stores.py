"""Every store passes the public suite; and what is particular to each."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshot.storage import (
    Capabilities,
    CountingStore,
    CreateOutcome,
    LocalStore,
    MemoryStore,
    ObjectStore,
    VerbCount,
    open_store,
    probe,
)
from snapshot.storage.base import Buffer
from snapshot.storage.testing import StoreTests
from statebackend.errors import (
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
    StoreCapabilityError,
    StoreUnreachableError,
)


def new_id() -> str:
    return uuid.uuid4().hex


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "made" / "when needed", new_id=new_id)


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore()


class TestCountingStore(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return CountingStore(MemoryStore())


# --- LocalStore: errors --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR])
@pytest.mark.parametrize("step", ["open", "write", "fsync", "link"])
def test_a_place_that_cannot_be_written_is_named_with_its_errno_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, step: str
) -> None:
    store = LocalStore(tmp_path, new_id=new_id)
    store.put("data/a", [b"x"])

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code), os.fspath(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(StoreUnreachableError) as caught:
            store.create("data/b", [b"y"])
    assert errno.errorcode[code] in caught.value.what
    assert store.uri in caught.value.what
    assert caught.value.todo
    assert os.listdir(tmp_path / ".tmp") == []
    assert [info.name for info in store.list("")] == ["data/a"]


def test_a_file_where_a_folder_must_be_is_an_error_and_not_an_absence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file", new_id=new_id)
    for call in (
        lambda: store.put("a", [b"x"]),
        lambda: store.create("a", [b"x"]),
        lambda: store.get("a"),
        lambda: store.list(""),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StoreUnreachableError, match="ENOTDIR"):
            call()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV])
def test_a_file_system_without_hard_links_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", fail)
    store = LocalStore(tmp_path, new_id=new_id)
    with pytest.raises(StoreCapabilityError, match=errno.errorcode[code]):
        store.create("log/0", [b"x"])
    with pytest.raises(StoreCapabilityError, match="hard link"):
        probe(store, new_id=new_id)
    assert store.list("") == []


def test_ids_that_repeat_never_share_a_temporary_file(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "0").write_bytes(b"left over")
    ids = iter("00001")
    LocalStore(tmp_path, new_id=lambda: next(ids)).put("a", [b"x"])
    assert (tmp_path / ".tmp" / "0").read_bytes() == b"left over"
    with pytest.raises(SettingError, match="unique"):
        LocalStore(tmp_path, new_id=lambda: "0").put("b", [b"x"])


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root", new_id=new_id)
    store.put("data/a", [b"x"])
    for path in ("data/a", "data", ".tmp", ""):
        target = tmp_path / "root" / path
        target.unlink() if target.is_file() else target.rmdir()
    assert store.create("data/b", [b"y"]) is CreateOutcome.CREATED
    assert store.get("data/b") == b"y"


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(SettingError, match="relative"):
        LocalStore("here", new_id=new_id)


# --- LocalStore: crash points --------------------------------------------------------------------


class PowerCut(BaseException):
    """The process ends here: nothing after it runs, not even cleaning up."""


STEPS = ("mkdir", "open", "write", "fsync", "close", "link", "replace", "unlink")


def cut_at(patch: pytest.MonkeyPatch, step: int, error: BaseException) -> Callable[[], int]:
    """Make the step-th call to the operating system, and (after a power cut) all later ones, fail.

    Returns how many steps were taken.
    """
    taken = 0

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal taken
            taken += 1
            if taken == step or (taken > step and isinstance(error, PowerCut)):
                raise error
            return real(*args, **kwargs)

        return call

    for name in STEPS:
        patch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: taken


def write(store: ObjectStore, verb: str, body: bytes) -> None:
    if verb == "create":
        store.create("log/0", [body[:4], body[4:]])
    else:
        store.put("log/0", [body[:4], body[4:]])


@pytest.mark.parametrize("verb", ["create", "put"])
@pytest.mark.parametrize("how", ["power cut", "error"])
def test_a_write_cut_at_any_step_leaves_the_whole_object_or_none(
    tmp_path: Path, verb: str, how: str
) -> None:
    outcomes = set()
    for step in range(1, 100):
        root = tmp_path / f"{step}"
        store = LocalStore(root, new_id=new_id)
        error = PowerCut() if how == "power cut" else OSError(errno.EIO, "injected")
        with pytest.MonkeyPatch.context() as patch:
            taken = cut_at(patch, step, error)
            try:
                write(store, verb, b"whole body")
                finished = True
            except (PowerCut, StateBackendError):
                finished = False
        again = LocalStore(root, new_id=new_id)
        found = [(info.name, info.size_bytes) for info in again.list("")]
        assert found in ([], [("log/0", 10)])
        if found:
            assert again.get("log/0") == b"whole body"
        assert found or not finished
        outcomes.add(bool(found))
        write(again, verb, b"whole body")  # the place is usable afterwards
        assert again.get("log/0") == b"whole body"
        if taken() < step:
            break
    assert taken() < step
    assert outcomes == {True, False}


def test_a_replacement_cut_at_any_step_leaves_the_old_or_the_new_object(tmp_path: Path) -> None:
    seen = set()
    for step in range(1, 100):
        root = tmp_path / f"{step}"
        LocalStore(root, new_id=new_id).put("log/0", [b"old"])
        with pytest.MonkeyPatch.context() as patch:
            taken = cut_at(patch, step, PowerCut())
            with contextlib.suppress(PowerCut):
                LocalStore(root, new_id=new_id).put("log/0", [b"the new one"])
        seen.add(LocalStore(root, new_id=new_id).get("log/0"))
        if taken() < step:
            break
    assert seen == {b"old", b"the new one"}


def test_a_file_is_synced_before_it_is_named_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(handle: int) -> None:
        trail.append("fsync " + os.readlink(f"/proc/self/fd/{handle}").rsplit("/", 1)[1])
        real_fsync(handle)

    def link(source: Path, target: Path) -> None:
        trail.append("link")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store = LocalStore(tmp_path / "root", new_id=lambda: "temp")
    store.create("log/0", [b"x"])
    first = trail[:]
    assert first.index("fsync temp") < first.index("link") < len(first) - 1
    assert first[-1] == "fsync log"
    assert f"fsync {tmp_path.name}" in first[: first.index("link")]  # the root's own entry
    assert first.count("fsync root") == 2  # the entries of .tmp and of log
    trail.clear()
    store.create("log/1", [b"x"])
    assert trail == ["fsync temp", "link", "fsync log"]


def test_an_object_whose_folder_failed_to_sync_is_not_read_back_as_if_it_were_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, new_id=new_id)
    store.create("log/0", [b"x"])
    real_fsync, calls = os.fsync, iter(range(9))

    def fsync(handle: int) -> None:
        if next(calls) == 1:  # the second: the folder, after the link
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreUnreachableError, match="EIO"):
            store.create("log/1", [b"y"])
    for read in (lambda: store.get("log/1"), lambda: store.get_tail("log/1", 1)):
        with pytest.raises(StoreUnreachableError, match="sync"):
            read()
    assert store.get("log/0") == b"x"
    store.put("log/1", [b"z"])
    assert store.get("log/1") == b"z"


# --- CountingStore, open_store, probe ------------------------------------------------------------


def test_counts_are_requests_and_bytes_by_verb() -> None:
    store = CountingStore(MemoryStore())
    store.put("a", [b"123", b"45"])
    store.create("b", [b"1"])
    store.create("b", [b"22"])
    store.get("a")
    store.get_range("a", 1, 2)
    store.get_tail("a", 3)
    with pytest.raises(ObjectNotFoundError):
        store.get("gone")
    before = store.counts
    store.list("")
    store.delete(["a", "b"])
    assert "list" not in before
    assert store.counts == {
        "put": VerbCount(1, 5),
        "create": VerbCount(2, 3),
        "get": VerbCount(2, 5),
        "get_range": VerbCount(1, 2),
        "get_tail": VerbCount(1, 3),
        "list": VerbCount(1, 0),
        "delete": VerbCount(1, 0),
    }


@pytest.mark.parametrize("form", ["{path}", "file://{quoted}", "file:{quoted}"])
def test_a_local_place_opens_by_path_or_uri(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a b%20c"
    quoted = path.as_uri().removeprefix("file://")
    store = open_store(form.format(path=path, quoted=quoted), new_id=new_id)
    store.put("x", [b"1"])
    assert (path / "x").read_bytes() == b"1"
    assert open_store(store.uri, new_id=new_id).get("x") == b"1"


def test_one_memory_store_per_name_in_a_process() -> None:
    name = new_id()
    open_store(f"memory://{name}", new_id=new_id).put("x", [b"1"])
    assert open_store(f"memory://{name}", new_id=new_id).get("x") == b"1"
    assert open_store(f"memory://{new_id()}", new_id=new_id).list("") == []


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("s3://bucket/x", "'s3'"),
        ("hdfs://host/x", "file, memory"),
        ("here/there", "relative"),
        ("./a:b", "relative"),
        ("", "relative"),
        ("file://host/x", "absolute"),
        ("file:x", "absolute"),
        ("memory:", "name"),
        ("memory://", "name"),
    ],
)
def test_a_uri_that_cannot_be_opened_says_why(uri: str, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        open_store(uri, new_id=new_id)


def test_a_store_is_not_shipped_in_a_closure(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Ship its URI"):
        pickle.dumps(LocalStore(tmp_path, new_id=new_id))


def test_a_good_store_passes_the_probe_and_nothing_is_left(tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path, new_id=new_id), MemoryStore()):
        probe(store, new_id=new_id)
        assert store.list("") == []


def test_an_unwritable_place_fails_the_probe_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnreachableError, match=f"{tmp_path}/file"):
        probe(LocalStore(tmp_path / "file", new_id=new_id), new_id=new_id)


class Overwrites(MemoryStore):
    def create(self, name: str, parts: list[Buffer]) -> CreateOutcome:  # type: ignore[override]
        self.put(name, parts)
        return CreateOutcome.CREATED


class Forgets(MemoryStore):
    def get(self, name: str) -> bytes:
        raise ObjectNotFoundError(name)


class Alters(MemoryStore):
    def get(self, name: str) -> bytes:
        return super().get(name) + b"!"


class NeverDeletes(MemoryStore):
    def delete(self, names: object) -> None:
        pass


class SaysThatItCannot(MemoryStore):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=False, ranged_read=True, reason="it is a tape")


@pytest.fixture(
    params=[
        (Overwrites, "twice"),
        (Forgets, "not there"),
        (Alters, "other bytes"),
        (NeverDeletes, "deleted"),
        (SaysThatItCannot, "a tape"),
    ]
)
def incapable(request: pytest.FixtureRequest) -> tuple[ObjectStore, str]:
    kind, reason = request.param
    return kind("bad"), reason


def test_a_store_that_cannot_keep_a_log_is_refused_with_the_reason(
    incapable: tuple[ObjectStore, str],
) -> None:
    store, reason = incapable
    with pytest.raises(StoreCapabilityError, match=reason) as caught:
        probe(store, new_id=new_id)
    assert "memory://bad" in caught.value.what
