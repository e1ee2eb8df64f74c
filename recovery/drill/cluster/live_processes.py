"""The living processes of a drill, found by a variable that all of them inherit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from recovery.drill.cluster.polling import POLL_S
from statebackend.system import SYSTEM

__all__ = ["DISK", "TOKEN", "LiveProcesses", "command_of", "environment_of", "parent_of"]

TOKEN: Final = "STATEBACKEND_DRILL"  # in the environment of every process of a drill
DISK: Final = "STATEBACKEND_DRILL_DISK"  # the folder that stands for its host's disk


def environment_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none if it has ended or is not ours."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def command_of(pid: int) -> str:
    """Its command line; empty if it has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")


def parent_of(pid: int) -> int:
    """The process that it is a child of; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


class LiveProcesses:
    """The processes that carry a token, by role.

    Args:
        token: the value of `TOKEN` in their environment.
        disks: of each host, by its name; a process is of the host whose disk `DISK` names.
    """

    def __init__(self, token: str, disks: Mapping[str, Path] | None = None) -> None:
        self.token = token
        self._disks = dict(disks or {})

    def all(self) -> list[int]:
        """Every living process of the drill but this one."""
        pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        mine = os.getpid()
        return sorted(p for p in pids if p != mine and environment_of(p).get(TOKEN) == self.token)

    def executors(self, host: str | None = None) -> list[int]:
        """JVMs that run executors."""
        return self._with("CoarseGrainedExecutorBackend", host)

    def python_workers(self, host: str | None = None) -> list[int]:
        """Python processes that run tasks: children of a daemon, which has the same command."""
        daemons = self._with("pyspark.daemon", host)
        return [pid for pid in daemons if parent_of(pid) in daemons]

    def driver_jvms(self) -> list[int]:
        """JVMs of drivers."""
        return self._with("org.apache.spark.deploy.SparkSubmit", None)

    def of_host(self, host: str) -> list[int]:
        """All processes of a host: Spark's worker, executors, Python."""
        roles = ("deploy.worker.Worker", "CoarseGrainedExecutorBackend", "pyspark.daemon")
        return sorted(pid for role in roles for pid in self._with(role, host))

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL; one that has ended is no error."""
        self._signal(pids, signal.SIGKILL)

    def freeze(self, pids: Sequence[int]) -> None:
        """SIGSTOP."""
        self._signal(pids, signal.SIGSTOP)

    def thaw(self, pids: Sequence[int]) -> None:
        """SIGCONT."""
        self._signal(pids, signal.SIGCONT)

    def end(self, timeout_s: float = 20.0) -> None:
        """Kill all of them, frozen ones too, and those that they start meanwhile."""
        deadline_s = SYSTEM.monotonic_s() + timeout_s
        while (left := self.all()) and SYSTEM.monotonic_s() < deadline_s:
            self.kill(left)
            SYSTEM.sleep_s(POLL_S)

    def _signal(self, pids: Sequence[int], how: int) -> None:
        for pid in pids:
            # Listed minutes ago, perhaps: the number may be another process's by now.
            if environment_of(pid).get(TOKEN) == self.token:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, how)

    def _with(self, words: str, host: str | None) -> list[int]:
        found = [pid for pid in self.all() if words in command_of(pid)]
        if host is None:
            return found
        disk = str(self._disks[host])
        return [pid for pid in found if environment_of(pid).get(DISK) == disk]
