"""What time means to an operator: its mode, its event-time column, how far its watermark lags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from statebackend.errors import SettingError

__all__ = ["NO_TIME", "TIME_MODES", "TimePlan", "time_mode_of"]

TIME_MODES: Final = ("none", "processing", "event")
_SPARKS_NAMES: Final = {"processingtime": "processing", "eventtime": "event"}


def time_mode_of(given: object, operator: str = "") -> str:
    """A time mode, which may be given by Spark's name: "None", "ProcessingTime", "EventTime".

    Args:
        operator: whose it is, for the error.

    Raises:
        SettingError: it is none.
    """
    name = str(given).lower()
    mode = _SPARKS_NAMES.get(name, name)
    if mode not in TIME_MODES:
        of = f" of operator {operator!r}" if operator else ""
        raise SettingError(
            f"The time mode{of} is {given!r}.",
            todo=f"Give one of {', '.join(map(repr, TIME_MODES))}.",
        )
    return mode


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
