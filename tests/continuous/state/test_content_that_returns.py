"""Lists whose content comes back after cleaning took the object that held it, in random runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.continuous.state.content import STEPS, Trial

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", range(6))
def test_a_checkpoint_names_only_objects_that_are_there(tmp_path: Path, seed: int) -> None:
    trial = Trial(tmp_path, seed)
    trial.live(STEPS)
    trial.job.crash()
    assert trial.cleaned
