"""Savepoints in the simulation: who takes them, begins new jobs with them and deletes them.

They lie in the bucket beside the job, each in a folder of its own, and so do the jobs that begin
with one. A stranger takes them as the command line does, a driver by the real `take`, with its
cleaner held; either may end at any point. A job is begun by the real `begin_with`, by one process
after the other until one comes to the end of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import recovery.savepoint_copy
import recovery.savepoint_create
import statebackend.spark.savepoints as product
from recovery.rewind import LocationProgress
from recovery.savepoint import delete_savepoint
from recovery.savepoint_create import Making, create_savepoint
from snapshot.log import CommitLog
from statebackend.errors import NotRestorableError, ObjectNotFoundError, StateBackendError
from tests.sim.bucket import Bucket, SimStore
from tests.sim.kernel import Process, Scheduler, current
from tests.sim.location import Plan, SimLocation
from tests.sim.threads import Pool, Threading
from tests.support.faults import Fault

if TYPE_CHECKING:
    from statebackend.spark.launch import Launch
    from tests.sim.app import App
    from tests.sim.world import World

__all__ = ["CLONES", "SAVEPOINTS", "Folder", "InstantStore", "replacements", "strike"]

SAVEPOINTS, CLONES = "savepoints/", "clones/"
_IO_S = 0.003
_IN_MEMORY_BYTES = 300  # of an object that is copied
_KEPT = 3
_TRIES = 12
_SETTLED_S = 3.0  # by then what a process sent has arrived
_SOURCE = b"v1\nfrom here on"


# --- places --------------------------------------------------------------------------------------


class Folder:
    """A part of the bucket, to `SimStore` as the whole."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket, self._prefix, self.sched = bucket, prefix, bucket.sched

    @property
    def down_until_s(self) -> float:
        return self._bucket.down_until_s

    def put(self, name: str, data: bytes) -> None:
        self._bucket.put(self._prefix + name, data)

    def create(self, name: str, data: bytes) -> Any:
        return self._bucket.create(self._prefix + name, data)

    def get(self, name: str) -> bytes:
        return self._bucket.get(self._prefix + name)

    def list(self, prefix: str) -> Any:
        found = self._bucket.list(self._prefix + prefix)
        cut = len(self._prefix)
        return [type(one)(one.name[cut:], one.size_bytes, one.modified_ms) for one in found]

    def delete(self, names: list[str]) -> None:
        self._bucket.delete([self._prefix + name for name in names])


class FolderStore(SimStore):
    """A folder of the bucket, as one process sees it."""

    def __init__(self, world: World, process: Process, prefix: str) -> None:
        super().__init__(Folder(world.bucket, prefix), process, world.config)  # type: ignore[arg-type]
        self.prefix = prefix

    @property
    def uri(self) -> str:
        return f"sim://{self.prefix.rstrip('/')}"


class InstantStore(FolderStore):
    """The same without a network, for checkers."""

    def _request(self, verb: str, name: str, do: Callable[[], Any]) -> Any:
        return do()

    def _read(self, name: str, data: bytes) -> bytes:
        return data

    def delete(self, names: Any) -> None:
        self._bucket.delete(list(names))


class SavedLocation(SimLocation):
    """The location's files, made from what `Shared` knows, as a savepoint reads them."""

    def list(self, folder: str) -> list[str]:
        """As `LocationFiles` has it."""
        return self.files(folder)

    def files(self, folder: str) -> list[str]:
        self._sched.pause(_IO_S)
        if folder == "sources":
            return ["sources/0/0"]
        known: Any = {"offsets": self._shared.offsets, "commits": self._shared.commits}
        return [f"{folder}/{batch}" for batch in sorted(known.get(folder, ()))]

    def chunks(self, name: str) -> Iterator[bytes]:
        self._sched.pause(_IO_S)
        folder, _, batch = name.partition("/")
        if folder == "metadata" and self._shared.query_id is not None:
            yield json.dumps({"id": self._shared.query_id}).encode()
        elif folder == "sources":
            yield _SOURCE
        elif folder == "offsets" and int(batch) in self._shared.offsets:
            yield plan_file(self._shared.offsets[int(batch)])
        elif folder == "commits" and int(batch) in self._shared.commits:
            yield b"v1\n{}"
        else:
            raise ObjectNotFoundError(f"There is no {name}.")


def plan_file(plan: Plan) -> bytes:
    """``offsets/n``."""
    return f"v1\n{json.dumps({'stamp': plan.stamp_ms})}\n{json.dumps({'seed': plan.seed})}".encode()


