"""Disks and clocks that fail in a process on demand: a small library that is preloaded into it.

`shim.c` has the library and says what each file of the control folder means. It is compiled where
it is needed, so that nothing machine-dependent is shipped; without a C compiler its faults are
skipped. Nothing outside the processes that preload it is touched, and root is no exception to it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from recovery.drill.faults.stage import CannotStrikeError, Stage

__all__ = ["Shim", "build_shim", "environment", "shim_of"]

_SOURCE: Final = Path(__file__).with_name("shim.c")
_COMPILERS: Final = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT_S: Final = 60.0
_PROBE_TIMEOUT_S: Final = 60.0
_SPLITTING: Final = frozenset(" :;$\t\n")  # the loader takes a name with these for several, or none
_STRUCK: Final = 7
_PROBE: Final = f"""
import errno, os, sys
try:
    os.fsync(os.open(sys.argv[1], os.O_RDONLY))
except OSError as error:
    sys.exit({_STRUCK} if error.errno == errno.EIO else 1)
"""

Call = Literal["unlink", "rename", "link"]
When = Literal["before", "after"]


def build_shim(folder: Path) -> Path | None:
    """Compile the library, and try it on a process.

    Args:
        folder: for the library. Where its path has a character at which the loader splits, a
            temporary folder is taken, which goes with this process.

    Returns:
        the library; None where there is no compiler, or what it made has no effect here.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    place = _loadable(folder.resolve())
    if compiler is None or place is None:
        return None
    source = _SOURCE.read_bytes()
    library = place / f"shim-{hashlib.blake2b(source, digest_size=8).hexdigest()}.so"
    if not (library.exists() or _compile(compiler, library)):
        return None
    return library if _has_effect(library) else None


def _loadable(folder: Path) -> Path | None:
    """The folder, or a temporary one in its place; None if that is no better."""
    if not _SPLITTING & set(str(folder)):
        return folder
    if _SPLITTING & set(tempfile.gettempdir()):
        return None
    place = tempfile.mkdtemp(prefix="statebackend-shim-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return Path(place)


def _compile(compiler: str, library: Path) -> bool:
    library.parent.mkdir(parents=True, exist_ok=True)
    draft = library.with_name(f".{library.name}.{os.getpid()}")
    command = [compiler, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(draft)]
    try:
        subprocess.run(
            [*command, str(_SOURCE), "-ldl", "-lpthread"],
            check=True,
            capture_output=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    draft.replace(library)
    return True


def _has_effect(library: Path) -> bool:
    """Whether a process under the library meets a fault that is turned on for it."""
    with tempfile.TemporaryDirectory() as scratch:
        control, disk = Path(scratch, "control"), Path(scratch, "disk")
        disk.mkdir()
        Shim(control).fail_syncs(disk)
        try:
            probe = subprocess.run(
                [sys.executable, "-c", _PROBE, str(disk)],
                env={**os.environ, **environment(library, control)},
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
            )
        except (OSError, subprocess.SubprocessError):
            return False
    return probe.returncode == _STRUCK


def environment(library: Path, control: Path) -> dict[str, str]:
    """The variables of a process that is to fail on demand, and of all that it starts.

    Args:
        library: what `build_shim` made. control: the folder whose files turn faults on.
    """
    before = os.environ.get("LD_PRELOAD", "")
    return {
        "LD_PRELOAD": f"{library} {before}".strip(),
        "SB_SHIM": str(control.resolve()),
    }


class Shim:
    """The switches of processes that have the library preloaded and share a control folder.

    Paths are told as they really are, without links. A change counts 50 ms later at most.
    """

    def __init__(self, control: Path) -> None:
        self._control = control
        control.mkdir(parents=True, exist_ok=True)

    def fail_syncs(self, below: Path) -> None:
        """EIO for whoever syncs a file at or below a path."""
        self._tell("fsync-fails", str(below.resolve()))

    def fill_disk(self, below: Path) -> None:
        """ENOSPC for whoever writes or makes something at or below a path."""
        self._tell("disk-full", str(below.resolve()))

    def forbid_writes(self, below: Path) -> None:
        """EROFS for whoever would change something at or below a path."""
        self._tell("read-only", str(below.resolve()))

    def shift_clock(self, offset_ms: int) -> None:
        """The wall clock is off by so much; monotonic clocks go on as they are."""
        self._forget("shifted")
        self._tell("clock-offset-ms", str(offset_ms))

    def shifted(self, offset_ms: int) -> set[int]:
        """The processes that were told a time that is off by so much, since `shift_clock`."""
        try:
            lines = (self._control / "shifted").read_text().splitlines()
        except FileNotFoundError:
            return set()
        told = (line.partition(" ") for line in lines)
        return {int(pid) for pid, _, by_ms in told if by_ms == str(offset_ms)}

    def hold_at(self, call: Call, part: str, *, when: When = "before", nth: int = 1) -> None:
        """Whoever calls this on a path with this part in it waits there, until `release`.

        Args:
            when: before the call has had its effect, or after it.
            nth: from which such call of a process on.
        """
        self._forget("held")
        self._tell("hold-at", f"{when} {call} {nth} {part}")

    def kill_at(self, call: Call, part: str, *, when: When = "before", nth: int = 1) -> None:
        """As `hold_at`, but it ends there by SIGKILL."""
        self._tell("kill-at", f"{when} {call} {nth} {part}")

    def held(self) -> str:
        """Who is held where, as "pid call path"; empty while nobody is."""
        try:
            return (self._control / "held").read_text().strip()
        except FileNotFoundError:
            return ""

    def refused(self) -> bool:
        """Whether anybody was refused something since `forget_refusals`."""
        return (self._control / "refused").exists()

    def forget_refusals(self) -> None:
        """Look for new ones from now on."""
        self._forget("refused")

    def release(self) -> None:
        """Nobody is held or killed any more."""
        for name in ("hold-at", "kill-at", "held"):
            self._forget(name)

    def calm(self) -> None:
        """Every fault is over."""
        for path in self._control.iterdir():
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def calm_afterwards(self) -> Iterator[Shim]:
        """Whatever happens, no fault outlasts the block."""
        try:
            yield self
        finally:
            self.calm()

    def _tell(self, name: str, text: str) -> None:
        draft = self._control / f".{name}"
        draft.write_text(text)
        draft.replace(self._control / name)

    def _forget(self, name: str) -> None:
        (self._control / name).unlink(missing_ok=True)


def shim_of(stage: Stage) -> Shim:
    """The switches of a drill's processes. Raises `CannotStrikeError` where there are none."""
    if stage.shim is None:
        raise CannotStrikeError("the drill runs without the preloaded library (a C compiler)")
    return Shim(stage.shim)
