"""Every store passes the public suite; and what is particular to each."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot.storage import (
    Capabilities,
    CountingStore,
    CreateOutcome,
    LocalStore,
    MemoryStore,
    ObjectStore,
    StoreOptions,
    VerbCount,
    open_store,
    probe,
)
from snapshot.storage.object_store import Buffer, ObjectInfo
from snapshot.storage.testing import StoreTests
from statebackend.errors import (
    EnvironmentMissingError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
    StoreCapabilityError,
    StoreUnreachableError,
)
from tests.support.failing_store import FailingStore, Failure
from tests.support.slow_store import SlowStore


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


class TestSlowStore(StoreTests):
    @pytest.fixture
    def store(self) -> ObjectStore:
        def no_wait(seconds: float) -> None:
            raise AssertionError("nothing was to be waited for")

        return SlowStore(MemoryStore(), sleep_s=no_wait)


class TestFailingStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        inner = LocalStore(tmp_path / "store", new_id=new_id)
        return FailingStore(inner, lambda verb, name, call_number: None)


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
    for path in ("data/a", "data", ".tmp"):
        target = tmp_path / "root" / path
        target.unlink() if target.is_file() else target.rmdir()
    assert store.create("data/b", [b"y"]) is CreateOutcome.CREATED
    assert store.get("data/b") == b"y"


@pytest.mark.parametrize("left", ["nothing", "the place where it was mounted"])
@pytest.mark.parametrize("knows", ["it wrote there", "it was told"])
def test_a_root_that_has_gone_away_is_said_and_nothing_is_written_in_its_place(
    tmp_path: Path, left: str, knows: str
) -> None:
    """As of a disk that is not mounted any more: what is put under it now would be lost later."""
    root = tmp_path / "mount" / "root"
    root.mkdir(parents=True)
    store = LocalStore(root, new_id=new_id, there=True)
    LocalStore(root, new_id=new_id).put("data/a", [b"x"])
    if knows == "it wrote there":
        store = LocalStore(root, new_id=new_id)
        store.put("data/b", [b"x"])
    elif left != "nothing":
        store.get("data/a")
    (tmp_path / "mount").rename(tmp_path / "elsewhere")
    if left != "nothing":
        root.mkdir(parents=True)
    calls: list[Callable[[], object]] = [
        lambda: store.put("data/c", [b"x"]),
        lambda: store.create("data/d", [b"x"]),
        lambda: store.get("data/a"),
        lambda: list(store.get_chunks("data/a")),
        lambda: store.get_tail("data/a", 1),
        lambda: store.list(""),
        lambda: store.list("data/"),
        lambda: store.delete(["data/a"]),
    ]
    for call in calls:
        with pytest.raises(StoreUnreachableError, match="gone away") as caught:
            call()
        assert "mount" in caught.value.todo
    assert not root.exists() or not list(root.iterdir())
    if root.exists():
        root.rmdir()
        root.parent.rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "mount")
    assert store.get("data/a") == b"x"
    store.put("data/c", [b"y"])
    assert store.get("data/c") == b"y"


def test_a_store_that_is_made_by_its_first_write_is_empty_until_then(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root", new_id=new_id)
    assert store.list("") == []
    with pytest.raises(ObjectNotFoundError):
        store.get("a")
    store.put("a", [b"x"])
    assert [info.name for info in store.list("")] == ["a"]


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


# --- what killed writers left --------------------------------------------------------------------

DAY_S = 24 * 3600


def age(path: Path, seconds: float) -> None:
    """Make a file this old, by the clock of its file system."""
    now_s = path.stat().st_mtime
    os.utime(path, (now_s - seconds, now_s - seconds))


KILLED = """
import os, sys
from snapshot.storage import LocalStore
def parts():
    yield b"half"
    os._exit(9)
class Parts(list):
    def __iter__(self):
        return parts()
