"""Where the Python processes of a side spend their time, by samples of py-spy (on PyPI)."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

__all__ = ["sampled", "shares"]

_TOP = 30


def sampled(pids: Sequence[int], seconds: float, folder: Path) -> dict[str, list[str]]:
    """The functions that use the processor most: by themselves, and with what they call.

    Args:
        folder: for what py-spy writes.
    """
    tool = shutil.which("py-spy")
    if tool is None:
        return {"error": ["there is no py-spy on PATH"]}
    runs = []
    for pid in pids:
        path = folder / f"profile-{pid}"
        command = [tool, "record", "-p", str(pid), "-d", str(round(seconds)), "-r", "200"]
        command += ["-f", "raw", "-o", str(path), "--native", "--nonblocking"]
        quiet = subprocess.DEVNULL
        runs.append((path, subprocess.Popen(command, stdout=quiet, stderr=quiet)))
    text = ""
    for path, run in runs:
        run.wait(seconds + 60)
        with contextlib.suppress(OSError):
            text += path.read_text(encoding="utf-8")
    return shares(text)


def shares(raw: str) -> dict[str, list[str]]:
    """Of samples in py-spy's raw form: a stack and a number on each line."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, number = line.rpartition(" ")
        frames = [_short(frame) for frame in stack.split(";")]
        own[frames[-1]] += int(number)
        for frame in set(frames):
            whole[frame] += int(number)
    total = sum(own.values()) or 1
    return {
        name: [f"{100 * n / total:5.1f}% {frame}" for frame, n in of.most_common(_TOP)]
        for name, of in (("own", own), ("with what they call", whole))
    }


def _short(frame: str) -> str:
    """Its function and its file, without the line."""
    name, _, place = frame.partition(" (")
    return f"{name} ({place.rpartition(':')[0] or place.rstrip(')')})" if place else name
