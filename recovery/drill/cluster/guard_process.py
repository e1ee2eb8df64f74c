"""Ends all processes of a drill when the process that started the drill has ended.

`python -m recovery.drill.cluster.guard_process <token>` does it when its own standard input ends,
so that none outlives that process, whatever became of it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from recovery.drill.cluster.live_processes import TOKEN, LiveProcesses

__all__ = ["guarded"]


@contextlib.contextmanager
def guarded(token: str) -> Iterator[None]:
    """While this lasts, processes with the token die with this one; after it, there are none."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "recovery.drill.cluster.guard_process", token],
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
