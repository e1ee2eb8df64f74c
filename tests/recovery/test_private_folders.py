"""Local copies belong to one user: other users' folders are refused, and others shut out."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from recovery.local import local_sockets
from recovery.local.local_copies import copies_seen
from recovery.local.private_folders import home_of, own_file_text, own_folder
from recovery.local.store_directory import HOLDER
from recovery.local.store_pool import StorePool, StorePoolSettings, ask_for
from recovery.local.workspace import Workspace
from statebackend import system
from statebackend.errors import LocalDirError
from statebackend.spark.frames.heartbeat import HeartbeatFile
from tests.recovery.driver import new_id
from tests.recovery.local.open_stores import AT_ONCE_S, REAL, keeping, subtask
from tests.recovery.local.small_copies import SMALL, filled

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def uses(local_dir: Path, what: str) -> None:
    if what == "job":
        subtask(local_dir)
    else:
        Workspace(str(local_dir), new_id).path()


def stranger_sees(path: Path) -> list[str]:
    """What another user of this host finds in a folder and below it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            found = [os.path.join(at, n) for at, d, f in os.walk(path) for n in (*d, *f)]
            os.write(write, "\n".join(found).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text.splitlines()


def test_what_a_task_leaves_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    local_dir = tmp_path / "missing" / "local"
    filled_by = subtask(local_dir)
    filled(filled_by)
    file = Workspace(str(local_dir), new_id).path()
    file.write_bytes(b"rows")
    assert mode(tmp_path / "missing") == mode(local_dir) == 0o700
    assert {one.name: mode(one) for one in local_dir.iterdir()} == {"job": 0o700, ".work": 0o700}
    assert mode(file.parent) == 0o700


@as_root
def test_another_user_of_the_host_can_open_none_of_it() -> None:
    with tempfile.TemporaryDirectory() as made:
        shared = Path(made)
        shared.chmod(0o755)
        local_dir = shared / "local"
        local_dir.mkdir(mode=0o755)  # as an administrator makes it
        filled(subtask(local_dir))
        Workspace(str(local_dir), new_id).path().write_bytes(b"rows")
        (local_dir / "control").write_bytes(b"to be seen")
        assert stranger_sees(local_dir) == [
            str(local_dir / one) for one in os.listdir(local_dir)
        ], "the names of jobs, and nothing in them"


@pytest.mark.parametrize("before", [0o755, 0o775, 0o777])
def test_folders_of_an_earlier_release_are_tightened_and_their_copies_used(
    tmp_path: Path, before: int
) -> None:
    local_dir = tmp_path / "local"
    name = filled(subtask(local_dir))
    for path in (local_dir, local_dir / "job", local_dir / "job" / "op"):
        path.chmod(before)
    (local_dir / ".work").mkdir(mode=before)
    held, reason = subtask(local_dir).acquire(0.0)
    assert (held.path.name, reason) == (name, "")
    held.release()
    Workspace(str(local_dir), new_id).path()
    assert mode(local_dir / "job") == mode(local_dir / ".work") == 0o700
    assert not mode(local_dir) & 0o022, "nobody else can put another folder there"


def test_the_default_folder_is_closed_and_named_after_who_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "who-asked")  # as YARN says it, of whoever runs the driver
    local_dir = Path(system.expanded(""))
    assert local_dir.parent == tmp_path
    assert "who-asked" not in local_dir.name
    local_dir.mkdir(mode=0o755)  # by an earlier release
    assert home_of(str(local_dir)) == local_dir
    assert mode(local_dir) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 123_456_789)
    assert Path(system.expanded("")).name == "statebackend-123456789", "no account has that number"


@as_root
def test_with_one_local_dir_two_users_keep_copies_beside_each_other() -> None:
    with tempfile.TemporaryDirectory() as made:
        shared = Path(made)
        os.chown(shared, STRANGER, STRANGER)
        shared.chmod(0o1777)
        filled(subtask(shared))
        assert mode(shared / "statebackend-root") == 0o700
        held, _ = subtask(shared).acquire(0.0)
        held.release()


