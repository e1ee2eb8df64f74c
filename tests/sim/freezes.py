"""Processes that stand still right before a call, and go on when others have long gone on.

A *phase* is one start of a driver (with its takeover and its way back), one cleaning, or one doing
of a savepoint. Its calls to the store and to the location are counted; the call that is struck is
drawn from all that phases of its kind have made so far, so that each has its chance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.sim.kernel import Process, current
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["Freezer", "Phase", "at_call"]

_CALLS = 8  # as long as no phase of a kind was seen
_LOOK_S = 0.25
_LONGEST_S = 8.0  # if nobody goes on, it thaws all the same
_ALONE_S = 2.0  # where there can be nobody else
_EPOCHS = 6  # that others go on, at most
_SHARES = {"cleaning": 0.2}  # of the rate: there is one after each epoch


class Phase:
    """One of them: it counts its calls."""

    def __init__(self, freezer: Freezer, kind: str, struck: int) -> None:
        self._freezer, self.kind, self._struck = freezer, kind, struck
        self.calls = 0

    def called(self) -> None:
        """A call is about to be made."""
        self.calls += 1
        if self.calls == self._struck:
            self._freezer.freeze(self)


class Freezer:
    """Freezes processes of a world in their phases."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._longest: dict[str, int] = {}

    @contextlib.contextmanager
    def watch(self, kind: str) -> Iterator[None]:
        """While open, what the current actor calls is counted, and one call may be struck."""
        world, actor, struck = self._world, current(), 0
        rate = world.config.calls_frozen * _SHARES.get(kind, 1.0)
        if world.sched.chance(rate):
            struck = world.sched.random.randint(1, self._longest.get(kind, _CALLS))
        before, phase = actor.phase, Phase(self, kind, struck)
        actor.phase = phase
        try:
            yield
        finally:
            actor.phase = before
            self._longest[kind] = max(self._longest.get(kind, 1), phase.calls)

    def freeze(self, phase: Phase) -> None:
        """Stand still right here; meanwhile somebody else starts the job, where that may be."""
        world, sched, process = self._world, self._world.sched, current().process
        if world.is_calm:
            return
        sched.note(Fault.CALL_FROZEN, f"{process}: call {phase.calls} of its {phase.kind}")
        sched.note(f"frozen in a {phase.kind}")
        is_driver = any(app.process is process for app in world.apps)
        if is_driver:
            world.start_rival()
        alone = is_driver and not world.config.zombies
        until_s = sched.now_s + (_ALONE_S if alone else _LONGEST_S) * sched.random.random()
        self._hold(process, until_s, world.epochs + sched.random.randint(1, _EPOCHS))
        sched.pause(0.0)

    def _hold(self, process: Process, until_s: float, epochs: int) -> None:
        world, now_s = self._world, self._world.sched.now_s
        if process.dead:
            return
        if world.is_calm or now_s >= until_s or world.epochs >= epochs:
            if world.epochs >= epochs:
                world.sched.note("thawed when others had gone on", process.name)
            return
        process.frozen_until = max(process.frozen_until, now_s + _LOOK_S * 1.1)
        world.sched.call(lambda: self._hold(process, until_s, epochs), _LOOK_S)


def at_call() -> None:
    """A call to the store or the location is about to be made by the current actor."""
    phase = current().phase
    if phase is not None:
        phase.called()
