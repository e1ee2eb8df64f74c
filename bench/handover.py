"""From one worker's open store to another's: `python -m bench handover`.

A process keeps a store open with an epoch that is applied and not flushed; another process of the
host asks for it at the door. Measured is each step: the question and its answer (which holds the
flush and the close), and opening what was let go. The holder's interpreter is idle, or runs Python
on its main thread all the time, as a worker does that is at another subtask; then with other switch
intervals. For comparison: a store that is kept open by the asker itself, and one that is closed.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import ROOT
from recovery.local import local_copies as local_module
from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock, StorePool, StorePoolSettings
from statebackend import system
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.store import Marker, RocksSettings, RocksStore

__all__ = ["handover", "handover_text"]

_VALUE_BYTES = 24
_CASES: tuple[tuple[str, bool, float], ...] = (
    ("holder idle", False, 0.005),
    ("holder busy", True, 0.005),
    ("holder busy, switch interval 1 ms", True, 0.001),
    ("holder busy, switch interval 0.1 ms", True, 0.0001),
)


def handover(*, keys: int, repeats: int, work: Path) -> dict[str, Any]:
    """Milliseconds of each step, medians over ``repeats``, for each kind of holder."""
    changed = keys // 10
    prepared = work / "prepared"
    store = RocksStore.open(str(prepared))
    _apply(store, np.arange(keys), 0)
    store.close()
    found: dict[str, Any] = {"keys": keys, "changed_keys": changed, "repeats": repeats}
    cases = {}
    for number, (name, busy, interval_s) in enumerate(_CASES):
        folder = work / f"case-{number}"
        cases[name] = _case(folder, prepared, busy, interval_s, changed, repeats)
    found["cases"] = cases
    found["kept by the asker"] = _own(work / "own", prepared, changed, repeats)
    return found


def _subtask(folder: Path, number: int, store_pool: StorePool | None) -> LocalSubtask:
    clock = Clock(system.monotonic_s, system.sleep_s)
    ids = (f"i{number}-{n}" for n in itertools.count())
    return LocalSubtask(
        str(folder),
        job="bench",
        operator="op",
        key_groups=KeyGroupRange(8 * number, 8 * number + 7),
        new_id=lambda: next(ids),
        clock=clock,
        store_pool=store_pool,
    )


def _store_pool() -> StorePool:
    clock = Clock(system.monotonic_s, system.sleep_s)
    return StorePool(clock, StorePoolSettings(open_limit=1000, idle_close_s=600.0))


def _apply(store: RocksStore, keys: Any, epoch: int) -> None:
    encoded = [int(key).to_bytes(8, "big") for key in sorted(keys)]
    value = epoch.to_bytes(8, "big") * (_VALUE_BYTES // 8)
    store.apply(encoded, [value] * len(encoded), _marker(epoch))


def _marker(epoch: int) -> Marker:
    return Marker(
        job_id="", operator="op", key_group_start=0, key_group_end=0, epoch=epoch, chain="c"
    )


def _case(
    folder: Path, prepared: Path, busy: bool, interval_s: float, changed: int, repeats: int
) -> dict[str, dict[str, float]]:
    folder.mkdir()
    command = [sys.executable, "-m", "bench.handover", str(folder), str(prepared)]
    command += [str(int(busy)), str(interval_s), str(changed), str(repeats)]
    holder = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "ready\n"
        asked = [_ask(folder, number) for number in range(repeats)]
        holder.stdin.write("end\n")
        holder.stdin.flush()
        inside = json.loads(holder.stdout.readline())
    finally:
        holder.stdin.close()
        holder.wait(30)
    steps = {name: [one[name] for one in asked] for name in asked[0]} | inside
    return {name: _spread(values) for name, values in steps.items()}


def _spread(values: list[float]) -> dict[str, float]:
    """The fastest beside the median: what else the machine does only ever adds."""
    return {"median": round(statistics.median(values), 2), "fastest": round(min(values), 2)}


def _ask(folder: Path, number: int) -> dict[str, float]:
    """Take one store over, as a task does."""
    subtask = _subtask(folder, number, None)
    doors: list[float] = []
    plain = local_module.ask_for

    def ask_for(path: Path, timeout_s: float) -> bool:
        start_s = time.perf_counter()
        answer = plain(path, timeout_s)
        doors.append((time.perf_counter() - start_s) * 1000)
        return answer

    local_module.ask_for = ask_for
    try:
        start_s = time.perf_counter()
        held, reason = subtask.acquire(10.0)
        acquired_s = time.perf_counter()
    finally:
        local_module.ask_for = plain
    assert not reason, reason
    store = held.open_store(RocksSettings())
    opened_s = time.perf_counter()
    marker = store.marker()
    assert marker is not None
    assert marker.epoch == 1
    held.release()
    return {
        "question to answer": sum(doors),
        "acquire, all of it": (acquired_s - start_s) * 1000,
        "open": (opened_s - acquired_s) * 1000,
        "together": (opened_s - start_s) * 1000,
    }


def _own(folder: Path, prepared: Path, changed: int, repeats: int) -> dict[str, Any]:
    """The same where nobody else has it: kept open here, and closed at the end of each epoch."""
    folder.mkdir()
    store_pool = _store_pool()
    _fill(folder, prepared, store_pool, changed, repeats)
    kept, closed = [], []
    for number in range(repeats):
        subtask = _subtask(folder, number, store_pool)
        start_s = time.perf_counter()
        held, _ = subtask.acquire(10.0)
        held.open_store(RocksSettings())
        kept.append((time.perf_counter() - start_s) * 1000)
        held.release()
        alone = _subtask(folder, number, None)
        start_s = time.perf_counter()
        held, _ = alone.acquire(10.0)
        held.open_store(RocksSettings())
        closed.append((time.perf_counter() - start_s) * 1000)
        held.release()
    store_pool.close()
    return {
        "taken, kept open": _spread(kept),
        "taken, closed": _spread(closed),
    }


def _fill(folder: Path, prepared: Path, store_pool: StorePool, changed: int, stores: int) -> None:
    for number in range(stores):
        subtask = _subtask(folder, number, store_pool)
        held = subtask.create()
        shutil.copytree(prepared, held.path / "db")
        _apply(held.open_store(RocksSettings()), np.arange(0, changed * 10, 10), 1)
        subtask.give_back(held)


# --- the holder's process ----------------------------------------------------------------------


def main() -> int:
    """Keep stores open until told to end; then say how long flushes and closes took."""
    folder, prepared, busy, interval_s, changed, repeats = sys.argv[1:]
    sys.setswitchinterval(float(interval_s))
    spans: dict[str, list[float]] = {"holder: flush": [], "holder: close": []}
    plain = RocksStore.close

    def close(store: RocksStore) -> None:
        start_s = time.perf_counter()
        store.flush()
        flushed_s = time.perf_counter()
        plain(store)
        spans["holder: flush"].append((flushed_s - start_s) * 1000)
        spans["holder: close"].append((time.perf_counter() - flushed_s) * 1000)

    store_pool = _store_pool()
    _fill(Path(folder), Path(prepared), store_pool, int(changed), int(repeats))
    RocksStore.close = close  # type: ignore[method-assign]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    print("ready", flush=True)
    rows = {"k": 1}
    while not ended.is_set():
        if int(busy):
            for _ in range(1000):
                rows = {"k": rows["k"] + 1}
        else:
            ended.wait(0.05)
    print(json.dumps(spans), flush=True)
    return 0


def handover_text(found: dict[str, Any]) -> str:
    """The figures as a table to read."""
    lines = [
        f"Handing over an open store of {found['keys']:,} keys, {found['changed_keys']:,} of them "
        f"changed and not flushed, ms, median of {found['repeats']} (the fastest):"
    ]
    cases = {**found["cases"], "nobody to ask": found["kept by the asker"]}
    for case, steps in cases.items():
        each = (f"{name} {ms['median']} ({ms['fastest']})" for name, ms in steps.items())
        lines.append(f"  {case}: " + ", ".join(each))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
