"""Waiting for the state of a start: until each subtask has it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from statebackend.runtime.driver.session import RunSession
from statebackend.system import System
from statebackend.work_done import Progress

__all__ = ["restored_in", "wait_restored"]

_LOOK_S: Final = 0.2


def restored_in(session: RunSession) -> tuple[int, int]:
    """How many subtasks of a query with micro-batches have their state, and of how many.

    A subtask says so with its first snapshot of the run.
    """
    specs = session.looked_at(lambda run: list(run.specs.values())) or []
    acked = {(one.operator, one.subtask) for one in session.progress.summary(None).subtasks}
    return len(acked), sum(one.parallelism for one in specs)


def wait_restored(
    known: Callable[[], tuple[int, int]],
    is_active: Callable[[], bool],
    timeout_s: float,
    progress: Progress | None,
    system: System,
) -> bool:
    """Look now and then until all have it; whether they do when the job ends, or time is up.

    Args:
        known: how many have it, and of how many; 0: that is not known yet.
        is_active: whether the job runs.
        progress: told what is known.
    """
    end_s = system.monotonic_s() + timeout_s
    while True:
        active = is_active()  # before the look: what a job has done that ends now counts
        done, total = known()
        if progress is not None:
            progress(done, total)
        if total and done >= total:
            return True
        if not active or system.monotonic_s() >= end_s:
            return False
        system.sleep_s(_LOOK_S)
