"""Slots of the simulation: the real slot and its subtasks, in a process of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from recovery.local.local_copies import LocalSubtask, copies_seen
from recovery.local.store_pool import Clock, StorePoolSettings
from snapshot.protocol.messages import BaseDone, BaseRenewal, BeginRequest
from statebackend.continuous.exchange.channel_messages import Identity
from statebackend.continuous.job.slot_messages import Copy, Deploy
from statebackend.continuous.worker.keyed_state import SubtaskState
from statebackend.continuous.worker.slot import Run, Slot
from statebackend.errors import CoordinatorUnreachableError, ProcessorError, StateBackendError
from statebackend.keygroups import key_group_range
from statebackend.rpc.envelope import Call
from statebackend.rpc.session_endpoint import Credentials
from statebackend.runtime.worker.operator_state_io import KeptBlobs
from statebackend.runtime.worker.participant import Membership, Participant
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.worker_store import SubtaskStore
from tests.sim.bucket import SimStore
from tests.sim.cluster import Host
from tests.sim.continuous.checkers import Stopped
from tests.sim.continuous.exchange import PlayedClient, PlayedServer
from tests.sim.disk import SimIncarnation, SimKeeper, SimSubtask
from tests.sim.kernel import Process, TimedOutError, current
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.continuous.driver import Driver

__all__ = ["SlotProcess"]


class _Client:
    """What `statebackend.rpc.driver_client.Client` is to a slot: requests to its driver."""

    def __init__(self, slot: SlotProcess) -> None:
        self._slot, self._driver = slot, slot.driver

    def begin(self, endpoint: Any, request: BeginRequest, *, timeout_s: float) -> Any:
        return self._ask(endpoint, lambda door: door.begin(request), timeout_s)

    def base_done(self, endpoint: Any, request: BaseDone, *, timeout_s: float) -> Any:
        return self._ask(endpoint, lambda door: door.base_done(request), timeout_s)

    def base_renewed(self, endpoint: Any, request: BaseRenewal, *, timeout_s: float) -> Any:
        return self._ask(endpoint, lambda door: door.base_renewed(request), timeout_s)

    def call(self, endpoint: Any, request: Call, *, timeout_s: float) -> Any:
        return self._ask(endpoint, lambda door: door.call(request.kind, request.body), timeout_s)

    def _fate(self) -> str:
        world = self._driver.world
        if self._slot.cut_until_s > world.sched.now_s:
            return "lost"
        if not world.sched.chance(world.config.hop_faults):
            return ""
        fate: str = world.sched.random.choice(["lost", "answer lost", "slow"])
        world.sched.note(Fault.MESSAGE_LATE if fate == "slow" else Fault.MESSAGE_LOST)
        return fate

    def _ask(self, endpoint: Any, ask: Any, timeout_s: float) -> Any:
        driver, world = self._driver, self._driver.world
        sched, config = world.sched, world.config
        asker = current()
        if asker.process.dead:
            raise GreenletExit
        waiting, fate = asker.wait, self._fate()

        def answer() -> None:
            door = driver.sessions.get((endpoint.session, endpoint.token))
            value, error = None, None
            try:
                if door is None:
                    raise CoordinatorUnreachableError("The token is not known (any more).")
                value = ask(door)
            except StateBackendError as found:
                error = type(found)(found.what, todo=found.todo)
            if fate != "answer lost" and self._slot.cut_until_s <= sched.now_s:
                sched.wake(asker, waiting, (value, error), config.hop_s)

        if fate != "lost" and not driver.process.dead:
            slow_s = 0.0 if fate != "slow" else timeout_s * 1.5 * sched.random.random()
            hop_s = config.hop_s * (0.5 + sched.random.random())
            sched.spawn(driver.process, answer, hop_s + slow_s)
        try:
            value, error = sched.park(timeout_s)
        except TimedOutError:
            raise CoordinatorUnreachableError("No answer came.") from None
        if error is not None:
            raise error
        return value


class _Slot(Slot):
    """The real one, in a process of the simulation."""

    def __init__(self, process: SlotProcess, run: Run, slot: int, credentials: Credentials) -> None:
        self._process = process
        super().__init__(run, slot, credentials, host=process.host.name, system=process.system)

    def _reached(self) -> Any:
        return _Client(self._process)

    def _listen(self, credentials: Credentials, host: str) -> None:
        run, world = self._run, self._process.world
        identity = Identity(
            job=run.job, run=run.run, generation=run.generation, token=credentials.token
        )
        self._tls = None
        server: Any = PlayedServer(world, self._process.process, identity)
        client: Any = PlayedClient(world, self._process.process, identity)
        self._server, self._exchange = server, client

    def _seen(self, spec: TaskSpec) -> list[Copy]:
        found = copies_seen(
            self._process.host.folder, job=self._process.world.job, operator=spec.uid
        )
        return [
            Copy(operator=spec.uid, key_group_start=of.start, key_group_end=of.end, epoch=epoch)
            for of, epoch in sorted(found.items())
        ]

    def _state(self, spec: TaskSpec, deploy: Deploy) -> SubtaskState:
        session = self._link.session(
            timeout_s=spec.begin_timeout_s, ack_timeout_s=spec.commit_timeout_s
        )
        participant = Participant(
            spec.subtask(self._index),
            Membership(session, self._endpoint.session, self._run.query_id),
            self._process.store,
            self._system,
        )
        work: Any = SimpleNamespace(path=None)
        return SubtaskState(
            SubtaskStore(spec, participant, lambda: self._copies(spec), self._process.turn),
            self._background,
            work=work,
            watermark_ms=deploy.watermarks_ms.get(spec.uid, 0),
        )

    def _copies(self, spec: TaskSpec) -> LocalSubtask:
        slot = self._process
        return SimSubtask(
            slot.host.folder,
            key_groups=key_group_range(self._index, spec.parallelism, spec.max_parallelism),
            system=slot.system,
            process=slot.process,
            opened=slot.world.opened,
            config=slot.world.config,
            store_pool=slot.store_pool,
            held=slot.held,
            doors=slot.world.doors,
            opener=slot.world.open_store,
            operator=spec.uid,
            job=slot.world.job,
        )


class SlotProcess:
    """One slot's process, from its start to its end.

    Attributes:
        cut_until_s: until then its driver does not hear of it, nor it of its driver.
        ended: it came to its end; well: nothing failed in it. failure: what did.
    """

    def __init__(self, driver: Driver, host: Host, run: Run, slot: int, token: Credentials) -> None:
        self.driver, self.world, self.host = driver, driver.world, host
        world = self.world
        world.made += 1
        self.process = Process(f"{host.name}.{world.prefix}s{world.made}")
        self.system = world.system_of(self.process)
        self.store = SimStore(world.bucket, self.process, world.config)
        self.held: list[SimIncarnation] = []
        settings = StorePoolSettings(
            open_limit=world.config.open_stores,
            idle_close_s=3.0,
            unflushed_epochs=world.config.unflushed_epochs,
        )
        self.turn = self.system.threads.semaphore(1)
        world.blobs[self.process] = KeptBlobs(self.system.threads)
        self.store_pool = SimKeeper(Clock.of(self.system), settings, self.process, world.doors)
        self.cut_until_s = 0.0
        self.ended = self.well = False
        self.failure: BaseException | None = None
        self.process.at_death.append(self._buried)
        world.sched.spawn(self.process, lambda: self.store_pool.tend(world.sched))
        world.sched.spawn(self.process, lambda: self._serve(run, slot, token), world.config.hop_s)
        world.slots.append(self)

    def _serve(self, run: Run, slot: int, token: Credentials) -> None:
        try:
            _Slot(self, run, slot, token).serve()
            self.well = True
        except Exception as error:
            self.failure = error
            code = error.code if isinstance(error, StateBackendError) else type(error).__name__
            self.world.sched.note(f"slot ended {code}", self.process.name)
            ours = isinstance(error, StateBackendError) and not isinstance(error, ProcessorError)
            if not ours and not self.world.violations and not isinstance(error, Stopped):
                self.world.violations.append(("error", f"{type(error).__name__}: {error}"))
        self.ended = True
        self.world.sched.kill(self.process)  # a worker is not used again

    def _buried(self) -> None:
        for held in self.held:
            held.abandon()
        self.ended = True
        self.world.doors.pop(self.store_pool.address, None)
        self.world.exchanges.pop(self.process.name, None)
        self.world.slots = [one for one in self.world.slots if one is not self]
