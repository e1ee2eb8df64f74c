"""Task-local copies: one holder at a time, a grave of its own for who froze, and sweeps."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from tests.recovery.driver import new_id
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
from tests.recovery.local.small_copies import SMALL, marker, subtask
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
