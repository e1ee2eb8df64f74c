"""Lookups and erasing together with what changes the way: two executors, TLS, S3, async commits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from recovery.drill.cluster.guard_process import guarded
from recovery.drill.cluster.local_cluster import open_cluster

if TYPE_CHECKING:
    from tests.support.s3 import S3

ROOT = Path(__file__).parents[3]
JOB = "tests.spark.cluster.lookuperasejob"

# A driver and two executors of its own, and two starts of a query: 45 s.
pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1200)]


def test_two_executors_answer_over_tls_and_a_key_is_erased_from_s3(
    tmp_path: Path, ministack: S3
) -> None:
    options = ministack.options(tls=True)
    words = ministack.fresh_uri(), options.endpoint_url, options.ca_bundle
    token = f"test-{os.getpid()}-{tmp_path.name}"
    with guarded(token), open_cluster("local-cluster[2,1,1024]", tmp_path, token) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", JOB, cluster.master, str(tmp_path), *words],
            cwd=ROOT,
            env={**cluster.driver_environment(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-4000:] or done.stderr[:4000]
    assert "exact" in done.stdout