class NewLocation:
    """The checkpoint location of a query that is to begin with a savepoint."""

    path = "/new"

    def __init__(self, sched: Scheduler) -> None:
        self._sched = sched
        self.written: dict[str, bytes] = {}

    def progress(self) -> LocationProgress:
        self._sched.pause(_IO_S)
        said = self.written.get("metadata")
        return LocationProgress(
            path=self.path,
            query_id=None if said is None else str(json.loads(said)["id"]),
            last_offset=self._last("offsets/"),
            last_commit=self._last("commits/"),
        )

    def _last(self, folder: str) -> int:
        names = [name for name in self.written if name.startswith(folder)]
        return max((int(name.removeprefix(folder)) for name in names), default=-1)

    def files(self, folder: str) -> list[str]:
        self._sched.pause(_IO_S)
        return sorted(name for name in self.written if name.startswith(f"{folder}/"))

    def chunks(self, name: str) -> Iterator[bytes]:
        self._sched.pause(_IO_S)
        yield self.written[name]

    def write(self, name: str, pieces: Iterator[bytes]) -> None:
        data = b"".join(pieces)
        self._sched.pause(_IO_S)
        self.written[name] = data


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

    def run() -> None:
        try:
            to = f"sim://{prefix.rstrip('/')}"
            product.take(app, app.job, launch, to, timeout_s)  # type: ignore[arg-type]
            sched.note("savepoint taken by the driver", prefix)
        except StateBackendError as error:
            # Not what it says: records hold durations, so a damaged one's digest is another each
            # time.
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
    log = CommitLog(store, job="job", writer=process.name, new_id=sched.new_id)

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
            new_id=sched.new_id,
            now_ms=lambda: int(sched.now_s * 1000),
            writer=process.name,
        )
        try:
            made = create_savepoint(making)
            sched.note("savepoint taken by a stranger", made.id)
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


def _in_tries(world: World, name: str, what: Callable[[Process], None]) -> bool:
    """Have something done by a process, and again by another until one came to its end."""
    sched = world.sched
    for attempt in range(_TRIES):
        process = Process(f"{name}.{attempt}")
        ended: list[str] = []

        def run(process: Process = process, ended: list[str] = ended) -> None:
            try:
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

    if _in_tries(world, f"savepoint-delete {prefix}", delete):
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
        job = SimpleNamespace(
            name="clone",
            uri=store.uri,
            store=store,
            log=lambda: CommitLog(store, job="clone", writer=process.name, new_id=sched.new_id),
        )
        uri = f"sim://{prefix.rstrip('/')}"
        product.begin_with(uri, job, location, lambda manifests: None)  # type: ignore[arg-type]

    if _in_tries(world, f"job-begin {clone}", begin):
        sched.note("job begun with a savepoint", clone)
        saves.begun(prefix, clone, location.written)
    else:
        sched.note("job not begun with a savepoint", clone)
    saves.used.remove(prefix)
    for name in saves.inside(clone):
        del world.bucket.objects[name]


# --- seams ---------------------------------------------------------------------------------------


class _System:
    """`statebackend.system`, with ids of the real length."""

    def __init__(self, system: Any, sched: Scheduler) -> None:
        self._system, self._sched = system, sched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def new_id(self) -> str:
        return self._sched.new_id().rjust(32, "0")

    def wall_ms(self) -> int:
        return int(self._sched.now_s * 1000)


def replacements(world: World, system: Any) -> Iterator[tuple[Any, str, Any]]:
    """What stands in the place of what, as in `seams`."""

    launches = world.saves.launches

    def open_at(job: Any, uri: str) -> FolderStore:
        process, prefix = current().process, uri.removeprefix("sim://") + "/"
        for app in world.apps:
            if app.process is process:  # `take` asks for its folder with its cleaner held
                world.saves.holding.append((prefix, launches[prefix]))
        return FolderStore(world, process, prefix)

    yield product, "system", _System(system, world.sched)
    yield product, "open_at", open_at
    yield product, "probe", lambda store, new_id: None
    yield (
        product,
        "CheckpointLocation",
        lambda spark, path: SavedLocation(world.shared, world.sched),
    )
    yield recovery.savepoint_copy, "threading", Threading
    yield recovery.savepoint_copy, "_IN_MEMORY_BYTES", _IN_MEMORY_BYTES
    for module in (recovery.savepoint_copy, recovery.savepoint_create):
        yield module, "ThreadPoolExecutor", Pool
