"""A continuous job on executors in processes of their own, one of which is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.drill.cluster.guard_process import guarded
from recovery.drill.cluster.local_cluster import open_cluster

ROOT = Path(__file__).parents[3]
JOB = "tests.spark.continuous.clusterjob"
CONFORMANCE = "tests.spark.continuous.conformancejob"


def run(folder: Path, master: str, module: str, *words: str) -> None:
    """A driver in a process of its own, which says that all is exact."""
    token = f"test-{os.getpid()}-{folder.name}"
    with guarded(token), open_cluster(master, folder, token) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", module, cluster.master, str(folder), *words],
            cwd=ROOT,
            env={**cluster.driver_environment(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "exact" in done.stdout


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_executor_changes_nothing_of_windows_and_counts(tmp_path: Path) -> None:
    run(tmp_path, "local-cluster[2,1,1024]", JOB)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_windowed_sums_are_exact_whatever_fails_and_when(tmp_path: Path) -> None:
    """End to end with injected failure, of reference/conformance.md, at parallelism 4."""
    run(tmp_path, "local[4]", CONFORMANCE, "1")
