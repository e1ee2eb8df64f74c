"""The pytest plugin: what its marker asks of a drill, and what becomes of the test.

Each test runs a small suite of its own, in which `run_drill` answers at once with a report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]

# What `run_drill` is told goes to a file; what it finds is what the job is named after.
CONFTEST = """
import json
from pathlib import Path
import msgspec
import pytest
from recovery.drill.run import runner
from recovery.drill.run.drill_options import named_faults
from recovery.drill.report.drill_report import Struck
from recovery.drill.run.strike_schedule import Strike
from tests.recovery.drill.reports import LOSSES, full_report

CALLS = Path(__file__).with_name("calls.jsonl")

def fault_of(one):
    return one.fault if isinstance(one, Strike) else one

def run_drill(job, *, truth=None, on_progress=None, **told):
    with CALLS.open("a") as file:
        file.write(json.dumps({"job": str(job), "truth": truth and truth.__name__, **told},
                              default=str) + "\\n")
    on_progress("epoch 0 committed")
    asked = [fault.name for fault in map(fault_of, named_faults(told.get("faults", ())))]
    faults = [
        Struck(fault=name, at_s=1.0, at_epoch=0, skipped="no compiler" if job == "skips" else "")
        for name in asked
    ]
    if job == "breaks":
        raise OSError("no Java here")
    report = full_report(job=str(job), command="", faults=faults, asked=asked,
                         seed=told["seed"])
    return msgspec.structs.replace(report, verdict=LOSSES) if job == "loses" else report

@pytest.fixture(autouse=True)
def answered_at_once(monkeypatch):
    monkeypatch.setattr(runner, "run_drill", run_drill)
"""


class Suite:
    """A suite in a folder of its own."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester
        pytester.makeconftest(CONFTEST)
        pytester.syspathinsert(ROOT)
        pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
        self.folder = pytester.path

    def run(self, source: str, *options: str) -> pytest.RunResult:
        self._pytester.makepyfile(test_inner="import pytest\n" + source)
        return self._pytester.runpytest_inprocess(*options)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What `run_drill` was told, in order."""
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Suite:
    return Suite(pytester)


def test_pytest_finds_the_plugin_where_the_package_is_installed() -> None:
    (found,) = entry_points(group="pytest11", name="statebackend_drill")
    assert found.value == "statebackend.pytest_plugin"


def test_a_suite_without_drills_pays_next_to_nothing_for_the_plugin() -> None:
    script = """
import sys
import pytest
before = set(sys.modules)
import statebackend.pytest_plugin
standard = sys.stdlib_module_names
print(sorted(n for n in set(sys.modules) - before if n.partition(".")[0] not in standard))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "['statebackend', 'statebackend.pytest_plugin']"


def test_importing_the_drills_package_loads_none_of_its_modules() -> None:
    script = """
import sys
import recovery.drill
print(sorted(n for n in sys.modules if n.startswith(("recovery", "pyspark", "msgspec"))))
recovery.drill.FaultPlan, recovery.drill.run_drill
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "['recovery', 'recovery.drill']"


@pytest.mark.full  # starts a pytest of its own: some seconds
def test_a_project_with_a_package_recovery_of_its_own_runs_its_tests(tmp_path: Path) -> None:
    (tmp_path / "recovery").mkdir()
    (tmp_path / "recovery" / "__init__.py").write_text("MINE = 1\n")
    (tmp_path / "test_mine.py").write_text(
        "from recovery import MINE\n\n"
        "def test_it(): assert MINE == 1\n\n"
        "def test_drilled(drill): drill('running-totals')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "."],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "your project has another one" in done.stdout


def test_the_marker_is_explained(suite: Suite) -> None:
    suite.run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.drill(faults=*"])


# --- what the drill is told -----------------------------------------------------------------------


def test_the_marker_s_parameters_and_the_call_s_reach_the_drill(suite: Suite) -> None:
    result = suite.run("""
def truth(folder):
    return []

@pytest.mark.drill(faults=["executor-killed"], at_epoch=3, seed=7, cluster="two-hosts")
def test_it(drill):
    report = drill("totals", truth=truth, parallelism=2)
    assert report.verdict.exact
    assert report.seed == 7
