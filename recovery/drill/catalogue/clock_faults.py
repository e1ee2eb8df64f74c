"""Clocks that jump."""

from __future__ import annotations

import random as random_numbers
from functools import partial
from typing import Final

from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.shim import Shim, shim_of
from recovery.drill.faults.stage import Stage
from recovery.drill.faults.waits import until_met

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
            until_met(
                stage,
                partial(_goes_by, stage, shim, offset_ms),
                "an executor or Python worker that goes by the shifted clock",
            )
            stage.pause(LASTS_S)
    return f"all processes by {first_ms / 1000:+.1f} s, then {second_ms / 1000:+.1f} s"


def _goes_by(stage: Stage, shim: Shim, offset_ms: int) -> bool:
    at_work = {*stage.processes.executors(), *stage.processes.python_workers()}
    return bool(at_work & shim.shifted(offset_ms))


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
