"""Checks the reasons for what the simulations do not reach: the tests named must reach it.

    python -m tests.sim.reach --holes holes.json --out bench/results/reach.md
    python -m tests.sim.reasons --holes holes.json --data reached.db tests/snapshot tests/recovery

Runs tests, notes for each which lines and branches of the protocol it goes through, and compares:
under each function with a reason of its own, every hole must be reached by a test that the reason
names. For the functions that only the "rest" of their file speaks of, it proposes tests. What no
test reaches is listed, too: such a reason must say why, in words.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest
from coverage.python import PythonFileReporter

from tests.sim.reach import ROOT, Hole, files_of_protocol, reasons

__all__ = ["main", "proposed", "reached_by", "run_tests"]

Reached = Mapping[tuple[str, int, int], set[str]]


class _ByTest:
    """A plugin of pytest: what is measured belongs to the test that runs."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test, with its fixtures."""
        self._measured.switch_context(item.nodeid.partition("[")[0])
        return (yield)


def _measured(data: str) -> coverage.Coverage:
    include = [str(one) for one in files_of_protocol()]
    return coverage.Coverage(data_file=data, branch=True, include=include, config_file=False)


def run_tests(tests: Sequence[str], data: str) -> None:
    """Run tests, and keep what they go through in a file, with what it has already."""
    measured = _measured(data)
    if Path(data).exists():
        measured.load()
    measured.start()
    pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[_ByTest(measured)])
    measured.stop()
    measured.save()


def reached_by(data: str, holes: Iterable[Hole]) -> Reached:
    """By file, line and end of a way (0: the line itself), the tests that went there."""
    files = {str(ROOT / name): name for name in {hole.file for hole in holes}}
    return _read(data, files, _measured(data))


def _read(path: str, files: Mapping[str, str], measured: coverage.Coverage) -> Reached:
    found: defaultdict[tuple[str, int, int], set[str]] = defaultdict(set)
    ways: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    query = (
        "select file.path, context.context, fromno, tono from arc "
        "join file on file.id = file_id join context on context.id = context_id"
    )
    with sqlite3.connect(path) as data:
        for file, test, start, end in data.execute(query):
            if file in files and test.count("::") == 1:  # a machine's steps are no test to name
                ways[file, test].append((start, end))
    readers = {file: PythonFileReporter(file, measured) for file in files}
    for (file, test), arcs in ways.items():
        name = files[file]
        for start, end in readers[file].translate_arcs(arcs):
            found[name, start, end].add(test)
            for line in (start, end):
                if line > 0:
                    found[name, line, 0].add(test)
    return found


def proposed(holes: Sequence[Hole], reached: Reached) -> tuple[list[str], list[Hole]]:
    """A few tests that together reach what can be reached of some holes, and the other holes."""
    left = {hole for hole in holes if reached.get((hole.file, hole.line, hole.to))}
    untold = [hole for hole in holes if hole not in left]
    tests: list[str] = []
    while left:
        by_test: defaultdict[str, set[Hole]] = defaultdict(set)
        for hole in left:
            for test in reached[hole.file, hole.line, hole.to]:
                by_test[test].add(hole)
        best = max(sorted(by_test), key=lambda test: len(by_test[test]))
        tests.append(best)
        left -= by_test[best]
    return sorted(tests), untold


def _named(why: str) -> list[str]:
    return re.findall(r"tests/[\w/]+\.py::\w+", why)


def _judged(holes: list[Hole], reached: Reached) -> Iterator[dict[str, Any]]:
    """Each function with holes: what its reason names, what would do, what nobody reaches."""
    known = reasons()
    by_function: defaultdict[tuple[str, str], list[Hole]] = defaultdict(list)
    for hole in holes:
        if (hole.file, "*") not in known:
            by_function[hole.file, hole.function].append(hole)
    for (file, function), own in by_function.items():
        why = known.get((file, function), "")
        named = set(_named(why))
        lacking = [
            hole for hole in own if not named & reached.get((hole.file, hole.line, hole.to), set())
        ]
        tests, untold = proposed(own, reached)
        yield {
            "file": file,
            "function": function,
            "why": why or f"(rest) {known.get((file, 'rest'), '')}",
            "lacking": [f"{hole.line}: {hole.text}" for hole in lacking],
            "tests": tests,
            "nobody": [f"{hole.line}: {hole.text}" for hole in untold],
        }


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.reasons", description=__doc__)
    parser.add_argument("--holes", required=True, help="as `tests.sim.reach --holes` wrote it")
    parser.add_argument("--out", default="", help="a file for all that was found, as JSON")
    parser.add_argument(
        "--data", required=True, help="a file for what tests go through; is added to"
    )
    parser.add_argument("tests", nargs="*", help="as pytest takes them; none: those of the file")
    given = parser.parse_args(arguments)
    holes = [Hole(**one) for one in json.loads(Path(given.holes).read_text(encoding="utf-8"))]
    if given.tests:
        run_tests(given.tests, given.data)
    judged = list(_judged(holes, reached_by(given.data, holes)))
    if given.out:
        Path(given.out).write_text(json.dumps(judged, indent=1), encoding="utf-8")
    false = 0
    for one in judged:
        own = not one["why"].startswith("(rest)")
        if own and _named(one["why"]) and one["lacking"]:
            false += 1
            print(f"{one['file']} {one['function']}: not reached by the tests named:")
            print("".join(f"    {hole}\n" for hole in one["lacking"]), end="")
    print(f"{len(judged)} functions, {false} reasons whose tests do not reach all of it")
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
