"""What befalls processes, disks and the network, each at its own times."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from snapshot.log.commit_log import CommitLog
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view
from snapshot.retention.history_keeping import KnownHistory
from statebackend.errors import StateBackendError
from tests.sim import clocks, erasing, savepoints
from tests.sim.bucket import SimStore
from tests.sim.cluster import Worker
from tests.sim.files import MemPath
from tests.sim.kernel import Process
from tests.sim.threads import SimThreads
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.app import App
    from tests.sim.world import World

__all__ = ["unleash"]


def unleash(world: World) -> None:
    """Start an actor for each kind that the world has."""
    config, process = world.config, Process(f"{world.prefix}chaos")
    for name, strike in _KINDS.items():
        mean_s = getattr(config, name)
        if mean_s > 0.0:
            world.sched.spawn(process, _striking(world, name, mean_s, strike))


def _striking(
    world: World, name: str, mean_s: float, strike: Callable[[World, Random], None]
) -> Callable[[], None]:
    sched = world.sched

    def go_on() -> None:
        while True:
            sched.pause(sched.random.expovariate(1.0 / mean_s))
            if world.is_calm:
                return
            strike(world, sched.random)

    return go_on


def _workers(world: World) -> list[Worker]:
    return [
        worker
        for app in world.apps
        for executor in app.executors
        if not executor.lost
        for worker in executor.workers
        if not worker.process.dead
    ]


def _kill_worker(world: World, random: Random) -> None:
    workers = _workers(world)
    busy = [worker for worker in workers if worker.attempt is not None]
    if busy and random.random() < 0.8:
        workers = busy
    if workers:
        world.sched.note(Fault.WORKER_KILLED)
        random.choice(workers).kill("chaos")


def _kill_executor(world: World, random: Random) -> None:
    if world.apps:
        world.sched.note(Fault.EXECUTOR_LOST)
        random.choice(random.choice(world.apps).executors).kill("executor lost")


def _lose_host(world: World, random: Random) -> None:
    host = random.choice(world.hosts)
    world.sched.note(Fault.HOST_LOST, host.name)
    for one in world.ground.worlds:
        one.lose(host)

    def wipe() -> None:  # once its processes are gone
        for folder in MemPath(host.folder).iterdir():
            world.disk.rmtree(folder)

    world.sched.call(wipe)


def _freeze_worker(world: World, random: Random) -> None:
    workers = _workers(world)
    busy = [worker for worker in workers if worker.attempt is not None]
    if workers:
        process = random.choice(busy or workers).process
        world.sched.note(Fault.WORKER_FROZEN, process.name)
        process.frozen_until = world.sched.now_s + 0.1 + 4.0 * random.random() ** 2


def _kill_driver(world: World, random: Random) -> None:
    if world.apps:
        app = random.choice(world.apps)
        world.sched.note(Fault.DRIVER_KILLED, app.process.name)
        world.kill_app(app)


def _freeze_driver(world: World, random: Random) -> None:
    if world.apps:
        app = random.choice(world.apps)
        world.sched.note(Fault.DRIVER_FROZEN, app.process.name)
        app.process.frozen_until = world.sched.now_s + 0.1 + 6.0 * random.random() ** 2
        world.sched.call(lambda: _thawed(world, app), app.process.frozen_until - world.sched.now_s)
        if world.config.zombies and random.random() < 0.7:
            world.start_app()


def _thawed(world: World, app: App) -> None:
    if not app.process.dead and world.newest is not app:
        world.sched.note("driver thawed as a zombie", app.process.name)


def _stop_query(world: World, random: Random) -> None:
    if world.apps:
        query = random.choice(world.apps).query
        if query is not None and query.isActive:
            world.sched.note(Fault.QUERY_STOPPED)
            query.stop()


def _second_driver(world: World, random: Random) -> None:
    if world.config.zombies and len(world.apps) == 1:
        world.sched.note(Fault.SECOND_DRIVER)
        world.start_app()


def _outage(world: World, random: Random) -> None:
    world.sched.note(Fault.STORE_UNREACHABLE)
    world.bucket.down_until_s = world.sched.now_s + 0.1 + 5.0 * random.random() ** 2


def _outside_clean(world: World, random: Random) -> None:
    """A stranger runs gc."""
    world.sched.note(Fault.STRANGER_CLEANS)
    process = Process(f"gc{world.sched.new_id()}")

    def run() -> None:
        store = SimStore(world.bucket, process, world.config)
        threads = SimThreads(world.sched, process)
        new_id = world.sched.new_id
        log = CommitLog(store, job=world.job, writer="gc", new_id=new_id, threads=threads)
        min_age_ms = int(world.config.clean_min_age_s * 1000)
        try:
            with world.freezer.watch("cleaning by a stranger"):
                report = clean(
                    store,
                    lambda: outside_view(store, log),
                    min_age_ms=min_age_ms,
                    prefixes=ALL_PREFIXES,
                    history=KnownHistory(outside=True),
                )
            world.sched.note("cleaned by a stranger", str(sorted(report.removed)))
        except StateBackendError as error:
            world.sched.note(f"a stranger's cleaning failed: {error.code}")

    world.sched.spawn(process, run)
    if random.random() < 0.2:
        world.sched.call(lambda: world.sched.kill(process), 0.2 * random.random())


def _damage_local(world: World, random: Random) -> None:
    """A file of some local copy is cut short, or gone; now and then all of a copy."""
    folder = MemPath(random.choice(world.hosts).folder)
    # What was fetched a moment ago is not cut: it would be put down to the durable base.
    files = [
        path
        for path in folder.files_below()
        if path.name != "lease" and "/work/parts/" not in str(path)
    ]
    if not files:
        return
    path = random.choice(files)
    if random.random() < 0.4:
        world.sched.note(Fault.LOCAL_FILE_GONE, path.parent.name)
        path.unlink(missing_ok=True)
    else:
        world.sched.note(Fault.LOCAL_FILE_DAMAGED, path.parent.name)
        data = path.read_bytes()
        path.unlink()  # another inode: a hard link of it is not cut
        path.write_bytes(data[: len(data) // 2])


def _rebalance(world: World, random: Random) -> None:
    if world.apps:
        world.sched.note(Fault.REBALANCED)
        random.choice(world.apps).rebalance("asked for")


def _cut_power(world: World, random: Random) -> None:
    """What nobody had synced of the location is gone: up to three batches, plan and commit."""
    shared = world.shared
    if len(shared.commits) < 6:  # what is left of the cut before was synced by then
        return
    world.sched.note(Fault.POWER_CUT)
    for app in list(world.apps):
        world.kill_app(app)
    left = max(shared.offsets, default=-1) - random.randrange(1, 4)
    for files in (shared.offsets, shared.commits):
        for batch in [n for n in files if n > left]:
            del files[batch]


_KINDS: dict[str, Callable[[World, Random], None]] = {
    "worker_killed_every_s": _kill_worker,
    "executor_killed_every_s": _kill_executor,
    "host_lost_every_s": _lose_host,
    "worker_frozen_every_s": _freeze_worker,
    "driver_killed_every_s": _kill_driver,
    "driver_frozen_every_s": _freeze_driver,
    "query_stopped_every_s": _stop_query,
    "second_driver_every_s": _second_driver,
    "outage_every_s": _outage,
    "outside_clean_every_s": _outside_clean,
    "local_damage_every_s": _damage_local,
    "rebalance_every_s": _rebalance,
    "savepoint_every_s": savepoints.strike,
    "erase_every_s": erasing.strike,
    "power_cut_every_s": _cut_power,
    "clock_jumps_every_s": clocks.strike,
}
