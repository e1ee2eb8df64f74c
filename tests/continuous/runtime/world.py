"""A continuous job in one process: its slots are threads, everything else is what runs on Spark."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from statebackend import system
from statebackend.continuous.driver.continuous_query import ContinuousQuery
from statebackend.continuous.driver.query_start import start
from statebackend.continuous.driver.slot_stage import Stage
from statebackend.continuous.job.flow import Flow, JobSetup
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.streams import ContinuousStream, continuous
from statebackend.continuous.sources.source import Source
from statebackend.continuous.worker.slot import Run, Slot
from statebackend.rpc.driver_server import Server
from statebackend.rpc.session_endpoint import Credentials
from statebackend.rpc.tls import Tls
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import saved_lineages
from statebackend.runtime.driver.worker_memory import WorkerMemory
from statebackend.runtime.worker.shipped_constants import PackedProcessor
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.settings import Settings
from tests.continuous.runtime.jobs import HeldBack, HeldClock


class ThreadCluster:
    """Slots as threads of this process."""

    timezone = "UTC"
    keeps_workers = True
    memory = WorkerMemory()

    def __init__(self, tls: Tls | None = None) -> None:
        self._server = Server(bind="127.0.0.1", advertised="127.0.0.1", tls=tls)
        self.slots: list[Slot] = []
        self.errors: list[BaseException] = []  # of all runs' slots
        self.on_slot: Callable[[Slot], None] = lambda slot: None
        self.host_of: Callable[[int], str] = lambda slot: ""  # a folder of its own for each

    def server(self) -> Server:
        return self._server

    def ship(self, packed: PackedProcessor) -> ShippedProcessor:
        assert not packed.parts
        return ShippedProcessor(packed.uid, packed.data, ())

    def stage(self, run: Run, credentials: Credentials) -> Stage:
        errors: list[BaseException] = []

        def serve(index: int) -> None:
            try:
                slot = Slot(self._on_host(run, index), index, credentials, host="127.0.0.1")
                self.slots.append(slot)
                self.on_slot(slot)
                slot.serve()
            except BaseException as error:
                errors.append(error)
                self.errors.append(error)

        def go() -> None:
            threads = [
                threading.Thread(target=serve, args=(index,), daemon=True)
                for index in range(run.graph.parallelism)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise RuntimeError(f"SparkException: {errors[0]}")

        return Stage(go, lambda: None)

    def _on_host(self, run: Run, slot: int) -> Run:
        host = self.host_of(slot)
        specs = {
            uid: replace(spec, local_dir=f"{spec.local_dir}/{host}" if host else spec.local_dir)
            for uid, spec in run.specs.items()
        }
        return replace(run, specs=specs)

    def close(self) -> None:
        self._server.shutdown()


class World:
    """A job's folder, and starts of it."""

    def __init__(self, folder: Path, tls: Tls | None = None) -> None:
        self.folder = folder
        self.cluster = ThreadCluster(tls)
        self.queries: list[ContinuousQuery] = []
        self.backend: Any = None
        self.renew()

    def renew(self, **settings: Any) -> None:
        """Another driver's backend: nothing is built yet."""
        allow_dropped_state = settings.pop("allow_dropped_state", False)
        name, savepoint = settings.pop("job", "job"), settings.pop("savepoint", None)
        job = Job(f"file://{self.folder}/state", name)
        if savepoint is not None:
            job.begins = lambda: saved_lineages(savepoint, job)
        found = Settings.resolve(settings, lambda key: None)
        local_dir = str(self.folder / "local")
        self.flow = Flow(JobSetup(job, found, local_dir, savepoint, allow_dropped_state))

    def source(self, source: Source, name: str = "source") -> ContinuousStream:
        return continuous(self.flow, source, name=name)

    def held(self, after_s: float) -> HeldClock:
        """Of a source that gives rows for so long, and the rest after `go_on`."""
        return HeldClock(self._go_on_file, after_s)

    def held_back(self, rows: int, **more: Any) -> HeldBack:
        """A source that gives its last tenth after `go_on` only."""
        return HeldBack(rows, self._go_on_file, rows // 10, **more)

    @property
    def _go_on_file(self) -> Path:
        return self.folder / "goes-on"

    def go_on(self) -> None:
        self._go_on_file.touch()

    def start(self, parallelism: int = 2, **options: Any) -> ContinuousQuery:
        given = {"checkpoint_interval_s": 0.1, "start_timeout_s": 30.0, **options}
        query = start(self.flow, parallelism, RunOptions(**given), self.cluster)
        self.queries.append(query)
        return query

    def run_with_failures(
        self,
        query: ContinuousQuery,
        drawn: random.Random,
        *,
        slots: int,
        most: int,
        after_s: tuple[float, float],
    ) -> None:
        """To the job's end, with failures of one of its newest ``slots``.

        What its source holds back comes after two restarts.
        """
        failures, next_s = 0, system.monotonic_s() + drawn.uniform(*after_s)
        while not query.await_termination(0.02):
            if query.restarts >= 2:
                self.go_on()
            if not query.is_running or query.restarts < failures or failures == most:
                continue
            if system.monotonic_s() > next_s:
                slot = drawn.choice(self.cluster.slots[-slots:])
                slot._link.broken("drawn", 0, RuntimeError("drawn"))
                failures += 1
                next_s = system.monotonic_s() + drawn.uniform(*after_s)

    def close(self) -> None:
        for query in self.queries:
            query.stop(20.0)
        self.cluster.close()


def soon(true: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    until_s = system.monotonic_s() + timeout_s
    while not true():
        assert system.monotonic_s() < until_s
        system.sleep_s(0.02)
