"""One seed's world: a bucket, hosts, applications, chaos and the checkers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from recovery.decide.start_batch import COMMITS, OFFSETS
from snapshot.protocol.messages import BeginReply
from snapshot.retention.garbage_collection import CleanReport, clean
from statebackend.errors import StateBackendError
from statebackend.spark.start.launch import Launch
from statebackend.state.table import StateTable
from tests.planted.bug import PlantedBug, adjust, planted
from tests.sim import chaos, revival
from tests.sim.app import App
from tests.sim.checkers.exactly_once import ExactlyOnce
from tests.sim.checkers.garbage import Garbage
from tests.sim.checkers.kept_history import KeptHistory
from tests.sim.checkers.keyless import Keyless
from tests.sim.checkers.ledger import Ledger, Stopped
from tests.sim.checkers.output import Output
from tests.sim.checkers.references import References
from tests.sim.checkers.saved import Saves
from tests.sim.checkers.second import SecondOnce
from tests.sim.checkers.single_writer import SingleWriter
from tests.sim.checkers.times import Times
from tests.sim.cluster import Host
from tests.sim.config import Config, draw
from tests.sim.disk import ModelStore
from tests.sim.freezes import Freezer
from tests.sim.ground import Ground, JobFolder
from tests.sim.kernel import Process, current
from tests.sim.location import Committed, Shared, State
from tests.sim.seams import installed
from tests.sim.second import UID as SECOND
from tests.sim.task import Attempt
from tests.support.faults import Fault

__all__ = ["Result", "Stopped", "World", "simulate", "simulate_task"]


@dataclass
class Result:
    """What became of one seed."""

    seed: int
    events: int
    epochs: int
    digest: str
    virtual_s: float
    counts: Counter[str]
    violations: list[tuple[str, str]] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class World:
    """One job, and everything that befalls it.

    Args:
        ground: where other jobs are as well. job: its name. folder: in the bucket.

    Attributes:
        prefix: of the names of its processes.
    """

    def __init__(
        self,
        seed: int,
        config: Config,
        ground: Ground,
        *,
        job: str = "job",
        folder: str = "",
    ) -> None:
        self.seed, self.config, self.ground, self.job = seed, config, ground, job
        self.sched, self.disk = ground.sched, ground.disk
        self.prefix = f"{job}." if folder else ""
        self.bucket: Any = JobFolder(ground.bucket, folder) if folder else ground.bucket
        ground.worlds.append(self)
        self.shared = Shared(config.parallelism, config=config, at_freeze=self.start_rival)
        self.shared.at_taken = self._taken
        self.opened, self.doors, self.hosts = ground.opened, ground.doors, ground.hosts
        self.apps: list[App] = []
        self.newest: App | None = None
        self.workers = self.attempts = self.salts = self.made = self.epochs = 0
        self.is_calm = False
        self.last_error: Exception | None = None
        self.cleaned = 0  # by drivers, since it is calm
        self.cleans_each_epoch = config.clean_every_epochs == 1 and not config.clean_min_age_s
        self.violations = ground.violations
        self.once = ExactlyOnce(self)
        self.output = Output(self)
        self.single = SingleWriter(self)
        self.references = References(self)
        self.garbage = Garbage(self)
        self.saves = Saves(self)
        self.keyless = Keyless(self)
        checkers = [self.single, self.references, self.once, self.garbage, self.saves]
        self.second_once = SecondOnce(self)
        self.times = Times(self)
        checkers += [self.keyless, self.second_once, self.times, KeptHistory(self)]
        self.ledger = Ledger(self.bucket, checkers)
        self.bucket.watchers.append(self.ledger)
        self.supervised = True
        self.erased: frozenset[bytes] = frozenset()  # keys that somebody erases now
        self.outside = Process(f"{self.prefix}outside")
        self.freezer = Freezer(self)

    # --- what is seen --------------------------------------------------------------------------

    def violated(self, checker: str, what: str) -> None:
        """Something that must never be."""
        self.violations.append((checker, what))
        self.sched.note(f"VIOLATION {checker}", what)
        raise Stopped(what)

    def open_store(
        self, path: str, settings: object, *, compacting: bool = True, make: bool = True
    ) -> ModelStore:
        """What a worker opens its databases with."""
        return ModelStore.open_in(path, current().process, self.opened, self.config, make=make)

    def start_app(self) -> App:
        self.made += 1
        app = App(self, self.made)
        self.apps.append(app)
        self.sched.note("driver started", str(app.process))
        return app

    def start_rival(self) -> None:
        """While one driver is frozen, another one starts the job."""
        if self.config.zombies and len(self.apps) == 1 and self.sched.random.random() < 0.8:
            self.sched.note(Fault.SECOND_DRIVER)
            self.sched.call(self.start_app, 0.01)

    def _taken(self, folder: str, batch: int) -> None:
        """A start takes a commit back: what must be there to go on from the batch before is."""
        config = self.config
        # Another start may be at it, too; and who goes back by many takes later plans first.
        if folder != COMMITS or config.zombies or config.takes_way_out or self.is_calm:
            return
        offsets, commits = self.shared.offsets, self.shared.commits
        needed = [(OFFSETS, batch, offsets), (OFFSETS, batch - 1, offsets)]
        needed.append((COMMITS, batch - 1, commits))
        lacks = [f"{name}/{n}" for name, n, files in needed if n >= 0 and n not in files]
        if lacks:
            self.violated("location", f"commit {batch} goes, and there is no {', '.join(lacks)}")

    def kill_app(self, app: App) -> None:
        self.apps = [one for one in self.apps if one is not app]
        self.sched.kill(app.process)

    def bound(self, app: App, launch: Launch) -> None:
        """A query is let in: it has claimed."""
        self.newest = app

    def restored(self, attempt: Attempt, table: StateTable, reply: BeginReply) -> None:
        """An attempt has its state."""
        once = self.second_once if attempt.uid == SECOND else self.once
        once.restored(attempt, table, reply)
        self.single.opened()

    def committed(self, app: App, session: str, committed: Committed, model: State) -> None:
        """Spark has committed a batch."""
        self.epochs += 1
        self.last_error = None
        self.sched.note("batch committed", f"{app.process} {committed.plan.batch}")
        self.saves.committed(committed)
        self.output.committed(committed, model)
        self.once.committed(app, committed)
        if committed.second is not None:
            self.second_once.committed(app, committed)
        self.keyless.committed(committed)

    def failed(self, attempt: Attempt, error: StateBackendError) -> None:
        """A task has failed."""
        self.sched.note(f"task failed: {error.code}", str(attempt))
        self.references.failed(attempt, error)

    def query_failed(self, app: App, error: Exception) -> None:
        """A query, or its start, has failed."""
        self.last_error = error
        self.references.query_failed(app, error)

    # --- running -------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Somebody starts the job again when its driver is gone."""
        while True:
            if not self.apps and self.supervised:
                self.start_app()
            self.sched.pause(0.2 + self.sched.random.random())

    def lose(self, host: Host) -> None:
        """A host goes, and what runs on it."""
        for app in self.apps:
            for executor in app.executors:
                if executor.host is host:
                    executor.kill("host lost")

    def begin(self) -> None:
        """The job is started, and things befall it."""
        self.sched.spawn(Process(f"{self.prefix}supervisor"), self.supervise)
        chaos.unleash(self)

    def run(self, events: int) -> None:
        self.begin()
        self._until(events=events)
        self.calm_down()
        self.check_alive()
        self.garbage.at_the_end()
        self.saves.at_the_end()

    def _until(self, **limits: Any) -> None:
        self.sched.run(**limits)
        error = self.sched.failed
        if error is None:
            return
        if not isinstance(error, Stopped):
            self.violations.append(("unexpected", f"{type(error).__name__}: {error}"))
        raise error

    def calm_down(self) -> None:
        """Nothing goes wrong any more."""
        sched = self.sched
        self.is_calm = True
        sched.note("calm")
        quiet = self.config.faultless()
        self.config.__dict__.update(quiet.__dict__)
        self.garbage.begin_calm()

    def check_alive(self) -> None:
        """The job must go on by itself."""
        revival.check_alive(self)

    def run_until(self, until_s: float) -> None:
        """Let virtual time go by.

        Raises:
            Stopped: a checker has seen enough.
        """
        self._until(until_s=until_s)

    def clean(self, *arguments: Any, **settings: Any) -> CleanReport:
        """What a driver cleans with: counted."""
        since_calm = self.is_calm
        process = current().process
        launch = next((app.launch for app in self.apps if app.process is process), None)
        self.saves.cleaning(launch)
        with self.freezer.watch("cleaning"):
            report = clean(*arguments, **settings)
        self.saves.cleaning(launch)
        self.sched.note("driver cleaned", f"{sorted(report.removed)}")
        self.cleaned += since_calm
        return report

    def do_outside(self, what: Callable[[], None]) -> None:
        """Have something run by a stranger's process, to its end."""
        ended = []

        def run() -> None:
            what()
            ended.append(True)

        self.sched.spawn(self.outside, run)
        # Cleaning asks the store for each object of hours without a record.
        deadline_s = self.sched.now_s + 60.0 + 0.1 * len(self.bucket.objects)
        while not ended and self.sched.now_s < deadline_s:
            self._until(until_s=self.sched.now_s + 0.1)
        if not ended:
            self.violations.append(("liveness", "what a stranger did came to no end"))

    def end(self) -> None:
        """Let go of everything that the job has open."""
        for app in list(self.apps):
            self.kill_app(app)


