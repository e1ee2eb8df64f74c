"""From `start()` to the first output, at first and after `kill -9`: `python -m bench starts`.

A counter over files, through Spark's `transformWithState` and ours, sides in turn. Each start is a
process and a JVM of its own. When some batches are committed, everything of it is killed; the next
start goes on from there, and its counts are checked. The way is cut in three:

* the JVM's: from the process's start to the session;
* Spark's: from there to the first call of the processor in a task, without our part;
* ours: `install`, our part of making the frame and of `start()`, and opening the state in the task.

In a cold JVM the first plan, the first job and the first broadcast take long, whoever asks for
them: if ours do, Spark's part gets shorter. So compare the sides by the time from the session to
the first call of the processor, which has Spark's part and ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.data import write_batches
from bench.machine import ROOT, busy_share
from bench.runner import SideFailed, session_of

__all__ = ["starts", "starts_text"]

_SIDES = ("spark", "ours")
_KINDS = ("first", "after kill -9")
_COMMITTED = 3  # batches before a kill
_BATCHES = 40
_PARTITIONS = 2
_TIMEOUT_S = 300.0
_POLL_S = 0.02

Notes = list[dict[str, Any]]


def starts(
    *,
    keys: int,
    rounds: int,
    sides: Sequence[str] = _SIDES,
    profile: bool = False,
    work: Path,
    progress: Any,
) -> dict[str, Any]:
    """Seconds of each part, for both sides and both kinds of start.

    Args:
        keys: of the state; each batch has all of them once. profile: also the driver's functions,
            from `install` to the end of `start()`; it slows what it measures.
        progress: called with a line for each start.
    """
    source = write_batches(work / "input", keys=keys, rows=keys, full=_BATCHES)
    sides = [side for side in _SIDES if side in sides]
    found: dict[str, Any] = {side: {kind: [] for kind in _KINDS} for side in sides}
    profiles: dict[str, str] = {}
    for number in range(rounds):
        for side in sides:
            folder = work / f"{side}-{number}"
            folder.mkdir()
            for kind in _KINDS:
                one, notes = _start(side, kind, source, folder, keys, profile)
                found[side][kind].append(one)
                progress(f"round {number + 1}/{rounds}, {side}, {kind}: {_line(one)}")
                if text := _of(notes, "started").get("profile"):
                    profiles[f"{side}, {kind}"] = text
    medians = {side: {kind: _medians(found[side][kind]) for kind in _KINDS} for side in sides}
    return {
        "keys": keys,
        "partitions": _PARTITIONS,
        "rounds": found,
        "median": medians,
        "profiles": profiles,
    }


def _start(
    side: str, kind: str, source: Path, folder: Path, keys: int, profile: bool
) -> tuple[dict[str, Any], Notes]:
    notes = folder / f"notes-{_KINDS.index(kind)}"
    begins = _committed(folder)
    task = {
        "side": side,
        "input": str(source),
        "work": str(folder),
        "partitions": _PARTITIONS,
        "notes": str(notes),
        "profile": profile,
        "timeout_s": _TIMEOUT_S,
    }
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    busy = busy_share()
    with _killed_at_last(folder) as (child, spawned_s):
        _wait(child, lambda: _committed(folder) >= begins + _COMMITTED, folder)
    said = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    for one in said:
        if one["name"] == "output" and (one["wrong"] or one["keys"] != keys):
            raise SideFailed(f"side {side!r}, {kind}: {one}: each key is counted once a batch")
    if kind != _KINDS[0] and _of(said, "output")["batch"] < begins:
        raise SideFailed(f"side {side!r} began before batch {begins}, which was not committed")
    return {**_parts(side, said, spawned_s), "busy_before": busy}, said


@contextlib.contextmanager
def _killed_at_last(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A side's process, and when it was started; it, its JVM and its workers are killed."""
    with (folder / "log").open("wb") as output:
        spawned_s = time.time()
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.startside", str(folder / "task.json")],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield child, spawned_s
        finally:
            while left := session_of(child.pid):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                child.poll()
                time.sleep(_POLL_S)
            child.wait()


