"""Savepoints in the simulation: who takes them, begins new jobs with them and deletes them.

They lie in the bucket beside the job, each in a folder of its own, and so do the jobs that begin
with one. A stranger takes them as the command line does, a driver by the real `take`, with its
cleaner held; either may end at any point. A job is begun by the real `begin_with`, by one process
after the other until one comes to the end of it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING

from recovery.savepoints.create_savepoint import Making, create_savepoint
from recovery.savepoints.savepoint_folder import delete_savepoint
from snapshot.log.commit_log import CommitLog
from statebackend.errors import NotRestorableError, StateBackendError
from statebackend.spark.start.query_from_savepoint import begin_with
from statebackend.spark.start.query_savepoints import take
from tests.sim.bucket import SimStore
from tests.sim.kernel import Process
from tests.sim.places import FolderStore, NewLocation, SavedLocation
from tests.sim.threads import SimSystem
from tests.support.faults import Fault

if TYPE_CHECKING:
    from statebackend.spark.start.launch import Launch
    from tests.sim.app import App
    from tests.sim.world import World

__all__ = ["CLONES", "SAVEPOINTS", "in_tries", "strike"]

SAVEPOINTS, CLONES = "savepoints/", "clones/"
_KEPT = 3
_TRIES = 12
_SETTLED_S = 3.0  # by then what a process sent has arrived


# --- what befalls savepoints ---------------------------------------------------------------------


def strike(world: World, random: Random) -> None:
    """Take one, or do something with one that is there."""
    folders = world.saves.folders()
    complete = world.saves.complete()
    kind = random.random()
    if complete and kind < 0.3:
        _spawn(world, lambda: _begin(world, random.choice(complete)))
    elif folders and (kind < 0.4 or len(folders) > _KEPT):
        _spawn(world, lambda: _delete(world, random.choice(folders)))
    elif kind < 0.7 and (launch := _launch(world)) is not None:
        _take_in_driver(world, world.newest, launch, random)
    else:
        _take_outside(world, random)


def _spawn(world: World, what: Callable[[], None]) -> None:
    world.sched.spawn(Process("strangers"), what)


def _launch(world: World) -> Launch | None:
    """Of the query that is the job's now."""
    launch = world.newest.launch if world.newest is not None else None
    return launch if launch is not None and launch.location_path is not None else None


def _take_in_driver(world: World, app: App, launch: Launch, random: Random) -> None:
    sched, timeout_s = world.sched, 0.3 + 6.0 * random.random()
    prefix = f"{SAVEPOINTS}{sched.new_id()}/"

    def location(path: str) -> SavedLocation:
        return SavedLocation(world.shared, sched)

    def run() -> None:
        try:
            to = f"sim://{prefix.rstrip('/')}"
            with world.freezer.watch("savepoint"):
                take(location, app.job, launch, to, timeout_s)
            sched.note("savepoint taken by the driver", prefix)
            world.saves.taken.add(prefix)
        except StateBackendError as error:
            sched.note(f"savepoint by the driver failed: {error.code}")
            world.saves.not_made(prefix, error)
        finally:
            holding = world.saves.holding
            holding[:] = [one for one in holding if one[0] != prefix]

    world.saves.made_by[prefix] = app.process
    world.saves.launches[prefix] = launch
    sched.spawn(app.process, run)


def _take_outside(world: World, random: Random) -> None:
    sched = world.sched
    process = Process(f"saver{sched.new_id()}")
    store = SimStore(world.bucket, process, world.config)
    system = SimSystem(sched, process, world.hosts[0].clock)
    log = CommitLog(
        store,
        job="job",
        writer=process.name,
        new_id=system.new_id,
        threads=system.threads,
    )

    def open_target(savepoint_id: str) -> FolderStore:
        prefix = f"{SAVEPOINTS}{savepoint_id}/"
        world.saves.made_by[prefix] = process
        return FolderStore(world, process, prefix)

    def run() -> None:
        making = Making(
            store=store,
            job="job",
            location=SavedLocation(world.shared, sched),
            manifests=log.manifests,
            open_target=open_target,
            new_id=system.new_id,
            now_ms=system.wall_ms,
            writer=system.process_name(),
            threads=system.threads,
        )
        try:
            with world.freezer.watch("savepoint"):
                made = create_savepoint(making)
            sched.note("savepoint taken by a stranger", made.id)
            world.saves.taken.add(f"{SAVEPOINTS}{made.id}/")
        except StateBackendError as error:
            sched.note(f"savepoint by a stranger failed: {error.code}")
            world.saves.not_made(process.name, error)
        world.sched.kill(process)

    sched.spawn(process, run)
    fate = random.random()
    if fate < 0.4:
        sched.call(lambda: _cut(world, process, Fault.SAVEPOINT_CUT), 0.6 * random.random())
    elif fate < 0.7:
        sched.call(lambda: _freeze(world, process), 0.2 * random.random())