@as_root
@pytest.mark.parametrize("local", ["missing", "missing/below", "own", "stranger's", "by-link"])
@pytest.mark.parametrize(("mode_above", "warned"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_folder_above_that_is_open_to_all_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, local: str, mode_above: int, warned: bool
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    os.chown(above, STRANGER, STRANGER)
    above.chmod(mode_above)
    (above / "own").mkdir(mode=0o700)
    (above / "stranger's").mkdir(mode=0o755)
    os.chown(above / "stranger's", STRANGER, STRANGER)
    (tmp_path / "by-link").symlink_to(above / "own")
    local_dir = (tmp_path if local == "by-link" else above) / local
    for _ in range(2):
        home_of(str(local_dir))
    told = [one.getMessage() for one in caplog.records if str(above) in one.getMessage()]
    assert len(told) == warned
    if warned:
        assert f"lies in {above}:" in told[0]


@as_root
def test_the_user_s_own_folder_below_one_that_is_open_to_all_is_told_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    home_of(str(tmp_path / system.user_folder_name()))
    assert f"lies in {tmp_path}:" in caplog.text


@pytest.mark.parametrize("what", ["job", ".work"])
def test_a_folder_that_another_user_has_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / what).mkdir(mode=0o777)
    if os.geteuid() == 0:
        os.chown(tmp_path / what, STRANGER, STRANGER)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LocalDirError, match="another user") as caught:
        uses(tmp_path, what)
    assert caught.value.code == "SB6001"
    assert "local_dir=" in caught.value.todo


@as_root
@pytest.mark.parametrize("what", ["job", "statebackend-root"])
def test_the_copies_in_a_stranger_s_folder_are_not_even_looked_at(
    tmp_path: Path, what: str
) -> None:
    local_dir = tmp_path if what == "job" else tmp_path / what
    local = subtask(local_dir)
    filled(local)
    assert copies_seen(str(local_dir), job="job", operator="op")
    os.chown(tmp_path / what, STRANGER, STRANGER)
    assert not copies_seen(str(local_dir), job="job", operator="op")
    with pytest.raises(LocalDirError, match=f"uid {STRANGER}"):
        subtask(local_dir)


