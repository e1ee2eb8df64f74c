"""Breaks promises one by one, each in a copy of the sources, and sees whether the tests notice.

``python -m tests.mutations --jobs 2``. The tests are those of the README's command: what only the
full suite would notice counts as missed. Before anything is broken, the same tests must pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.mutations.promises import BROKEN, BrokenPromise

__all__ = ["broken_text", "main"]

ROOT: Final = Path(__file__).parents[2]
_SELECTED: Final = re.compile(r'-m pytest .*?-m "([^"]+)" --durations=20 \{posargs:tests\}')
_HERE: Final = re.compile(r"^here = (.+)$", re.MULTILINE)
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; the exit status is 1 if a promise was broken and no test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", help="promises whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="promises at a time")
    parser.add_argument("--passed", action="store_true", help="they passed just before")
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args(arguments)
    wanted = [one for one in BROKEN if any(part in one.name for part in given.only or [""])]
    tests = sorted({test for one in wanted for test in one.tests})
    failed = "" if given.passed else _first_failure(None, tests)
    if failed:
        print(f"{failed} fails although nothing is broken.", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(given.jobs) as pool:
        noticed = list(pool.map(lambda one: _first_failure(one, one.tests), wanted))
    lines = ["| promise | broken in | noticed by |", "| --- | --- | --- |"]
    for one, by in zip(wanted, noticed, strict=True):
        lines.append(f"| {one.name} | `{one.path}` | {f'`{by}`' if by else '**nobody**'} |")
    text = "\n".join([*lines, "", f"{sum(map(bool, noticed))} of {len(wanted)} noticed.", ""])
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    return 0 if all(noticed) else 1


def selection() -> str:
    """What ``tox -e tests`` selects, in the words of pytest's ``-m``.

    Raises:
        LookupError: tox.ini does not say it as it used to.
    """
    text = (ROOT / "tox.ini").read_text(encoding="utf-8")
    found, here = _SELECTED.search(text), _HERE.search(text)
    if found is None or here is None:
        raise LookupError("tox.ini has no pytest command for all tests")
    return found[1].replace("{[spark]here}", here[1])


def broken_text(one: BrokenPromise) -> str:
    """The module, broken.

    Raises:
        LookupError: what is to be changed does not stand there once.
    """
    text = (ROOT / one.path).read_text(encoding="utf-8")
    if text.count(one.before) != 1:
        raise LookupError(f"{one.path} has {text.count(one.before)} times: {one.before!r}")
    return text.replace(one.before, one.after)


def _first_failure(one: BrokenPromise | None, tests: Sequence[str]) -> str:
    """The first test that fails in a copy of the sources; "" if all pass.

    Raises:
        RuntimeError: no test was selected, or pytest did not get to running them.
    """
    with tempfile.TemporaryDirectory(prefix="statebackend-mutation-") as folder:
        copy = Path(folder) / "sources"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        if one is not None:
            (copy / one.path).write_text(broken_text(one), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-m", selection(), *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    failed = _FAILED.search(done.stdout)
    if failed is None and done.returncode != 0:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[1] if failed else ""
