"""Whether this host can run jobs: one small check for each thing that was seen to be missing."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, TypeAlias

from recovery.local.private_folders import open_above
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_probe import probe
from statebackend import system
from statebackend.cli.job_folders import Place
from statebackend.environment import require_java
from statebackend.errors import EnvironmentMissingError, StateBackendError

__all__ = ["Check", "examine", "examine_spark"]

Status: TypeAlias = Literal["ok", "warn", "fail"]

# Package, oldest and first version that is too new (None: no limit known).
_PACKAGES: Final[tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None], ...]] = (
    ("pyspark", (4, 1), (4, 4)),
    ("rocksdict", (0, 3, 29), (0, 4)),
    ("pyarrow", (18,), None),
    ("pandas", (2, 2), (3,)),
    ("numpy", (1, 26), None),
    ("msgspec", (0, 19), None),
    ("blake3", (1,), None),
    ("zstandard", (0, 23), None),
    ("fsspec", (2024, 6), None),
)
_OPEN_FILES_WANTED: Final = 4096
_OPEN_FILES_NEEDED: Final = 256
_FREE_WANTED_BYTES: Final = 5 << 30
_FREE_NEEDED_BYTES: Final = 256 << 20
_SKEW_WARN_S: Final = 5.0
_SKEW_FAIL_S: Final = 900.0  # S3 refuses requests that are signed further off
_SLOW_S: Final = 1.0
_TIMEOUT_S: Final = 60.0
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_LOCALITY: Final = "spark.shuffle.reduceLocality.enabled"
_LOCAL_DIR: Final = "spark.local.dir"

# In a process of its own: one that opened a database must not fork, and one that crashes in a
# library that does not fit the machine must not take the doctor along.
_OPEN_A_STORE: Final = """
import sys
from pathlib import Path
from rocksdict import Options, Rdict
path = sys.argv[1]
store = Rdict(path, Options(raw_mode=True))
store[b"key"] = b"value"
store.flush()
store.close()
store = Rdict(path, Options(raw_mode=True))
assert store[b"key"] == b"value"
store.close()
"""


@dataclass(frozen=True)
class Check:
    """One check: `ok`, `warn` (it works, but not as it could) or `fail`; and what to do."""

    name: str
    status: Status
    detail: str
    todo: str = ""


def examine(place: Place | None, local_dir: str) -> list[Check]:
    """Every check, none of which stops the others.

    Args:
        place: the folder of all jobs, to be tried too.
        local_dir: for local copies; empty: the one that a query would take.
    """
    default = system.default_local_dir(_spark_default(_LOCAL_DIR))
    folder = Path(system.expanded(local_dir or default))
    found = [_python(), *_packages(), _java(), _workers_python(), _rocksdict(), _open_files()]
    found += [*_local_dir(folder), _locality()]
    if place is not None:
        found += _store(place)
    return found


def examine_spark() -> Iterator[Check]:
    """Start a session, and try what of Spark's private surface is needed."""
    from pyspark.sql import SparkSession  # a JVM is started: not for the other checks

    from statebackend.spark.spark_internals import probe_internals

    builder = SparkSession.builder.master("local[1]").appName("statebackend-doctor")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    try:
        for one in probe_internals(session):
            detail = f"for {one.use}" + (f": {one.reason}" if one.reason else "")
            todo = "Install a PySpark that docs/reference/compatibility.md names."
            if one.reason:
                yield Check(f"spark: {one.member}", "fail", detail, todo)
            else:
                yield Check(f"spark: {one.member}", "ok", detail)
    finally:
        session.stop()


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Check]:
    for name, oldest, too_new in _PACKAGES:
        wanted = f">={_dotted(oldest)}" + (f",<{_dotted(too_new)}" if too_new else "")
        todo = f"pip install '{name}{wanted}'"
        try:
            text = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, "fail", "not installed", todo)
            continue
        version = _version(text)
        if version < oldest or (too_new is not None and version >= too_new):
            yield Check(name, "fail", f"{text} is not {wanted}", todo)
        else:
            yield Check(name, "ok", text)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _java() -> Check:
    try:
        require_java()
    except EnvironmentMissingError as error:
        return Check("java", "fail", error.what, error.todo)
    return Check("java", "ok", f"found ({os.environ.get('JAVA_HOME') or shutil.which('java')})")


