"""Processor time of a side's processes over time: what a busy machine falsifies least.

A thread reads `/proc` ten times a second; processes that are new are looked for every two seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np

__all__ = ["CpuSampler", "used_s"]

_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_S = 0.1
_SEARCH_EVERY = 20


class CpuSampler:
    """Samples the processes of this session (the side, its JVM, its Python workers)."""

    def __init__(self) -> None:
        self._session = os.getsid(0)
        self._known: dict[int, str] = {}
        self._used_s: dict[int, float] = {}
        self._samples: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """Seconds of processor time between two moments (of ``time.time``), by kind of process."""
        times, java, python = np.array(self._samples).T
        found = {}
        for name, used in (("jvm", java), ("python", python)):
            before, after = np.interp([start_s, end_s], times, used)
            found[name] = round(float(after - before), 3)
        return found

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(_SAMPLE_S):
            if count % _SEARCH_EVERY == 0:
                self._search()
            count += 1
            for pid in self._known:
                with contextlib.suppress(OSError):
                    self._used_s[pid] = used_s(pid)
            used = {"jvm": 0.0, "python": 0.0}
            for pid, kind in self._known.items():
                # Of one that has ended the last reading stays.
                used[kind] += self._used_s.get(pid, 0.0)
            self._samples.append((time.time(), used["jvm"], used["python"]))

    def _search(self) -> None:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in self._known:
                continue
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                if os.getsid(pid) == self._session:
                    name = (entry / "comm").read_text(encoding="utf-8").strip()
                    self._known[pid] = "jvm" if name == "java" else "python"


def used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
