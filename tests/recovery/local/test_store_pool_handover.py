"""Stores that stay open between processes: handed over at once, never waited for without end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery.local.store_directory import HOLDER
from recovery.local.store_pool import ask_for
from tests.recovery.driver import Changes
from tests.recovery.local.open_stores import (
    AT_ONCE_S,
    TIMEOUT_S,
    deltas,
    keeping,
    seen,
    store_of,
    subtask,
    written,
)
from tests.recovery.local.small_copies import ROOT, SMALL
from tests.recovery.restore.one_subtask_job import Job

# --- two processes of a host ---------------------------------------------------------------------


WORKER = """
import json, sys
from pathlib import Path
from recovery.local.store_pool import StorePool, StorePoolSettings
from tests.recovery.local.open_stores import REAL, seen, subtask, written
store_pool = StorePool.of_process(REAL, StorePoolSettings())
local = subtask(Path(sys.argv[1]), store_pool)
held = None
for line in sys.stdin:
    command, *numbers = line.split()
    answer = None
    if command == "open":
        held, reason = local.acquire(float(numbers[0]))
        answer = [held.path.name, reason, *map(str, seen(held))]
    elif command == "write":
        written(held, *map(int, numbers))
    elif command == "flush":
        held.flush()
    elif command == "keep":
        local.give_back(held)
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """Another process of the host, with a store pool of its own."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def do(self, *commands: str) -> Any:
        assert self.process.stdout is not None
        answer = None
        for command in commands:
            self.send(command)
            answer = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()


def test_a_store_that_is_not_in_use_is_handed_over_at_once_with_all_it_holds(
    tmp_path: Path, worker: Worker
) -> None:
    name = worker.do("open 0", "write 0 1 2", "keep", "open 0")[0]
    worker.do("write 3", "keep")
    started_s = time.monotonic()
    held, reason = subtask(tmp_path).acquire(TIMEOUT_S)
    assert time.monotonic() - started_s < AT_ONCE_S
    assert (held.path.name, reason) == (name, "")
    assert seen(held) == (3, b"3")
    written(held, 4)
    held.release()
    assert worker.do("open 60") == [name, "", "4", "b'4'"]


def test_a_holder_whose_socket_was_deleted_is_asked_at_another(
    tmp_path: Path, worker: Worker
) -> None:
    name = worker.do("open 0", "write 0 1", "keep", "open 0")[0]
    worker.do("keep")
    for _ in range(2):
        socket_path = Path((subtask(tmp_path).path / name / HOLDER).read_text())
        shutil.rmtree(socket_path.parent)
        started_s = time.monotonic()
        held, reason = subtask(tmp_path).acquire(TIMEOUT_S)
        assert time.monotonic() - started_s < AT_ONCE_S
        assert (held.path.name, reason) == (name, "")
        assert seen(held) == (1, b"1")
        held.release()
        assert worker.do("open 60", "keep") is None
        assert Path((subtask(tmp_path).path / name / HOLDER).read_text()).exists()


def test_a_store_that_is_kept_open_is_taken_up_by_its_own_process_without_asking(
    tmp_path: Path,
) -> None:
    with keeping() as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0)
        store = held.store
        local.give_back(held)
        again, reason = local.acquire(0)
        assert again is held
        assert again.store is store
        assert (again.opened_here, reason) == (False, "")
        again.release()


def test_a_store_with_too_large_filters_is_closed_and_comes_back_with_all_it_holds(
    tmp_path: Path,
) -> None:
    small = replace(SMALL, block_cache_bytes=1 << 12, for_maps=True, whole_filters=True)
    with keeping() as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        held.open_store(small)
        written(held, 0)
        held.flush()  # a table file, with a filter
        local.give_back(held)
        again, reason = local.acquire(0)
        assert again is not held
        again.open_store(small)
        assert (reason, seen(again)) == ("", (0, b"0"))
        written(again, 1)
        local.give_back(again)
        third, _ = local.acquire(0)
        assert third is again  # once
        third.release()


def test_a_store_in_use_is_not_handed_over_and_the_asker_makes_its_own(
    tmp_path: Path, worker: Worker
) -> None:
    name = worker.do("open 0", "write 0", "keep", "open 0")[0]
    started_s = time.monotonic()
    held, reason = subtask(tmp_path).acquire(0.4)
    assert 0.4 <= time.monotonic() - started_s < AT_ONCE_S
    assert reason == f"the local copy was held by another process ({name})"
    assert seen(held) == (None, None)
    written(held, 7)
    worker.do("write 99", "keep")  # the twin goes on, into its grave
    assert seen(held) == (7, b"7")
    held.release()
    assert worker.do("open 60") == [held.path.name, "", "7", "b'7'"]


@pytest.mark.parametrize("in_use", [True, False])
def test_a_frozen_holder_is_not_waited_for_and_thaws_into_its_own_grave(
    tmp_path: Path, worker: Worker, *, in_use: bool
) -> None:
    name = worker.do("open 0")[0]
    worker.do("write 0")
    if not in_use:
        worker.do("keep")
    worker.process.send_signal(signal.SIGSTOP)
    started_s = time.monotonic()
    held, reason = subtask(tmp_path).acquire(0.4)
    assert 0.4 <= time.monotonic() - started_s < AT_ONCE_S
    assert reason == f"the local copy was held by another process ({name})"
    written(held, 7)
    worker.process.send_signal(signal.SIGCONT)
    if in_use:
        worker.do("write 99", "keep")
    assert seen(held) == (7, b"7")
    assert deltas(held) == [7]
    held.release()
    assert worker.do("open 60") == [held.path.name, "", "7", "b'7'"]


def test_what_a_killed_holder_had_on_disk_is_found_with_the_deltas_that_it_had_not(
    tmp_path: Path, worker: Worker
) -> None:
    worker.do("open 0", "write 0 1 2", "flush", "write 3 4", "keep")
    name = worker.do("open 0")[0]
    worker.process.kill()
    worker.process.wait()
    held, reason = subtask(tmp_path).acquire(TIMEOUT_S)
    assert (held.path.name, reason) == (name, "")
    assert seen(held) == (2, b"2")
    assert deltas(held) == [3, 4]
    held.release()


EPOCHS: list[Changes] = [
    {b"\0\0k": b"%d" % n, b"\0\0%d" % (n % 3): None if n % 2 else b"x"} for n in range(7)
]
DRIVER_AND_WORKER = """
import sys
from pathlib import Path
from recovery.local.store_pool import StorePool, StorePoolSettings
from snapshot.storage.local_store import LocalStore
from tests.recovery.driver import new_id
from tests.recovery.local.open_stores import REAL, store_of
from tests.recovery.local.test_store_pool_handover import EPOCHS
from tests.recovery.restore.one_subtask_job import Job
root, flush_after = Path(sys.argv[1]), int(sys.argv[2])
store_pool = StorePool(REAL, StorePoolSettings())
job = Job(root, store=store_of(root), store_pool=store_pool)
for number, changes in enumerate(EPOCHS):
    job.run(changes)
    if number == flush_after:
        (kept,) = store_pool._kept.values()
        kept.held.flush()
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("flush_after", [-1, 0, 3, 6])
def test_after_a_kill_with_unflushed_epochs_the_exact_state_comes_from_this_host_alone(
    tmp_path: Path, flush_after: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER_AND_WORKER, str(tmp_path), str(flush_after)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
    finally:
        process.kill()
        process.communicate()
    job = Job(tmp_path, store=store_of(tmp_path))
    state: dict[bytes, bytes] = {}
    for epoch, changes in enumerate(EPOCHS):
        merged = {**state, **changes}
        state = {key: value for key, value in merged.items() if value is not None}
        job.truth[epoch] = state
    job.epoch = len(EPOCHS)
    report = job.reopened()  # compares marker and content
    if flush_after < 0:  # an empty directory: it could have been anybody's
        assert report.source in {"local", "durable"}
    else:
        assert (report.source, report.durable_reads) == ("local", 0)
    job.run({b"\0\0k": b"on"})


# --- forks, and what is left at the door ---------------------------------------------------------


FORK = """
import os, sys
from pathlib import Path
from recovery.local.store_pool import StorePool, StorePoolSettings
from tests.recovery.local.open_stores import REAL, subtask, written
root = Path(sys.argv[1])
ours = StorePool.of_process(REAL, StorePoolSettings())
assert StorePool.of_process(REAL, StorePoolSettings()) is ours
child = os.fork()
mine = StorePool.of_process(REAL, StorePoolSettings())
assert (mine is ours) is bool(child)
local = subtask(root, mine, number=1 if child else 2)
held, _ = local.acquire(0)
written(held, 0)
local.give_back(held)
assert held.store is not None
asking = subtask(root, number=1 if child else 2)
again, reason = asking.acquire(30)
assert (again.path, reason) == (held.path, ""), reason
again.release()
mine.close()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_a_keeper_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], cwd=ROOT, timeout=120)
    assert done.returncode == 0


LEFT: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.write_bytes(b""),
    "a path where nothing is": lambda path: path.write_text("/nowhere/door"),
    "zeros": lambda path: path.write_bytes(bytes(40)),
    "zeros within": lambda path: path.write_bytes(b"/tmp/a\0b"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\xfd"),
    "a long path": lambda path: path.write_text("/nowhere" * 100),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("left", LEFT)
def test_what_is_left_at_a_door_costs_no_more_than_the_wait(tmp_path: Path, left: str) -> None:
    frozen, _ = subtask(tmp_path).acquire(0)
    LEFT[left](frozen.path / "holder")
    held, reason = subtask(tmp_path).acquire(0.05)
    assert "held by another process" in reason
    held.release()
    frozen.release()


def test_a_holder_file_of_a_process_that_died_is_in_nobody_s_way(tmp_path: Path) -> None:
    with keeping() as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0)
        local.give_back(held)
        door = (held.path / "holder").read_text()
    let_go, _ = subtask(tmp_path).acquire(0)
    assert not let_go.orphaned
    let_go.release()
    (held.path / "holder").write_text(door)  # its socket is gone
    again, reason = subtask(tmp_path).acquire(0)
    assert (again.path, reason, again.orphaned) == (held.path, "", True)
    again.release()


@pytest.mark.parametrize("words", [b"", b"\xff\xfe", b"\0", b"/", b"x" * 9000])
def test_whatever_is_said_at_the_door_it_stays_open(tmp_path: Path, words: bytes) -> None:
    with keeping() as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0)
        local.give_back(held)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(store_pool.address)
            stranger.sendall(words)
        assert ask_for(held.path, 10)
        assert held.store is None


def test_a_door_deep_in_the_tree_is_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with keeping() as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0)
        local.give_back(held)
        again, reason = subtask(tmp_path).acquire(TIMEOUT_S)
        assert (again.path, reason) == (held.path, "")
        again.release()
