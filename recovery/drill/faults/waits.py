"""Waits of faults: for what shows that one was met, and no longer than the job has input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from recovery.drill.faults.stage import CannotStrikeError, Stage

__all__ = ["MET_LIMIT_S", "until_met", "until_noticed", "until_or_end"]

MET_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05
_NOTICED_LIMIT_S: Final = 20.0
_NOTICED_EPOCHS: Final = 3


def until_or_end(
    stage: Stage, condition: Callable[[], Any], what: str, timeout_s: float = 60.0
) -> Any:
    """As `Stage.until`, but not beyond the end of a job's input.

    Raises:
        CannotStrikeError: the job has read all its input, so it will not come.
        DrillError: the time ran out.
    """

    def found() -> Any:
        it = condition()
        if not it:
            _refuse_at_end(stage)
        return it

    return stage.until(found, what, timeout_s)


def until_met(
    stage: Stage, condition: Callable[[], Any], what: str, limit_s: float = MET_LIMIT_S
) -> Any:
    """Wait until somebody meets a fault: one that nobody has met has not struck.

    Args:
        what: shows it. limit_s: of pauses, so that what is asked takes no part of it.

    Raises:
        CannotStrikeError: nobody does within the limit, or the job has read all its input.
    """
    waited_s = 0.0
    while not (found := condition()):
        _refuse_at_end(stage)
        if waited_s >= limit_s:
            raise CannotStrikeError(f"there was not {what} within {limit_s:g} s")
        stage.pause(_POLL_S)
        waited_s += _POLL_S
    return found


def until_noticed(stage: Stage, what: str, seen: Callable[[], bool]) -> str:
    """Wait until damage was met, or long enough; what to say of it."""
    before, waited_s = stage.committed(), 0.0
    while not seen():
        # Damage in a part that nobody needs stays where it is, and does no harm.
        if waited_s >= _NOTICED_LIMIT_S or stage.committed() >= before + _NOTICED_EPOCHS:
            return f"{what} (nobody needed it)"
        stage.pause(_POLL_S)
        waited_s += _POLL_S
    return f"{what} (noticed)"


def _refuse_at_end(stage: Stage) -> None:
    if stage.has_read_all():
        raise CannotStrikeError("the job has read all its input")
