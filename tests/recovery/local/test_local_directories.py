"""The directories of task-local copies: marks, pointers and deltas, and disks that do not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import LocalCopyError, LocalDeltaError, LocalDirError
from statebackend.rocks.store import Marker
from tests.recovery.local.small_copies import (
    GROUPS,
    ROOT,
    SMALL,
    FakeClock,
    directories,
    filled,
    marker,
    subtask,
)

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


# --- local deltas --------------------------------------------------------------------------------


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
from tests.recovery.local.small_copies import SMALL, marker, subtask
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
