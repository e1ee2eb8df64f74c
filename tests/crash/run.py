"""Every crash point of every step: ``python -m tests.crash``. Prints JSON; exit 1 if any is bad.

``--part 1/20`` takes a twentieth of all cuts.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.crash.continuous_life import (
    ContinuousKind,
    ContinuousLife,
    lived_continuous,
    try_continuous,
)
from tests.crash.cuts import check_of, try_cuts
from tests.crash.erasing import check_erasing, recorded_erasing
from tests.crash.failures import Failed, try_failures
from tests.crash.life import Kind, Life, lived
from tests.crash.other_states import (
    check_operator_state,
    check_savepoint_cut,
    recorded_operator_state,
    recorded_savepoint,
)
from tests.crash.requests import try_requests
from tests.crash.sides import check_rewind, check_spill, recorded_rewind, recorded_spill
from tests.crash.sink import try_sink

KINDS = {
    "small bases, synchronous": Kind(),
    "small bases, asynchronous": Kind(asynchronous=True),
    "bases of files, synchronous": Kind(files=True),
    "bases of files, asynchronous": Kind(files=True, asynchronous=True),
}
CONTINUOUS = {
    "continuous, small bases": ContinuousKind(),
    "continuous, bases of files": ContinuousKind(files=True),
}
SIDES = {
    "rewind": (recorded_rewind, check_rewind),
    "spill": (recorded_spill, check_spill),
    "operator state": (recorded_operator_state, check_operator_state),
    "savepoint": (recorded_savepoint, check_savepoint_cut),
    "erase": (recorded_erasing, check_erasing),
}
PIECES = 2  # a scenario is given to each process in so many: equal disks are opened once in each
MEMORY = "/dev/shm"


@dataclass
class Found:
    """What one scenario showed: counts by step of the protocol, and what went wrong."""

    operations: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    disks: int = 0
    failures: int = 0
    typed_errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Another part of it."""
        self.operations = self.operations or other.operations
        self.cuts += other.cuts
        self.disks += other.disks
        self.failures += other.failures
        self.typed_errors += other.typed_errors
        self.violations += other.violations


Share = tuple[int, int]
Task = Callable[[Path, Share], Found]


@dataclass(frozen=True)
class LifeCuts:
    """Power cuts in a recorded life."""

    life: Life

    def __call__(self, root: Path, share: Share) -> Found:
        """Try a share of them."""
        tried = try_cuts(self.life.ops, check_of(self.life), root, share=share)
        return Found(tried.operations, tried.cuts, tried.images, violations=tried.violations)


@dataclass(frozen=True)
class ContinuousCuts:
    """Power cuts in a recorded life of a continuous job."""

    life: ContinuousLife

    def __call__(self, root: Path, share: Share) -> Found:
        """Try a share of them."""
        tried = try_continuous(self.life, root, share)
        return Found(tried.operations, tried.cuts, tried.images, violations=tried.violations)


@dataclass(frozen=True)
class SideCuts:
    """Power cuts in a step beside it."""

    name: str

    def __call__(self, root: Path, share: Share) -> Found:
        """Try a share of them."""
        record, check = SIDES[self.name]
        (root / "life").mkdir()
        recorder, first = record(root / "life")
        tried = try_cuts(recorder.ops, check, root / "cuts", first=first, share=share)
        return Found(tried.operations, tried.cuts, tried.images, violations=tried.violations)


@dataclass(frozen=True)
class Requests:
    """Cuts between requests to an object store."""

    kind: Kind

    def __call__(self, root: Path, share: Share) -> Found:
        """Try a share of them."""
        tried = try_requests(self.kind, root, share)
        return Found(tried.requests, tried.cuts, violations=tried.violations)


@dataclass(frozen=True)
class Failures:
    """Operations that fail with EIO or ENOSPC, and a power cut at the end."""

    kind: Kind

    def __call__(self, root: Path, share: Share) -> Found:
        """Try a share of them."""
        return _failures(try_failures(self.kind, root, share=share))


@dataclass(frozen=True)
class SinkFailures:
    """Operations of a sink of files that fail, and a power cut at the end."""

    def __call__(self, root: Path, share: Share) -> Found:
        """Try a share of them."""
        return _failures(try_sink(root, share))


def _failures(failed: Failed) -> Found:
    return Found(
        Counter({"file operations": failed.operations}),
        failures=failed.failures,
        typed_errors=failed.errors,
        violations=failed.violations,
    )


def scenarios(root: Path) -> Iterator[tuple[str, Task]]:
    """All of them, by name; lives are recorded here, once."""
    for name in SIDES:
        yield f"power cut: {name}", SideCuts(name)
    yield "failing disk: sink", SinkFailures()
    for name, continuous in CONTINUOUS.items():
        yield f"power cut: {name}", ContinuousCuts(lived_continuous(root / name, continuous))
    for name, kind in KINDS.items():
        yield f"object store, {name}", Requests(kind)
        yield f"power cut, {name}", LifeCuts(lived(root / name, kind))
        yield f"failing disk, {name}", Failures(kind)


def _run(task: Task, share: Share) -> Found:
    logging.disable(logging.CRITICAL)
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="statebackend-crash-", dir=place) as path:
        return task(Path(path), share)


def _plain(found: Found) -> dict[str, Any]:
    values = ((one.name, getattr(found, one.name)) for one in fields(found))
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in values}


def _report(found: dict[str, Found], seconds: float) -> dict[str, Any]:
    return {
        "scenarios": {name: _plain(one) for name, one in found.items()},
        "operations": sum(sum(one.operations.values()) for one in found.values()),
        "cuts": sum(sum(one.cuts.values()) for one in found.values()),
        "disks_opened": sum(one.disks for one in found.values()),
        "failures": sum(one.failures for one in found.values()),
        "violations": sum(len(one.violations) for one in found.values()),
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", default="0/1", help="which part of all cuts: 0/20 to 19/20")
    parser.add_argument("--only", default="", help="scenarios whose name has this in it")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    if not 0 <= part < parts:
        parser.error(f"--part {options.part}: the parts are 0/{parts} to {parts - 1}/{parts}")
    logging.disable(logging.CRITICAL)
    started_s, found = time.monotonic(), dict[str, Found]()
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    spawn = multiprocessing.get_context("spawn")  # RocksDB survives no fork
    with (
        tempfile.TemporaryDirectory(prefix="statebackend-crash-", dir=place) as path,
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool,
    ):
        for name, task in scenarios(Path(path)):
            if options.only not in name:
                continue
            # A start of a continuous job is dear, and most of its cuts leave equal disks.
            count = options.jobs * (1 if isinstance(task, ContinuousCuts) else PIECES)
            pieces = [(part + piece * parts, parts * count) for piece in range(count)]
            one = found.setdefault(name, Found())
            for done in pool.map(_run, [task] * count, pieces):
                one.add(done)
            cuts = sum(one.cuts.values())
            print(
                f"{time.monotonic() - started_s:6.0f} s  {name}: {cuts} cuts, "
                f"{one.failures} failures, {len(one.violations)} violations",
                file=sys.stderr,
                flush=True,
            )
    report = _report(found, time.monotonic() - started_s)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 1 if report["violations"] else 0