def _workers_python() -> Check:
    """The Python that Spark starts on executors must be one with the same packages."""
    name, command = "PYSPARK_PYTHON", os.environ.get("PYSPARK_PYTHON", "")
    todo = f"Set PYSPARK_PYTHON={sys.executable} (on every host, the same version everywhere)."
    if not command:
        first = shutil.which("python3")
        detail = f"not set: workers run the python3 that is first on PATH ({first or 'none'})"
        if first and os.path.dirname(first) == os.path.dirname(sys.executable):
            return Check(name, "ok", detail)
        return Check(name, "warn", detail, todo)
    try:
        said = _run([command, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, "fail", f"{command} does not run ({_reason(error)})", todo)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if said != own:
        return Check(name, "fail", f"{command} is Python {said}, this is {own}", todo)
    return Check(name, "ok", command)


def _rocksdict() -> Check:
    with tempfile.TemporaryDirectory(prefix="statebackend-doctor-") as folder:
        try:
            _run([sys.executable, "-c", _OPEN_A_STORE, os.path.join(folder, "db")])
        except (OSError, subprocess.SubprocessError) as error:
            return Check(
                "rocksdb",
                "fail",
                f"a store in {folder} could not be opened, written and closed ({_reason(error)})",
                "Install rocksdict anew for this machine; check the temporary directory.",
            )
    return Check("rocksdb", "ok", "opened, written, closed and read back")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (at most {hard})"
    todo = f"ulimit -n {_OPEN_FILES_WANTED}, for the executors' user on every host."
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES_NEEDED:
        return Check("open files", "fail", detail, todo)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES_WANTED:
        return Check("open files", "warn", detail, todo)
    return Check("open files", "ok", detail)


def _local_dir(folder: Path) -> Iterator[Check]:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    todo = "Give local_dir= a directory on a local disk, writable by the executors' user."
    try:
        with tempfile.TemporaryDirectory(prefix="statebackend-doctor-", dir=there) as scratch:
            first = Path(scratch, "first")
            first.write_bytes(b"probe")
            Path(scratch, "second").hardlink_to(first)
        missing = "" if there == folder else f" (to be made in {there})"
        yield Check("local dir", "ok", f"{folder}{missing}: writable, with hard links")
    except OSError as error:
        yield Check("local dir", "fail", f"{folder}: {error.strerror or error}", todo)
    yield _owner(folder)
    free = shutil.disk_usage(there).free
    detail = f"{free / 2**30:.1f} GiB free on the disk of {folder}"
    todo = "Free space there, or give local_dir= a larger disk: state lies there twice at times."
    if free < _FREE_NEEDED_BYTES:
        yield Check("local disk", "fail", detail, todo)
    elif free < _FREE_WANTED_BYTES:
        yield Check("local disk", "warn", detail, todo)
    else:
        yield Check("local disk", "ok", detail)


def _owner(folder: Path) -> Check:
    """Checks who owns the local directory, by the rules of `recovery.local.private_folders`."""
    name, of_users = "local dir owner", folder.name == system.user_folder_name()
    above = open_above(folder)
    renamed = above and Check(
        name,
        "warn",
        f"other users can rename what lies in {above}, and {folder} is below it",
        "Set its sticky bit (chmod +t), or give local_dir= a directory elsewhere.",
    )
    try:
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode):
            if of_users or found.st_uid not in (0, os.geteuid()) or not folder.exists():
                todo = "Have it removed, or give local_dir= the directory itself."
                what = f"a symbolic link (of uid {found.st_uid}) that is not followed"
                return Check(name, "fail", f"{folder} is {what}", todo)
            found = folder.stat()
    except OSError:
        return renamed or Check(name, "ok", f"{folder}: to be made, for this user alone")
    own = found.st_uid == os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        todo = "Move what is there, or give another local_dir=."
        return Check(name, "fail", f"{folder} is not a directory", todo)
    open_to_all = found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX
    if of_users and not own:
        todo = "Have it removed, or give local_dir= another directory."
        return Check(name, "fail", f"{folder} is another user's (uid {found.st_uid})", todo)
    if not own:
        below = _owner(folder / system.user_folder_name())
        if below.status == "fail":
            return below
        if open_to_all:
            todo = "Set its sticky bit (chmod +t), or give local_dir= a directory of this user's."
            return Check(name, "warn", f"other users can rename what lies in {folder}", todo)
    if renamed:
        return renamed
    if own:
        return Check(name, "ok", f"{folder} is this user's")
    return Check(name, "ok", f"copies go to {folder / system.user_folder_name()}")


