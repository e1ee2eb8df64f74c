"""A driver of the simulation: the real query with its restarts, and what Spark does for it, played.

The slots of a run end together, as those of a barrier stage do; who loses his driver does not.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from recovery.decide.restart_strategy import FixedDelay
from snapshot.storage.store_options import StoreOptions
from statebackend.continuous.driver.continuous_query import ContinuousQuery
from statebackend.continuous.driver.query_start import start
from statebackend.continuous.driver.slot_stage import Stage
from statebackend.continuous.job.flow import Flow, JobSetup
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.streams import continuous
from statebackend.continuous.worker.slot import Run
from statebackend.errors import FencedError, StateBackendError
from statebackend.rpc.session_endpoint import Credentials, Endpoint
from statebackend.runtime.driver.job_savepoints import saved_lineages
from statebackend.runtime.driver.store_patience import StorePatience
from statebackend.runtime.driver.worker_memory import WorkerMemory
from statebackend.runtime.worker.operator_state_io import KeptBlobs
from statebackend.runtime.worker.shipped_constants import PackedProcessor
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.settings import Settings
from tests.sim.app import SimJob
from tests.sim.bucket import SimStore
from tests.sim.continuous.job import OUTPUT, Again, Data, LedgerSink, Numbered, Rules
from tests.sim.continuous.slots import SlotProcess
from tests.sim.kernel import Process
from tests.sim.places import FolderStore
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.continuous.world import World

__all__ = ["Driver"]

_DEFAULTS = Settings.resolve({}, lambda _: None)
GROUPS = 16
PARALLELISM_MAX = 3
_LOOK_S = 0.05


class _Server:
    """The driver's service: sessions by name and token."""

    certificate = b""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.location = driver, driver.process.name

    def add(self, session: str, token: str, handler: Any) -> Endpoint:
        self.remove(session)
        self._driver.sessions[session, token] = handler
        return Endpoint.of(self.location, session, Credentials(token=token))

    def remove(self, session: str) -> None:
        for known in [one for one in self._driver.sessions if one[0] == session]:
            del self._driver.sessions[known]


class _Cluster:
    """Where the driver's slots run."""

    timezone = "UTC"
    keeps_workers = True
    memory = WorkerMemory()

    def __init__(self, driver: Driver) -> None:
        self._driver, self._server = driver, _Server(driver)

    def server(self) -> Any:
        return self._server

    def ship(self, packed: PackedProcessor) -> ShippedProcessor:
        return ShippedProcessor(packed.uid, packed.data, ())

    def stage(self, run: Run, credentials: Credentials) -> Stage:
        driver, world = self._driver, self._driver.world
        slots: list[SlotProcess] = []

        def cancel() -> None:
            for slot in slots:
                world.sched.kill(slot.process)

        def go() -> None:
            for number in range(run.graph.parallelism):
                host = world.sched.random.choice(world.hosts)
                slots.append(SlotProcess(driver, host, run, number, credentials))
            while not all(slot.ended for slot in slots):
                world.sched.pause(_LOOK_S)
                failed = [slot for slot in slots if slot.ended and not slot.well]
                if failed:
                    world.sched.pause(4 * _LOOK_S)  # by then others may have ended by themselves
                    cancel()
                    raise RuntimeError(f"SparkException: {failed[0].failure or 'a worker died'}")

        threads = driver.system.threads
        return Stage(go, cancel, lambda what: threads.start(what, "stage"))


class _Job(SimJob):
    """The job, as this driver has it."""

    def open_at(self, uri: str) -> FolderStore:
        """A savepoint's folder: beside the jobs."""
        world = self._app.world
        place: Any = SimpleNamespace(bucket=world.ground.bucket, config=world.config)
        return FolderStore(place, self._app.process, uri.removeprefix("sim://") + "/")


