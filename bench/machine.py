"""What the figures were taken on, and how busy it was with other things."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "busy_share", "describe"]

ROOT = Path(__file__).parents[1]
_PACKAGES = ("pyspark", "pyarrow", "numpy", "pandas", "rocksdict", "msgspec", "blake3")


def describe() -> dict[str, Any]:
    """Machine, versions and commit; the JVM's version is added by who starts one."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": _java_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": len(_git("status", "--porcelain").splitlines()),
        "load_average": list(os.getloadavg()),
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def busy_share(seconds: float = 1.0) -> float:
    """The share of all cores that somebody uses now (0 to 1): to be asked while we do nothing."""
    before = _ticks()
    time.sleep(seconds)
    busy, total = (after - start for after, start in zip(_ticks(), before, strict=True))
    return round(busy / total, 3) if total else 0.0


def _ticks() -> tuple[int, int]:
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    ticks = [int(field) for field in fields]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _java_version() -> str:
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return "not found"
    lines = (done.stderr or done.stdout).splitlines()
    return lines[0] if lines else "unknown"


def _git(*arguments: str) -> str:
    # No optional locks: a look at the tree must not write to its index.
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
