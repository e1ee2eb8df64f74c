"""The drivers of a drill, one after the other: each that a fault ends gets a successor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from recovery.drill.cluster.driver_process import Driver
from recovery.drill.cluster.local_cluster import Cluster
from recovery.drill.cluster.polling import until
from recovery.drill.driver.driver_messages import DriverConfig
from statebackend.errors import DrillError

__all__ = ["Succession"]

_EXECUTORS_GONE_S: Final = 300.0
_IDLE_S: Final = 5.0
_FAILURES_MAX: Final = 3  # one after the other without an epoch between them


class Succession:
    """See `recovery.drill.faults.stage.Drivers`.

    Args:
        config: of every driver, but for its file of events.
        epochs: how many were committed so far.

    Attributes:
        every: the drivers so far, oldest first.
        struck: faults so far: what a driver's failure may come from.
        parallelism: of the drivers to come.
    """

    def __init__(
        self,
        config: DriverConfig,
        cluster: Cluster,
        *,
        now_s: Callable[[], float],
        say: Callable[[str], None],
        epochs: Callable[[], int],
    ) -> None:
        self._config, self._cluster = config, cluster
        self._now_s, self._say, self._epochs = now_s, say, epochs
        self.every: list[Driver] = []
        self.warnings: list[str] = []
        self.struck: list[str] = []
        self.parallelism = config.parallelism
        self._held = False  # a fault is between the end of one driver and the start of the next
        self._failures = 0
        self._epochs_at_failure = 0

    # --- what there is -------------------------------------------------------------------------

    def living(self) -> list[Driver]:
        """The drivers that have not ended."""
        return [driver for driver in self.every if driver.running]

    def running(self) -> int:
        """How many drivers there are."""
        return len(self.living())

    def started(self) -> int:
        """How many drivers there have been."""
        self.look()
        return len(self.every)

    def restored(self) -> int:
        """How many subtasks have told the newest driver that they have their state back."""
        self.look()
        return len(self.every[-1].recoveries) if self.every else 0

    def newest(self) -> int:
        """The number of the newest driver whose query has started, else of the newest of all."""
        ready = [d for d in self.every if d.ready_s is not None]
        return (ready or self.every)[-1].number if self.every else 0

    def is_ready(self) -> bool:
        """Whether a driver's query has started."""
        return any(driver.ready_s is not None for driver in self.living())

    def are_idle(self) -> bool:
        """Whether one has had nothing to read for a while."""
        waiting = [driver.idle_s for driver in self.living() if driver.idle_s is not None]
        return any(self._now_s() - since_s > _IDLE_S for since_s in waiting)

    def has_finished(self) -> bool:
        """Whether one has read all input and ended."""
        return any(driver.ending == "finished" for driver in self.every)

    # --- what is done to them ------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL to the driver and its JVM, and wait until they and their executors are gone."""
        self._held = True
        processes = self._cluster.processes
        for driver in self.living():
            driver.kill(processes)
        until(lambda: not processes.executors(), "the executors' end", _EXECUTORS_GONE_S)

    def start(self, **fields: Any) -> None:
        """Start a driver if none runs; `fields` of its `DriverConfig` differ from the others'."""
        self._held = False
        self.look()
        if not self.living():
            self.start_another(**fields)

    def start_another(self, **fields: Any) -> Driver:
        """Start a driver, whoever else runs."""
        number = len(self.every) + 1
        events = str(Path(self._config.root) / "drivers" / f"{number}.events")
        changed = {"events": events, "parallelism": self.parallelism, **fields}
        config = msgspec.structs.replace(self._config, **changed)
        driver = Driver(number, config, self._cluster.driver_environment(), now_s=self._now_s)
        self.every.append(driver)
        self._say(f"driver {number} started")
        return driver

    def rescale(self, parallelism: int) -> None:
        """Another parallelism, for all drivers that are started from now on."""
        self.parallelism = parallelism

    def over(self) -> None:
        """A strike is over: a driver that it ended gets its successor."""
        self._held = False

    # --- what becomes of them ------------------------------------------------------------------

    def tend(self) -> None:
        """Look after them; start another one if none runs any more. Raises as `look`."""
        self.look()
        if not (self.has_finished() or self._held or self.living()):
            self.start_another()

    def look(self) -> None:
        """Take in what became of each.

        Raises:
            DrillError: one failed before any fault, or too many did.
        """
        living = self.living()
        for driver in living:
            driver.look()
            self._look_for_restarts(driver)
        for driver in living:
            if not driver.running:
                self._ended(driver)

    def _look_for_restarts(self, driver: Driver) -> None:
        while driver.restarts_seen < driver.restarts:
            driver.restarts_seen += 1
            self._say(f"the job starts again in driver {driver.number}")
            if not self.struck:
                self.warnings.append("The job failed and started again before any fault.")

    def _ended(self, driver: Driver) -> None:
        first_line = driver.error.partition("\n")[0][:300]
        self._say(f"driver {driver.number} {driver.ending}" + (first_line and f": {first_line}"))
        if driver.ending != "failed":
            return
        todo = f"Look at {driver.log}."
        if not self.struck:
            raise DrillError(f"The job's driver failed before any fault: {first_line}", todo=todo)
        self.warnings.append(f"Driver {driver.number} failed after {self.struck[-1]}: {first_line}")
        if self._epochs() > self._epochs_at_failure:
            self._failures = 0
        self._epochs_at_failure = self._epochs()
        self._failures += 1
        if self._failures >= _FAILURES_MAX and not self.living():
            raise DrillError(
                f"{self._failures} drivers failed one after the other without an epoch between "
                f"them, after {self.struck[-1]}; the last one: {first_line}",
                todo=todo,
            )
