"""The edge towards the machine: clocks, ids, names. Protocol code is handed these, never asks.

`System` is all that a process stands on, as one argument; `SYSTEM` is the real one.
"""

from __future__ import annotations

import functools
import gc
import os
import pwd
import random
import re
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from statebackend.threads import THREADS, Threads

__all__ = [
    "OWN_CODE",
    "SYSTEM",
    "System",
    "cores",
    "default_local_dir",
    "executor_name",
    "expanded",
    "host_name",
    "keep_loaded",
    "memory_bytes",
    "monotonic_s",
    "new_id",
    "own_memory_limit_bytes",
    "process_name",
    "quick_turns",
    "s3_endpoint",
    "sleep_s",
    "temporary_folder",
    "unhurried_collector",
    "user_folder_name",
    "wall_ms",
    "warn",
]

OWN_CODE: Final = tuple(
    str(Path(__file__).parents[1] / name) + os.sep
    for name in ("statebackend", "snapshot", "recovery")
)
"""What the names of this library's files begin with."""

# Of the container that this is, by both versions of control groups; groups within it are not seen.
_MEMORY_LIMITS: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_CPU_QUOTA: Final = "/sys/fs/cgroup/cpu.max"  # in a period, and the period
_YOUNG_OBJECTS: Final = 50_000
_ID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Spark's own folders in a local directory: those of a standalone worker and an application, which
# go with it, and of an executor's block manager, which goes with that.
_SPARKS_FOLDERS: Final = re.compile(f"(?:/spark-{_ID}/executor-{_ID})?/blockmgr-{_ID}")


class System(Protocol):
    """What a process stands on: time, ids, its names, and threads."""

    @property
    def threads(self) -> Threads:
        """Locks, events, threads and futures."""

    def monotonic_s(self) -> float:
        """Seconds that never go backwards; only differences mean anything."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, by this host's clock, which may be set back."""

    def sleep_s(self, seconds: float, /) -> None:
        """Wait."""

    def new_id(self) -> str:
        """An id that nobody else has."""

    def new_uuid(self) -> str:
        """An id that nobody else has, as Spark writes it: with hyphens."""

    def new_secret(self) -> str:
        """A word that nobody can guess."""

    def draw(self) -> float:
        """A number from 0 to 1 that nobody can foresee."""

    def process_name(self) -> str:
        """This process, for people."""

    def host_name(self) -> str:
        """This host, as Spark names it."""

    def executor_name(self) -> str:
        """The executor that this worker belongs to."""

    def unhurried_collector(self) -> AbstractContextManager[None]:
        """While entered, the interpreter looks for cycles less often."""


def monotonic_s() -> float:
    """Seconds that never go backwards; only differences mean anything."""
    return time.monotonic()


def wall_ms() -> int:
    """Milliseconds since 1970, by this host's clock."""
    return time.time_ns() // 1_000_000


@contextmanager
def quick_turns(interval_s: float = 0.001) -> Iterator[None]:
    """Inside, threads that wait for the interpreter get it five times as soon as they usually do.

    Rows go through several threads of a process, and wait for each in turn.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def sleep_s(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the user's line that called this library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN_CODE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


def new_id() -> str:
    """An id that nobody else has: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def host_name() -> str:
    """This host, as Spark names it where it says so."""
    return os.environ.get("SPARK_LOCAL_IP") or socket.gethostname()


