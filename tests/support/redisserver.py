"""A Redis server on loopback, from Debian's package redis-server. Its data are gone with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.servers import free_port

__all__ = ["RedisServer", "start_redis"]

START_LIMIT_S = 30.0


class RedisServer:
    """The running process, and its URL."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._output = folder / "redis.out"
        words = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder)]
        self._command = ["redis-server", *words, "--save", "", *(options or ("--appendonly", "no"))]
        self._start()

    def _start(self) -> None:
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it takes connections."""
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 5).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(f"Redis did not start: {self._output.read_text(errors='replace')}")

    def restart(self, away_s: float) -> None:
        """Kill it, and start it again in the same place; without a log of its own it is empty."""
        self.stop()
        time.sleep(away_s)
        self._start()
        self.wait()

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(30)


def start_redis(folder: Path, *options: str) -> RedisServer:
    """A server without data; without the package the test is skipped.

    Options are Redis's; ``--appendonly yes --appendfsync always`` keeps data through a restart.

    `tox -e redis` sets STATEBACKEND_REDIS, and then it fails.
    """
    if shutil.which("redis-server") is None:
        reason = "Debian's package redis-server is not installed."
        if os.environ.get("STATEBACKEND_REDIS"):
            pytest.fail(reason)
        pytest.skip(reason)
    server = RedisServer(folder, *options)
    try:
        server.wait()
    except BaseException:
        server.stop()
        raise
    return server
