"""Task-local copies: one holder at a time, a grave of its own for everyone who froze."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.store_pool import Clock
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import LocalCopyError, LocalDeltaError, LocalDirError
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.store import Marker, RocksSettings
from tests.recovery.driver import new_id

GROUPS = KeyGroupRange(0, 7)
ROOT = Path(__file__).parents[2]
SMALL = RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)


class FakeClock(Clock):
    """Sleeping takes no time; `meanwhile` happens during the sleep of that number."""

    def __init__(self, meanwhile: dict[int, Callable[[], Any]] | None = None) -> None:
        self.time_s = 100.0
        self.sleeps = 0
        self.meanwhile = meanwhile or {}
        super().__init__(lambda: self.time_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.time_s += seconds
        self.sleeps += 1
        self.meanwhile.get(self.sleeps, lambda: None)()


def subtask(
    path: Path, *, clock: Clock | None = None, operator: str = "op", number: int = 0
) -> LocalSubtask:
    return LocalSubtask(
        str(path),
        job="job",
        operator=operator,
        key_groups=KeyGroupRange(8 * number, 8 * number + 7),
        new_id=new_id,
        clock=clock or FakeClock(),
    )


def marker(epoch: int, chain: str = "aa") -> Marker:
    return Marker(
        job_id="job-0", operator="op", key_group_start=0, key_group_end=7, epoch=epoch, chain=chain
    )


def filled(local: LocalSubtask, value: bytes = b"1", epoch: int = 0) -> str:
    """Make a store directory that holds something and let it go; its name."""
    held = local.create()
    held.open_store(SMALL).apply([b"\0\0k"], [value], marker(epoch))
    held.release()
    return held.path.name


def directories(local: LocalSubtask) -> set[str]:
    return {path.name for path in local.path.iterdir() if path.is_dir()}


# --- one holder ----------------------------------------------------------------------------------


def test_without_a_copy_a_new_store_directory_is_made(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    held, reason = local.acquire(1)
    assert reason == "there is no local copy on this host"
    assert directories(local) == {held.path.name}
    assert held.open_store(SMALL).marker() is None
    held.release()


def test_a_copy_that_was_let_go_is_taken_up_again(tmp_path: Path) -> None:
    name = filled(subtask(tmp_path))
    held, reason = subtask(tmp_path).acquire(1)
    assert (held.path.name, reason) == (name, "")
    store = held.open_store(SMALL)
    assert store.get(b"\0\0k") == b"1"
    assert held.open_store(SMALL) is store
    held.release()
    held.release()


def test_operators_and_subtasks_have_places_of_their_own(tmp_path: Path) -> None:
    odd = ["op", "OP", "o/p", "o%2Fp", ".", "..", "a b", "größe", "0"]
    paths = {
        subtask(tmp_path, operator=operator, number=number).path.resolve()
        for operator in odd
        for number in (0, 1)
    }
    assert len(paths) == 2 * len(odd)
    assert all(path.parent.parent == tmp_path.resolve() / "job" for path in paths)


@pytest.mark.parametrize("timeout_s", [0, 0.05, 3])
def test_a_holder_is_waited_for_and_not_longer_than_said(tmp_path: Path, timeout_s: float) -> None:
    first, _ = subtask(tmp_path).acquire(1)
    clock = FakeClock()
    second, reason = subtask(tmp_path, clock=clock).acquire(timeout_s)
    assert reason == f"the local copy was held by another process ({first.path.name})"
    assert second.path != first.path
    assert timeout_s <= clock.time_s - 100 < timeout_s + 0.1
    first.release()
    second.release()


def test_a_copy_that_is_let_go_while_it_is_waited_for_is_taken(tmp_path: Path) -> None:
    filled(subtask(tmp_path))
    first, _ = subtask(tmp_path).acquire(1)
    clock = FakeClock({3: first.release})
    second, reason = subtask(tmp_path, clock=clock).acquire(60)
    assert (second.path, reason, clock.sleeps) == (first.path, "", 3)
    second.release()


def test_who_waited_takes_what_counts_now_and_not_what_it_waited_for(tmp_path: Path) -> None:
    filled(subtask(tmp_path), b"old")
    first, _ = subtask(tmp_path).acquire(1)

    def another_takes_over() -> None:
        filled(subtask(tmp_path), b"new")
        first.release()

    clock = FakeClock({1: another_takes_over})
    second, reason = subtask(tmp_path, clock=clock).acquire(60)
    assert reason == ""
    assert second.open_store(SMALL).get(b"\0\0k") == b"new"
    second.release()


def test_who_got_the_lease_of_what_no_longer_counts_gives_it_back(tmp_path: Path) -> None:
    class Overtaken(LocalSubtask):
        """Another takes over between reading the pointer and locking what it named."""

        def _lease(self, path: Path) -> StoreDirectory | None:
            if path.name == old:
                filled(subtask(tmp_path), b"new")
            return super()._lease(path)

    old = filled(subtask(tmp_path), b"old")
    local = Overtaken(
        str(tmp_path), job="job", operator="op", key_groups=GROUPS, new_id=new_id, clock=FakeClock()
    )
    held, reason = local.acquire(0)
    assert reason == ""
    assert held.path.name != old
    assert held.open_store(SMALL).get(b"\0\0k") == b"new"
    held.release()
    local.path.joinpath("current").write_text(old)
    again, _ = subtask(tmp_path).acquire(0)  # the other lease was given back
    assert again.path.name == old
    again.release()


# --- other processes -----------------------------------------------------------------------------

HOLD = """
import sys
from recovery.local.local_copies import LocalSubtask
from tests.recovery.test_local import SMALL, marker, subtask
from pathlib import Path
local = subtask(Path(sys.argv[1]))
held, reason = local.acquire(0)
store = held.open_store(SMALL)
print(held.path.name, flush=True)
for line in sys.stdin:
    epoch = int(line)
    store.apply([b"\\0\\0k", b"\\0\\0zombie"], [b"zombie", b"!"], marker(epoch, "dead"))
    held.write_delta(epoch, "dead", b"zombie")
    local.sweep(held)
    held.release()
    print("released", flush=True)