@pytest.mark.parametrize("what", ["job", ".work"])
def test_a_symbolic_link_in_the_place_of_a_folder_is_refused(tmp_path: Path, what: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    local_dir = tmp_path / "local"
    local_dir.mkdir(mode=0o700)
    (local_dir / what).symlink_to(elsewhere)
    with pytest.raises(LocalDirError, match="symbolic link"):
        uses(local_dir, what)
    assert not list(elsewhere.iterdir())


def test_a_local_dir_by_way_of_a_link_of_the_user_s_own_is_used(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "local").symlink_to(tmp_path / "disk")
    filled(subtask(tmp_path / "local"))
    assert (tmp_path / "disk" / "job").is_dir()


@as_root
def test_a_local_dir_by_way_of_a_stranger_s_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "local").symlink_to(tmp_path / "disk")
    os.chown(tmp_path / "local", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(LocalDirError, match="symbolic link of another user"):
        subtask(tmp_path / "local")


@as_root
def test_what_a_stranger_put_into_a_folder_that_was_open_to_all_is_refused_each_time(
    tmp_path: Path,
) -> None:
    local = subtask(tmp_path)
    name = filled(local)
    (tmp_path / "job").chmod(0o777)
    planted = local.path / name / HOLDER
    planted.write_text("/tmp/door")
    os.chown(planted, STRANGER, STRANGER)
    for _ in range(2):
        with pytest.raises(LocalDirError, match=HOLDER):
            subtask(tmp_path)
    planted.unlink()
    subtask(tmp_path)
    assert mode(tmp_path / "job") == 0o700


@as_root
def test_a_start_that_is_killed_while_it_looks_leaves_that_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    folder.mkdir(mode=0o777)
    planted = folder / "planted"
    planted.touch()
    os.chown(planted, STRANGER, STRANGER)
    seen: list[int] = []

    def killed(path: str) -> NoReturn:
        seen.append(mode(Path(path)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "walk", killed)
        with pytest.raises(KeyboardInterrupt):
            own_folder(folder)
    assert not seen[0] & 0o011, "closed to others before it is looked at"
    for _ in range(2):
        with pytest.raises(LocalDirError, match="planted"):
            own_folder(folder)
    planted.unlink()
    own_folder(folder)
    assert mode(folder) == 0o700


@as_root
def test_nobody_else_gets_into_a_folder_that_is_looked_at() -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        folder = Path(made, "job")
        folder.mkdir()
        for marked, gets_in in ((0o777, True), (0o722, False)):
            folder.chmod(marked)
            pid = os.fork()
            if pid == 0:
                try:
                    os.setgid(STRANGER)
                    os.setuid(STRANGER)
                    (folder / f"of-{marked:o}").touch()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert (os.waitpid(pid, 0)[1] == 0) is gets_in


@as_root
def test_a_holder_that_a_stranger_names_is_not_believed(tmp_path: Path) -> None:
    with keeping() as kept, keeping() as asking:
        local = subtask(tmp_path, kept)
        held, _ = local.acquire(0.0)
        held.open_store(SMALL)
        local.give_back(held)
        path = held.path
        other = subtask(tmp_path, asking)
        assert other.kept_elsewhere() == (path, kept.address)
        os.chown(path / HOLDER, STRANGER, STRANGER)
        assert other.kept_elsewhere() is None
        assert not ask_for(path, AT_ONCE_S)
        assert own_file_text(path / HOLDER) is None


# --- who is at the other end of a socket -------------------------------------------------------


@as_root
def test_a_store_is_not_handed_over_to_another_user() -> None:
    """Even where a mistake has opened the folder, and the socket in it."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        local = Path(made, "local")
        kept = StorePool(REAL, StorePoolSettings(), lambda: Path(made, "doors"))
        try:
            of = subtask(local, kept)
            held, _ = of.acquire(0.0)
            held.open_store(SMALL)
            of.give_back(held)
            Path(made, "doors").chmod(0o755)
            Path(kept.address).chmod(0o777)
            assert answer_to(STRANGER, kept.address, str(held.path)) == b""
            assert kept.keeps(held.path), "it stays where it is"
            assert answer_to(0, kept.address, str(held.path)) == b"free"
        finally:
            kept.close()


def answer_to(uid: int, door: str, said: str) -> bytes:
    """What a process of that user hears at a door."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(uid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.settimeout(AT_ONCE_S)
                asking.connect(door)
                try:
                    asking.sendall(said.encode())
                    os.write(write, asking.recv(16))
                except OSError:
                    pass
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return found


@as_root
def test_a_door_of_another_user_is_told_nothing() -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        door = Path(made, "door")
        ready, ready_for = os.pipe()
        heard, heard_for = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(STRANGER)
                os.setuid(STRANGER)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
                    listening.bind(str(door))
                    listening.listen(1)
                    os.write(ready_for, b"1")
                    listening.settimeout(AT_ONCE_S)
                    asker, _ = listening.accept()
                    os.write(heard_for, asker.recv(4096))
                    asker.sendall(b"free")
            finally:
                os._exit(0)
        os.close(heard_for)
        os.read(ready, 1)
        copy = Path(made, "copy")
        copy.mkdir(mode=0o700)
        (copy / HOLDER).write_text(str(door))
        assert not ask_for(copy, AT_ONCE_S)
        with os.fdopen(heard, "rb") as file:
            assert file.read() == b""
        os.waitpid(pid, 0)


def test_a_peer_of_this_user_is_known_and_one_of_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    with one, other:
        assert local_sockets.peer_uid(one) in (os.geteuid(), None)
        assert local_sockets.of_this_user(one)
        monkeypatch.setattr(local_sockets, "peer_uid", lambda _: os.geteuid() + 1)
        assert not local_sockets.of_this_user(one)
        monkeypatch.setattr(local_sockets, "peer_uid", lambda _: None)
        assert local_sockets.of_this_user(other), "its folder is closed to others"


def test_a_keeper_s_folder_is_closed(tmp_path: Path) -> None:
    kept = StorePool(REAL, StorePoolSettings(), lambda: tmp_path / "doors")
    assert mode(tmp_path / "doors") == 0o700
    kept.close()


def test_the_heartbeat_s_folder_is_made_again_closed_and_never_taken_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = HeartbeatFile()
    folder = Path(file.path).parent
    folder.rmdir()  # as a cleaner does
    file.write("run", 1, watermark_moves=False, processing_due_ms=None)
    assert mode(folder) == 0o700
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(LocalDirError, match="another user"):
        file.write("run", 2, watermark_moves=False, processing_due_ms=None)
