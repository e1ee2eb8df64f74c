"""What a fault can reach of a running drill: its processes, its disks, its store, its drivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from recovery.drill.jobs.drill_job import DrillJob
    from recovery.drill.proxy.fault_proxy import FaultProxy
    from recovery.drill.savepoints.drill_savepoints import Savepoints

__all__ = ["CannotStrikeError", "Drivers", "Host", "Processes", "Stage"]


class CannotStrikeError(Exception):
    """This fault cannot be made here; the text says why. The drill goes on and reports it."""


class Host(Protocol):
    """One of the cluster's hosts (with `local-cluster` there is one, with one disk)."""

    @property
    def name(self) -> str:
        """Its address."""

    @property
    def local_dir(self) -> Path:
        """Where the task-local copies of its executors lie (the `local_dir=` of the backend)."""


class Processes(Protocol):
    """The living processes of a drill, by role; ids of processes that the drill started."""

    def executors(self, host: str | None = None) -> list[int]:
        """JVMs that run executors."""

    def python_workers(self, host: str | None = None) -> list[int]:
        """Python processes that run tasks."""

    def of_host(self, host: str) -> list[int]:
        """All processes of a host: Spark's worker, executors, Python."""

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL; one that has ended is no error."""

    def freeze(self, pids: Sequence[int]) -> None:
        """SIGSTOP."""

    def thaw(self, pids: Sequence[int]) -> None:
        """SIGCONT."""


class Drivers(Protocol):
    """The drivers of a drill, one after the other."""

    @property
    def parallelism(self) -> int:
        """The job's, from the next driver on."""

    def rescale(self, parallelism: int) -> None:
        """Another parallelism, for all drivers that are started from now on."""

    def restored(self) -> int:
        """How many subtasks have told the newest driver that they have their state back."""

    def kill(self) -> None:
        """SIGKILL to the driver and its JVM, and wait until they and their executors are gone."""

    def start(self, **fields: Any) -> None:
        """Start a driver if none runs; `fields` of its `DriverConfig` differ from the others'."""

    def start_another(self) -> object:
        """Start a driver on the same job, checkpoint and sink while the first runs."""

    def running(self) -> int:
        """How many drivers there are."""

    def started(self) -> int:
        """How many drivers there have been, whatever became of them."""


class Stage(Protocol):
    """A running drill, as faults see it."""

    @property
    def job(self) -> DrillJob:
        """What runs."""

    @property
    def root(self) -> Path:
        """The drill's folder: input, checkpoint, store, local directories, logs."""

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint location."""

    @property
    def store(self) -> Path | None:
        """The folder of the job's durable copies (with `log/`, `data/`, `base/`); None on S3."""

    @property
    def hosts(self) -> Sequence[Host]:
        """At least one."""

    @property
    def processes(self) -> Processes:
        """The living ones."""

    @property
    def uri(self) -> str:
        """Of the job's store."""

    @property
    def proxy(self) -> FaultProxy | None:
        """Between the job and its S3 server; None on files."""

    @property
    def shim(self) -> Path | None:
        """A folder whose files turn faults of the preloaded library on; None without a compiler."""

    @property
    def drivers(self) -> Drivers:
        """That run it."""

    @property
    def subtasks_max(self) -> int:
        """The most that the parallelism may be."""

    def rebalance(self, executors: int) -> None:
        """Have the running driver place its subtasks anew, on so many executors at least.

        Raises `DrillError` if it does not.
        """

    @property
    def savepoints(self) -> Savepoints:
        """Asks for them, and looks at them."""

    def committed(self) -> int:
        """The last epoch that Spark has committed; -1 for none."""

    def has_read_all(self) -> bool:
        """Whether a job that is not fed has come to the end of what there is."""

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """Poll until it gives something true, and give that. Raises `DrillError`."""

    def pause(self, seconds: float) -> None:
        """Let time pass."""

    def say(self, text: str) -> None:
        """One line of progress."""