"""


@contextmanager
def holder(path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that holds the copy, and what it holds."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_another_process_keeps_us_out_until_it_lets_go_or_dies(tmp_path: Path) -> None:
    first = filled(subtask(tmp_path))
    with holder(tmp_path) as (process, name):
        assert name == first
        held, reason = subtask(tmp_path).acquire(0)
        assert "held by another process" in reason
        held.release()
        (held.path.parent / "current").write_text(name)  # as if it were the first to ask
        process.send_signal(signal.SIGKILL)
        process.wait()
        held, reason = subtask(tmp_path).acquire(0)
        assert (held.path.name, reason) == (name, "")
        held.release()


def test_a_frozen_holder_is_not_waited_for_and_thaws_into_its_own_grave(tmp_path: Path) -> None:
    filled(subtask(tmp_path))
    with holder(tmp_path) as (process, frozen):
        process.send_signal(signal.SIGSTOP)
        local = subtask(tmp_path)
        ours, reason = local.acquire(5)
        assert reason == f"the local copy was held by another process ({frozen})"
        store = ours.open_store(SMALL)
        store.apply([b"\0\0k"], [b"ours"], marker(7))
        ours.write_delta(8, "ours", b"ours")

        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("99\n")
        process.stdin.flush()
        assert process.stdout.readline() == "released\n"

        assert store.marker() == marker(7)
        assert list(store.scan()) == [(b"\0\0k", b"ours")]
        ours.release()
        again, reason = local.acquire(0)
        assert (again.path, reason) == (ours.path, "")
        again.open_store(SMALL)
        assert again.describe().deltas == [(8, "ours")]
        assert again.describe().epoch == 7
        local.sweep(again)
        assert directories(local) == {again.path.name}
        again.release()


# --- what cannot be taken up ---------------------------------------------------------------------


def test_a_copy_that_was_marked_bad_is_not_used_again(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    name = filled(local)
    held, _ = local.acquire(0)
    held.mark_bad("a block is rotten")
    held.release()
    fresh, reason = local.acquire(0)
    assert reason == "the local copy was marked bad: a block is rotten"
    assert fresh.path.name != name
    fresh.release()


@pytest.mark.parametrize("text", ["", "torn"])
def test_any_mark_counts_even_a_torn_one(tmp_path: Path, text: str) -> None:
    local = subtask(tmp_path)
    (local.path / filled(local) / "BAD").write_text(text)
    held, reason = local.acquire(0)
    assert "marked bad" in reason
    held.release()


def test_a_pointer_to_a_deleted_directory_is_no_copy_and_nothing_is_made_there(
    tmp_path: Path,
) -> None:
    local = subtask(tmp_path)
    name = filled(local)
    shutil.rmtree(local.path / name)
    held, reason = local.acquire(0)
    assert reason == "the local copy was deleted"
    assert directories(local) == {held.path.name}
    assert held.path.name != name
    held.release()


@pytest.mark.parametrize("text", ["", "\n", "gone"])
def test_a_pointer_that_names_nothing_is_no_copy(tmp_path: Path, text: str) -> None:
    local = subtask(tmp_path)
    (local.path / "current").write_text(text)
    held, reason = local.acquire(0)
    assert reason
    held.release()
    again, reason = local.acquire(0)
    assert (again.path, reason) == (held.path, "")
    again.release()


def test_a_directory_name_is_never_used_twice(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    names = set()
    for _ in range(4):
        held = local.create()
        held.release()
        names.add(held.path.name)
        shutil.rmtree(held.path)
    assert len(names) == 4


# --- sweeping ------------------------------------------------------------------------------------


def test_a_sweep_removes_what_nobody_holds_and_nothing_else(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    left = [filled(local) for _ in range(3)]
    held_by_another = local.create()
    ours = local.create()
    local.sweep(ours)
    assert directories(local) == {held_by_another.path.name, ours.path.name}
    assert not {*left} & directories(local)
    held_by_another.release()
    local.sweep(ours)
    assert directories(local) == {ours.path.name}
    ours.release()


def test_a_sweep_by_one_that_was_superseded_removes_nothing_that_counts(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    left = filled(local)
    superseded = local.create()
    current = filled(local)  # made while the other was frozen, and let go
    local.sweep(superseded)
    assert directories(local) == {left, superseded.path.name, current}
    held, reason = local.acquire(0)
    assert (held.path.name, reason) == (current, "")
    held.release()
    superseded.release()


def test_files_that_are_no_store_directories_are_left_alone_by_a_sweep(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    (local.path / "note").write_text("mine")
    ours = local.create()
    local.sweep(ours)
    assert (local.path / "note").read_text() == "mine"
    assert (local.path / "current").read_text() == ours.path.name
    ours.release()


def test_a_store_directory_that_is_swept_while_it_is_made_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept: list[str] = []

    def sweeper_was_quicker(lease: int, operation: int) -> None:
        if not swept:
            (path,) = [p for p in local.path.iterdir() if p.is_dir()]
            swept.append(path.name)
            shutil.rmtree(path)
        flock(lease, operation)

    local = subtask(tmp_path)
    monkeypatch.setattr(fcntl, "flock", sweeper_was_quicker)
    held = local.create()
    assert held.path.name not in swept
    assert held.path.is_dir()
    held.release()


# --- local deltas --------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path: Path) -> Iterator[StoreDirectory]:
    made = subtask(tmp_path).create()
    yield made
    made.release()


def test_deltas_are_described_read_and_dropped_by_epoch(held: StoreDirectory) -> None:
    held.open_store(SMALL).apply([], [], marker(3))
    for epoch in (3, 4, 11):
        held.write_delta(epoch, f"d{epoch}", b"%d" % epoch)
    held.write_delta(4, "other attempt", b"x")
    assert sorted(held.describe().deltas) == [
        (3, "d3"),
        (4, "d4"),
        (4, "other attempt"),
        (11, "d11"),
    ]
    assert held.read_delta(11, "d11") == b"11"
    held.drop_deltas(4)
    assert held.describe().deltas == [(11, "d11")]
    held.forget_delta(11, "d11")
    held.forget_delta(11, "d11")
    assert held.describe().deltas == []


def test_a_copy_is_described_by_its_marker(held: StoreDirectory) -> None:
    assert held.describe() == LocalCopy()
    held.write_delta(0, "d", b"")
    held.open_store(SMALL)
    assert held.describe() == LocalCopy(deltas=[(0, "d")])
    at = Marker(
        job_id="job-9",
        operator="op",
        key_group_start=0,
        key_group_end=7,
        epoch=5,
        chain="cc",
        applying="dd",
    )
    held.open_store(SMALL).apply([], [], at)
    assert held.describe() == LocalCopy(
        job_id="job-9", epoch=5, chain="cc", applying="dd", deltas=[(0, "d")]
    )


def test_what_a_crash_left_of_a_delta_is_no_delta(held: StoreDirectory) -> None:
    held.write_delta(1, "d", b"x")
    (held.path / "deltas" / ".2.4711").write_bytes(b"half of it")
    (held.path / "deltas" / "note").write_bytes(b"")
    assert held.describe().deltas == [(1, "d")]
    held.drop_deltas(99)
    assert held.describe().deltas == []


def test_a_delta_that_is_not_there_is_a_delta_error(held: StoreDirectory) -> None:
    with pytest.raises(LocalDeltaError):
        held.read_delta(1, "d")


# --- directories that cannot be used -------------------------------------------------------------


def test_a_file_in_local_dirs_place_is_named(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(LocalDirError, match=str(place)):
        subtask(place)


@pytest.mark.parametrize("name", ["current", "lease"])
def test_a_directory_in_a_files_place_is_an_unusable_directory(tmp_path: Path, name: str) -> None:
    local = subtask(tmp_path)
    directory = local.path / filled(local)
    place = {"lease": directory, "current": local.path}[name] / name
    place.unlink()
    place.mkdir()
    with pytest.raises(LocalDirError, match="local_dir="):
        local.acquire(0)


@pytest.mark.parametrize("name", ["current", ".current.one"])
def test_a_pointer_that_cannot_be_written_leaves_no_lease_and_no_store_directory(
    tmp_path: Path, name: str
) -> None:
    clock = FakeClock()
    local = LocalSubtask(
        str(tmp_path), job="j", operator="op", key_groups=GROUPS, new_id=lambda: "one", clock=clock
    )
    (local.path / name).mkdir()
    with pytest.raises(LocalDirError, match="local_dir="):
        local.create()
    assert [path.name for path in local.path.iterdir()] == [name]
    open_files = [os.readlink(link) for link in _links(Path("/proc/self/fd"))]
    assert not [path for path in open_files if path.startswith(str(tmp_path))]
    (local.path / name).rmdir()
    local.create().release()


def _links(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_symlink()]


def test_a_subtasks_directory_that_vanished_is_an_unusable_directory(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    shutil.rmtree(local.path)
    with pytest.raises(LocalDirError):
        local.acquire(0)


def test_a_delta_that_cannot_be_written_is_an_unusable_directory(held: StoreDirectory) -> None:
    (held.path / "deltas").write_text("in the way")
    with pytest.raises(LocalDirError, match="deltas"):
        held.write_delta(1, "d", b"x")


def test_a_mark_that_cannot_be_written_does_not_hide_the_first_error(
    held: StoreDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(held.path)
    held.mark_bad("a block is rotten")
    assert "could not be marked bad" in caplog.text


FULL = """
import subprocess, sys
from pathlib import Path
from statebackend.errors import LocalDirError
from tests.recovery.test_local import SMALL, marker, subtask
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=True)
held = subtask(disk).create()
store = held.open_store(SMALL)
store.apply([b"k"], [b"x" * 100], marker(0))
(disk / "ballast").write_bytes(b"")
try:
    with open(disk / "ballast", "wb") as ballast:
        while True:
            ballast.write(bytes(4096))
            ballast.flush()
