"""The edge towards the machine: clocks, ids, names. Protocol code is handed these, never asks."""

from __future__ import annotations

import getpass
import os
import socket
import tempfile
import time
import uuid

__all__ = [
    "default_local_dir",
    "executor_name",
    "expanded",
    "host_name",
    "monotonic_s",
    "new_id",
    "process_name",
    "sleep_s",
]


def monotonic_s() -> float:
    """Seconds that never go backwards; only differences mean anything."""
    return time.monotonic()


def sleep_s(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def new_id() -> str:
    """An id that nobody else has: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def host_name() -> str:
    """This host, as Spark names it where it says so."""
    return os.environ.get("SPARK_LOCAL_IP") or socket.gethostname()


def expanded(path: str) -> str:
    """``path`` with this host's environment variables filled in (``$TMPDIR/state``)."""
    return os.path.expandvars(path)


def executor_name() -> str:
    """The executor this Python worker belongs to; "driver" in local mode.

    Spark says it to Python only by the working directory, ``.../work/app-<id>/<executor>``.
    """
    folder, name = os.path.split(os.getcwd())
    return name if name.isdigit() and os.path.basename(folder).startswith("app-") else "driver"


def process_name() -> str:
    """This process, for people: host and process id."""
    return f"{host_name()}:{os.getpid()}"


def default_local_dir() -> str:
    """A directory of the user's in the host's temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"statebackend-{getpass.getuser()}")
