"""All planted bugs of all simulations, and by which seed and checker one is found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Final

from tests.planted.bug import PlantedBug, Simulation

__all__ = ["SIMULATIONS", "Found", "everything", "find", "simulation"]

# Each has its bugs in a module of its own, which says how they are run: `SIMULATION`.
SIMULATIONS: Final = {
    "sim": "tests.sim.bugs",
    "channels": "tests.channels.bugs",
    "trial": "tests.continuous.runtime.bugs",
    "content": "tests.continuous.state.content",
    "continuous": "tests.sim.continuous.bugs",
}


@dataclass(frozen=True)
class Found:
    """A planted bug that showed: the first seed that shows it, and what its checker said."""

    seed: int
    checker: str
    what: str


@cache
def simulation(name: str) -> Simulation:
    """One of them; what it needs is imported only now."""
    found: Simulation = import_module(SIMULATIONS[name]).SIMULATION
    assert found.name == name
    return found


def everything() -> list[tuple[Simulation, PlantedBug]]:
    """Every planted bug that there is, with what runs it."""
    return [(one, bug) for one in map(simulation, SIMULATIONS) for bug in one.bugs.values()]


def find(of: Simulation, bug: PlantedBug, seeds: Iterable[int]) -> Found | None:
    """Run one seed after the other until something shows; None if nothing does."""
    for seed in seeds:
        violations = of.simulate(seed, bug).violations
        if violations:
            return Found(seed, *violations[0])
    return None
