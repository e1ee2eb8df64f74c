"""Whole drills on real processes: what holds is found to hold, and a planted bug is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.drill.cluster.live_processes import TOKEN, environment_of
from recovery.drill.cluster.polling import until
from recovery.drill.run.runner import run_drill
from tests.spark.drill import jobs

# A minute or more each: a drill starts drivers and executors of its own, and kills them.
pytestmark = pytest.mark.cluster

LIMIT_S = 300.0


def of_folder(folder: Path) -> list[int]:
    """The processes of a drill in this folder."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [
        pid
        for pid in pids
        if (found := environment_of(pid)).get(TOKEN) and str(folder) in found.get("DRILL_TEST", "")
    ]


@pytest.mark.timeout(900)
def test_running_totals_are_exact_through_a_killed_executor_and_a_killed_driver(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    report = run_drill(
        "running-totals",
        faults=["executor-killed", "driver-killed"],
        seed=4,
        folder=tmp_path / "drill",
        on_progress=lines.append,
    )
    assert report.verdict.exact, report.verdict
    assert report.verdict.expected == report.verdict.found > 0
    assert [struck.fault for struck in report.faults] == ["executor-killed", "driver-killed"]
    assert all(s.recovered_s and not s.skipped and s.target for s in report.faults)
    assert [driver.ending for driver in report.drivers] == ["killed", "finished"]
    assert [done.epoch for done in report.epochs] == list(range(len(report.epochs)))
    assert {r.driver for r in report.recoveries} == {1, 2}
    assert any("executor-killed strikes" in line for line in lines)


@pytest.mark.timeout(900)
def test_state_in_a_global_of_python_is_found_out(tmp_path: Path) -> None:
    report = run_drill(
        jobs.FORGETFUL,
        faults="driver-killed",
        at_epoch=2,
        seed=1,
        cluster="local[2]",
        folder=tmp_path / "drill",
    )
    assert not report.verdict.exact
    assert report.verdict.failure == "", "the job came to its end"
    assert report.verdict.wrong > 0
    assert report.verdict.lost > 0
    assert any(example.startswith("wrong: (") for example in report.verdict.examples)


@pytest.mark.timeout(900)
def test_a_job_that_fails_by_itself_is_reported_and_not_tried_for_ever(tmp_path: Path) -> None:
    report = run_drill(jobs.broken, truth=jobs.truth, cluster="local[2]", folder=tmp_path / "drill")
    assert not report.verdict.exact
    assert "this job cannot even be built" in report.verdict.failure
    assert [driver.ending for driver in report.drivers] == ["failed"]


@pytest.mark.timeout(900)
def test_a_drill_that_is_killed_itself_leaves_no_process_behind(tmp_path: Path) -> None:
    code = (
        f"from statebackend import run_drill; run_drill('timers', folder={str(tmp_path)!r} + '/d')"
    )
    drill = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "DRILL_TEST": str(tmp_path)}
    )
    commits = tmp_path / "d" / "checkpoint" / "commits"
    until(lambda: (commits / "0").exists() or drill.poll() is not None, "an epoch", LIMIT_S)
    assert len(of_folder(tmp_path)) > 3, "driver, JVM, executors"
    frozen = of_folder(tmp_path)[:2]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    drill.kill()
    drill.wait()
    until(lambda: not of_folder(tmp_path), "the end of all processes", LIMIT_S)
