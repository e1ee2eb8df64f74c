"""Which checker catches which planted bug, and which fault strikes where, from a real run.

``python -m tests.planted --jobs 2 --out bench/results/planted.md``. Each bug is run seed by seed
until something shows. The exit status is 1 if one was not caught, or not by a checker that is meant
to see it. Both tables are Markdown.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.kills import strikes as kills
from tests.planted.bug import PlantedBug, Simulation
from tests.planted.finding import SIMULATIONS, Found, everything, find, simulation
from tests.support.faults import DRILLED, Fault, struck

__all__ = ["bugs_table", "faults_table", "main"]

_Task = tuple[str, str, int]


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--seeds", type=int, help="of each bug, at most (its simulation's own)")
    parser.add_argument("--only", action="append", help="bugs of this name")
    parser.add_argument("--simulation", action="append", choices=[*SIMULATIONS])
    parser.add_argument("--faults", type=int, default=48, help="clean seeds, for the faults")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at a time")
    parser.add_argument("--out", type=Path, help="a file for the tables")
    given = parser.parse_args(arguments)
    wanted = [
        (of, bug)
        for of, bug in everything()
        if bug.name in (given.only or [bug.name]) and of.name in (given.simulation or SIMULATIONS)
    ]
    tasks = [(of.name, bug.name, given.seeds or of.seeds) for of, bug in wanted]
    names = list(dict.fromkeys(of.name for of, _ in wanted))
    # Spawned: what one bug's runs leave in a process, the next must not see.
    quiet = logging.disable, (logging.CRITICAL,)
    with multiprocessing.get_context("spawn").Pool(given.jobs, *quiet, maxtasksperchild=1) as pool:
        found = dict(zip(tasks, pool.imap(_found, tasks), strict=True))
        counts = dict(
            zip(names, pool.map(_struck, [(n, given.faults) for n in names]), strict=True)
        )
    rows = [(of, bug, found[task]) for (of, bug), task in zip(wanted, tasks, strict=True)]
    text = f"{bugs_table(rows)}\n\n{faults_table(counts, given.faults)}\n"
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    return 0 if all(one and one.checker in bug.shows_in for _, bug, one in rows) else 1


def _found(task: _Task) -> Found | None:
    of, bug, seeds = simulation(task[0]), task[1], task[2]
    return find(of, of.bugs[bug], range(seeds))


def _struck(task: tuple[str, int]) -> Counter[Fault]:
    of, seeds = simulation(task[0]), task[1]
    # Trials take seconds of real time each.
    tried = range(min(seeds, of.clean_seeds_max))
    return struck(sum((of.simulate(seed, None).counts for seed in tried), Counter[str]()))


def bugs_table(rows: Sequence[tuple[Simulation, PlantedBug, Found | None]]) -> str:
    """A line for each bug: who saw it first, and with which seed."""
    lines = ["| in | planted bug | the rule, as it is broken | caught by | at seed | issue 18 |"]
    lines.append("|---|---|---|---|---|---|")
    for of, bug, found in rows:
        caught = found.checker if found else "**nobody**"
        if found and found.checker not in bug.shows_in:
            caught += " (**not meant to**)"
        at = str(found.seed) if found else ""
        lines.append(f"| {of.name} | {bug.name} | {bug.what} | {caught} | {at} | {bug.issue18} |")
    caught_count = sum(found is not None for *_, found in rows)
    by = Counter(f"{of.name}: {found.checker}" for of, _, found in rows if found)
    lines += ["", f"{caught_count} of {len(rows)} caught. {_listed(by)}"]
    return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {times}" for name, times in sorted(counts.items())) + "."


def faults_table(counts: dict[str, Counter[Fault]], seeds: int) -> str:
    """A line for each kind of fault: how often it struck in clean runs, and who else has it."""
    killed = {fault.name for fault in kills.ALL}
    lines = [f"| fault | what happens | {' | '.join(counts)} | kills | drills |"]
    lines.append("|---|---|" + "---|" * (len(counts) + 2))
    for fault in Fault:
        times = [f"{of[fault]:,}" if of[fault] else "" for of in counts.values()]
        drills = ", ".join(name for name, kinds in DRILLED.items() if fault in kinds)
        marks = _row([*times, "yes" if fault in killed else "", drills])
        lines.append(f"| {fault} | {fault.sentence} | {marks} |")
    lines += ["", f"How often each struck in {seeds} seeds without a planted bug, or fewer."]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return " | ".join(cells)
