"""A job of three finished epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.restore.one_subtask_job import Job, K, L, M


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three epochs done on host h; its store stands at epoch 1, with the delta of 2 beside it."""
    made = Job(tmp_path)
    made.run({K: b"0", L: b"0"}, {K: b"1", M: b"1"}, {L: None, M: b"2"})
    return made