""")
    result.assert_outcomes(passed=1)
    (call,) = suite.calls
    folder = Path(call.pop("folder"))
    assert folder.name == "drill-1"
    assert call == {
        "job": "totals",
        "truth": "truth",
        "faults": ["executor-killed"],
        "at_epoch": 3,
        "seed": 7,
        "cluster": "two-hosts",
        "parallelism": 2,
    }


def test_without_a_marker_a_job_is_run_without_faults(suite: Suite) -> None:
    suite.run("def test_it(drill): drill('totals')").assert_outcomes(passed=1)
    assert suite.calls[0].keys() == {"job", "truth", "seed", "folder"}


def test_the_nearest_marker_wins_argument_by_argument(suite: Suite) -> None:
    suite.run("""
@pytest.mark.drill(["driver-killed"], at_epoch=1, commit="async")
class TestThem:
    @pytest.mark.drill(at_epoch=5)
    def test_it(self, drill):
        drill("totals")
""").assert_outcomes(passed=1)
    (call,) = suite.calls
    assert (call["faults"], call["at_epoch"], call["commit"]) == (["driver-killed"], 5, "async")


def test_several_faults_are_one_drill_or_with_each_a_test_of_each(suite: Suite) -> None:
    suite.run("""
@pytest.mark.drill(faults=["driver-killed", "executor-killed"])
def test_together(drill):
    drill("totals")

@pytest.mark.drill(faults=["driver-killed", "executor-killed"], each=True)
def test_each(drill):
    drill("totals")
""").assert_outcomes(passed=3)
    assert [call["faults"] for call in suite.calls] == [
        ["driver-killed", "executor-killed"],
        ["driver-killed"],
        ["executor-killed"],
    ]


def test_faults_are_given_as_the_runner_takes_them(suite: Suite) -> None:
    suite.run("""
from recovery.drill import Strike
from recovery.drill.catalogue import ALL

KILLED = ALL["executor-killed"]
STRIKE = Strike(fault=KILLED, after_epoch=2)

def test_name(drill): drill("totals", faults="executor-killed")
def test_fault(drill): drill("totals", faults=KILLED)
def test_strike(drill): drill("totals", faults=STRIKE)

@pytest.mark.drill(faults=STRIKE, cluster=None, at_epoch=None)
def test_marked(drill): drill("totals")

@pytest.mark.drill(faults=[STRIKE, "driver-killed"], each=True)
def test_each(drill, request):
    assert request.node.name in ("test_each[executor-killed]", "test_each[driver-killed]")
    drill("totals")
""").assert_outcomes(passed=6)
    assert suite.calls[0]["faults"] == ["executor-killed"]
    assert [len(call["faults"]) for call in suite.calls] == [1] * 6
    assert suite.calls[3].keys() == {"job", "truth", "faults", "seed", "folder"}


def test_a_seed_is_drawn_and_the_option_replays_it(suite: Suite) -> None:
    source = """
@pytest.mark.drill(seed=5)
def test_given(drill): drill("loses")

def test_drawn(drill): drill("loses")
"""
    result = suite.run(source)
    result.assert_outcomes(failed=2)
    given, drawn = (call["seed"] for call in suite.calls)
    assert given == 5
    assert 0 <= drawn < 2**31
    result.stdout.fnmatch_lines(
        [f"Replay: pytest 'test_inner.py::test_drawn' --drill-seed {drawn}"]
    )
    suite.run(source, "--drill-seed", "99")
    assert [call["seed"] for call in suite.calls[2:]] == [99, 99]


@pytest.mark.parametrize(
    ("marker", "told"),
    [
        ("at_epoc=3", "*`drill` takes no 'at_epoc', but faults, at_epoch,*"),
        (
            "['executor-kild']",
            "*There is no fault 'executor-kild'. Did you mean 'executor-killed'*",
        ),
        ("each=True", "*`drill` with each=True needs faults"),
        ("['driver-killed'], 3", "*name all arguments of `drill` but the faults*"),
    ],
)
def test_a_marker_that_is_written_wrongly_says_what_is_wrong(
    suite: Suite, marker: str, told: str
) -> None:
    result = suite.run(f"@pytest.mark.drill({marker})\ndef test_it(drill): drill('totals')")
    assert result.ret != 0
    result.stdout.fnmatch_lines([told])


# --- what becomes of the test ---------------------------------------------------------------------


def test_a_drill_that_is_not_exact_fails_the_test_with_the_report(suite: Suite) -> None:
    result = suite.run("def test_it(drill): drill('loses')")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["Not exact: 2 lost, 1 duplicated (4,042 of 4,043 rows).", "Drivers", "Replay: pytest *"]
    )
    result.stdout.fnmatch_lines(["epoch 0 committed"])
    result.stdout.no_fnmatch_line("*plugin.py*")


def test_a_fault_that_these_options_rule_out_is_told_before_the_drill(suite: Suite) -> None:
    result = suite.run(
        """
