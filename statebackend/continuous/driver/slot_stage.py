"""Where the slots of a continuous job run: a barrier stage of Spark's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from statebackend.continuous.job.flow import JobSetup
from statebackend.continuous.worker.slot import Run, SlotTask
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.rpc.driver_server import Server
from statebackend.rpc.session_endpoint import Credentials
from statebackend.runtime.driver.services import driver_server
from statebackend.runtime.driver.worker_memory import WorkerMemory, worker_memory
from statebackend.runtime.worker.shipped_constants import PackedProcessor, sent_by
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.settings import Settings
from statebackend.threads import Thread

__all__ = ["Cluster", "SparkCluster", "Stage", "cluster_of"]


def _in_a_thread_of_spark(go: Callable[[], None]) -> Thread:
    """A job group is a thread's, with all that Spark keeps of it."""
    thread: Thread = InheritableThread(target=go, name="statebackend-stage", daemon=True)
    thread.start()  # type: ignore[attr-defined]
    return thread


@dataclass(frozen=True)
class Stage:
    """The slots of a run.

    Attributes:
        run: starts all of them, and returns when they have ended; raises if one of them failed.
        cancel: ends them, from another thread.
        start: has something done in a thread, from which ``run`` may be called.
    """

    run: Callable[[], None]
    cancel: Callable[[], None]
    start: Callable[[Callable[[], None]], Thread] = _in_a_thread_of_spark


class Cluster(Protocol):
    """What a job needs of wherever it runs."""

    @property
    def timezone(self) -> str:
        """In which timestamps are shown."""

    @property
    def keeps_workers(self) -> bool:
        """Whether a worker process lives on for the next run."""

    @property
    def memory(self) -> WorkerMemory:
        """A worker's."""

    def server(self) -> Server:
        """The driver's service."""

    def ship(self, packed: PackedProcessor) -> ShippedProcessor:
        """A processor, for the slots."""

    def stage(self, run: Run, credentials: Credentials) -> Stage:
        """The slots of a run, not started."""


class SparkCluster:
    """The cluster of a session."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark, self._settings = spark, settings

    @property
    def timezone(self) -> str:
        """The session's."""
        return str(self._spark.conf.get("spark.sql.session.timeZone", "UTC"))

    @property
    def keeps_workers(self) -> bool:
        """As the session was told."""
        conf = self._spark.sparkContext.getConf()
        return conf.get("spark.python.worker.reuse", "true") != "false"

    @property
    def memory(self) -> WorkerMemory:
        """As the session was told."""
        return worker_memory(self._spark)

    def server(self) -> Server:
        """The one of this driver process."""
        return driver_server(self._spark, self._settings)

    def ship(self, packed: PackedProcessor) -> ShippedProcessor:
        """By broadcasts, as far as it is large."""
        context = self._spark.sparkContext
        return packed.ship(context.broadcast, sent_by(context))

    def stage(self, run: Run, credentials: Credentials) -> Stage:
        """A barrier stage with a job group of its own.

        Raises:
            SparkLostError: Spark is gone. The stage raises it, too, when it runs.
        """
        context = self._spark.sparkContext
        group, slots = f"statebackend-{run.run}", run.graph.parallelism
        with jvm.calls():
            shared = context.broadcast(credentials)

        def go() -> None:
            with jvm.calls():
                context.setJobGroup(group, f"continuous job {run.job}", interruptOnCancel=True)
                rows = context.parallelize(range(slots), slots).barrier()
                rows.mapPartitions(SlotTask(run, shared)).collect()

        def cancel() -> None:
            with jvm.calls():
                context.cancelJobGroup(group)

        return Stage(go, cancel)


def cluster_of(setup: JobSetup) -> Cluster:
    """Of the backend's session."""
    assert setup.spark is not None  # a `StateBackend` has one
    return SparkCluster(setup.spark, setup.settings)
