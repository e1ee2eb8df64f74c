"""Savepoints of simulated continuous jobs: taken while faults strike, and new jobs begun with one.

Its driver takes it by the real `ContinuousQuery.savepoint`. What the sink had shown when it was
asked for, and when it was there, is between what the new job must begin: no row of a lane comes
twice, and none is left out. The new job runs beside the first, on its hosts and in its bucket, and
has faults of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from statebackend.errors import NotRestorableError, StateBackendError
from tests.sim.savepoints import CLONES, SAVEPOINTS

if TYPE_CHECKING:
    from tests.sim.continuous.world import World

__all__ = ["CLONE", "Saved", "strike"]

CLONE = "clone"
_LOOK_S = 0.5


@dataclass(frozen=True)
class Saved:
    """A savepoint that is there.

    Attributes:
        first, last: see `Output.begin_between`. parallelism: of the job when it was there.
    """

    folder: str
    first: dict[tuple[int, bool, int], int]
    last: dict[tuple[int, bool, int], int] | None
    parallelism: int


def strike(world: World, random: Random) -> None:
    """Take one; or begin a job with one that is there."""
    if world.saved and random.random() < 0.5 and not world.cloned:
        _begin(world, random.choice(world.saved), random)
    elif world.apps:
        _take(world, random)


def _take(world: World, random: Random) -> None:
    driver = random.choice(world.apps)
    query, sched = driver.query, world.sched
    folder, timeout_s = f"{SAVEPOINTS}{sched.new_id()}", 0.3 + 8.0 * random.random()
    if query is None:
        return

    def run() -> None:
        first = world.output.marks()
        try:
            made = query.savepoint(f"sim://{folder}", timeout_s=timeout_s)
        except StateBackendError as error:
            sched.note(f"savepoint failed: {error.code}")
            if first or not isinstance(error, NotRestorableError):  # there was something to save
                world.query_failed(driver, error)
            return
        sched.note("savepoint taken", folder)
        last = None if made.uncommitted else world.output.marks()
        world.saved.append(Saved(folder, first, last, world.parallelism))

    sched.spawn(driver.process, run)


def _begin(world: World, saved: Saved, random: Random) -> None:
    config = dataclasses.replace(world.config, savepoint_every_s=0.0)
    if random.random() < 0.6:
        config.parallelism = random.randint(1, 3)
    clone = type(world)(
        world.seed,
        config,
        world.ground,
        job=CLONE,
        folder=f"{CLONES}{world.sched.new_id()}/",
        savepoint=f"sim://{saved.folder}",
    )
    clone.rescaled = world.cloned = True
    clone.model, clone.times = world.model, world.times  # the same input
    clone.output.begin_between(saved.first, saved.last)
    world.sched.note("job begun with a savepoint")
    if config.parallelism != saved.parallelism:
        world.sched.note("job begun with a savepoint at another parallelism")
    clone.begin()

    def delete() -> None:
        """Once it has begun, nobody needs the savepoint."""
        while not clone.epochs:
            world.sched.pause(_LOOK_S)
        world.bucket.delete([n for n in world.bucket.objects if n.startswith(saved.folder)])
        world.sched.note("savepoint: deleted", saved.folder)

    if random.random() < 0.5:
        world.saved.remove(saved)
        world.sched.spawn(clone.outside, delete)
