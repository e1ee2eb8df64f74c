"""One seed's continuous job: a bucket, hosts, drivers, slots, what befalls them, the checkers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from statebackend.continuous.driver.query import ContinuousQuery
from statebackend.errors import StateBackendError
from statebackend.runtime.worker import operator_state_io as operatorstate
from statebackend.runtime.worker.operator_state_io import KeptBlobs
from tests.planted.bug import PlantedBug, adjust, planted
from tests.sim.bucket import Bucket
from tests.sim.checkers.ledger import Checker, Ledger
from tests.sim.checkers.references import References
from tests.sim.cluster import Host
from tests.sim.continuous import chaos
from tests.sim.continuous.checkers import Leftovers, Output, State, Stopped
from tests.sim.continuous.config import JobConfig, draw
from tests.sim.continuous.driver import Driver
from tests.sim.continuous.exchange import PlayedServer
from tests.sim.continuous.job import within
from tests.sim.continuous.model import Model
from tests.sim.continuous.slots import SlotProcess
from tests.sim.continuous.threads import JobSystem
from tests.sim.disk import ModelStore, Opened, SimKeeper
from tests.sim.files import Disk
from tests.sim.freezes import Freezer
from tests.sim.kernel import Process, Scheduler, current
from tests.sim.seams import installed

__all__ = ["Result", "World", "simulate"]

_CALM_EPOCHS = 6
_CALM_S = 60.0
_CALM_MIN_S = 5.0  # by then what was on its way has arrived


@dataclass
class Result:
    """What became of one seed."""

    seed: int
    events: int
    epochs: int
    rows: int
    digest: str
    virtual_s: float
    counts: Counter[str]
    violations: list[tuple[str, str]] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class World:
    """Everything that one seed simulates.

    Attributes:
        newest: the driver that has claimed the job last.
        staged: output that is prepared, and not committed.
    """

    def __init__(self, seed: int, config: JobConfig, *, keep_trace: bool) -> None:
        self.seed, self.config = seed, config
        self.sched = Scheduler(seed, keep_trace=keep_trace)
        self.bucket = Bucket(self.sched)
        self.disk = Disk()
        root = self.disk.root()
        self.opened = Opened()
        self.doors: dict[str, SimKeeper] = {}
        self.hosts = [Host(number, root) for number in range(config.hosts)]
        self.model = Model(seed, keys=config.keys, contents=config.contents)
        self.apps: list[Driver] = []
        self.newest: Driver | None = None
        self.slots: list[SlotProcess] = []
        self.exchanges: dict[str, PlayedServer] = {}
        self.blobs: dict[Process, KeptBlobs] = {}
        self.staged: dict[Any, list[tuple[int, int, int]]] = {}
        self.parallelism = config.parallelism
        self.made = self.epochs = 0
        self.rescaled = self.is_calm = False
        self.supervised = True
        self.outside = Process("outside")
        self.violations: list[tuple[str, str]] = []
        self.output, self.state = Output(self), State(self)
        self.references = References(self)
        self.garbage = Leftovers(self)
        self.freezer = Freezer(self)  # type: ignore[arg-type]
        checkers: list[Checker] = [self.references, self.garbage, self.output]
        self.ledger = Ledger(self.bucket, checkers)
        self.bucket.watchers.append(self.ledger)

    # --- what is seen --------------------------------------------------------------------------

    def violated(self, checker: str, what: str) -> None:
        """Something that must never be."""
        self.violations.append((checker, what))
        self.sched.note(f"VIOLATION {checker}", what)
        raise Stopped(what)

    def system_of(self, process: Process) -> JobSystem:
        """What a process stands on."""
        return JobSystem(self.sched, process)

    def open_store(
        self, path: str, settings: object, *, compacting: bool = True, make: bool = True
    ) -> ModelStore:
        """What a slot opens its databases with."""
        return ModelStore.open_in(path, current().process, self.opened, self.config, make=make)

    def claimed(self, writer: str) -> None:
        """A driver has the job."""
        found = [one for one in self.apps if one.process.name == writer]
        self.newest = found[0] if found else None

    def query_failed(self, driver: Driver, error: StateBackendError) -> None:
        """A query, or its start, has failed for good."""
        app: Any = driver
        self.references.query_failed(app, error)

    # --- drivers -------------------------------------------------------------------------------

    def start_driver(self) -> None:
        """Another one."""
        self.apps.append(Driver(self))

    def end_driver(self, driver: Driver) -> None:
        """SIGKILL; its slots may live on, until they miss it."""
        self.apps = [one for one in self.apps if one is not driver]
        self.sched.kill(driver.process)
        orphaned = self.sched.chance(self.config.orphans)
        for slot in self.slots:
            if slot.driver is driver and not orphaned:
                self.sched.kill(slot.process)

    kill_app = end_driver

    def supervise(self) -> None:
        """Somebody starts the job again when its driver is gone."""
        while True:
            if not self.apps and self.supervised:
                self.start_driver()
            self.sched.pause(0.2 + self.sched.random.random())

    # --- running -------------------------------------------------------------------------------

    def run(self, events: int) -> None:
        """So many events with faults, and then until all is calm and checked."""
        self.sched.spawn(Process("supervisor"), self.supervise)
        chaos.unleash(self)
        while self.sched.events < events:
            self._until(events=min(events, self.sched.events + 500))
        self._calm_down()
        self.garbage.at_the_end()

    def _until(self, **limits: Any) -> None:
        self.sched.run(**limits)
        error = self.sched.failed
        if error is not None and not self.violations:
            raise error
        if self.opened.collisions and not self.violations:
            self.violations.append(("local store", self.opened.collisions[0]))
        if self.violations:  # seen by a slot or a driver, which took it for a failure of its own
            raise Stopped(self.violations[0][1])

    def _calm_down(self) -> None:
        """Nothing goes wrong any more: the job must go on by itself."""
        sched = self.sched
        self.is_calm = True
        sched.note("calm")
        self.config.calm_down()
        self.bucket.down_until_s = 0.0
        start_s, epochs, rows = sched.now_s, self.epochs, self.output.rows
        self.garbage.begin_calm()
        while (
            self.epochs < epochs + _CALM_EPOCHS
            or self.output.rows == rows
            or sched.now_s < start_s + _CALM_MIN_S
        ):
            if sched.now_s > start_s + _CALM_S:
                self.violations.append(("life", "no progress although nothing goes wrong"))
                return
            self._until(until_s=sched.now_s + 0.5)
        orphans = [slot for slot in self.slots if slot.driver.process.dead]
        if orphans and sched.now_s > start_s + 20 * self.config.silence_s:
            self.violations.append(("life", f"{orphans[0].process} does not miss its driver"))

    def do_outside(self, what: Callable[[], None]) -> None:
        """Have something run by a stranger's process, to its end."""
        ended = []

        def run() -> None:
            what()
            ended.append(True)

        self.sched.spawn(self.outside, run)
        deadline_s = self.sched.now_s + 60.0
        while not ended and self.sched.now_s < deadline_s:
            self._until(until_s=self.sched.now_s + 0.1)
        if not ended:
            self.violations.append(("life", "what a stranger did came to no end"))

    def end(self) -> None:
        """Let go of everything: leases are file descriptors."""
        for driver in list(self.apps):
            self.end_driver(driver)
        for slot in self.slots:
            self.sched.kill(slot.process)
        self.sched.end()
        for uri in [uri for uri in ContinuousQuery.running_jobs if uri.startswith("sim:")]:
            del ContinuousQuery.running_jobs[uri]


