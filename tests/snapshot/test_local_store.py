"""A store in a folder: places that cannot be written, and what killed writers leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot.storage import CreateOutcome, LocalStore, probe
from statebackend.errors import (
    ObjectNotFoundError,
    SettingError,
    StoreCapabilityError,
    StoreUnreachableError,
)
from tests.snapshot.fresh_ids import new_id

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


# --- a file that is replaced ---------------------------------------------------------------------


def test_a_replaced_file_is_read_to_the_end_as_it_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, new_id=new_id)
    store.put("a", [b"old."])
    chunks = store.get_chunks("a", 2)
    assert next(chunks) == b"ol"
    store.put("a", [b"new"])
    assert list(chunks) == [b"d."]
