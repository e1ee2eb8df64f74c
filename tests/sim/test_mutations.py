"""Planted bugs: each is found, by a checker that is meant to, within a few seeds."""

from __future__ import annotations

import pytest

from tests.sim.mutations import MUTATIONS
from tests.sim.world import simulate

SEEDS = range(16)
EVENTS = 8_000


def test_there_are_enough_planted_bugs_and_every_checker_is_needed() -> None:
    assert len(MUTATIONS) >= 12
    shown = {checker for mutation in MUTATIONS.values() for checker in mutation.shows_in}
    assert shown >= {"exactly once", "output", "single writer", "references", "garbage"}


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in SEEDS:
        result = simulate(seed, events=EVENTS, mutation=name)
        if result.violations:
            assert result.violations[0][0] in MUTATIONS[name].shows_in, result.violations
            return
    pytest.fail(f"{len(SEEDS)} seeds did not show it: {MUTATIONS[name].what}")