def _freeze(world: World, process: Process) -> None:
    if not process.dead:
        world.sched.note(Fault.SAVEPOINT_FROZEN, process.name)
        process.frozen_until = world.sched.now_s + 0.1 + 4.0 * world.sched.random.random() ** 2


def _cut(world: World, process: Process, what: str) -> None:
    if not process.dead:
        world.sched.note(what, process.name)
        world.sched.kill(process)


def in_tries(world: World, name: str, what: Callable[[Process], None]) -> bool:
    """Have something done by a process, and again by another until one came to its end."""
    sched = world.sched
    for attempt in range(_TRIES):
        process = Process(f"{name}.{attempt}")
        ended: list[str] = []

        def run(process: Process = process, ended: list[str] = ended) -> None:
            try:
                with world.freezer.watch(name.partition(" ")[0]):
                    what(process)
                ended.append("")
            except StateBackendError as error:
                sched.note(f"{name.partition(' ')[0]} failed: {error.code}")
                world.saves.failed(name, error)
                ended.append(error.code)

        sched.spawn(process, run)
        if attempt < _TRIES // 2 and sched.random.random() < 0.5:
            sched.pause(1.2 * sched.random.random())
            if not ended:
                _cut(world, process, f"{name.partition(' ')[0]} cut")
                continue
        while not ended:
            sched.pause(0.1)
        if not ended[0]:
            return True
        sched.pause(0.3 * sched.random.random())
    return False


def _delete(world: World, prefix: str) -> None:
    """Delete what is there, complete or not; nothing may be left."""
    saves, sched = world.saves, world.sched
    if prefix in saves.deleting or prefix in saves.used:
        return
    saves.deleting.add(prefix)
    maker = saves.made_by[prefix]
    if not saves.is_complete(prefix):  # somebody may be about to write it
        if not maker.dead:
            saves.deleting.discard(prefix)
            return
        sched.pause(_SETTLED_S)
    was = "deleted" if saves.is_complete(prefix) else "incomplete one deleted"

    def delete(process: Process) -> None:
        try:
            left = delete_savepoint(FolderStore(world, process, prefix))
            if left:
                saves.violated(f"{prefix} was deleted, and {left} was left")
        except NotRestorableError:
            if any(name.endswith((".begun", ".json")) for name in saves.inside(prefix)):
                raise

    if in_tries(world, f"savepoint-delete {prefix}", delete):
        sched.note(f"savepoint: {was}", prefix)
        saves.is_deleted(prefix)
    saves.deleting.discard(prefix)


def _begin(world: World, prefix: str) -> None:
    """A new job, which begins with a savepoint."""
    saves, sched = world.saves, world.sched
    if prefix in saves.deleting or not saves.is_complete(prefix) or saves.in_doubt(prefix):
        return
    saves.used.append(prefix)
    location, clone = NewLocation(sched), f"{CLONES}{sched.new_id()}/"

    def begin(process: Process) -> None:
        store = FolderStore(world, process, clone)
        system = SimSystem(sched, process)
        job = SimpleNamespace(
            name="clone",
            uri=store.uri,
            store=store,
            system=system,
            log=lambda: CommitLog(
                store,
                job="clone",
                writer=process.name,
                new_id=sched.new_id,
                threads=system.threads,
            ),
            open_at=lambda uri: FolderStore(world, process, f"{uri.removeprefix('sim://')}/"),
        )
        uri = f"sim://{prefix.rstrip('/')}"
        begin_with(uri, job, location, lambda manifests: None)  # type: ignore[arg-type]

    if in_tries(world, f"job-begin {clone}", begin):
        sched.note("job begun with a savepoint", clone)
        saves.begun(prefix, clone, location.written)
    else:
        sched.note("job not begun with a savepoint", clone)
    saves.used.remove(prefix)
    for name in saves.inside(clone):
        del world.bucket.objects[name]
