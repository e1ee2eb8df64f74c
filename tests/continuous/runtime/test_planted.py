"""A small job under failures is exact as it is; that bugs show there is in `tests.planted`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.continuous.runtime.trial import Trial

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full  # whole jobs with planted bugs


@pytest.mark.parametrize("seed", range(2))
def test_without_a_bug_all_is_exact(tmp_path: Path, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        trial = Trial(tmp_path, seed, patch)
        assert trial.run() == ("", "")
    assert trial.runs > 2
    assert all(trial.made.values())


@pytest.mark.parametrize(("seed", "concurrent"), [(0, 2), (1, 3)])
def test_without_a_bug_all_is_exact_while_several_checkpoints_are_under_way(
    tmp_path: Path, seed: int, concurrent: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        trial = Trial(tmp_path, seed, patch, concurrent=concurrent)
        assert trial.run() == ("", "")
    assert trial.most == concurrent
    assert trial.runs > 2
    assert all(trial.made.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_without_a_bug_all_is_exact_for_long(tmp_path: Path, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert Trial(tmp_path, seed, patch).run() == ("", "")
