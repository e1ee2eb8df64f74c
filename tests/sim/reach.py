"""Measures which lines and branches of the protocol the simulations reach.

    python -m tests.sim.reach --jobs 2 --out bench/results/reach.md

Both simulations are run: that of micro-batches, and that of continuous jobs. Every line or branch
that no seed reached is listed under its function. `unreached.toml` gives the reason for each, by
file and function. With ``--check`` a hole without a reason, and a reason without a hole, is an
error.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import coverage

__all__ = ["Hole", "Reach", "files_of_protocol", "holes_of", "main", "reasons"]

ROOT = Path(__file__).parents[2]
REASONS = Path(__file__).with_name("unreached.toml")
# The protocol, and the drivers of both modes. What is left out has a reason in `unreached.toml`.
PROTOCOL = (
    "snapshot/{protocol,barriers,formats,log,retention}/*.py",
    "recovery/{decide,local,restore,savepoints,inspect}/*.py",
    "statebackend/runtime/{driver,worker}/*.py",
    "statebackend/spark/{start,worker}/*.py",
    "statebackend/continuous/{driver,worker,job}/*.py",
)
# Where a decision of the protocol is made, "rest" is no reason: each function needs its own.
DECISIONS = (
    "snapshot/",
    "recovery/decide/",
    "statebackend/runtime/driver/",
    "statebackend/spark/start/",
    "statebackend/continuous/driver/",
)


@dataclass(frozen=True, order=True)
class Hole:
    """A line, or a way from one line to another, that was never taken.

    Attributes:
        file: from the root. function: its qualified name, "" for the module itself.
        line: the first number. text: the source there, and where the way would lead.
        to: of a way, where it would lead, below 0 at the function's end; 0: it is a line.
    """

    file: str
    function: str
    line: int
    text: str
    to: int = 0


@dataclass
class Reach:
    """Figures of one file, and its holes."""

    lines: int = 0
    lines_reached: int = 0
    branches: int = 0
    branches_reached: int = 0
    holes: list[Hole] = field(default_factory=list)


def files_of_protocol() -> list[Path]:
    """What is measured."""
    found: set[Path] = set()
    for pattern in PROTOCOL:
        head, brace, rest = pattern.partition("{")
        names, _, tail = rest.partition("}")
        for name in names.split(",") if brace else [""]:
            found.update(ROOT.glob(head + name + tail))
    return sorted(found)


def _run(task: tuple[str, int, int], *, folder: str) -> int:
    """Run one seed of a simulation, by its module, in this process under coverage."""
    of, seed, events = task
    measured = coverage.Coverage(
        data_file=f"{folder}/coverage",
        data_suffix=f"{of}.{seed}",
        branch=True,
        concurrency="greenlet",
        include=[str(path) for path in files_of_protocol()],
        config_file=False,
    )
    measured.start()
    try:
        # After the start: modules are measured as they load.
        result = import_module(of).simulate(seed, events=events)
    finally:
        measured.stop()
        measured.save()
    if result.violations:
        print(f"{of}, seed {seed}: {result.violations}", file=sys.stderr)
    return int(result.events)


def measure(tasks: Iterable[tuple[str, int, int]], jobs: int) -> tuple[dict[str, Any], int]:
    """Run seeds, each in a process of its own.

    Args:
        tasks: the module of a simulation, a seed, how many events.

    Returns:
        coverage's report, as its JSON has it; how many events there were.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, maxtasksperchild=1) as pool:
            total = sum(pool.imap_unordered(partial(_run, folder=folder), tasks))
        whole = coverage.Coverage(
            data_file=f"{folder}/coverage",
            branch=True,
            include=[str(path) for path in files_of_protocol()],
            config_file=False,
        )
        whole.config.exclude_list += [
            r"if TYPE_CHECKING:",
            r"^\s*\.\.\.$",
            r"raise NotImplementedError",
            r"class .*\(Protocol",
        ]
        whole.combine([folder])
        out = f"{folder}/report.json"
        whole.json_report(outfile=out)
        return json.loads(Path(out).read_text(encoding="utf-8")), total


def _functions(source: str) -> dict[int, str]:
    """By line the qualified name of the function that it is in."""
    found: dict[int, str] = {}

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = f"{name}.{child.name}" if name else child.name
                if not isinstance(child, ast.ClassDef):
                    for line in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                        found[line] = own
                walk(child, own)
            else:
                walk(child, name)

    walk(ast.parse(source), "")
    return found


def holes_of(file: str, source: str, known: Mapping[str, Any]) -> list[Hole]:
    """What one file's part of the report says was not reached.

    Args:
        known: ``missing_lines`` and ``missing_branches`` (pairs of lines; a target below 0 is the
            end of the function).
    """
    lines, functions = source.splitlines(), _functions(source)
    missing = set(known["missing_lines"])

    def text(line: int) -> str:
        return lines[line - 1].strip() if 0 < line <= len(lines) else "its end"

    holes = [Hole(file, functions.get(n, ""), n, text(n)) for n in sorted(missing)]
    for start, end in known["missing_branches"]:
        if start in missing:
            continue
        if end not in missing:  # else the line that it leads to says it
            holes.append(
                Hole(file, functions.get(start, ""), start, f"{text(start)} -> {text(end)}", end)
            )
    return sorted(holes)


def reach_of(report: Mapping[str, Any]) -> dict[str, Reach]:
    """By file what was reached, of coverage's report."""
    found = {}
    for path, known in sorted(report["files"].items()):
        name = str(Path(path).resolve().relative_to(ROOT)) if Path(path).is_absolute() else path
        figures = known["summary"]
        found[name] = Reach(
            lines=figures["num_statements"],
            lines_reached=figures["covered_lines"],
            branches=figures["num_branches"],
            branches_reached=figures["covered_branches"],
            holes=holes_of(name, (ROOT / name).read_text(encoding="utf-8"), known),
        )
    return found


