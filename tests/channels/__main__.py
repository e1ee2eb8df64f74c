"""Runs seeds: ``python -m tests.channels --seeds 0:20000``.

Each is a whole dataflow with its interleavings and faults, run to its end in one thread. Prints a
line for each that fails, with how to replay it, and at the end a summary as JSON. The exit status
is 1 if any failed. With STATEBACKEND_CHANNELS_SEED set, that one seed is run, and its trace is
shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from tests.channels.branches import unreached
from tests.channels.bugs import BUGS
from tests.channels.world import simulate

SEED = "STATEBACKEND_CHANNELS_SEED"


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.channels", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="from:to, the last one not included")
    parser.add_argument("--planted", choices=[*BUGS], help="a planted bug")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--out", default="", help="a file for the summary")
    given = parser.parse_args(arguments)
    if os.environ.get(SEED):
        return _replay(int(os.environ[SEED]), given)
    first, _, last = given.seeds.partition(":")
    summary = _all(range(int(first), int(last or int(first) + 1)), given)
    text = json.dumps(summary, indent=2)
    print(text)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return 1 if summary["violations"] else 0


def _replay(seed: int, given: argparse.Namespace) -> int:
    result = simulate(seed, bug=BUGS.get(given.planted), keep_trace=True)
    print("\n".join(result.trace))
    print(f"seed {seed}: {result.steps} steps, {result.cuts} cuts, digest {result.digest}")
    for checker, what in result.violations:
        print(f"{checker}: {what}")
    return 1 if result.violations else 0


def _all(wanted: range, given: argparse.Namespace) -> dict[str, Any]:
    started_s = time.monotonic()
    counts: Counter[str] = Counter()
    steps = cuts = seeds = 0
    violations = []
    for seed in wanted:
        result = simulate(seed, bug=BUGS.get(given.planted))
        seeds += 1
        steps += result.steps
        cuts += result.cuts
        counts.update(result.counts)
        for checker, what in result.violations:
            replay = f"{SEED}={seed} python -m tests.channels"
            if given.planted:
                replay += f" --planted {given.planted!r}"
            violations.append({"seed": seed, "checker": checker, "what": what, "replay": replay})
            print(f"seed {seed}: {checker}: {what[:300]}\n  replay: {replay}", flush=True)
        if seeds % 1000 == 0:
            print(f"... {seeds} seeds, {cuts} cuts", file=sys.stderr, flush=True)
        if given.minutes and time.monotonic() > started_s + given.minutes * 60:
            break
    wall_s = time.monotonic() - started_s
    return {
        "seeds": seeds,
        "first_seed": wanted.start,
        "steps": steps,
        "cuts": cuts,
        "wall_s": round(wall_s, 1),
        "steps_per_s": round(steps / max(wall_s, 1e-9)),
        "planted": given.planted,
        "violations": violations,
        "unreached": unreached(counts),
        "noted": dict(sorted(counts.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
