"""What befalls the processes of a continuous job, its disks and its store."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.sim import chaos as batches
from tests.sim.continuous import savepoints
from tests.sim.files import MemPath
from tests.sim.kernel import Process
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.continuous.world import World

__all__ = ["unleash"]


def unleash(world: World) -> None:
    """Start an actor for each kind that the world has."""
    process = Process(f"{world.prefix}chaos")
    for name, strike in _KINDS.items():
        mean_s = getattr(world.config, name)
        if mean_s > 0.0:
            world.sched.spawn(process, batches._striking(world, name, mean_s, strike))  # type: ignore[arg-type]


def _kill_slot(world: World, random: Random) -> None:
    if world.slots:
        slot = random.choice(world.slots)
        world.sched.note(Fault.WORKER_KILLED, slot.process.name)
        world.sched.kill(slot.process)


def _cut_slot(world: World, random: Random) -> None:
    if world.slots:
        slot = random.choice(world.slots)
        world.sched.note(Fault.SLOT_CUT_OFF, slot.process.name)
        slot.cut_until_s = world.sched.now_s + 2.5 * world.config.silence_s * random.random()


def _freeze_slot(world: World, random: Random) -> None:
    if world.slots:
        process = random.choice(world.slots).process
        world.sched.note(Fault.WORKER_FROZEN, process.name)
        process.frozen_until = world.sched.now_s + 0.1 + 6.0 * random.random() ** 2


def _step_clock(world: World, random: Random) -> None:
    """By milliseconds to hours, mostly back."""
    if world.apps or world.slots:
        system = random.choice([one.system for one in (*world.apps, *world.apps, *world.slots)])
        world.sched.note(Fault.CLOCK_STEPPED)
        system.ahead_ms += random.choice([-1, -1, 1]) * int(10 ** random.uniform(0.0, 7.0))


def _kill_driver(world: World, random: Random) -> None:
    if world.apps:
        driver = random.choice(world.apps)
        world.sched.note(Fault.DRIVER_KILLED, driver.process.name)
        world.end_driver(driver)


def _freeze_driver(world: World, random: Random) -> None:
    if world.apps:
        driver = random.choice(world.apps)
        world.sched.note(Fault.DRIVER_FROZEN, driver.process.name)
        driver.process.frozen_until = world.sched.now_s + 0.1 + 6.0 * random.random() ** 2
        if len(world.apps) == 1 and random.random() < 0.7:
            world.sched.note(Fault.SECOND_DRIVER)
            world.start_driver()


def _stop_query(world: World, random: Random) -> None:
    if world.apps:
        query = random.choice(world.apps).query
        if query is not None and query.is_active:
            world.sched.note(Fault.QUERY_STOPPED)
            query._stop.set()
            if query.run is not None:
                query.run.stop()


def _ask_for_checkpoint(world: World, random: Random) -> None:
    """As a user does, by the real `ContinuousQuery.checkpoint`."""
    if not world.apps:
        return
    driver = random.choice(world.apps)
    query, timeout_s = driver.query, 0.1 + 6.0 * random.random()
    if query is None:
        return

    def run() -> None:
        epoch = query.checkpoint(timeout_s)
        world.sched.note("checkpoint asked for" + ("" if epoch is not None else " in vain"))
        epochs = [record.manifest.epoch for record in world.ledger.records.values()]
        if epoch is not None and epoch > max(epochs, default=-1):
            world.violated("life", f"checkpoint {epoch} was said to be complete: {epochs}")

    world.sched.spawn(driver.process, run)


def _lose_host(world: World, random: Random) -> None:
    host = random.choice(world.hosts)
    world.sched.note(Fault.HOST_LOST, host.name)
    for one in world.ground.worlds:
        one.lose(host)

    def wipe() -> None:  # once its processes are gone
        for folder in MemPath(host.folder).iterdir():
            world.disk.rmtree(folder)

    world.sched.call(wipe)


def _outage(world: World, random: Random) -> None:
    batches._outage(world, random)  # type: ignore[arg-type]


def _outside_clean(world: World, random: Random) -> None:
    batches._outside_clean(world, random)  # type: ignore[arg-type]


_KINDS: Final[dict[str, Callable[[Any, Random], None]]] = {
    "slot_killed_every_s": _kill_slot,
    "slot_cut_every_s": _cut_slot,
    "slot_frozen_every_s": _freeze_slot,
    "clock_stepped_every_s": _step_clock,
    "driver_killed_every_s": _kill_driver,
    "driver_frozen_every_s": _freeze_driver,
    "query_stopped_every_s": _stop_query,
    "host_lost_every_s": _lose_host,
    "outage_every_s": _outage,
    "outside_clean_every_s": _outside_clean,
    "savepoint_every_s": savepoints.strike,
    "asked_every_s": _ask_for_checkpoint,
}
