"""A continuous job on executors in processes of their own, one of which is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.drill.cluster import open_cluster
from recovery.drill.processes import guarded

ROOT = Path(__file__).parents[3]
JOB = "tests.spark.continuous.clusterjob"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_executor_changes_nothing_of_windows_and_counts(tmp_path: Path) -> None:
    token = f"test-{os.getpid()}-{tmp_path.name}"
    with guarded(token), open_cluster("local-cluster[2,1,1024]", tmp_path, token) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", JOB, cluster.master, str(tmp_path)],
            cwd=ROOT,
            env={**cluster.driver_environment(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "exact" in done.stdout