LocalStore(sys.argv[1], new_id=lambda: sys.argv[2]).put("data/a", Parts())
"""


def test_what_killed_writers_left_is_removed_after_a_day(tmp_path: Path) -> None:
    left = tmp_path / ".tmp"
    for name in ("old", "young"):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path), name],
            cwd=Path(__file__).parents[2],
            timeout=60,
            check=False,
        )
        assert done.returncode == 9
    assert sorted(os.listdir(left)) == ["old", "young"]
    age(left / "old", DAY_S + 60)
    age(left / "young", DAY_S - 60)
    (left / "folder").mkdir()
    store = LocalStore(tmp_path, new_id=new_id)
    store.list("")
    with pytest.raises(ObjectNotFoundError):
        store.get("data/a")
    assert (left / "old").exists()  # reading touches nothing
    store.create("data/b", [b"x"])
    assert sorted(os.listdir(left)) == ["folder", "young"]
    age(left / "young", DAY_S)
    store.put("data/c", [b"x"])
    assert (left / "young").exists()  # once per store object
    assert [info.name for info in store.list("")] == ["data/b", "data/c"]


@pytest.mark.parametrize("verb", ["create", "put"])
def test_a_writer_that_sleeps_for_days_keeps_its_file(tmp_path: Path, verb: str) -> None:
    class Slow(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield b"half "
            age(tmp_path / ".tmp" / "slow", 9 * DAY_S)
            LocalStore(tmp_path, new_id=new_id).put("data/other", [b"x"])
            age(tmp_path / ".tmp" / "slow", 9 * DAY_S)
            yield b"and half"

    write_parts = getattr(LocalStore(tmp_path, new_id=lambda: "slow"), verb)
    write_parts("data/a", Slow())
    assert LocalStore(tmp_path, new_id=new_id).get("data/a") == b"half and half"
    assert os.listdir(tmp_path / ".tmp") == []


def test_where_files_cannot_be_locked_nothing_is_swept_and_all_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "old").write_bytes(b"half")
    age(tmp_path / ".tmp" / "old", 9 * DAY_S)
    store = LocalStore(tmp_path, new_id=new_id)
    store.put("data/a", [b"x"])
    assert store.get("data/a") == b"x"
    assert os.listdir(tmp_path / ".tmp") == ["old"]


# --- CountingStore, open_store, probe ------------------------------------------------------------


def test_counts_are_requests_and_bytes_by_verb(tmp_path: Path) -> None:
    store = CountingStore(MemoryStore())
    store.put("a", [b"123", b"45"])
    store.create("b", [b"1"])
    store.create("b", [b"22"])
    store.get("a")
    store.get_range("a", 1, 2)
    store.get_tail("a", 3)
    assert list(store.get_chunks("a", 2)) == [b"12", b"34", b"5"]
    with pytest.raises(ObjectNotFoundError):
        list(store.get_chunks("gone"))
    (tmp_path / "file").write_bytes(b"1234567")
    store.put_file("c", tmp_path / "file")
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
        "get_chunks": VerbCount(2, 5),
        "put_file": VerbCount(1, 7),
        "list": VerbCount(1, 0),
        "delete": VerbCount(1, 0),
    }


def test_a_call_takes_the_latency_and_its_bytes_the_bandwidth() -> None:
    waits: list[float] = []
    inner = MemoryStore()
    store = SlowStore(inner, sleep_s=waits.append, latency_s=0.5, bytes_per_s=1000)
    store.put("a", [b"x" * 250, b"y" * 250])
    assert waits == [0.75, 0.25]
    waits.clear()
    store.get("a")
    assert waits == [0.25, 0.75]
    waits.clear()
    assert len(list(store.get_chunks("a", 250))) == 2
    assert waits == [0.5, 0.25, 0.25]
    with pytest.raises(SettingError):
        SlowStore(inner, sleep_s=waits.append, latency_s=-1)


def test_a_lost_request_does_nothing_and_a_lost_answer_hides_what_was_done() -> None:
    inner = MemoryStore()
    asked: list[tuple[str, str, int]] = []
    failures: dict[int, Failure] = {1: "before", 2: "after", 3: KeyError("as planned")}

    def plan(verb: str, name: str, call_number: int) -> Failure:
        asked.append((verb, name, call_number))
        return failures.get(call_number) if verb == "create" else None

    store = FailingStore(inner, plan)
    with pytest.raises(StoreUnreachableError):
        store.create("log/0", [b"x"])
    assert inner.list("") == []
    with pytest.raises(StoreUnreachableError):
        store.create("log/0", [b"x"])
    assert inner.get("log/0") == b"x"
    with pytest.raises(KeyError):
        store.create("log/1", [b"x"])
    assert store.create("log/0", [b"x"]) is CreateOutcome.EXISTS
    store.list("log/")
    store.delete(["log/0", "log/1"])
    assert asked[-3:] == [("create", "log/0", 4), ("list", "log/", 1), ("delete", "log/0", 1)]


def test_a_stream_breaks_off_after_its_first_piece() -> None:
    inner = MemoryStore()
    inner.put("a", [b"0123"])
    chunks = FailingStore(inner, lambda *_: "after").get_chunks("a", 2)
    assert next(chunks) == b"01"
    with pytest.raises(StoreUnreachableError):
        next(chunks)


def test_a_memory_store_says_by_its_own_clock_when_an_object_was_written() -> None:
    store = MemoryStore(clock_ms=lambda: 7)
    store.put("a", [b"x"])
    assert [info.modified_ms for info in store.list("")] == [7]


def test_listings_compare_by_name_and_size_whenever_they_were_written() -> None:
    assert ObjectInfo("a", 1, 5) == ObjectInfo("a", 1, 6)
    assert sorted([ObjectInfo("b", 1), ObjectInfo("a", 2, 9)])[0].name == "a"


def test_a_replaced_file_is_read_to_the_end_as_it_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, new_id=new_id)
    store.put("a", [b"old."])
    chunks = store.get_chunks("a", 2)
    assert next(chunks) == b"ol"
    store.put("a", [b"new"])
    assert list(chunks) == [b"d."]


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
        ("nosuch://host/x", "file, memory, s3"),
        ("simplecache::file:///x", "chain"),
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


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:topsecret@bucket/x",
        "s3://key@bucket/topsecret",
        "sftp://user:topsecret@host/x",
        "file://user:topsecret@host/x",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(SettingError) as caught:
        open_store(uri, new_id=new_id)
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        *("s3://", "s3:bucket", "s3://B/x", "s3://a/x", "s3://a..b/x", "s3://1.2.3.4/x"),
        *("s3://bucket//x", "s3://bucket/../x", "s3://bucket/.x", "s3://buc_ket/x"),
    ],
)
def test_a_malformed_s3_uri_is_refused(uri: str) -> None:
    with pytest.raises(SettingError):
        open_store(uri, new_id=new_id)


def test_what_only_s3_can_give_is_not_left_out_in_silence(tmp_path: Path) -> None:
    options = StoreOptions(sse="AES256", endpoint_url="https://host")
    for uri in (str(tmp_path), tmp_path.as_uri(), "memory://x", "gs://bucket/x"):
        with pytest.raises(SettingError, match="endpoint_url, sse"):
            open_store(uri, new_id=new_id, options=options)
    open_store("memory://x", new_id=new_id, options=StoreOptions(deadline_s=5))


@pytest.mark.parametrize(
    "given",
    [
        {"endpoint_url": "host:80"},
        {"endpoint_url": "https://"},
        {"endpoint_url": "https://host?x=1"},
        {"sse": "ROT13"},
        {"kms_key_id": "key"},
        {"deadline_s": 0},
        {"read_timeout_s": float("nan")},
        {"max_connections": 0},
    ],
)
def test_options_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        StoreOptions(**given)


def test_options_travel_and_refuse_a_secret_without_repeating_it() -> None:
    options = StoreOptions(endpoint_url="https://host:9000", region="here", deadline_s=1.5)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(SettingError) as caught:
        StoreOptions(endpoint_url="https://key:topsecret@host")
    assert "topsecret" not in str(caught.value)


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("snapshot.storage.s3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(EnvironmentMissingError) as caught:
        open_store("s3://bucket/x", new_id=new_id)
    assert "statebackend[s3]" in caught.value.todo


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


def test_a_probe_costs_four_requests() -> None:
    store = CountingStore(MemoryStore())
    probe(store, new_id=new_id)
    assert sum(count.requests for count in store.counts.values()) == 4


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


class AltersOnce(MemoryStore):
    altered = False

    def get(self, name: str) -> bytes:
        data = super().get(name)
        if not self.altered:
            self.altered = True
            data = bytes([data[0] ^ 1]) + data[1:]
        return data


class SaysThatItCannot(MemoryStore):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=False, ranged_read=True, reason="it is a tape")


def test_a_bit_that_flips_on_its_way_to_the_probe_is_not_the_store_s_inability() -> None:
    store = AltersOnce("good")
    probe(store, new_id=new_id)
    assert store.altered


@pytest.fixture(
    params=[
        (Overwrites, "twice"),
        (Forgets, "not there"),
        (Alters, "other bytes"),
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
