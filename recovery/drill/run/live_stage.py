"""A running drill, as faults see it: a `Stage` of real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery.drill.cluster.driver_succession import Succession
from recovery.drill.cluster.local_cluster import Cluster
from recovery.drill.cluster.polling import until
from recovery.drill.driver.driver_messages import REBALANCE, DriverConfig
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.feeder import Feeder
from recovery.drill.proxy.fault_proxy import FaultProxy
from recovery.drill.savepoints.drill_savepoints import Savepoints
from statebackend.errors import DrillError
from statebackend.system import SYSTEM, System

__all__ = ["LiveStage", "Setup"]

_REBALANCED_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a stage is made of.

    Attributes:
        config: of every driver, but for its file of events.
        subtasks_max: what the parallelism may be raised to.
        limit_s: when the whole drill is given up.
        system: what the drill itself stands on.
    """

    job: DrillJob
    cluster: Cluster
    config: DriverConfig
    store: Path | None
    proxy: FaultProxy | None
    shim: Path | None
    seed: int
    subtasks_max: int
    limit_s: float
    say: Callable[[str], None]
    system: System = SYSTEM


class LiveStage:
    """See `recovery.drill.faults.stage.Stage`; every wait looks after the drivers."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._system = setup.system
        self._began_s = self._system.monotonic_s()
        self._saying = self._system.threads.lock()
        config, cluster = setup.config, setup.cluster
        self.job, self.root, self.checkpoint = setup.job, Path(config.root), Path(config.checkpoint)
        self.store, self.uri, self.proxy, self.shim = (
            setup.store,
            config.uri,
            setup.proxy,
            setup.shim,
        )
        self.hosts, self.processes = cluster.hosts, cluster.processes
        self.subtasks_max = setup.subtasks_max
        self.savepoints = Savepoints(config, cluster.driver_environment)
        self.drivers = Succession(
            config, cluster, now_s=self.now_s, say=self.say, epochs=lambda: len(self.feeder.epochs)
        )
        feed = setup.job.feed
        self.feeder = Feeder(
            self.checkpoint,
            None if feed is None else lambda number: feed(self.root, number, setup.seed),
            now_s=self.now_s,
            driver=self.drivers.newest,
            committed=lambda done: self.say(f"epoch {done.epoch}"),
        )

    def now_s(self) -> float:
        """Seconds since the drill began."""
        return self._system.monotonic_s() - self._began_s

    def say(self, text: str) -> None:
        """One line of progress."""
        with self._saying:  # the feeder has a thread of its own
            self._setup.say(f"{self.now_s():7.1f} s  {text}")

    # --- waiting -------------------------------------------------------------------------------

    def committed(self) -> int:
        """The last epoch that Spark has committed; -1 for none."""
        return self.feeder.last()

    def has_read_all(self) -> bool:
        """Whether a job that is not fed has come to the end of what there is."""
        return self.job.feed is None and self.drivers.are_idle()

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """Poll until it gives something true, and give that. Raises `DrillError`."""
        return until(condition, what, timeout_s, tend=self.tend, system=self._system)

    def pause(self, seconds: float) -> None:
        """Let time pass, and look after the drivers."""
        until_s = self.now_s() + seconds
        while (left_s := until_s - self.now_s()) > 0:
            self.tend()
            self._system.sleep_s(min(0.05, left_s))

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
        if self.feeder.failure is not None:
            raise self.feeder.failure
        self.drivers.tend()

    # --- what takes a while --------------------------------------------------------------------

    def rebalance(self, executors: int) -> None:
        """Have the running driver place its subtasks anew, on so many executors at least.

        Raises `DrillError` if it does not.
        """
        asked = self.root / REBALANCE
        draft = asked.with_suffix(".draft")
        draft.write_text(str(executors))
        draft.rename(asked)  # whole at once
        self.until(lambda: not asked.exists(), "subtasks to be placed anew", _REBALANCED_S)

    def finish(self, timeout_s: float) -> None:
        """Let the driver read all input and end; one that fails on the way gets a successor.

        Raises:
            DrillError: it does not come to its end.
        """
        self.until(self.feeder.done.is_set, "the last input to be fed", timeout_s)
        Path(self._setup.config.stop).touch()

        def finished() -> bool:
            self.drivers.look()
            return self.drivers.has_finished()

        self.until(finished, "the driver's end", timeout_s)

    def run_to_its_end(self, timeout_s: float, **fields: Any) -> str:
        """Run one more driver, alone, with other `fields` of its config; why it failed, or empty.

        The job has come to its end: the driver reads all input there is, and ends.

        Raises:
            DrillError: it does not end.
        """
        driver = self.drivers.start_another(**fields)
        self.until(lambda: not driver.running, f"the end of driver {driver.number}", timeout_s)
        return "" if driver.ending == "finished" else driver.error or driver.ending
