"""Starting sides, one at a time, each in a process of its own, and reading what they report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.machine import ROOT, busy_share

__all__ = ["SideFailed", "batch_stats", "check_output", "run_side", "run_task", "session_of"]

_LOG_LINES = 40
_STOP_S = 30.0


class SideFailed(RuntimeError):
    """A side did not come to its end, or said something wrong."""


def run_side(
    side: str,
    *,
    work: Path,
    source: Path,
    partitions: int,
    timeout_s: float,
    name: str = "counter",
    store: str | None = None,
    settings: dict[str, Any] | None = None,
    conf: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run one side to its end in a new folder under ``work``, which is removed.

    Args:
        name: of the work. store: where our state is durable, if not in that folder.

    Raises:
        SideFailed: with the end of its log.
    """
    task = {
        "side": side,
        "name": name,
        "input": str(source),
        "partitions": partitions,
        "timeout_s": timeout_s,
        "settings": settings or {},
        "conf": conf or {},
    }
    if store:
        task["store"] = store
    return run_task("bench.side", task, work / side)


def run_task(module: str, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run ``python -m module`` on a task in a new folder, which is removed; what it reports.

    Args:
        task: has ``side``, ``name``, ``timeout_s``; where its folder, its store (unless it names
            one) and its result are is added.

    Raises:
        SideFailed: with the end of its log.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    result, log = folder / "result.json", folder / "log"
    where = {"work": str(folder), "store": f"file://{folder}/store", "result": str(result)}
    (folder / "task.json").write_text(json.dumps(where | task), encoding="utf-8")
    busy = busy_share()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(folder / "task.json")],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(task["timeout_s"] + 120)
        finally:
            _end(child)
    if code or not result.exists():
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        said = "\n".join(tail)
        raise SideFailed(f"side {task['side']!r}, {task['name']}, ended with {code}:\n{said}")
    report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    report["busy_before"] = busy
    shutil.rmtree(folder)
    return report


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait until nothing of a side runs any more: a JVM that still stops would disturb the next."""
    deadline_s = time.monotonic() + _STOP_S
    while (left := session_of(child.pid)) and time.monotonic() < deadline_s:
        if child.poll() is None:  # we were interrupted
            break
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def session_of(leader: int) -> list[int]:
    """The processes of the session that a side was started in: its own, its JVM's, its workers'."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, _, _, session = _stat_fields(entry)
                if int(session) == leader and state != "Z":
                    found.append(int(entry.name))
    return found


def _stat_fields(entry: Path) -> list[str]:
    # After the name, which may hold anything but ends the last parenthesis: state, parent, group,
    # session.
    return (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]


def batch_stats(report: dict[str, Any], first: int, last: int, rows: int) -> dict[str, Any]:
    """What the counted batches ``first`` to ``last`` took.

    ``total_s`` is from the start of the first to the commit file of the last: everything between
    is in it. ``batch_s`` is Spark's own figure for each.

    Raises:
        SideFailed: a counted batch is missing.
    """
    batches = {b["batch"]: b for b in report["batches"]}
    missing = [n for n in range(first, last + 1) if n not in batches]
    if missing:
        raise SideFailed(f"side {report['side']!r} has no figures for batches {missing}")
    counted = [batches[n] for n in range(first, last + 1)]
    total_s = counted[-1]["committed_s"] - counted[0]["start_s"]
    batch_s = [b["duration_ms"]["triggerExecution"] / 1000 for b in counted]
    phases = sorted({name for b in counted for name in b["duration_ms"]})
    return {
        "batches": len(counted),
        "total_s": round(total_s, 3),
        "rows_per_s": round(rows * len(counted) / total_s, 1),
        "batch_s": batch_s,
        "batch_median_s": round(statistics.median(batch_s), 4),
        "cpu_s_per_batch": {
            kind: round(statistics.fmean(b["cpu_s"][kind] for b in counted), 3)
            for kind in ("jvm", "python")
        },
        "phases_ms": {
            name: statistics.median(b["duration_ms"].get(name, 0) for b in counted)
            for name in phases
        },
        "compilations": report["compilations"],
        "busy_before": report["busy_before"],
    }


def check_output(report: dict[str, Any], expected: Sequence[Mapping[str, int]]) -> None:
    """Whether each batch read and gave what it must, and nothing came after them.

    Args:
        expected: one for each batch with rows in or out, as :class:`bench.works.Work` counted them.

    Raises:
        SideFailed: naming side, batch and both figures. A side that is wrong is not fast.
    """
    side, stateful = report["side"], report["side"] in ("spark", "ours")
    batches = {batch["batch"]: batch for batch in report["batches"]}
    wanted: dict[int, Mapping[str, int]] = dict(enumerate(expected))
    if not stateful:  # what goes in comes out, and no timer makes a batch of its own
        rows = {number: one["input_rows"] for number, one in wanted.items() if one["input_rows"]}
        wanted = {number: {"input_rows": n, "output_rows": n} for number, n in rows.items()}
    if missing := sorted(set(wanted) - set(batches)):
        raise SideFailed(f"side {side!r} did not run batches {missing}")
    for number, batch in batches.items():
        nothing = dict.fromkeys(expected[0], 0)
        for name, value in wanted.get(number, nothing).items():
            found = batch[name]
            if found is None and not value:  # Spark may leave out what nothing was observed of
                continue
            if found != value:
                raise SideFailed(f"side {side!r}, batch {number}: {name} is {found}, not {value}")
