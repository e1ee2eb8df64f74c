"""A driver as a child process: started in a session of its own, watched, and killed for real."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from examples.flights.workdir import WorkDir

ROOT: Final = Path(__file__).parents[2]
_GONE_S: Final = 20.0


class Driver:
    """One run. Leaving the ``with`` block ends whatever is left of it."""

    def __init__(self, work: WorkDir, number: int) -> None:
        work.scratch.mkdir(exist_ok=True)
        with work.log.open("a") as log:
            log.write(f"--- run {number}\n")
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "examples.flights", "driver", str(work.root), str(number)],
                cwd=work.scratch,  # Spark leaves files in its working directory
                env=_environment(work),
                stdin=subprocess.PIPE,  # closed when this process ends: then the driver ends too
                stdout=log,
                stderr=log,
                start_new_session=True,  # the driver, its JVM and the Python workers
            )
        self.pid = self._process.pid

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL, and wait until the whole session is gone.

        The group holds the driver and its JVM. Spark's Python workers make a group of their own;
        they end by themselves once the JVM is gone, and are killed if they do not.
        """
        # The session's number is the driver's process id, which is ours until we wait for it.
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _GONE_S
        while left := _session(self.pid):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"processes {left} of the driver do not end")
            if time.monotonic() > deadline_s - _GONE_S / 2:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


def _session(number: int) -> list[int]:
    """The living processes of a session that we started (Linux)."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
        if int(session) == number and state not in "ZX":
            found.append(int(folder.name))
    return found


def _environment(work: WorkDir) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,  # the workers run this very interpreter
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": str(work.scratch),
    }
