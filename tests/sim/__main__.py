"""Runs seeds: ``python -m tests.sim --seeds 0:1000 --jobs 2 --events 100000``.

Prints a line for each that fails, with how to replay it, and at the end a summary as JSON. The
exit status is 1 if any failed. With STATEBACKEND_SIM_SEED set, that one seed is run, and its trace
is shown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.sim.branches import reached
from tests.sim.bugs import BUGS
from tests.sim.world import Result, simulate, simulate_task

SEED = "STATEBACKEND_SIM_SEED"


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="from:to, the last one not included")
    parser.add_argument("--events", type=int, default=20_000, help="of each seed, before its calm")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--planted", choices=[*BUGS], help="a planted bug")
    parser.add_argument("--erase-every-s", type=float, default=0.0, help="keys are erased so often")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--out", default="", help="a file for the summary")
    given = parser.parse_args(arguments)
    if os.environ.get(SEED):
        return _replay(int(os.environ[SEED]), given)
    first, _, last = given.seeds.partition(":")
    wanted = range(int(first), int(last or int(first) + 1))
    summary = _all(wanted, given)
    text = json.dumps(summary, indent=2)
    print(text)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return 1 if summary["violations"] else 0


def _replay(seed: int, given: argparse.Namespace) -> int:
    result = simulate(
        seed,
        events=given.events,
        bug=BUGS.get(given.planted),
        keep_trace=True,
        erase_every_s=given.erase_every_s,
    )
    print("\n".join(result.trace))
    print(f"seed {seed}: {result.events} events, {result.epochs} epochs, digest {result.digest}")
    for checker, what in result.violations:
        print(f"{checker}: {what}")
    return 1 if result.violations else 0


def _results(wanted: range, given: argparse.Namespace) -> Iterator[Result]:
    bug, erase_every_s = BUGS.get(given.planted), given.erase_every_s
    tasks = ((seed, given.events, bug, erase_every_s) for seed in wanted)
    until_s = time.monotonic() + given.minutes * 60 if given.minutes else float("inf")
    if given.jobs == 1:
        for task in tasks:
            yield simulate_task(task)
            if time.monotonic() > until_s:
                return
        return
    # Spawned, and replaced now and then: what one seed leaves in a process, the next must not see.
    with multiprocessing.get_context("spawn").Pool(given.jobs, maxtasksperchild=50) as pool:
        for result in pool.imap_unordered(simulate_task, tasks):
            yield result
            if time.monotonic() > until_s:
                pool.terminate()
                return


def _all(wanted: range, given: argparse.Namespace) -> dict[str, Any]:
    started_s = time.monotonic()
    counts: Counter[str] = Counter()
    events = epochs = seeds = 0
    virtual_s = 0.0
    violations = []
    for result in _results(wanted, given):
        seeds += 1
        events += result.events
        epochs += result.epochs
        virtual_s += result.virtual_s
        counts.update(result.counts)
        for checker, what in result.violations:
            replay = f"{SEED}={result.seed} python -m tests.sim --events {given.events}"
            if given.erase_every_s:
                replay += f" --erase-every-s {given.erase_every_s:g}"
            if given.planted:
                replay += f" --planted {given.planted!r}"
            found = {"seed": result.seed, "checker": checker, "what": what, "replay": replay}
            violations.append(found)
            print(f"seed {result.seed}: {checker}: {what[:300]}\n  replay: {replay}", flush=True)
        if seeds % 50 == 0:
            print(f"... {seeds} seeds, {events} events", file=sys.stderr, flush=True)
    wall_s = time.monotonic() - started_s
    return {
        "seeds": seeds,
        "first_seed": wanted.start,
        "events": events,
        "epochs": epochs,
        "virtual_hours": round(virtual_s / 3600, 2),
        "wall_s": round(wall_s, 1),
        "events_per_s": round(events / max(wall_s, 1e-9)),
        "jobs": given.jobs,
        "planted": given.planted,
        "violations": violations,
        "branches": dict(reached(counts)),
        "noted": dict(sorted(counts.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
