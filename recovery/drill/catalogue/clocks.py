"""Clocks that jump."""

from __future__ import annotations

import random as random_numbers
from typing import Final

from recovery.drill.scenario import DrillFault
from recovery.drill.shim import shim_of
from recovery.drill.stage import Stage

__all__ = ["FAULTS", "LASTS_S"]

LASTS_S: Final = 4.0  # each time
_HOUR_MS: Final = 3_600_000
_SMALLEST_MS: Final = 5_000


def _jump(stage: Stage, rng: random_numbers.Random) -> str:
    """Every process's wall clock jumps ahead or back, then the other way, then to where it was."""
    shim = shim_of(stage)
    first_ms = rng.choice([-1, 1]) * rng.randrange(_SMALLEST_MS, _HOUR_MS)
    second_ms = -rng.randrange(_SMALLEST_MS, _HOUR_MS) * (1 if first_ms > 0 else -1)
    with shim.calm_afterwards():
        for offset_ms in (first_ms, second_ms):
            shim.shift_clock(offset_ms)
            stage.pause(LASTS_S)
    return f"all processes by {first_ms / 1000:+.1f} s, then {second_ms / 1000:+.1f} s"


FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        name="clock-jumped",
        summary="The wall clock of driver and executors jumps by up to an hour, forwards and "
        "backwards, within seconds.",
        promise="No lease, commit or clean-up goes by the wall clock alone, and results are exact; "
        "processing-time timers follow the clock.",
        strike=_jump,
        needs=frozenset({"compiler"}),
    ),
)
