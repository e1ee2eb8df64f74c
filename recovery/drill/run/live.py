"""A running drill, as faults see it: a `Stage` of real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from recovery.drill.cluster.driver_messages import REBALANCE, Told
from recovery.drill.cluster.drivers import Driver
from recovery.drill.cluster.local_cluster import Cluster, DiskHost
from recovery.drill.cluster.processes import LiveProcesses, until
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.feeding import Pace
from recovery.drill.proxy.proxy import FaultProxy
from recovery.drill.report.outcome import EpochDone
from recovery.drill.savepoints.requests import Savepoints
from statebackend.errors import DrillError
from statebackend.system import SYSTEM, System

__all__ = ["LiveStage", "Setup"]

_EXECUTORS_GONE_S = 300.0
_IDLE_S = 5.0
_REBALANCED_S = 300.0
_FAILURES_MAX = 3  # of drivers, one after the other without an epoch between them


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a stage is made of.

    Attributes:
        told: what every driver is told, but for its file of events.
        subtasks_max: what the parallelism may be raised to.
        limit_s: when the whole drill is given up.
        system: what the drill itself stands on.
    """

    job: DrillJob
    cluster: Cluster
    told: Told
    store: Path | None
    proxy: FaultProxy | None
    shim: Path | None
    seed: int
    subtasks_max: int
    limit_s: float
    say: Callable[[str], None]
    system: System = SYSTEM


