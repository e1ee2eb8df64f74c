"""What time means to an operator: its mode, its event-time column, how far its watermark lags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["NO_TIME", "TIME_MODES", "TimePlan"]

TIME_MODES: Final = ("none", "processing", "event")


@dataclass(frozen=True)
class TimePlan:
    """What time means to an operator.

    ``event_position``: of the event-time column, None without one. ``side_position``: of the column
    that says which of two measured inputs a row is of. ``delay_ms``: None where the
    operator takes the job's watermark and adds nothing to it. ``drops_late``: whether late rows are
    left out by their own event time; else the operator looks to it. ``output_position``: of the
    output's column that operators behind this one take for event time. ``output_delay_ms``: the
    delay of the watermark that goes with it.
    """

    mode: str = "none"
    event_position: int | None = None
    delay_ms: int | None = None
    side_position: int | None = None
    drops_late: bool = True
    output_position: int | None = None
    output_delay_ms: int = 0


NO_TIME: Final = TimePlan()
