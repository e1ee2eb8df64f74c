"""The living processes of a drill, found by a variable that all of them inherit.

`python -m recovery.drill.cluster.live_processes <token>` is the guard: it ends them all when its
own standard input ends, so that none outlives the process that started the drill, whatever became
of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from statebackend.errors import DrillError
from statebackend.system import SYSTEM, System

__all__ = [
    "DISK",
    "TOKEN",
    "LiveProcesses",
    "command_of",
    "environment_of",
    "guarded",
    "parent_of",
    "until",
]

TOKEN: Final = "STATEBACKEND_DRILL"  # in the environment of every process of a drill
DISK: Final = "STATEBACKEND_DRILL_DISK"  # the folder that stands for its host's disk
_POLL_S = 0.05


def until(
    condition: Callable[[], Any],
    what: str,
    timeout_s: float,
    *,
    tend: Callable[[], object] | None = None,
    system: System = SYSTEM,
) -> Any:
    """Poll until `condition` gives something true, and give that.

    Args:
        what: is waited for, as the error says it.
        tend: is called between the polls; what it raises ends the wait.

    Raises:
        DrillError: the time ran out.
    """
    deadline_s = system.monotonic_s() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if tend is not None:
            tend()
        if system.monotonic_s() >= deadline_s:
            raise DrillError(
                f"Waited {timeout_s:g} s in vain for {what}.",
                todo="Look at the logs in the drill's folder.",
            )
        system.sleep_s(_POLL_S)


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
            SYSTEM.sleep_s(_POLL_S)

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


@contextlib.contextmanager
def guarded(token: str) -> Iterator[None]:
    """While this lasts, processes with the token die with this one; after it, there are none."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "recovery.drill.cluster.live_processes", token],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != TOKEN}
        | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,  # a Ctrl-C is for the drill, and the guard outlives it
    )
    try:
        yield
    finally:
        if guard.stdin is not None:
            guard.stdin.close()  # as the kernel does it if this process dies
        guard.wait(timeout=90)


def _guard(token: str) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    LiveProcesses(token).end(timeout_s=60.0)


if __name__ == "__main__":
    _guard(sys.argv[1])
