"""Real clusters of processes on loopback: those of the drills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.drill.cluster.guard_process import guarded
from recovery.drill.cluster.local_cluster import TWO_HOSTS, open_cluster
from tests.spark.cluster.trial import Trial


def _trial(folder: Path, cluster: str) -> Iterator[Trial]:
    token = f"test-{os.getpid()}-{folder.name}"
    with guarded(token), open_cluster(cluster, folder, token) as running:
        trial = Trial(folder, running)
        yield trial
        trial.end()


@pytest.fixture
def local_cluster(tmp_path: Path) -> Iterator[Trial]:
    """Two executor processes under one driver."""
    yield from _trial(tmp_path, "local-cluster[2,1,1024]")


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Trial]:
    """A standalone master and two workers that count as two hosts, each with its own disk."""
    yield from _trial(tmp_path, TWO_HOSTS)
