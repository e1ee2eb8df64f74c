"""A job of two subtasks whose copies are all on one host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.driver import MAX_PARALLELISM
from tests.recovery.rescale.rescaled_job import World, key, on_one_host


@pytest.fixture(params=[False, True], ids=["small", "files"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """Two subtasks, all on host a."""
    made = World(tmp_path, 2, large=request.param)
    for number in range(4):
        on_one_host(made, {key(g): b"%d" % number for g in range(MAX_PARALLELISM)})
    return made
