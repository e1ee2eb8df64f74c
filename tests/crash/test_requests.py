"""A job's writes to its store, cut before and after every one of them, and lost on their way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.life import Kind
from tests.crash.requests import HOWS, try_requests

KINDS = [Kind(files, asynchronous) for files in (False, True) for asynchronous in (False, True)]
PARTS = 5  # of all cuts, `python -m tests.crash` has the rest


@pytest.mark.parametrize(
    "kind",
    # Cuts between the writes of files are many: tox -e full has them.
    [pytest.param(kind, marks=[pytest.mark.full] if kind.files else []) for kind in KINDS],
    ids=str,
)
def test_wherever_a_job_s_writes_are_cut_the_state_comes_back_and_nothing_is_left_over(
    tmp_path: Path, kind: Kind
) -> None:
    tried = try_requests(kind, tmp_path, (KINDS.index(kind) % PARTS, PARTS))
    assert not tried.violations, "\n".join(tried.violations)
    steps = {"record", "large slice", "base upload", "history", "clean-up"}
    assert set(tried.requests) == steps
    assert {how for how in HOWS if any(how in cut for cut in tried.cuts)} == set(HOWS)
    assert sum(tried.cuts.values()) > 15