def simulate(
    seed: int,
    *,
    events: int = 20_000,
    bug: PlantedBug | None = None,
    config: Config | None = None,
    keep_trace: bool = False,
    erase_every_s: float = 0.0,
) -> Result:
    """Run one seed: so many events with its faults, and then until all is calm and checked."""
    config = config or draw(Random(f"config {seed}"))
    config.erase_every_s = config.erase_every_s or erase_every_s
    adjust(config, bug)
    if config.asynchronous:
        config.checked = True  # as the product demands
    world = World(seed, config, Ground(seed, config.hosts, keep_trace=keep_trace))
    failure: BaseException | None = None
    with (
        installed(
            world.disk,
            small_bytes=config.small_bytes,
            arrow=config.arrow,
            opener=world.open_store,
        ),
        planted(bug),
    ):
        try:
            world.run(events)
        except Stopped:
            pass
        except Exception as error:
            failure = error
            if not world.violations:
                world.violations.append(("unexpected", f"{type(error).__name__}: {error}"))
        finally:
            world.end()
            world.sched.end()  # leases are file descriptors
    if failure is not None and keep_trace and not isinstance(failure, Stopped):
        raise failure
    sched = world.sched
    return Result(
        seed=seed,
        events=sched.events,
        epochs=world.epochs,
        digest=f"{sched.digest:016x}",
        virtual_s=sched.now_s,
        counts=sched.counts,
        violations=world.violations,
        trace=sched.trace or [],
    )


def simulate_task(task: tuple[int, int, PlantedBug | None, float]) -> Result:
    """`simulate` for a pool of processes: seed, events, planted bug, how often keys are erased."""
    seed, events, bug, erase_every_s = task
    return simulate(seed, events=events, bug=bug, erase_every_s=erase_every_s)