class _OwnBlobs:
    """Each process's own, in the place of this process's."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.blobs[current().process], name)


def _blobs(world: World) -> PlantedBug:
    def patches() -> Any:
        yield operatorstate, "_of_process", _OwnBlobs(world)

    return PlantedBug("", "a process has its own blobs", (), patches)


def simulate(
    seed: int,
    *,
    events: int = 12_000,
    bug: PlantedBug | None = None,
    config: JobConfig | None = None,
    keep_trace: bool = False,
) -> Result:
    """Run one seed."""
    config = config or draw(Random(f"job {seed}"))
    adjust(config, bug)
    world = World(seed, config, keep_trace=keep_trace)
    files = installed(world.disk, small_bytes=config.small_bytes, arrow=True)
    failure: Exception | None = None
    with files, within(world), planted(_blobs(world)), planted(bug):
        try:
            world.run(events)
        except Stopped:
            pass
        except Exception as error:
            failure = error
            world.violations.append(("unexpected", f"{type(error).__name__}: {error}"))
        finally:
            world.end()
    if failure is not None and keep_trace:
        raise failure
    sched = world.sched
    return Result(
        seed=seed,
        events=sched.events,
        epochs=world.epochs,
        rows=world.output.rows,
        digest=f"{sched.digest:016x}",
        virtual_s=sched.now_s,
        counts=sched.counts,
        violations=world.violations,
        trace=sched.trace or [],
    )
