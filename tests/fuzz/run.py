"""Damaged inputs by the million: ``python -m tests.fuzz --seed 0 --inputs 1000000 --jobs 2``.

Each kind of input runs in a process of its own, so that one which dies is seen and costs no other.
What may come of an input: a typed error of ours, or the meaning that the undamaged one has; where
there is no digest by which damage could be told, any meaning that is sound. Never another
exception, more than a second of processor time, or more memory than the limit. Prints JSON; exit 1
if there was anything else. An input is made anew by its seed, kind and number.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import random
import resource
import subprocess
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from tests.fuzz import local, moved, spoken, stored, typed
from tests.fuzz.target import Target

__all__ = ["KINDS", "fuzzed", "kinds", "main"]

KINDS: Final = (
    "record",
    "record, its tail",
    "manifest in a record that is sealed",
    "delta",
    "delta without a digest",
    "delta without a digest, streamed",
    "delta with other lengths",
    "file index of a base",
    "object name",
    "request to the coordinator",
    "reply of the coordinator",
    "endpoint of a session",
    "schema as DDL",
    "schema as JSON",
    "declaration of a state",
    "row of a state",
    "key of a state",
    "pointers and marks of a local copy",
    "marker of a local store",
    "block that was spilled",
    "count of a list state",
    "layout of a store in parts",
    "layout of a store in parts, signed",
    "file index of a base in parts",
    "lists of an operator",
    "broadcast state of an operator",
    "savepoint.json",
)

_MODULES: Final = (stored, spoken, typed, local, moved)
_SLOW_S: Final = 1.0
_HANG_S: Final = 300
_WARM: Final = 20  # inputs that may take longer: modules are loaded
_RSS_BYTES: Final = 1 << 30
_MEMORY_BYTES: Final = 16 << 30  # of address space, most of which nobody touches
_SHOWN: Final = 20


def kinds() -> Iterator[Target]:
    """All kinds of inputs."""
    for module in _MODULES:
        yield from module.targets()


def fuzzed(target: Target, seed: int, first: int, inputs: int) -> dict[str, Any]:
    """Give a target its inputs of these numbers, and judge."""
    outcomes: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    examples: dict[str, int] = {}
    slowest_s = 0.0
    start = (seed << 64) + (zlib.crc32(target.name.encode()) << 32)
    for number in range(first, first + inputs):
        if (number - first) % 1000 == 0:
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
        given = target.make(random.Random(start + number))
        before_s = time.process_time()
        try:
            outcomes[target.take(given)] += 1
        except Exception as error:
            what = _said(error)
            violations[what] += 1
            examples.setdefault(what, number)
        took_s = time.process_time() - before_s
        if number - first >= _WARM:
            slowest_s = max(slowest_s, took_s)
            if took_s > _SLOW_S:
                violations[f"more than {_SLOW_S} s"] += 1
                examples.setdefault(f"more than {_SLOW_S} s", number)
    faulthandler.cancel_dump_traceback_later()
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rss_bytes > _RSS_BYTES:
        violations[f"{rss_bytes} bytes of memory"] += 1
    return {
        "inputs": inputs,
        "outcomes": dict(outcomes),
        "slowest_s": round(slowest_s, 3),
        "rss_bytes": rss_bytes,
        "violations": sum(violations.values()),
        "found": [
            f"{count} times, first by input {examples.get(what, -1)}: {what}"
            for what, count in violations.most_common(_SHOWN)
        ],
    }


def _said(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[::-1][:4]
    where = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__}: {str(error)[:120]!r} ({where})"


def _in_a_process(name: str, seed: int, first: int, inputs: int) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.fuzz", "--kind", name]
    command += ["--seed", str(seed), "--first", str(first), "--inputs", str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return name, json.loads(done.stdout)
    except ValueError:
        said = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
        return name, {"inputs": inputs, "violations": 1, "found": [said]}


def _all(seed: int, inputs: int, jobs: int) -> int:
    each = -(-inputs // len(KINDS))
    started_s, found = time.monotonic(), dict[str, dict[str, Any]]()
    with ThreadPoolExecutor(jobs) as pool:
        for name, one in pool.map(lambda name: _in_a_process(name, seed, 0, each), KINDS):
            found[name] = one
            said = f"{one['inputs']} inputs, {one['violations']} violations"
            print(f"{name}: {said}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started_s
    total = sum(one["inputs"] for one in found.values())
    violations = sum(one["violations"] for one in found.values())
    report = {
        "seed": seed,
        "kinds": found,
        "inputs": total,
        "violations": violations,
        "seconds": round(seconds, 1),
        "inputs_per_s": round(total / seconds),
    }
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 1 if violations else 0


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all kinds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--kind", default="", help="this kind alone, in this process")
    parser.add_argument("--first", type=int, default=0, help="the number of its first input")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if not options.kind:
        return _all(options.seed, options.inputs, options.jobs)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    target = next(one for one in kinds() if one.name == options.kind)
    report = fuzzed(target, options.seed, options.first, options.inputs)
    print(json.dumps(report))
    return 1 if report["violations"] else 0
