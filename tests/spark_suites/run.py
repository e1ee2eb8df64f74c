"""Runs the tests that Spark has for its stateful operators in Python, with our state.

``python -m tests.spark_suites``. The tests are those of the installed PySpark: it has them in its
``python/lib/pyspark.zip``, which its Python workers import from. Nothing of them is kept here. Each
class of tests has a session of its own, as its authors wrote it; `statebackend.install` is called
for it, and nothing else is changed.

A test that fails must be one of `tests.spark_suites.known_failures`, and its failure must contain
what is said there. Any other failure is a defect of ours, and so is a known one that passes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.spark_suites.known_failures import KNOWN, Known

_TWS = ("", "_checkpoint_v2", "_state_variable", "_state_variable_checkpoint_v2")
SUITES = (  # below pyspark.sql.tests.pandas
    *(f"streaming.test_{flavour}transform_with_state{part}"
      for flavour in ("", "pandas_") for part in _TWS),
    "streaming.test_tws_tester",
    "test_pandas_grouped_map_with_state",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one test: `passed`, `skipped`, `internals`, `difference` or `defect`."""

    suite: str
    test: str
    kind: str
    why: str
    seconds: float


class Recorder(unittest.TestResult):
    """Takes each test's outcome down, and says it at once."""

    def __init__(self, suite: str) -> None:
        super().__init__()
        self.suite = suite
        self.outcomes: list[Outcome] = []
        self._started_s = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        """Begins the test's time."""
        super().startTest(test)
        self._started_s = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        """A pass; of a test that is known to fail: a defect of the list."""
        known = known_for(self.suite, test)
        if known:
            self._add(test, "defect", f"passes, and should fail ({known.why})")
        else:
            self._add(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Skipped by Spark's own decorator."""
        self._add(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """An assertion of the test itself."""
        self.addError(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """Any failure: known by its text, or a defect."""
        text = "".join(traceback.format_exception(*err))
        known = known_for(self.suite, test)
        if known and known.text in text:
            self._add(test, known.kind, known.why)
        else:
            print(text, file=sys.stderr, flush=True)
            self._add(test, "defect", text.strip().splitlines()[-1][:300])

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        """A part that failed is the test's failure; unittest says nothing more of the test then."""
        if err is not None:
            self.addError(test, err)

    def _add(self, test: unittest.TestCase, kind: str, why: str) -> None:
        seconds = round(time.monotonic() - self._started_s, 1)
        name = getattr(test, "_testMethodName", str(test))
        self.outcomes.append(Outcome(self.suite, name, kind, why, seconds))
        print(f"{kind:10} {self.suite} {name} ({seconds} s) {why}", flush=True)


def find_sparks_tests() -> None:
    """Make ``pyspark.sql.tests`` importable, which is in PySpark's zip file only."""
    import pyspark.sql

    package = Path(pyspark.sql.__file__).parents[1]
    pyspark.sql.__path__.append(str(package / "python" / "lib" / "pyspark.zip" / "pyspark" / "sql"))


def known_for(suite: str, test: unittest.TestCase) -> Known | None:
    """What is known of a test's failure; None: it must pass."""
    name = getattr(test, "_testMethodName", "")
    for one in KNOWN:
        if name in one.tests and any(part in suite for part in one.modules):
            return one
    return None


def run_suite(suite: str, only: str) -> list[Outcome]:
    """Run the tests of one module in whose names the pattern `only` is found."""
    import statebackend

    module = importlib.import_module(f"pyspark.sql.tests.pandas.{suite}")
    recorder = Recorder(suite)
    for case in vars(module).values():
        if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
            continue
        if case.__module__ != module.__name__:
            continue

        class Installed(case):  # type: ignore[misc,valid-type]
            @classmethod
            def setUpClass(cls) -> None:
                super().setUpClass()
                statebackend.install(cls.spark)

            @classmethod
            def tearDownClass(cls) -> None:
                statebackend.uninstall(cls.spark)
                super().tearDownClass()

        Installed.__name__ = Installed.__qualname__ = case.__name__
        names = unittest.TestLoader().getTestCaseNames(Installed)
        chosen = unittest.TestSuite(Installed(name) for name in names if re.search(only, name))
        if chosen.countTestCases():
            chosen.run(recorder)
    return recorder.outcomes


def table(outcomes: list[Outcome]) -> str:
    """The counts by suite, and the reasons of what failed."""
    kinds = ("passed", "skipped", "internals", "difference", "defect")
    lines = [f"| suite | {' | '.join(kinds)} |", "| --- |" + " --- |" * len(kinds)]
    for suite in [*dict.fromkeys(one.suite for one in outcomes), "all"]:
        found = [one.kind for one in outcomes if suite in (one.suite, "all")]
        lines.append(f"| {suite} | " + " | ".join(str(found.count(kind)) for kind in kinds) + " |")
    reasons = [(one.kind, one.why) for one in outcomes if one.kind not in ("passed", "skipped")]
    lines += ["", "| count | kind | why |", "| --- | --- | --- |"]
    lines += [f"| {reasons.count(one)} | {one[0]} | {one[1]} |" for one in dict.fromkeys(reasons)]
    return "\n".join(lines)


def main() -> int:
    """Run the suites; 1 if there is a defect."""
    parser = argparse.ArgumentParser(prog="python -m tests.spark_suites", description=__doc__)
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--only", default="", help="a pattern of tests' names")
    parser.add_argument("--json", type=Path, help="a file for every test's outcome")
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    report = given.json and given.json.resolve()  # before the working directory changes
    with tempfile.TemporaryDirectory(prefix="spark-suites-", ignore_cleanup_errors=True) as scratch:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        find_sparks_tests()
        os.chdir(scratch)  # Spark leaves its warehouse in the working directory
        for suite in given.suite or SUITES:
            outcomes += run_suite(suite, given.only)
    if report:
        report.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    print("\n" + table(outcomes))
    return int(any(one.kind == "defect" for one in outcomes))
