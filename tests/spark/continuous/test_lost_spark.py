"""A continuous job whose Spark is taken from under it, in a driver process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # starts and kills a Spark of its own

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_driver_whose_jvm_was_killed_says_so_and_does_not_start_the_job_again(
    tmp_path: Path, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.continuous.lostspark", str(tmp_path), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert "[SB5012] Spark is gone from this driver" in done.stdout, (
        done.stdout + done.stderr[-3000:]
    )
    restarts = int(done.stdout.split("restarts=")[1].split()[0])
    assert restarts <= 1, "the slots may be missed before the JVM is"
