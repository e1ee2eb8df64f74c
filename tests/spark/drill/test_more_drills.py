"""The rest of the catalogue, each fault against a bundled job on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recovery.drill.report.drill_report import DrillReport
from recovery.drill.run.runner import run_drill
from tests.support.servers import server_binaries

# A minute or more each: a drill starts drivers and executors of its own, and kills them.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


def drilled(folder: Path, *faults: str, **given: Any) -> DrillReport:
    """A drill in which every fault was made, and that ended with exact results."""
    report = run_drill(
        given.pop("job", "running-totals"), faults=faults, folder=folder / "drill", **given
    )
    assert [f"{struck.fault}: {struck.skipped}" for struck in report.faults if struck.skipped] == []
    assert sorted(struck.fault for struck in report.faults) == sorted(faults)
    assert report.verdict.exact, (report.verdict, report.faults, report.warnings)
    assert all(struck.recovered_s is not None for struck in report.faults)
    return report


def test_damaged_local_copies_are_put_aside_and_made_up_for(tmp_path: Path) -> None:
    report = drilled(tmp_path, "local-truncated", "local-foreign", seed=5)
    sources = [r.report.source for r in report.recoveries if r.report.epoch > 0]
    assert set(sources) & {"durable", "mixed"}


def test_a_driver_killed_in_a_commit_loses_and_repeats_nothing(tmp_path: Path) -> None:
    faults = ("crash-in-commit", "newest-record-damaged")
    report = drilled(tmp_path, *faults, seed=3, cluster="local[2]")
    assert any("SB3001" in driver.error for driver in report.drivers)


def test_a_job_goes_on_at_another_parallelism(tmp_path: Path) -> None:
    report = drilled(tmp_path, "rescaled", "rescale-crashed", seed=4, cluster="local[2]")
    subtasks = [{r.report.subtask for r in report.recoveries if r.driver == n} for n in (1, 2)]
    assert len(subtasks[0]) != len(subtasks[1])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["running-totals", "timers", "vectorised"])
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_job_is_rescaled_again_and_again(tmp_path: Path, job: str, commit: Any) -> None:
    faults = ["rescaled", "rescale-crashed"] * 2
    drilled(tmp_path, *faults, "host-lost", "rebalanced", job=job, commit=commit, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "commit"),
    [("running-totals", "sync"), ("timers", "async"), ("vectorised", "sync")],
)
def test_clones_of_a_job_are_exact_and_a_savepoint_that_is_cut_costs_nothing(
    tmp_path: Path, job: str, commit: Any
) -> None:
    lines: list[str] = []
    faults = ["savepoint-taken", "savepoint-crashed", "rescaled", "savepoint-taken"]
    drilled(tmp_path, *faults, job=job, commit=commit, seed=5, on_progress=lines.append)
    said = " ".join(lines)
    assert said.count("the clone is exact") == said.count("is whole") == 2


@pytest.mark.slow
@pytest.mark.parametrize("job", ["running-totals", "timers", "vectorised"])
def test_local_copies_suffer_everything_at_once(tmp_path: Path, job: str) -> None:
    faults = ("local-deleted", "local-truncated", "local-flipped", "local-foreign")
    drilled(tmp_path, *faults, *faults, job=job, seed=11)


@pytest.mark.slow
def test_disks_that_refuse_for_a_while_cost_time_only(tmp_path: Path) -> None:
    drilled(tmp_path, "local-read-only", "disk-full", "fsync-failing", seed=2)


@pytest.mark.slow
def test_a_store_s_folder_that_refuses_for_a_while_costs_time_only(tmp_path: Path) -> None:
    drilled(tmp_path, *["store-folder-failing"] * 3, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["running-totals", "timers"])
def test_clocks_that_jump_change_no_result(tmp_path: Path, job: str) -> None:
    drilled(tmp_path, "clock-jumped", "clock-jumped", job=job, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "s3"])
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_crashes_in_the_middle_of_things(tmp_path: Path, store: str, commit: Any) -> None:
    if store == "s3":
        server_binaries()
    faults = ["crash-in-commit", "crash-in-upload", "crash-in-clean-up"]
    faults += ["crash-in-rewind"] if commit == "async" else []
    drilled(tmp_path, *faults, store=store, commit=commit, seed=8)


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_store_on_s3_suffers_everything(tmp_path: Path, commit: Any) -> None:
    server_binaries()
    faults = ["store-slow", "store-throttled", "store-down", "answers-lost", "answers-corrupted"]
    faults += ["credentials-expired", "newest-record-damaged"]
    report = drilled(tmp_path, *faults, store="s3", commit=commit, seed=6)
    assert sum(count.faulted for count in report.requests) > 0