def _wait(child: subprocess.Popen[bytes], good: Any, folder: Path) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not good():
        if child.poll() is not None or time.monotonic() > deadline_s:
            tail = (folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:]
            raise SideFailed(f"the start in {folder} did not get far enough:\n{tail}")
        time.sleep(_POLL_S)


def _committed(folder: Path) -> int:
    """How many batches are."""
    return len(list((folder / "checkpoint" / "commits").glob("[0-9]*")))


def _of(notes: Notes, name: str) -> dict[str, Any]:
    """The first of that name."""
    return next(one for one in notes if one["name"] == name)


def _parts(side: str, notes: Notes, spawned_s: float) -> dict[str, Any]:
    at = {name: _of(notes, name)["at_s"] for name in ("session", "frame", "task", "output")}
    output = _of(notes, "output")
    ours, in_jvm_s = _ours(notes) if side == "ours" else ({}, 0.0)
    return {
        "jvm_s": round(at["session"] - spawned_s, 3),
        "spark_s": round(at["task"] - at["session"] - sum(ours.values()), 3),
        "ours_s": round(sum(ours.values()), 3),
        "session_to_first_call_s": round(at["task"] - at["session"], 3),
        "ours_in_jvm_s": round(in_jvm_s, 3),
        "ours_parts_s": {name: round(seconds, 3) for name, seconds in ours.items()},
        "start_to_first_output_s": round(at["output"] - at["frame"], 3),
        "process_to_first_output_s": round(at["output"] - spawned_s, 3),
        "sources": sorted({source for source, _ in output.get("restores", ())}),
    }


def _ours(notes: Notes) -> tuple[dict[str, float], float]:
    """The seconds of each of our parts; and of all, those in which Spark's JVM worked for it."""
    sparks = _of(notes, "sparks_start")
    found, in_jvm_s = {}, -float(sparks["in_jvm_s"])
    for name, begin, end in (
        ("install", "session", "installed"),
        ("frame", "source", "frame"),
        ("start", "frame", "started"),
    ):
        first, last = _of(notes, begin), _of(notes, end)
        found[name] = last["at_s"] - first["at_s"]
        in_jvm_s += last["in_jvm_s"] - first["in_jvm_s"]
    found["start"] -= sparks["seconds"]
    found["restore"] = max(seconds for _, seconds in _of(notes, "output")["restores"])
    return found, in_jvm_s


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    def median(values: Any) -> float:
        return round(statistics.median(values), 3)

    names = [name for name in found[0] if name.endswith("_s") and name != "ours_parts_s"]
    parts = found[0]["ours_parts_s"]
    return {
        **{name: median(one[name] for one in found) for name in names},
        "ours_parts_s": {
            name: median(one["ours_parts_s"][name] for one in found) for name in parts
        },
    }


def _line(one: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one["ours_parts_s"].items())
    return (
        f"start() to first output {one['start_to_first_output_s']:.2f} s, from the process's start "
        f"{one['process_to_first_output_s']:.2f} s: JVM {one['jvm_s']:.2f}, from the session to "
        f"the first call {one['session_to_first_call_s']:.2f}, of that Spark "
        f"{one['spark_s']:.2f}, ours {one['ours_s']:.2f}"
        + (f" ({parts}; of that {one['ours_in_jvm_s']:.2f} in the JVM)" if parts else "")
    )


def starts_text(found: dict[str, Any]) -> str:
    """The figures to read."""
    rounds = max(len(of[_KINDS[0]]) for of in found["rounds"].values())
    lines = [f"Starts of a counter of {found['keys']:,} keys, medians of {rounds}:"]
    lines += [
        f"  {kind}, {side}: {_line(found['median'][side][kind])}"
        for kind in _KINDS
        for side in found["median"]
    ]
    lines += [f"The driver, {name}:\n{text}" for name, text in found["profiles"].items()]
    return "\n".join(lines)
