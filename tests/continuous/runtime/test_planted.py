"""Bugs planted into a running job: under failures each shows, and the job as it is is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.continuous.runtime.planted import BUGS, SEVERAL
from tests.continuous.runtime.trial import Trial

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = 8
MANY_SEEDS = 30  # one or two show with every fourth only
QUICK = ("a barrier overtakes rows", "handed out on both sides", "prepared is not repeated")
SLOW = sorted(set(BUGS) - set(QUICK))


def found(bug: str, folder: Path, concurrent: int = 1, seeds: int = SEEDS) -> str:
    """With which of the seeds, and how."""
    planted = {**BUGS, **SEVERAL}[bug]
    for seed in range(seeds):
        with pytest.MonkeyPatch.context() as patch:
            trial = Trial(folder / str(seed), seed, patch, concurrent=concurrent)
            planted.plant(patch, trial)
            shown, what = trial.run()
        if shown:
            assert shown in planted.shows_in, (shown, what)
            return f"seed {seed}: {shown}: {what}"
    return ""


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


@pytest.mark.parametrize("bug", SEVERAL)
def test_a_bug_of_several_checkpoints_at_once_shows(tmp_path: Path, bug: str) -> None:
    assert found(bug, tmp_path, concurrent=3), SEVERAL[bug].what


@pytest.mark.parametrize("bug", QUICK)
def test_a_planted_bug_shows(tmp_path: Path, bug: str) -> None:
    assert found(bug, tmp_path), BUGS[bug].what


@pytest.mark.slow
@pytest.mark.parametrize("bug", SLOW)
@pytest.mark.timeout(600)
def test_every_planted_bug_shows(tmp_path: Path, bug: str) -> None:
    assert found(bug, tmp_path, seeds=MANY_SEEDS), BUGS[bug].what


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_without_a_bug_all_is_exact_for_long(tmp_path: Path, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert Trial(tmp_path, seed, patch).run() == ("", "")
