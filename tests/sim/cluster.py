"""Hosts, executors and Python workers, and the network between a worker and its driver."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from recovery.local.store_pool import Clock, StorePoolSettings
from snapshot.protocol.messages import AckRequest, BaseDone, BaseRenewal, BeginReply, BeginRequest
from statebackend.errors import CoordinatorUnreachableError, StateBackendError
from statebackend.rocks.store import RocksSettings
from statebackend.runtime.worker.operator_state_io import KeptBlobs
from tests.sim.bucket import SimStore
from tests.sim.clocks import WallClock
from tests.sim.disk import SimIncarnation, SimKeeper
from tests.sim.files import MemPath
from tests.sim.kernel import Process, TimedOutError, current
from tests.sim.task import Attempt, SimEpoch
from tests.sim.threads import SimSystem
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.app import App

_PLAIN = re.compile(r"[^0-9/']{0,40}")  # a reason without what is another one each time

__all__ = ["Executor", "Host", "Worker"]


class Host:
    """A machine: its disk outlives every process on it."""

    def __init__(self, number: int, root: MemPath) -> None:
        self.name = f"h{number}"
        self.folder = str(root / self.name)
        MemPath(self.folder).mkdir()
        self.clock = WallClock()


class Client:
    """What `statebackend.rpc.driver_client.Client` is to a task: requests to its driver."""

    def __init__(self, app: App) -> None:
        self._app = app

    def begin(self, endpoint: Any, request: BeginRequest, *, timeout_s: float) -> Any:
        sched = self._app.world.sched
        if request.copy.applying:
            sched.note("copy half applied", request.copy.applying)
        reply, bodies = self._ask(endpoint, "begin", request, timeout_s)
        self._note_parents(endpoint, request, reply)
        if reply.layers:
            sched.note("restored with a layer")
        return reply, bodies

    def _note_parents(self, endpoint: Any, request: BeginRequest, reply: BeginReply) -> None:
        """How a subtask is put together from those of another parallelism."""
        sched = self._app.world.sched
        if reply.look_for:
            sched.note("told to look for parents")
        stores = sum(step.kind == "store" for step in reply.steps)
        parts = {
            step.keep: "local" if step.found_at else "durable"
            for step in reply.steps
            if step.keep is not None
        }
        if not parts:
            return
        kinds = set(parts.values())
        kind = "mixed" if len(kinds) > 1 else kinds.pop()
        sched.note(f"child from parents: {kind}", f"{stores} stores, {len(parts)} parts")
        if stores > 1:
            sched.note("child from several local parents")
        session = self._app.sessions.get(endpoint.session)
        if session is not None and session._coordinator is not None:
            operator = session._coordinator.run.operators[request.operator]
            own = operator.lineage.subtasks[request.subtask]
            if any(parent.parents for parent in own.parents):
                sched.note("rescaled twice before a base")

    def ack(self, endpoint: Any, request: AckRequest, *, timeout_s: float) -> Any:
        if request.restore is not None:
            sched, restore = self._app.world.sched, request.restore
            sched.note(f"restored {restore.source}")
            for reason in restore.reason.split("; "):
                sched.note(f"reason: {_PLAIN.match(reason)[0]}", reason)
        return self._ask(endpoint, "ack", request, timeout_s)

    def base_done(self, endpoint: Any, request: BaseDone, *, timeout_s: float) -> Any:
        return self._ask(endpoint, "base_done", request, timeout_s)

    def base_renewed(self, endpoint: Any, request: BaseRenewal, *, timeout_s: float) -> Any:
        return self._ask(endpoint, "base_renewed", request, timeout_s)

    def _ask(self, endpoint: Any, verb: str, request: Any, timeout_s: float) -> Any:
        app, world = self._app, self._app.world
        sched, config = world.sched, world.config
        asker = current()
        waiting = asker.wait
        random = sched.random.random
        lost = sched.chance(config.hop_faults)
        fate = "" if not lost else sched.random.choice(["lost", "answer lost", "slow"])
        if fate:
            sched.note(Fault.MESSAGE_LATE if fate == "slow" else Fault.MESSAGE_LOST, verb)

        def answer() -> None:
            session = app.sessions.get(endpoint.session)
            value, error = None, None
            try:
                if session is None:
                    raise CoordinatorUnreachableError("The token is not known (any more).")
                value = getattr(session, verb)(request)
            except StateBackendError as found:
                error = type(found)(found.what, todo=found.todo)
                sched.note(f"{verb}: {found.code}")
            if fate != "answer lost":
                sched.wake(asker, waiting, (value, error), config.hop_s * (0.5 + random()))

        if fate != "lost" and not app.process.dead:
            slow_s = 0.0 if fate != "slow" else timeout_s * 1.5 * random()
            sched.spawn(app.process, answer, config.hop_s * (0.5 + random()) + slow_s)
        try:
            value, error = sched.park(timeout_s)
        except TimedOutError:
            sched.note(f"rpc: {fate or 'no answer'}", verb)
            raise CoordinatorUnreachableError(f"No answer to {verb} came.") from None
        if error is not None:
            raise error
        return value


class Worker:
    """A Python worker: one process, one task at a time, stores that it keeps."""

    def __init__(self, app: App, executor: Executor) -> None:
        world = app.world
        self.app, self.executor, self.host = app, executor, executor.host
        world.workers += 1
        self.process = Process(f"{self.host.name}.w{world.workers}")
        self.store = SimStore(world.bucket, self.process, world.config)
        self.client = Client(app)
        self.held: list[SimIncarnation] = []
        config = world.config
        settings = StorePoolSettings(
            open_limit=config.open_stores,
            idle_close_s=3.0,
            unflushed_epochs=config.unflushed_epochs,
        )
        self.system = SimSystem(world.sched, self.process, self.host.clock)
        self.blobs = KeptBlobs(self.system.threads)
        self.turn = self.system.threads.semaphore(1)  # a worker uploads one base at a time
        self.store_pool = SimKeeper(Clock.of(self.system), settings, self.process, world.doors)
        self.spec = SimpleNamespace(
            uid="op",
            job=world.job,
            begin_timeout_s=config.hop_timeout_s,
            commit_timeout_s=config.commit_timeout_s + config.hop_timeout_s,
            lease_timeout_s=config.lease_timeout_s,
            rocks=RocksSettings(),
            base_bytes_per_s=0,
        )
        self.attempt: Attempt | None = None
        self.last_subtask = ("", -1)
        self.process.at_death.append(self._buried)
        world.sched.spawn(self.process, lambda: self.store_pool.tend(world.sched))

    @property
    def idle(self) -> bool:
        return self.attempt is None and not self.process.dead

    def run(self, attempt: Attempt) -> None:
        """Take an attempt on."""
        self.attempt, self.last_subtask = attempt, attempt.anchor
        sched = self.app.world.sched
        sched.spawn(self.process, lambda: self._run(attempt), self.app.world.config.hop_s)

    def _run(self, attempt: Attempt) -> None:
        failure: StateBackendError | None = None
        try:
            epoch = SimEpoch(attempt, self)
            epoch.read()
            for _ in epoch.run(None):  # type: ignore[arg-type]
                pass
        except StateBackendError as error:
            failure = error
            self.app.world.failed(attempt, error)
        self.attempt = None
        self._tell(attempt, failure)

    def _tell(self, attempt: Attempt, failure: StateBackendError | None) -> None:
        app = self.app
        app.world.sched.call(lambda: app.deliver("ended", attempt, failure), app.world.config.hop_s)

    def kill(self, why: str) -> None:
        """SIGKILL; the executor sees that its worker is gone, and makes another."""
        if self.process.dead:
            return
        world = self.app.world
        world.sched.note(f"worker killed: {why}", self.process.name)
        if self.attempt is not None:
            world.sched.note("worker killed in a task")
            lost = CoordinatorUnreachableError("The Python worker crashed.")
            self._tell(self.attempt, lost)
        world.sched.kill(self.process)
        self.executor.replace(self)

    def _buried(self) -> None:
        for held in self.held:
            held.abandon()
        self.app.world.doors.pop(self.store_pool.address, None)


class Executor:
    """Some workers on one host, for one application."""

    def __init__(self, app: App, host: Host) -> None:
        self.app, self.host = app, host
        self.lost = False
        self.workers = [Worker(app, self) for _ in range(app.world.config.workers)]

    def replace(self, worker: Worker) -> None:
        """Another worker in the place of one that died."""
        place = self.workers.index(worker)
        if not self.lost:
            self.workers[place] = Worker(self.app, self)

    def kill(self, why: str) -> None:
        """All of it; the driver hears of it a while later, and gets another."""
        if self.lost:
            return
        self.lost = True
        for worker in list(self.workers):
            worker.kill(why)
        self.app.executor_lost(self)


def later(app: App, what: Callable[[], None], delay_s: float) -> None:
    """Something that happens unless the application is gone by then."""
    app.world.sched.call(lambda: None if app.process.dead else what(), delay_s)
