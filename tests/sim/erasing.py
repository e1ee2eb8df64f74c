"""Keys that are erased in the simulation, between two runs of the job.

The job is stopped as by a kill: what its processes have sent may arrive yet. The real `Erasing` is
run by one process after the other until one comes to the end of it; the one before was cut at any
point. From its record on the oracle knows the epoch without the keys: the batches after it begin
with that, and so does all that the log says.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

from snapshot.log.commit_log import CommitLog
from statebackend.errors import CheckpointLocationError, NotRestorableError, SettingError
from statebackend.tables.erase_from_log import Erasing, epoch_to_erase_in
from tests.sim.bucket import SimStore
from tests.sim.config import Config
from tests.sim.files import MemPath
from tests.sim.kernel import Process
from tests.sim.location import State, key_of
from tests.sim.places import SavedLocation
from tests.sim.savepoints import in_tries
from tests.sim.threads import SimSystem

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["can_erase", "erased_in", "strike", "without"]

_KEYS = 3  # at once, at most
_SETTLED_S = 3.0  # by then what a killed process has sent has arrived


def can_erase(config: Config) -> bool:
    """Whether the model knows what follows: no timers go, and nobody goes back by many epochs."""
    undecided = config.indeterminate and config.asynchronous  # see checkers.saved
    going_back = config.takes_way_out or config.power_cut_every_s or config.batches_kept < 10
    return not (config.timed or undecided or going_back)


def without(state: State, erased: frozenset[bytes]) -> State:
    """A state without some keys, which have their key groups before them."""
    return {key: value for key, value in state.items() if key[:2] + key[4:] not in erased}


def strike(world: World, random: Random) -> None:
    """Stop the job, have keys erased, and let it be started again."""
    if not world.erased and can_erase(world.config):
        numbers = [random.randrange(3 * world.config.keys) for _ in range(random.randint(1, _KEYS))]
        keys = frozenset(key[:2] + key[4:] for key in map(key_of, numbers))
        world.sched.spawn(Process("strangers"), lambda: _erase(world, keys))


def _erase(world: World, keys: frozenset[bytes]) -> None:
    sched = world.sched
    world.supervised, world.erased = False, keys

    def erase(process: Process) -> None:
        for app in list(world.apps):
            world.kill_app(app)
        try:
            _run(world, process, sorted(keys))
        except (CheckpointLocationError, NotRestorableError, SettingError) as error:
            sched.note(f"nothing to erase: {error.code}")

    try:
        if in_tries(world, f"erase {sched.new_id()}", erase):
            sched.note("keys erased", f"{sorted(keys)}")
        else:
            sched.note("keys not erased")
        sched.pause(_SETTLED_S * sched.random.random())
    finally:
        world.supervised, world.erased = True, frozenset()


def _run(world: World, process: Process, keys: list[bytes]) -> None:
    system: Any = SimSystem(world.sched, process, world.hosts[0].clock)
    store = SimStore(world.bucket, process, world.config)
    log = CommitLog(
        store,
        job=world.job,
        writer=process.name,
        new_id=system.new_id,
        threads=system.threads,
    )
    manifests = log.manifests()
    if not manifests:
        return
    location: Any = SavedLocation(world.shared, world.sched)
    epoch, check = epoch_to_erase_in(manifests, location)
    scratch: Any = MemPath(f"/erasing/{system.new_id()}")
    scratch.mkdir(parents=True)
    erasing = Erasing(
        store=store,
        job=world.job,
        log=log,
        manifests=manifests,
        epoch=epoch,
        scratch=scratch,
        check=check,
        system=system,
    )
    counted, _ = erasing.run("op", keys)
    world.sched.note("entries erased" if counted else "no entry erased")


def erased_in(world: World, epoch: int) -> None:
    """A record of an epoch without the keys is in the log: from here on that is the epoch."""
    files = [world.shared.commits, world.shared.hidden, world.shared.purged]
    for folder in files:
        for name, one in list(folder.items()):  # type: ignore[attr-defined]
            if getattr(one, "state", None) is not None and one.plan.batch == epoch:
                folder[name] = dataclasses.replace(  # type: ignore[index]
                    one, state=without(one.state, world.erased)
                )
                world.saves.committed(folder[name])  # type: ignore[index]