def _locality() -> Check:
    name = "reduce locality"
    if _spark_default(_LOCALITY) == "false":
        return Check(name, "ok", f"{_LOCALITY} is false in spark-defaults.conf")
    return Check(
        name,
        "warn",
        f"{_LOCALITY} is not set to false in spark-defaults.conf",
        f'Build the session with .config("{_LOCALITY}", "false"): otherwise subtasks may move '
        "between executors, and local copies are used less. Results are the same.",
    )


def _spark_default(key: str) -> str:
    """What ``spark-defaults.conf`` says; "" without it."""
    for path in _spark_defaults():
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            if found := re.search(rf"^\s*{re.escape(key)}[\s=]+(\S+)\s*$", text, re.MULTILINE):
                return found[1]
    return ""


def _spark_defaults() -> Iterator[Path]:
    conf, home = os.environ.get("SPARK_CONF_DIR"), os.environ.get("SPARK_HOME")
    if conf:
        yield Path(conf, "spark-defaults.conf")
    elif home:
        yield Path(home, "conf", "spark-defaults.conf")
    else:
        with contextlib.suppress(metadata.PackageNotFoundError):
            package = metadata.distribution("pyspark").locate_file("pyspark")
            yield Path(str(package), "conf", "spark-defaults.conf")


# --- the store -----------------------------------------------------------------------------------


def _store(place: Place) -> Iterator[Check]:
    try:
        store = place.open()
        took_s = _timed(lambda: probe(store, new_id=system.new_id))
    except StateBackendError as error:
        yield Check("store", "fail", f"[{error.code}] {error.what}", error.todo)
        return
    slow = took_s > _SLOW_S
    yield Check(
        "store",
        "warn" if slow else "ok",
        f"{store.uri} creates, reads back and deletes (in {took_s:.2f} s)",
        "Every checkpoint waits for one such request: use a store nearer by." if slow else "",
    )
    can = store.capabilities
    names = [name for name in ("ranged_read", "atomic_put", "streamed") if not getattr(can, name)]
    yield Check(
        "store's abilities",
        "warn" if names else "ok",
        f"without {', '.join(names)}: {can.reason}" if names else "all of them",
        "It works, with more bytes moved or more memory." if names else "",
    )
    yield _clock(store)


def _clock(store: ObjectStore) -> Check:
    name = f"probe/{system.new_id()}"
    try:
        store.put(name, [b"clock"])
        now_s = time.time()
        times = [info.modified_ms for info in store.list("probe/") if info.name == name]
        store.delete([name])
    except StateBackendError as error:
        return Check("clock", "fail", f"[{error.code}] {error.what}", error.todo)
    if not times or times[0] is None:
        return Check("clock", "ok", "the store does not say what time it is")
    skew_s = now_s - times[0] / 1000
    detail = f"this host is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the store"
    todo = "Set the host's clock (NTP). Signed requests are refused when it is 15 minutes off."
    if abs(skew_s) > _SKEW_FAIL_S:
        return Check("clock", "fail", detail, todo)
    if abs(skew_s) > _SKEW_WARN_S:
        return Check("clock", "warn", detail, todo)
    return Check("clock", "ok", detail)


# --- helpers -------------------------------------------------------------------------------------


def _timed(call: Callable[[], object]) -> float:
    started_s = time.monotonic()
    call()
    return time.monotonic() - started_s


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
        check=True,
    )
    return done.stdout.strip()


def _reason(error: Exception) -> str:
    """Why a command failed: the last line that it said."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return lines[-1] if lines else f"exit status {error.returncode}"
    return str(error)