def reasons() -> dict[tuple[str, str], str]:
    """Why something is not reached, by file and function.

    "rest" stands for all functions of a file that have no reason of their own (not where decisions
    are made), "*" for a file that no simulation runs: something else is in its place.
    """
    if not REASONS.exists():
        return {}
    tables = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    return {(file, name): why for file, table in tables.items() for name, why in table.items()}


def _why(hole: Hole, known: Mapping[tuple[str, str], str]) -> str:
    names = [hole.function, "*", *([] if hole.file.startswith(DECISIONS) else ["rest"])]
    return next((known[hole.file, name] for name in names if (hole.file, name) in known), "")


def _tests_gone(whys: Iterable[str]) -> list[str]:
    """Tests that reasons name, and that are not there."""
    named = {one for why in whys for one in re.findall(r"tests/[\w/]+(?:\.py)?(?:::\w+)?", why)}
    gone = []
    for one in sorted(named):
        path, _, test = one.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if test and (ROOT / path).exists() else ""
        if not (ROOT / path).exists() or (test and f"def {test}(" not in text):
            gone.append(one)
    return gone


def _markdown(found: Mapping[str, Reach], known: Mapping[tuple[str, str], str]) -> Iterable[str]:
    yield "| file | lines | reached | branches | reached | holes with a reason | without |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, one in found.items():
        without = [hole for hole in one.holes if not _why(hole, known)]
        yield (
            f"| `{name}` | {one.lines} | {_percent(one.lines_reached, one.lines)} "
            f"| {one.branches} | {_percent(one.branches_reached, one.branches)} "
            f"| {len(one.holes) - len(without)} | {len(without)} |"
        )
    whole = [one for name, one in found.items() if (name, "*") not in known]
    lines, branches = sum(one.lines for one in whole), sum(one.branches for one in whole)
    yield (
        f"| all that is simulated | {lines} "
        f"| {_percent(sum(one.lines_reached for one in whole), lines)} "
        f"| {branches} | {_percent(sum(one.branches_reached for one in whole), branches)} | | |"
    )
    yield ""
    yield "Not reached, and why:"
    yield ""
    for name, one in found.items():
        for function in dict.fromkeys(hole.function for hole in one.holes):
            holes = [hole for hole in one.holes if hole.function == function]
            if (name, "*") in known and (name, function) not in known:
                continue
            where = ", ".join(str(hole.line) for hole in holes)
            why = _why(holes[0], known) or "**no reason**"
            yield f"- `{name}` `{function or 'module'}`, {where}: {why}"
    for (name, function), why in known.items():
        if function == "*":
            yield f"- `{name}`, whole: {why}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _range(seeds: str) -> range:
    first, _, last = seeds.partition(":")
    return range(int(first), int(last))


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.reach", description=__doc__)
    parser.add_argument("--seeds", default="0:36", help="from:to, the last one not included")
    parser.add_argument("--events", type=int, default=10_000, help="of each seed, before its calm")
    parser.add_argument("--continuous", default="0:16", help="seeds of continuous jobs")
    parser.add_argument("--continuous-events", type=int, default=6_000, help="of each of those")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", default="", help="a file for the tables, as Markdown")
    parser.add_argument("--holes", default="", help="a file for what was not reached, as JSON")
    parser.add_argument("--check", action="store_true", help="fail where reasons and holes differ")
    parser.add_argument("--judge", default="", help="a file of --holes: nothing is run")
    given = parser.parse_args(arguments)
    if given.judge:
        told = json.loads(Path(given.judge).read_text(encoding="utf-8"))
        return int(_differ([Hole(**one) for one in told], reasons()))
    wanted = (
        ("tests.sim.world", given.seeds, given.events),
        ("tests.sim.continuous.world", given.continuous, given.continuous_events),
    )
    tasks = [(of, seed, events) for of, seeds, events in wanted for seed in _range(seeds)]
    report, events = measure(tasks, given.jobs)
    found, known = reach_of(report), reasons()
    command = (
        f"python -m tests.sim.reach --seeds {given.seeds} --events {given.events} "
        f"--continuous {given.continuous} --continuous-events {given.continuous_events}"
    )
    text = "\n".join([f"`{command}`: {events} events.", "", *_markdown(found, known)])
    if given.out:
        Path(given.out).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    holes = [hole for one in found.values() for hole in one.holes]
    if given.holes:
        Path(given.holes).write_text(json.dumps([asdict(hole) for hole in holes]), "utf-8")
    return 1 if _differ(holes, known) and given.check else 0


def _differ(holes: list[Hole], known: Mapping[tuple[str, str], str]) -> bool:
    """Whether there are holes without a reason, or reasons without a hole; says which."""
    there = {(hole.file, hole.function) for hole in holes}
    there |= {(hole.file, "*") for hole in holes}
    there |= {(hole.file, "rest") for hole in holes if not hole.file.startswith(DECISIONS)}
    without = [hole for hole in holes if not _why(hole, known)]
    stale = [f"{file} {name}" for file, name in known if (file, name) not in there]
    stale += [f"{test}, which is not there" for test in _tests_gone(known.values())]
    print(f"{len(holes)} holes, {len(without)} without a reason; {len(stale)} reasons too many")
    for hole in without:
        print(f"no reason for {hole.file} {hole.function}, {hole.line}: {hole.text}")
    for one in stale:
        print(f"no hole for the reason of {one}")
    return bool(without or stale)


if __name__ == "__main__":
    sys.exit(main())
