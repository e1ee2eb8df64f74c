"""What must be on the machine before Spark is started, asked early and answered in one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Final

from statebackend.errors import EnvironmentMissingError
from statebackend.system import warn

__all__ = [
    "RENAME_IT",
    "hidden_package",
    "java_major_version",
    "refuse_hidden_packages",
    "require_java",
    "warn_of_other_python",
]

OLDEST_JAVA: Final = 17
_TODO: Final = (
    "Install a Java runtime of version 17 or 21 (Debian and Ubuntu: apt install "
    "openjdk-17-jre-headless; macOS: brew install openjdk@17), and put it on PATH or into "
    "JAVA_HOME."
)
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_TIMEOUT_S: Final = 60.0
_SIBLINGS: Final = ("snapshot", "recovery")
RENAME_IT: Final = "Rename that file or folder, or take it off sys.path."


def hidden_package() -> tuple[str, str] | None:
    """One of the packages that this one is made of, and the user's module that hides it, if any."""
    above = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in _SIBLINGS:
        spec = find_spec(name)
        found = (spec.origin or "") if spec else ""
        if os.path.dirname(os.path.dirname(os.path.abspath(found))) != above:
            return name, found or "nothing"
    return None


def refuse_hidden_packages() -> None:
    """Refuse to work in a Python worker of Spark's where `hidden_package` finds one.

    A worker has another ``sys.path`` than the driver: its working directory, and what came by
    ``addPyFile``.

    Raises:
        EnvironmentMissingError: naming it.
    """
    if hidden := hidden_package():
        name, found = hidden
        raise EnvironmentMissingError(
            f"statebackend needs its package {name!r}, and a Python worker of Spark's finds "
            f"{found} under that name.",
            todo=f"{RENAME_IT} Or, if it came by addPyFile() or --py-files, send it under "
            "another name.",
        )


def require_java() -> None:
    """Make sure that Spark will find a Java that can run it.

    Raises:
        EnvironmentMissingError: there is none, or it is older than 17.
    """
    command, where = _java()
    try:
        done = subprocess.run(
            [command, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentMissingError(
            f"Spark needs Java, and {command} ({where}) cannot be run ({error}).", todo=_TODO
        ) from error
    version = java_major_version(done.stderr + done.stdout)
    if done.returncode != 0 or version is None:
        said = (done.stderr + done.stdout).strip().splitlines()
        raise EnvironmentMissingError(
            f"Spark needs Java, and {command} ({where}) does not say its version "
            f"({said[-1] if said else 'it says nothing'}).",
            todo=_TODO,
        )
    if version < OLDEST_JAVA:
        raise EnvironmentMissingError(
            f"Spark needs Java {OLDEST_JAVA} or later, and {command} ({where}) is version "
            f"{version}.",
            todo=_TODO,
        )


def warn_of_other_python(command: str) -> None:
    """Say so if Spark's workers on this host are going to run a Python that lacks this package.

    Without ``PYSPARK_PYTHON`` Spark takes the ``python3`` that is first on PATH, which need not be
    the interpreter that runs the driver: a virtual environment that is not activated, say.

    Args:
        command: what Spark starts its workers with.
    """
    found = shutil.which(command)
    if found is None or os.path.dirname(found) == os.path.dirname(sys.executable):
        return
    look = "import sys, importlib.util as u; sys.exit(u.find_spec('statebackend') is None)"
    try:
        done = subprocess.run(
            [found, "-c", look],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # Spark will say so itself
    if done.returncode:
        warn(
            f"Spark's Python workers run {found}, which has no package statebackend; the driver "
            f"runs {sys.executable}. Activate the virtual environment, or set PYSPARK_PYTHON="
            f"{sys.executable} before the session is made."
        )


def java_major_version(text: str) -> int | None:
    """The major version in what ``java -version`` prints; None if it is not there."""
    found = _VERSION.search(text)
    if found is None:
        return None
    first, second = found.groups()
    return int(second) if first == "1" and second else int(first)  # "1.8.0" is version 8


def _java() -> tuple[str, str]:
    """The Java that Spark's own launcher would take, and where that was said."""
    home = os.environ.get("JAVA_HOME")
    if home:
        return os.path.join(home, "bin", "java"), f"JAVA_HOME is {home}"
    command = shutil.which("java")
    if command is None:
        raise EnvironmentMissingError(
            "Spark needs Java, and there is neither a java on PATH nor a JAVA_HOME.", todo=_TODO
        )
    return command, "found on PATH"