@pytest.mark.drill(["credentials-expired"])
def test_strict(drill): drill("totals")

@pytest.mark.drill(["credentials-expired"], lenient=True)
def test_lenient(drill): drill("totals")
""",
        "-rs",
    )
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["credentials-expired was not made: it needs store='s3'"])
    assert not (suite.folder / "calls.jsonl").exists()


def test_a_fault_that_could_not_be_made_fails_the_test_unless_it_is_lenient(suite: Suite) -> None:
    result = suite.run(
        """
@pytest.mark.drill(["disk-full"])
def test_strict(drill): drill("skips")

@pytest.mark.drill(["disk-full"], lenient=True)
def test_lenient(drill): drill("skips")

@pytest.mark.drill(["disk-full"], lenient=True)
def test_lenient_and_wrong(drill): drill("loses")

def test_fault(drill):
    from recovery.drill import Strike
    from recovery.drill.catalogue import ALL
    drill("skips", faults=Strike(fault=ALL["disk-full"], after_epoch=1))
""",
        "-rs",
    )
    result.assert_outcomes(failed=3, skipped=1)
    result.stdout.fnmatch_lines(
        ["The results are exact, but disk-full was not made: no compiler.", "SKIPPED*no compiler"]
    )


def test_a_drill_that_cannot_run_is_an_error_that_still_says_how_to_replay(suite: Suite) -> None:
    result = suite.run("def test_it(drill): drill('breaks')")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*OSError: no Java here", "replay: pytest *--drill-seed *"])


def test_a_test_that_passes_keeps_its_report_in_a_section(suite: Suite) -> None:
    result = suite.run("def test_it(drill): drill('totals')", "-rP")
    result.stdout.fnmatch_lines(["Exact: 4,043 rows, *", "Replay: pytest *"])


def test_reports_are_kept_where_the_option_says(suite: Suite) -> None:
    folder = suite.folder / "reports"
    suite.run(
        """
@pytest.mark.drill(["driver-killed"], each=True)
def test_it(drill):
    drill("totals")
    drill("totals")

def test_wrong(drill): drill("loses")
""",
        "--drill-report",
        str(folder),
    ).assert_outcomes(passed=1, failed=1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "test_inner.py-test_it-driver-killed-2.html",
        "test_inner.py-test_it-driver-killed-2.json",
        "test_inner.py-test_it-driver-killed.html",
        "test_inner.py-test_it-driver-killed.json",
        "test_inner.py-test_wrong.html",
        "test_inner.py-test_wrong.json",
    ]
    kept = json.loads((folder / "test_inner.py-test_wrong.json").read_text())
    assert kept["command"].startswith("pytest 'test_inner.py::test_wrong' --drill-seed ")


def test_the_seed_is_in_the_junit_file(suite: Suite) -> None:
    suite.run("def test_it(drill): drill('totals')", "--junitxml", "out.xml", "--drill-seed", "31")
    assert '<property name="drill_seed" value="31" />' in (suite.folder / "out.xml").read_text()


@pytest.mark.full  # starts a pytest with three processes
def test_of_xdist_s_workers_one_at_a_time_runs_a_drill(suite: Suite) -> None:
    pytest.importorskip("xdist")
    result = suite.run(
        """
import time
from recovery.drill.run import runner

@pytest.mark.parametrize("n", range(6))
def test_it(drill, n, monkeypatch):
    at_once = runner.run_drill

    def slowly(*args, **told):
        began_s = time.monotonic()
        time.sleep(0.2)
        with open("times.txt", "a") as file:
            file.write(f"{began_s} {time.monotonic()}\\n")
        return at_once(*args, **told)

    monkeypatch.setattr(runner, "run_drill", slowly)
    drill("loses")
""",
        "-n2",
    )
    result.assert_outcomes(failed=6)
    lines = (suite.folder / "times.txt").read_text().splitlines()
    times = sorted(tuple(map(float, line.split())) for line in lines)
    assert len(times) == 6
    assert all(end_s <= began_s for (_, end_s), (began_s, _) in pairwise(times))
    result.stdout.fnmatch_lines(["*pytest 'test_inner.py::test_it?1?' --drill-seed *"])