class Driver:
    """A driver process.

    Attributes:
        sessions: of its runs, by name and token.
        query: the one that runs.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        world.made += 1
        self.process = Process(f"{world.prefix}driver{world.made}")
        self.system = world.system_of(self.process)
        self.sessions: dict[tuple[str, str], Any] = {}
        self.query: ContinuousQuery | None = None
        world.blobs[self.process] = KeptBlobs(self.system.threads)
        self.settings = self._settings()
        world.sched.spawn(self.process, self._main)

    def _settings(self) -> Settings:
        config = self.world.config
        return dataclasses.replace(
            _DEFAULTS,
            max_parallelism=GROUPS,
            inline_limit_bytes=config.inline_budget_bytes,
            base_every_epochs=config.base_every_epochs,
            base_apart_every_epochs=config.apart_every_epochs,
            base_apart_min_bytes=200,
            base_whole_limit_bytes=config.whole_limit_bytes,
            base_lease_s=config.base_lease_s,
            retain_epochs=config.retain_epochs,
            clean_every_epochs=config.clean_every_epochs,
            clean_min_age_s=config.clean_min_age_s,
            start_timeout_s=10.0,
            commit_timeout_s=config.commit_timeout_s,
        )

    def _main(self) -> None:
        """Start the job, again and again, until somebody else has taken over."""
        world, fenced = self.world, False
        while not fenced:
            error = self._run_query()
            code = error.code if error is not None else ""
            world.sched.note(f"query ended {code}".strip(), str(self.process))
            if error is not None:
                world.query_failed(self, error)
            fenced = isinstance(error, FencedError)
            world.sched.pause(0.1 + 0.3 * world.sched.random.random())
        world.sched.note("driver gave up", str(self.process))
        world.end_driver(self)

    def _run_query(self) -> StateBackendError | None:
        world = self.world
        if world.sched.chance(world.config.rescale):
            world.parallelism = world.sched.random.randint(1, PARALLELISM_MAX)
            world.rescaled = True
            world.sched.note(Fault.RESCALED, str(world.parallelism))
        try:
            self.query = start(self._flow(), world.parallelism, self._options(), _Cluster(self))  # type: ignore[arg-type]
        except StateBackendError as error:
            return error
        self.query._done.wait()
        return self.query.exception()

    def _options(self) -> RunOptions:
        config = self.world.config
        return RunOptions(
            checkpoint_interval_s=config.interval_s / config.concurrent,
            max_concurrent=config.concurrent,
            alignment_timeout_s=config.alignment_timeout_s,
            timeout_s=5.0,
            silence_s=config.silence_s,
            start_timeout_s=10.0,
            tolerable_failures=1000,
            restart=FixedDelay(100_000, 0.1),
        )

    def _flow(self) -> Flow:
        world = self.world
        setup = JobSetup(self._job(), self.settings, local_dir="", savepoint=world.savepoint)
        flow = Flow(setup)
        data = continuous(flow, Data(world), name="data").key_by("key")
        joined = data.connect_broadcast(continuous(flow, Rules(world), name="rules"))
        timed = world.config.timed
        time = {"time_mode": "event", "event_time": "at"} if timed else {}
        made = joined.process(Numbered(timed), uid="op", output_schema=OUTPUT, **time)
        if world.config.chained:
            time = {"time_mode": "event"} if timed else {}
            by_bucket = made.key_by("bucket")
            made = by_bucket.process(Again(timed), uid="again", output_schema=OUTPUT, **time)
        made.sink(LedgerSink(world), uid="sink")
        return flow

    def _job(self) -> SimJob:
        config = self.world.config
        store = SimStore(self.world.bucket, self.process, config)
        patience = StorePatience(
            config.commit_timeout_s, now_s=self.system.monotonic_s, sleep_s=self.system.sleep_s
        )
        app: Any = self
        job = _Job(app, store, patience)
        job.name = job.local_name = self.world.job
        job.options, job.begins = StoreOptions(), dict
        if self.world.savepoint is not None:
            job.begins = lambda: saved_lineages(self.world.savepoint, job)
        return job
