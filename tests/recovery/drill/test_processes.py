"""Processes of a drill are found by their token, and none is left over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recovery.drill.cluster.guard_process import guarded
from recovery.drill.cluster.live_processes import DISK, TOKEN, LiveProcesses
from recovery.drill.cluster.local_cluster import open_cluster
from recovery.drill.cluster.polling import until
from statebackend.errors import DrillError

Start = Callable[..., subprocess.Popen[bytes]]
CODE = "import sys, time; print('here', flush=True); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process whose command line has given words in it, and waits until it runs."""
    started: list[subprocess.Popen[bytes]] = []

    def run(token: str, *words: str, disk: str = "") -> subprocess.Popen[bytes]:
        environment = {**os.environ, TOKEN: token, DISK: disk}
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, *words], env=environment, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_roles_and_hosts_are_told_apart_and_strangers_are_not_touched(
    start: Start, tmp_path: Path
) -> None:
    disks = {"a": tmp_path / "a", "b": tmp_path / "b"}
    mine = LiveProcesses(f"mine-{os.getpid()}", disks)
    executor = start(mine.token, "CoarseGrainedExecutorBackend", disk=str(disks["a"]))
    worker = start(mine.token, "org.apache.spark.deploy.worker.Worker", disk=str(disks["b"]))
    stranger = start("stranger", "CoarseGrainedExecutorBackend", disk=str(disks["a"]))
    assert mine.all() == sorted([executor.pid, worker.pid])
    assert mine.executors() == mine.executors("a") == mine.of_host("a") == [executor.pid]
    assert mine.executors("b") == []
    assert mine.of_host("b") == [worker.pid]
    mine.freeze([worker.pid])
    mine.end()
    assert executor.wait() == worker.wait() == -9
    assert stranger.poll() is None
    mine.kill([executor.pid])  # it has ended: no error


def test_a_number_that_is_another_process_s_by_now_is_not_signalled(start: Start) -> None:
    mine = LiveProcesses(f"mine-{os.getpid()}")
    stranger = start("stranger")
    mine.freeze([stranger.pid])
    mine.kill([stranger.pid])
    with pytest.raises(subprocess.TimeoutExpired):
        stranger.wait(timeout=0.3)
    assert "(stopped)" not in Path(f"/proc/{stranger.pid}/status").read_text()


def test_the_guard_ends_frozen_processes_when_its_drill_is_killed(start: Start) -> None:
    token = f"guarded-{os.getpid()}"
    process = start(token)
    LiveProcesses(token).freeze([process.pid])
    code = (
        "import os; from recovery.drill.cluster.guard_process import guarded\n"
        f"with guarded({token!r}): os.kill(os.getpid(), 9)"
    )
    assert process.poll() is None
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert process.wait(timeout=60) == -9


def test_after_the_guarded_part_nothing_is_left_over(start: Start) -> None:
    token = f"left-{os.getpid()}"
    with guarded(token):
        process = start(token)
    assert process.wait(timeout=10) == -9


def test_what_is_waited_for_in_vain_is_named() -> None:
    with pytest.raises(DrillError, match="in vain for a miracle"):
        until(lambda: False, "a miracle", 0.01)


def test_a_cluster_that_cannot_be_struck_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrillError, match="yarn"):
        open_cluster("yarn", tmp_path, "token")