def s3_endpoint() -> str | None:
    """The S3 server that the environment names, for clients that do not look there themselves."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def expanded(path: str) -> str:
    """``path`` with this host's environment variables filled in (``$TMPDIR/state``).

    If ``path`` is empty: the default directory of the executor that this process belongs to, and of
    the user that it runs as. Executors need not run as the driver's user.
    """
    return os.path.expandvars(path) if path else default_local_dir()


def hide_worker_traceback() -> None:
    """Have this Python worker of Spark's report the error that ends it without its traceback.

    The worker ends with that error, so no other is affected.
    """
    os.environ["SPARK_HIDE_TRACEBACK"] = "1"


def executor_name() -> str:
    """The executor this Python worker belongs to; "driver" in local mode.

    Spark says it to Python only by the working directory, ``.../work/app-<id>/<executor>``.
    """
    folder, name = os.path.split(os.getcwd())
    return name if name.isdigit() and os.path.basename(folder).startswith("app-") else "driver"


@contextmanager
def unhurried_collector() -> Iterator[None]:
    """Look for cycles less often: rows come and go by the thousand, and hardly ever form one."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_kept: set[str] = set()


def keep_loaded(what: str) -> None:
    """Leave what is in memory by now to the end of the process; once for each ``what``.

    Spark's worker has Python look for cycles after every task. Through all the modules of this
    package and of its libraries that takes 15 ms or more, in the time of the task that comes next.
    """
    if what not in _kept:
        _kept.add(what)
        gc.collect()
        gc.freeze()


def process_name() -> str:
    """This process, for people: host and process id."""
    return f"{host_name()}:{os.getpid()}"


def cores() -> int:
    """Processors that this process may use, or the time of so many in its container."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # not there; "max"
        quota, period = map(int, Path(_CPU_QUOTA).read_text(encoding="ascii").split())
        count = max(1, min(count, round(quota / max(1, period))))
    return count


def memory_bytes() -> int:
    """The memory of this host, or of the container that it is."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # not there; "max"
            size = min(size, int(Path(name).read_text(encoding="ascii")))
    return size


def own_memory_limit_bytes() -> int | None:
    """What this process may map (Spark limits it by ``spark.executor.pyspark.memory``), if so."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def default_local_dir(configured: str = "") -> str:
    """A folder of the user's in the first of Spark's local directories on this host.

    YARN names them in ``LOCAL_DIRS``. Elsewhere an executor names its own folders in them, in
    ``SPARK_LOCAL_DIRS`` of its workers; ours lies beside those, so that it outlives them and the
    next executor on the host finds it.

    Args:
        configured: ``spark.local.dir``, where the environment names none.
    """
    said = os.environ.get("LOCAL_DIRS") or os.environ.get("SPARK_LOCAL_DIRS") or configured
    first = said.partition(",")[0].strip().rstrip("/")
    if found := _SPARKS_FOLDERS.search(first):
        first = first[: found.start()] or "/"
    return os.path.join(first or tempfile.gettempdir(), user_folder_name())


def user_folder_name() -> str:
    """The name of this user's folder in a directory that users share."""
    return _folder_name_of(os.geteuid())


@functools.cache
def _folder_name_of(uid: int) -> str:
    # Not from the environment: on YARN it names who submitted the job, not the process's user.
    try:
        return f"statebackend-{pwd.getpwuid(uid).pw_name}"
    except KeyError:  # in a container
        return f"statebackend-{uid}"


def temporary_folder(owner: object) -> str:
    """A folder on this host that only this user can read; gone when ``owner`` is, or the process.

    Raises:
        OSError: there is no place for it.
    """
    path = tempfile.mkdtemp(prefix="statebackend-")
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return path


class _Machine:
    """The real one."""

    threads: Threads = THREADS

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return wall_ms()

    def sleep_s(self, seconds: float, /) -> None:
        time.sleep(seconds)

    def new_id(self) -> str:
        return uuid.uuid4().hex

    def new_uuid(self) -> str:
        return str(uuid.uuid4())

    def new_secret(self) -> str:
        return secrets.token_urlsafe(24)

    def draw(self) -> float:
        return random.random()

    def process_name(self) -> str:
        return process_name()

    def host_name(self) -> str:
        return host_name()

    def executor_name(self) -> str:
        return executor_name()

    def unhurried_collector(self) -> AbstractContextManager[None]:
        return unhurried_collector()


SYSTEM: Final[System] = _Machine()