except OSError:
    pass
for fails in (lambda: held.write_delta(1, "d", bytes(1 << 16)), held.release):
    try:
        fails()
    except LocalDirError as error:
        print(error.code)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
try:
    subtask(disk, number=1)
except LocalDirError as error:
    print(error.code)
"""


def test_a_full_disk_and_a_read_only_one_are_unusable_directories(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    works = (
        unshare
        and not subprocess.run(
            [unshare, "-m", "mount", "-t", "tmpfs", "none", str(tmp_path)],
            check=False,
            capture_output=True,
        ).returncode
    )
    if not works or os.geteuid() != 0:
        pytest.skip("mounting needs root and a mount namespace")
    assert unshare
    done = subprocess.run(
        [unshare, "-m", sys.executable, "-c", FULL, str(tmp_path)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["SB6001"] * 3, done.stderr


def test_a_store_that_cannot_be_flushed_is_let_go_and_marked(tmp_path: Path) -> None:
    local = subtask(tmp_path)
    held = local.create()
    held.open_store(SMALL).apply([b"k"], [b"x"], marker(0))
    shutil.rmtree(held.path / "db")
    with pytest.raises(LocalCopyError):
        held.release()
    held.release()
    fresh, reason = local.acquire(0)
    assert "marked bad" in reason
    fresh.release()
