"""Planted bugs: each is found, by a checker that is meant to, within a few seeds."""

from __future__ import annotations

import pytest

from tests.channels.mutations import MUTATIONS
from tests.channels.world import simulate

SEEDS = range(48)


def test_there_are_enough_planted_bugs_and_every_checker_is_needed() -> None:
    assert len(MUTATIONS) >= 25
    shown = {checker for mutation in MUTATIONS.values() for checker in mutation.shows_in}
    assert shown >= {"cut", "output", "order", "numbers", "liveness"}


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in SEEDS:
        result = simulate(seed, mutation=name)
        if result.violations:
            assert result.violations[0][0] in MUTATIONS[name].shows_in, result.violations
            return
    pytest.fail(f"{len(SEEDS)} seeds did not show it: {MUTATIONS[name].what}")


def test_a_planted_bug_is_taken_out_again() -> None:
    before = simulate(1).digest
    for name in MUTATIONS:
        simulate(1, mutation=name)
    assert simulate(1).digest == before
