"""Faults against a continuous job on real processes: what it has put out is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.drill.test_more_drills import drilled
from tests.support.servers import server_binaries

# A minute or more each: a drill starts drivers and executors of its own, and kills them.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

JOB = "continuous-windows"


def test_windows_are_exact_through_a_killed_executor_and_a_killed_driver(tmp_path: Path) -> None:
    report = drilled(tmp_path, "executor-killed", "driver-killed", job=JOB, seed=1)
    assert [driver.ending for driver in report.drivers] == ["killed", "finished"]
    assert report.drivers[0].restarts >= 1
    assert {recovery.driver for recovery in report.recoveries} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        ("worker-killed", "worker-frozen", "executor-frozen"),
        ("host-lost", "disk-full", "fsync-failing"),
        ("crash-in-commit", "crash-in-upload", "crash-in-clean-up"),
        ("rescaled", "rescale-crashed", "two-drivers"),
    ],
)
def test_windows_are_exact_through_whatever_happens(tmp_path: Path, faults: list[str]) -> None:
    drilled(tmp_path, *faults, job=JOB, seed=7)


@pytest.mark.slow
def test_windows_on_s3_are_exact_whatever_its_answers(tmp_path: Path) -> None:
    server_binaries()
    faults = ("store-slow", "store-throttled", "store-down", "answers-lost", "credentials-expired")
    drilled(tmp_path, *faults, job=JOB, store="s3", seed=7)