class LiveStage:
    """See `recovery.drill.faults.reach.Stage`; every wait looks after the drivers."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._system = setup.system
        self._began_s = self._system.monotonic_s()
        self._saying = self._system.threads.lock()
        self.drivers: list[Driver] = []
        self.warnings: list[str] = []
        self.struck: list[str] = []  # faults so far: what a driver's failure may come from
        self._held = False  # a fault is between the end of one driver and the start of the next
        self._failures = 0
        self._epochs_at_failure = 0
        self.parallelism = setup.told.parallelism  # of the drivers to come
        self.savepoints = Savepoints(setup.told, setup.cluster.driver_environment)
        feed = setup.job.feed
        self.pace = Pace(
            self.checkpoint,
            None if feed is None else lambda number: feed(self.root, number, setup.seed),
            now_s=self.now_s,
            driver=self._running_number,
            committed=self._say_epoch,
        )

    # --- what there is -------------------------------------------------------------------------

    @property
    def job(self) -> DrillJob:
        """What runs."""
        return self._setup.job

    @property
    def root(self) -> Path:
        """The drill's folder."""
        return Path(self._setup.told.root)

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint location."""
        return Path(self._setup.told.checkpoint)

    @property
    def store(self) -> Path | None:
        """The folder of the job's durable copies; None on S3."""
        return self._setup.store

    @property
    def uri(self) -> str:
        """Of the job's store."""
        return self._setup.told.uri

    @property
    def hosts(self) -> Sequence[DiskHost]:
        """Those with executors."""
        return self._setup.cluster.hosts

    @property
    def processes(self) -> LiveProcesses:
        """The living ones."""
        return self._setup.cluster.processes

    @property
    def proxy(self) -> FaultProxy | None:
        """Between the job and its S3 server; None on files."""
        return self._setup.proxy

    @property
    def shim(self) -> Path | None:
        """The control folder of the preloaded library; None without it."""
        return self._setup.shim

    def now_s(self) -> float:
        """Seconds since the drill began."""
        return self._system.monotonic_s() - self._began_s

    def say(self, text: str) -> None:
        """One line of progress."""
        with self._saying:  # the pace has a thread of its own
            self._setup.say(f"{self.now_s():7.1f} s  {text}")

    def _say_epoch(self, done: EpochDone) -> None:
        self.say(f"epoch {done.epoch}")

    # --- waiting -------------------------------------------------------------------------------

    def committed(self) -> int:
        """The last epoch that Spark has committed; -1 for none."""
        return self.pace.last()

    def wait_for_epoch(self, epoch: int, timeout_s: float = 120.0) -> None:
        """Until Spark has committed it. Raises `DrillError`."""
        self.until(lambda: self.committed() >= epoch, f"epoch {epoch}", timeout_s)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """Poll until it gives something true, and give that. Raises `DrillError`."""
        return until(condition, what, timeout_s, tend=self.tend, system=self._system)

    def pause(self, seconds: float) -> None:
        """Let time pass, and look after the drivers."""
        until_s = self.now_s() + seconds
        while (left_s := until_s - self.now_s()) > 0:
            self.tend()
            self._system.sleep_s(min(0.05, left_s))

    # --- drivers -------------------------------------------------------------------------------

    def _running_number(self) -> int:
        """The newest driver whose query has started, else the newest of all."""
        ready = [d for d in self.drivers if d.ready_s is not None]
        return (ready or self.drivers)[-1].number if self.drivers else 0

    def is_ready(self) -> bool:
        """Whether a driver's query has started."""
        return any(driver.ready_s is not None for driver in self.running())

    def has_read_all(self) -> bool:
        """Whether a job that is not fed has come to the end of what there is."""
        if self.job.feed is not None:
            return False
        waiting = [driver.idle_s for driver in self.running() if driver.idle_s is not None]
        return any(self.now_s() - since_s > _IDLE_S for since_s in waiting)

    def running(self) -> list[Driver]:
        """The drivers that have not ended."""
        return [driver for driver in self.drivers if driver.running]

    def kill_driver(self) -> None:
        """SIGKILL to the driver and its JVM, and wait until they and their executors are gone."""
        self._held = True
        for driver in self.running():
            driver.kill(self.processes)
        until(lambda: not self.processes.executors(), "the executors' end", _EXECUTORS_GONE_S)

    def start_driver(self, **told: Any) -> None:
        """Start a driver if none runs, told otherwise than the others in these fields of `Told`."""
        self._held = False
        self._look()
        if not self.running():
            self._start(told)

    def start_rival(self) -> None:
        """Start a second driver on the same job, checkpoint and sink while the first runs."""
        self._start({})

    def rescale(self, parallelism: int) -> None:
        """Another parallelism, for all drivers that are started from now on."""
        self.parallelism = parallelism

    @property
    def subtasks_max(self) -> int:
        """The most that the parallelism may be."""
        return self._setup.subtasks_max

    def rebalance(self, executors: int) -> None:
        """Have the running driver place its subtasks anew, on so many executors at least.

        Raises `DrillError` if it does not.
        """
        asked = self.root / REBALANCE
        draft = asked.with_suffix(".draft")
        draft.write_text(str(executors))
        draft.rename(asked)  # whole at once
        self.until(lambda: not asked.exists(), "subtasks to be placed anew", _REBALANCED_S)

    def restored(self) -> int:
        """How many subtasks have told the newest driver that they have their state back."""
        self._look()
        return len(self.drivers[-1].recoveries) if self.drivers else 0

    def drivers_running(self) -> int:
        """How many drivers there are."""
        return len(self.running())

    def drivers_started(self) -> int:
        """How many drivers there have been."""
        self._look()
        return len(self.drivers)

    def over(self) -> None:
        """A strike is over: a driver that it ended gets its successor."""
        self._held = False

    def _start(self, told: dict[str, Any]) -> None:
        number = len(self.drivers) + 1
        events = str(self.root / "drivers" / f"{number}.events")
        told = {"events": events, "parallelism": self.parallelism, **told}
        given = msgspec.structs.replace(self._setup.told, **told)
        environment = self._setup.cluster.driver_environment()
        self.drivers.append(Driver(number, given, environment, now_s=self.now_s))
        self.say(f"driver {number} started")

    def tend(self) -> None:
        """Look after everything; start another driver if none runs any more.

        Raises:
            DrillError: the drill cannot go on.
        """
        if self.now_s() > self._setup.limit_s:
            raise DrillError(
                f"The drill was given up after {self.now_s():.0f} s.",
                todo=f"Look at the logs in {self.root}.",
            )
        if self.pace.failure is not None:
            raise self.pace.failure
        self._look()
        finished = any(driver.ending == "finished" for driver in self.drivers)
        if not (finished or self._held or self.running()):
            self._start({})

    def _look(self) -> None:
        running = self.running()
        for driver in running:
            driver.look()
            self._look_for_restarts(driver)
        for driver in running:
            if not driver.running:
                self._ended(driver)

    def _look_for_restarts(self, driver: Driver) -> None:
        while driver.restarts_seen < driver.restarts:
            driver.restarts_seen += 1
            self.say(f"the job starts again in driver {driver.number}")
            if not self.struck:
                self.warnings.append("The job failed and started again before any fault.")

    def _ended(self, driver: Driver) -> None:
        first_line = driver.error.partition("\n")[0][:300]
        self.say(f"driver {driver.number} {driver.ending}" + (first_line and f": {first_line}"))
        if driver.ending != "failed":
            return
        if not self.struck:
            raise DrillError(
                f"The job's driver failed before any fault: {first_line}", todo=self._where(driver)
            )
        self.warnings.append(f"Driver {driver.number} failed after {self.struck[-1]}: {first_line}")
        if len(self.pace.epochs) > self._epochs_at_failure:
            self._failures = 0
        self._epochs_at_failure = len(self.pace.epochs)
        self._failures += 1
        if self._failures >= _FAILURES_MAX and not self.running():
            raise DrillError(
                f"{self._failures} drivers failed one after the other without an epoch between "
                f"them, after {self.struck[-1]}; the last one: {first_line}",
                todo=self._where(driver),
            )

    @staticmethod
    def _where(driver: Driver) -> str:
        return f"Look at {driver.log}."

    def finish(self, timeout_s: float) -> None:
        """Let the driver read all input and end; one that fails on the way gets a successor.

        Raises:
            DrillError: it does not come to its end.
        """
        self.until(self.pace.done.is_set, "the last input to be fed", timeout_s)
        Path(self._setup.told.stop).touch()

        def finished() -> bool:
            self._look()
            return any(d.ending == "finished" for d in self.drivers)

        self.until(finished, "the driver's end", timeout_s)

    def run_to_its_end(self, timeout_s: float, **told: Any) -> str:
        """Run one more driver, told otherwise, beside nobody; why it failed, or empty.

        The job has come to its end: the driver reads all input there is, and ends.

        Raises:
            DrillError: it does not end.
        """
        self._start(told)
        driver = self.drivers[-1]
        self.until(lambda: not driver.running, f"the end of driver {driver.number}", timeout_s)
        return "" if driver.ending == "finished" else driver.error or driver.ending
