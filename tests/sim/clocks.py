"""Wall clocks: one for each host, each driver and the store, and each may be wrong by hours."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["BEGAN_MS", "WallClock", "strike"]

BEGAN_MS = 1_700_000_000_000
_RIGHT = 0.2  # of the steps: somebody sets the clock right
_EXPONENTS = (0.0, 7.6)  # of ten, in milliseconds: up to eleven hours


class WallClock:
    """A machine's wall clock. Time in between steps goes by as everywhere.

    Attributes:
        ahead_ms: of the true time; below 0 it is behind.
    """

    def __init__(self) -> None:
        self.ahead_ms = 0

    def wall_ms(self, now_s: float) -> int:
        """What it shows at a virtual time."""
        return BEGAN_MS + int(now_s * 1000) + self.ahead_ms

    def step(self, random: Random) -> int:
        """Step either way, or to the true time; by how much."""
        by_ms = -self.ahead_ms
        if random.random() >= _RIGHT:
            by_ms = int(10 ** random.uniform(*_EXPONENTS)) * random.choice([-1, 1])
        self.ahead_ms += by_ms
        return by_ms


def strike(world: World, random: Random) -> None:
    """Somebody's clock steps."""
    clocks = {str(app.process): app.clock for app in world.apps}
    clocks |= {host.name: host.clock for host in world.hosts}
    clocks["store"] = world.bucket.clock
    name = random.choice([*clocks])
    world.sched.note(Fault.CLOCK_JUMPED, f"{name} by {clocks[name].step(random)} ms")
