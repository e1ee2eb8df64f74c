"""One seed's continuous job: a bucket, hosts, drivers, slots, what befalls them, the checkers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from statebackend.continuous.driver.continuous_query import ContinuousQuery
from statebackend.errors import OutputLostError, StateBackendError
from statebackend.runtime.worker import operator_state_io as operatorstate
from statebackend.runtime.worker.operator_state_io import KeptBlobs
from tests.planted.bug import PlantedBug, adjust, planted
from tests.sim.checkers.kept_history import KeptHistory
from tests.sim.checkers.ledger import Checker, Ledger
from tests.sim.checkers.references import References
from tests.sim.cluster import Host
from tests.sim.continuous import beside, chaos
from tests.sim.continuous.checkers import Leftovers, Output, State, Stopped
from tests.sim.continuous.config import JobConfig, draw, draw_parts
from tests.sim.continuous.driver import Driver
from tests.sim.continuous.exchange import PlayedServer
from tests.sim.continuous.job import here, owned, within
from tests.sim.continuous.model import Model
from tests.sim.continuous.savepoints import Saved
from tests.sim.continuous.slots import SlotProcess
from tests.sim.continuous.threads import JobSystem
from tests.sim.continuous.times import BASE_MS, DELAY_MS, Times
from tests.sim.disk import ModelStore
from tests.sim.freezes import Freezer
from tests.sim.ground import Ground, JobFolder
from tests.sim.kernel import Process, current
from tests.sim.seams import installed

__all__ = ["Result", "World", "simulate"]

_CALM_EPOCHS = 4
_CALM_S = 60.0
_CALM_MIN_S = 3.0  # by then what was on its way has arrived


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
    """One continuous job, and everything that befalls it.

    Args:
        job: its name. folder: in the bucket. savepoint: what it begins with.

    Attributes:
        newest: the driver that has claimed the job last.
        cloned: another job has begun with a savepoint of it.
        staged: output that is prepared, and not committed.
        prefix: of the names of its processes.
    """

    def __init__(
        self,
        seed: int,
        config: JobConfig,
        ground: Ground,
        *,
        job: str = "job",
        folder: str = "",
        savepoint: str | None = None,
    ) -> None:
        self.seed, self.config, self.ground = seed, config, ground
        self.job, self.savepoint = job, savepoint
        self.prefix = f"{job}." if folder else ""
        self.sched, self.disk = ground.sched, ground.disk
        self.bucket: Any = JobFolder(ground.bucket, folder) if folder else ground.bucket
        self.opened, self.doors, self.hosts = ground.opened, ground.doors, ground.hosts
        ground.worlds.append(self)
        self.model = Model(seed, keys=config.keys, contents=config.contents)
        self.times = Times(
            self.model, splits=config.splits, rate=config.rate, hold_ms=config.hold_ms
        )
        self.apps: list[Driver] = []
        self.newest: Driver | None = None
        self.slots: list[SlotProcess] = []
        self.exchanges: dict[str, PlayedServer] = {}
        self.blobs: dict[Process, KeptBlobs] = {}
        self.staged: dict[Any, list[tuple[int, int, int]]] = {}
        self.parallelism = config.parallelism
        self.made = self.epochs = 0
        self.rescaled = self.is_calm = self.cloned = False
        self.supervised = True
        self.outside = Process(f"{self.prefix}outside")
        self.violations = ground.violations
        self.saved: list[Saved] = []
        self.output, self.state = Output(self), State(self)
        self.references = References(self)
        self.garbage = Leftovers(self)
        self.freezer = Freezer(self)  # type: ignore[arg-type]
        checkers: list[Checker] = [self.references, self.garbage, self.output, KeptHistory(self)]
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
        owned(process, self)
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
        if isinstance(error, OutputLostError) and driver is self.newest:
            self.output.violated(f"the job commits what is not there: {error}")

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

    def lose(self, host: Host) -> None:
        """A host goes, and what runs on it."""
        for slot in self.slots:
            if slot.host is host:
                self.sched.kill(slot.process)

    def supervise(self) -> None:
        """Somebody starts the job again when its driver is gone."""
        while True:
            if not self.apps and self.supervised:
                self.start_driver()
            self.sched.pause(0.2 + self.sched.random.random())

    # --- running -------------------------------------------------------------------------------

    def begin(self) -> None:
        """The job is started, and things befall it."""
        self.sched.spawn(Process(f"{self.prefix}supervisor"), self.supervise)
        chaos.unleash(self)

    def run(self, events: int) -> None:
        """So many events with faults, and then until all is calm and checked, in every job."""
        self.begin()
        if self.config.beside:
            beside.begin(self.seed, self.config, self.ground)
        while self.sched.events < events:
            self._until(events=min(events, self.sched.events + 500))
        worlds = self.ground.worlds
        for world in worlds:
            world.calm_down()
        for world in worlds:
            world.check_alive()
        for world in worlds:
            world.garbage.at_the_end()

    def _until(self, **limits: Any) -> None:
        self.sched.run(**limits)
        error = self.sched.failed
        if error is not None and not self.violations:
            raise error
        if self.opened.collisions and not self.violations:
            self.violations.append(("local store", self.opened.collisions[0]))
        if self.violations:  # seen by a slot or a driver, which took it for a failure of its own
            raise Stopped(self.violations[0][1])

    def calm_down(self) -> None:
        """Nothing goes wrong any more."""
        self.is_calm = True
        self.sched.note("calm")
        self.config.calm_down()
        self.bucket.down_until_s = 0.0
        self.garbage.begin_calm()

    def check_alive(self) -> None:
        """The job must go on by itself."""
        sched = self.sched
        start_s, epochs, rows = sched.now_s, self.epochs, self.output.rows
        due_ms = BASE_MS + int(start_s * 1000) - DELAY_MS
        while (
            self.epochs < epochs + _CALM_EPOCHS
            or self.output.rows == rows
            or sched.now_s < start_s + _CALM_MIN_S
            or (self.config.timed and self.output.lacks_timers(due_ms))
        ):
            if sched.now_s > start_s + _CALM_S:
                lacks = self.config.timed and self.output.lacks_timers(due_ms)
                said = f"no progress although nothing goes wrong; {lacks or 'all timers fired'}"
                self.violations.append(("life", said))
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
        """Let go of everything that the job has open."""
        for driver in list(self.apps):
            self.end_driver(driver)
        for slot in self.slots:
            self.sched.kill(slot.process)
        for uri in [uri for uri in ContinuousQuery.running_jobs if uri.startswith("sim:")]:
            del ContinuousQuery.running_jobs[uri]


class _OwnBlobs:
    """Each process's own, in the place of this process's."""

    def __getattr__(self, name: str) -> Any:
        process = current().process
        return getattr(here().blobs[process], name)


def _blobs() -> PlantedBug:
    def patches() -> Any:
        yield operatorstate, "_of_process", _OwnBlobs()

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
    config = config or draw_parts(draw(Random(f"job {seed}")), seed)
    adjust(config, bug)
    ground = Ground(seed, config.hosts, keep_trace=keep_trace)
    world = World(seed, config, ground)
    files = installed(ground.disk, small_bytes=config.small_bytes, arrow=True)
    failure: Exception | None = None
    with files, within(), planted(_blobs()), planted(bug):
        try:
            world.run(events)
        except Stopped:
            pass
        except Exception as error:
            failure = error
            world.violations.append(("unexpected", f"{type(error).__name__}: {error}"))
        finally:
            for one in ground.worlds:
                one.end()
            ground.sched.end()  # leases are file descriptors
    if failure is not None and keep_trace:
        raise failure
    sched = world.sched
    return Result(
        seed=seed,
        events=sched.events,
        epochs=sum(one.epochs for one in ground.worlds),
        rows=sum(one.output.rows for one in ground.worlds if isinstance(one, World)),
        digest=f"{sched.digest:016x}",
        virtual_s=sched.now_s,
        counts=sched.counts,
        violations=world.violations,
        trace=sched.trace or [],
    )
