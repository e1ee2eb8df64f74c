"""Asks for life: after every fault has ceased the job must start again and reach the truth.

Or its error names an exact way out, which is then taken as whoever reads it would: an epoch for
``go_back_to``, a setting to raise, files to put back from a copy of the location.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from statebackend.errors import StateBackendError
from tests.sim.location import Shared

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["check_alive", "take_way_out"]

_EPOCHS = re.compile(r"(?:can give up what came after epoch|it can go back to) (\d+(?:, \d+)*)")
_AGAIN = "before, and has gone on since"
_KEEP_MORE = re.compile(r"[Ss]et it to (\d+) or more")
_FILES = re.compile(r"\b(offsets|commits)/(\d+)")
_COPY = "Put these files back from a copy of the location"
_BATCHES = 2  # that it must run after its driver, and after that of the start that follows
_LONGEST_S = 90.0
_SHORTEST_S = 3.0  # by then what was on its way has arrived


# --- ways out ------------------------------------------------------------------------------------


def take_way_out(world: World, error: Exception) -> None:
    """Do what an error says that can be done; nothing where it says nothing."""
    _keep_more(world, error)
    if _put_back(world, error):
        return
    shared = world.shared
    if shared.go_back_to is not None and _AGAIN in str(error):
        shared.went_back_to.add(shared.go_back_to)  # that one cannot be named a second time
    named = _EPOCHS.search(str(error))
    epochs = [int(one) for one in named[1].split(", ")] if named else []
    shared.go_back_to = next((n for n in epochs if n not in shared.went_back_to), None)
    if shared.go_back_to is not None:
        world.sched.note("goes back as an error said")


def _keep_more(world: World, error: Exception) -> None:
    wanted = _KEEP_MORE.search(str(error))
    if wanted and world.config.batches_kept < int(wanted[1]):
        world.config.batches_kept = int(wanted[1])
        world.sched.note("keeps more batches as an error said")


def _put_back(world: World, error: Exception) -> bool:
    """Somebody has a copy of each file that Spark has removed."""
    if not isinstance(error, StateBackendError) or _COPY not in str(error):
        return False
    shared, named = world.shared, _FILES.findall(error.what)
    if not named or not all(_has_copy(shared, folder, int(batch)) for folder, batch in named):
        return False
    for folder, batch in named:
        files = shared.offsets if folder == "offsets" else shared.commits
        files[int(batch)] = shared.purged[folder, int(batch)]  # type: ignore[assignment]
    world.sched.note("files put back from a copy as an error said", str(named))
    return True


def _has_copy(shared: Shared, folder: str, batch: int) -> bool:
    return (folder, batch) in shared.purged


# --- life ----------------------------------------------------------------------------------------


def check_alive(world: World) -> None:
    """The job goes on as it is, and then once more from its files alone, by a new driver."""
    if not _goes_on(world):
        return
    world.sched.note("started anew in the calm")
    for app in list(world.apps):
        world.kill_app(app)
    world.cleaned = 0
    _goes_on(world)


def _goes_on(world: World) -> bool:
    sched = world.sched
    start_s, epochs = sched.now_s, world.epochs
    while (
        world.epochs < epochs + _BATCHES
        or sched.now_s < start_s + _SHORTEST_S
        or (world.cleans_each_epoch and world.cleaned < 2)
    ):
        if sched.now_s > start_s + _LONGEST_S:
            said = f"the last refusal: {world.last_error}" if world.last_error else "not refused"
            world.violations.append(
                ("liveness", f"no progress although nothing goes wrong; {said}")
            )
            return False
        world.run_until(sched.now_s + 1.0)
    return True
