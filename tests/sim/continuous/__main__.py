"""Continuous jobs by their seeds: ``python -m tests.sim.continuous --seeds 0:100``.

With STATEBACKEND_SIM_SEED set, that one seed is run, and its trace is shown. The exit status is 1
if a checker saw something.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import Any

from tests.sim.__main__ import SEED
from tests.sim.continuous.bugs import BUGS, simulate_task
from tests.sim.continuous.world import Result, simulate


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.continuous", description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="first:last, without the last")
    parser.add_argument("--events", type=int, default=6_000, help="of each seed, before its calm")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--planted", choices=[*BUGS], help="a planted bug")
    given = parser.parse_args(arguments)
    if os.environ.get(SEED):
        return _replay(int(os.environ[SEED]), given)
    first, _, last = given.seeds.partition(":")
    tasks = [(seed, given.events, given.planted) for seed in range(int(first), int(last))]
    started_s = time.monotonic()
    # Spawned: what one seed leaves in a process, the next must not see.
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=20) as pool:
        summary = _summed(list(pool.imap_unordered(simulate_task, tasks)), given)
    print(json.dumps({**summary, "wall_s": round(time.monotonic() - started_s, 1)}, indent=2))
    return 1 if summary["violations"] else 0


def _replay(seed: int, given: argparse.Namespace) -> int:
    result = simulate(seed, events=given.events, bug=BUGS.get(given.planted), keep_trace=True)
    print("\n".join(result.trace))
    print(f"seed {seed}: {result.events} events, {result.epochs} epochs, digest {result.digest}")
    for checker, what in result.violations:
        print(f"{checker}: {what}")
    return 1 if result.violations else 0


def _summed(results: list[Result], given: argparse.Namespace) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    violations = []
    for result in results:
        counts.update(result.counts)
        for checker, what in result.violations:
            replay = f"{SEED}={result.seed} python -m tests.sim.continuous --events {given.events}"
            if given.planted:
                replay += f" --planted {given.planted!r}"
            found = {"seed": result.seed, "checker": checker, "what": what, "replay": replay}
            violations.append(found)
    return {
        "seeds": len(results),
        "events": sum(result.events for result in results),
        "epochs": sum(result.epochs for result in results),
        "rows": sum(result.rows for result in results),
        "virtual_hours": round(sum(result.virtual_s for result in results) / 3600, 2),
        "planted": given.planted,
        "violations": violations,
        "noted": dict(sorted(counts.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
