"""Planted bugs: each is found within a few seeds, by a checker that is meant to; then it is out."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from tests.channels.world import simulate as simulate_channels
from tests.planted.bug import Patches, PlantedBug, Simulation, adjust, by_name, planted
from tests.planted.finding import everything, find, simulation
from tests.sim.world import simulate as simulate_sim

EVERY = everything()


def _marks(of: Simulation, bug: PlantedBug) -> list[pytest.MarkDecorator]:
    if bug.name in of.minutes:
        return [pytest.mark.slow, pytest.mark.timeout(600)]
    # One of each simulation shows that its bugs are found; all of them take minutes. The second, if
    # there is one: the first bug of some simulations takes ten seconds.
    one = list(of.bugs)[:2][-1]
    return [] if bug.name == one else [pytest.mark.full]


# Up to half a minute each: seeds are run until one shows the bug.
@pytest.mark.parametrize(
    ("of", "bug"),
    [pytest.param(*one, id=f"{one[0].name}-{one[1].name}", marks=_marks(*one)) for one in EVERY],
)
def test_a_planted_bug_is_found(of: Simulation, bug: PlantedBug) -> None:
    found = find(of, bug, range(of.seeds))
    assert found is not None, f"{of.seeds} seeds did not show it: {bug.what}"
    assert found.checker in bug.shows_in, found
    # It is the bug that was seen, not what its world is like.
    without = of.simulate(found.seed, replace(bug, patches=lambda: iter(())))
    assert not without.violations


@pytest.mark.parametrize(
    ("of", "bug"), [pytest.param(*one, id=f"{one[0].name}-{one[1].name}") for one in EVERY]
)
def test_a_planted_bug_is_taken_out_again(of: Simulation, bug: PlantedBug) -> None:
    owners = {id(owner): owner for owner, _, _ in bug.patches()}.values()
    assert owners
    before = [dict(vars(owner)) for owner in owners]
    with planted(bug):
        assert not all(map(_same, owners, before))
    assert all(map(_same, owners, before))


def _same(owner: Any, before: dict[str, Any]) -> bool:
    """Whether the very same is under every name."""
    now = vars(owner)
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


@pytest.mark.full  # a run with each planted bug
def test_clean_runs_are_the_same_before_and_after_planted_bugs() -> None:
    sim, channels = simulation("sim").bugs, simulation("channels").bugs
    clean = simulate_sim(1, events=500), simulate_channels(1)
    for bug in sim.values():
        simulate_sim(1, events=100, bug=bug)
    for bug in channels.values():
        simulate_channels(1, bug=bug)
    again = simulate_sim(1, events=500), simulate_channels(1)
    assert [one.digest for one in again] == [one.digest for one in clean]


# --- enough of them -------------------------------------------------------------------------------


def test_there_are_sixty_planted_bugs_and_each_checker_is_needed() -> None:
    assert len(EVERY) >= 60
    shown = {(of.name, checker) for of, bug in EVERY for checker in bug.shows_in}
    for name, checkers in {
        "sim": ("exactly once", "output", "single writer", "references", "garbage", "savepoints"),
        "channels": ("cut", "output", "order", "numbers", "liveness"),
        "trial": ("rows", "error", "stuck"),
        "content": ("references",),
        "continuous": ("output", "state", "references"),
    }.items():
        assert shown >= {(name, checker) for checker in checkers}


# --- the framework itself -------------------------------------------------------------------------


class Base:
    inherited = 1

    @staticmethod
    def static() -> int:
        return 1


class Owner(Base):
    own = 1

    @classmethod
    def of_class(cls) -> int:
        return 1


def _patches() -> Patches:
    yield Owner, "inherited", 2
    yield Owner, "absent", 2
    yield Owner, "own", 2
    yield Owner, "own", 3
    yield Owner, "of_class", lambda: 2
    yield Base, "static", lambda: 2


def test_what_was_inherited_absent_or_a_descriptor_is_as_it_was() -> None:
    before = dict(vars(Owner)), dict(vars(Base))
    bug = PlantedBug("a", "a rule", ("a checker",), _patches)
    with contextlib.suppress(RuntimeError), planted(bug):
        assert (Owner.inherited, vars(Owner)["absent"], Owner.own) == (2, 2, 3)
        raise RuntimeError("a run fails")
    assert _same(Owner, before[0])
    assert _same(Base, before[1])
    assert "inherited" not in vars(Owner)


def test_a_patch_that_fails_leaves_none_of_those_before_it() -> None:
    def patches() -> Patches:
        yield Owner, "own", 2
        raise LookupError("the product has changed")

    with (
        pytest.raises(LookupError, match="the product has changed"),
        planted(PlantedBug("a", "a rule", (), patches)),
    ):
        pass
    assert Owner.own == 1


def test_names_are_given_once_and_worlds_have_the_fields() -> None:
    bug = PlantedBug("a", "a rule", (), _patches, {"no_such_rate": 1.0})
    with pytest.raises(ValueError, match="same name"):
        by_name(bug, bug)
    from tests.sim.config import Config

    with pytest.raises(AttributeError, match="no_such_rate"):
        adjust(Config(), bug)
