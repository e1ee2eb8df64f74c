"""One application: the driver with Spark's batch rules, and the executors it has.

The start is the real `Launch`, the run the real `RunSession`; what is played is what Spark does
with them. A batch is planned (``offsets/n``), its tasks run as attempts and are tried again, may
have twins, and may be evaluated again by another stage attempt, whose outcome then counts. When
every subtask has ended well and the sink has taken the output, ``commits/n`` is written.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from recovery.decide.live_lineages import ResolvedOnce
from snapshot.log.commit_log import RecordCache
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import FencedError, StateBackendError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.store_patience import StorePatience
from statebackend.runtime.time_plan import TimePlan
from statebackend.settings import Settings
from statebackend.spark.start.launch import Launch, Operator
from statebackend.spark.start.launch_dependencies import StartOptions, Surroundings
from tests.sim import second, timemodel
from tests.sim.bucket import SimStore
from tests.sim.clocks import WallClock
from tests.sim.cluster import Executor, Worker, later
from tests.sim.config import Config
from tests.sim.initial import given, initial_of
from tests.sim.kernel import Process
from tests.sim.keyless import KeylessState, whole_after
from tests.sim.location import (
    GROUPS,
    Committed,
    Plan,
    SimLocation,
    State,
    after,
    plan_of,
    rows_of,
)
from tests.sim.places import FolderStore
from tests.sim.revival import take_way_out
from tests.sim.stage import Stage
from tests.sim.task import Attempt
from tests.sim.threads import Event, SimSystem
from tests.sim.timemodel import DELAY_MS, EVENT, Clock
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["App", "QueryFailed"]

_DEFAULTS = Settings.resolve({}, lambda _: None)
_KEY = StructType()
PARALLELISM_MAX = 5


class QueryFailed(Exception):
    """Spark ended the query."""


class SimJob(Job):
    """A job whose store is the bucket, as one driver has it."""

    def __init__(self, app: App, store: SimStore, patience: StorePatience) -> None:
        self.uri, self.name, self.store_uri = "sim://", app.world.job, "sim://job"
        self.options = None
        self.local_name, self.system = app.world.job, app.system
        self._app, self._patience = app, patience
        self._store = CountingStore(store)
        self._cache = RecordCache(app.system.threads)
        self.resolved = ResolvedOnce()

    def open_at(self, uri: str) -> FolderStore:
        """A savepoint's folder. `take` asks for it with its cleaner held."""
        saves, prefix = self._app.world.saves, uri.removeprefix("sim://") + "/"
        saves.holding.append((prefix, saves.launches[prefix]))
        return FolderStore(self._app.world, self._app.process, prefix)

    def probe(self, store: ObjectStore) -> None:
        """The bucket does what is asked of it."""


class SimSession:
    """What a start asks of Spark's session: how many batches it keeps."""

    def __init__(self, config: Config) -> None:
        said = {"spark.sql.streaming.minBatchesToRetain": str(config.batches_kept)}
        self.conf = SimpleNamespace(get=said.get)


class SimSurroundings(Surroundings):
    """What a driver's process has, and the location that all drivers share."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._running: dict[str, Any] = {}

    @property
    def running(self) -> dict[str, Any]:
        return self._running

    def server(self) -> Any:
        return SimpleNamespace(remove=self._app.remove_session)

    def location(self, path: str) -> SimLocation:
        return SimLocation(self._app.shared, self._app.world.sched)

    def check_sink(self, query: Any, *, checked: bool) -> bool:
        """It is foreachBatch, of which each batch must be checked."""
        return True

    def check_output(self, query: Any, operators: Any) -> None:
        """There are no plans of Spark's here."""


class Query:
    """What `Launch` sees of a query."""

    def __init__(self, query_id: str) -> None:
        self.id = query_id
        self.stopped = Event()
        self.failure: BaseException | None = None
        stream = SimpleNamespace(
            getClass=lambda: SimpleNamespace(getSimpleName=lambda: "MicroBatchExecution"),
            resolvedCheckpointRoot=lambda: "/location",
        )
        self._jsq = SimpleNamespace(streamingQuery=lambda: stream)

    @property
    def isActive(self) -> bool:
        return not self.stopped.is_set()

    def stop(self) -> None:
        self.stopped.set()


class App:
    """A driver process and its executors."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.shared = world.shared
        self.process = Process(f"{world.prefix}app{number}")
        self.process.at_death.append(self._gone)
        sched, config = world.sched, world.config
        self.clock = WallClock()
        if config.clock_jumps_every_s:
            self.clock.step(sched.random)
        self.system = SimSystem(sched, self.process, self.clock)
        store = SimStore(world.bucket, self.process, config)
        patience = StorePatience(
            config.commit_timeout_s, now_s=self.system.monotonic_s, sleep_s=self.system.sleep_s
        )
        self.job = SimJob(self, store, patience)
        self.around = SimSurroundings(self)
        self.sessions: dict[str, Any] = {}
        self.query: Query | None = None
        self.stage: Stage | None = None
        self.second: Stage | None = None
        self.launch: Launch | None = None
        self.fenced = False
        self.attempts = 0
        self.parallelism = world.shared.parallelism
        self.second_parallelism = world.shared.second_parallelism
        self.executors: list[Executor] = [Executor(self, host) for host in world.hosts]
        self.places = {p: p % len(world.hosts) for p in range(PARALLELISM_MAX)}
        self.settings = dataclasses.replace(
            _DEFAULTS,
            commit="async" if config.asynchronous else "sync",
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
        sched.spawn(self.process, self._main)

    # --- the driver's program ------------------------------------------------------------------

    def _main(self) -> None:
        """Start the query, again and again, until somebody else has taken over."""
        sched = self.world.sched
        while not self.fenced:
            try:
                self._run_query()
            except (StateBackendError, QueryFailed) as error:
                code = error.code if isinstance(error, StateBackendError) else str(error)
                sched.note(f"query failed {code}", str(self.process))
                self.world.query_failed(self, error)
                if self.world.config.takes_way_out or self.world.is_calm:
                    take_way_out(self.world, error)
                # Whoever was fenced by another driver stops for good; the job is in good hands.
                self.fenced = isinstance(error, FencedError) and self.world.newest is not self
            sched.pause(0.1 + 0.3 * sched.random.random())
        sched.note("driver gave up", str(self.process))
        self.world.kill_app(self)

    def _run_query(self) -> None:
        sched, shared = self.world.sched, self.shared
        if sched.chance(self.world.config.rescale):
            shared.parallelism = sched.random.randint(1, PARALLELISM_MAX)
            sched.note(Fault.RESCALED, str(shared.parallelism))
        self.parallelism = shared.parallelism
        timed, initial = self.world.config.timed, given(self)
        time = TimePlan(timed, 0, DELAY_MS) if timed == EVENT else TimePlan(timed or "none")
        first = Operator("op", self.parallelism, GROUPS, _KEY, {}, time=time, initial=initial)
        operators = {"op": first}
        if self.world.config.second:
            if self.world.config.rescale and sched.chance(0.3):
                shared.second_parallelism = sched.random.randint(1, PARALLELISM_MAX)
            n = self.second_parallelism = shared.second_parallelism
            operators[second.UID] = Operator(second.UID, n, GROUPS, _KEY, {})
        launch = Launch(
            self,  # type: ignore[arg-type]
            self.job,
            sessions=[SimSession(self.world.config)],  # type: ignore[list-item]
            operators=operators,
            settings=self.settings,
            options=StartOptions(
                go_back_to=shared.go_back_to, checked=lambda query: self.world.config.checked
            ),
            around=self.around,
            clean=self.world.clean,
        )
        self.launch = launch
        with self.world.freezer.watch("start"):
            launch.prepare(None, "/location")
        if shared.query_id is None:
            shared.query_id = sched.new_id()
        query = self.query = Query(shared.query_id)
        session = launch.session
        self.sessions[launch._name] = session
        try:
            # Spark begins the first batch at once; its tasks wait at the gate.
            running = sched.spawn(self.process, lambda: self._batches(query, launch._name))
            with self.world.freezer.watch("takeover"):
                launch.bind(query)  # type: ignore[arg-type]
            sched.note("query started", f"{self.process}")
            self.world.bound(self, launch)
            shared.go_back_to = None
            query.stopped.wait()
            del running
        finally:
            query.stop()
            self.sessions.pop(launch._name, None)
            for stage in self._stages():
                stage.abandon()
        if query.failure is not None:
            raise query.failure
        failure = session.failure
        if failure is not None:
            raise failure
        raise QueryFailed("stopped")

    def remove_session(self, name: str) -> None:
        """What the server does for `Launch` when a start was refused."""
        self.sessions.pop(name, None)

    # --- batches -------------------------------------------------------------------------------

    def _batches(self, query: Query, session: str) -> None:
        try:
            batch = self._first_batch()
            while query.isActive:
                self._batch(query, session, batch)
                batch += 1
        except (StateBackendError, QueryFailed) as error:
            query.failure = query.failure or error
        finally:
            query.stop()

    def _first_batch(self) -> int:
        """Where Spark goes on, by its location alone."""
        sched, shared = self.world.sched, self.shared
        sched.pause(0.005)
        planned, committed = max(shared.offsets, default=-1), max(shared.commits, default=-1)
        return planned + 1 if planned == committed else planned

    def _batch(self, query: Query, session: str, batch: int) -> None:
        world, shared = self.world, self.shared
        sched, config = world.sched, world.config
        sched.pause(0.004)
        plan = shared.offsets.get(batch)
        if plan is None:
            plan = shared.offsets[batch] = plan_of(
                shared, batch, config, sched.random, self.system.wall_ms()
            )
            last = shared.offsets.get(batch - 1, plan)
            if plan.stamp_ms < last.stamp_ms:
                sched.note(Fault.CLOCK_STEPPED, str(batch))
            shared.purge(batch)
        else:
            sched.note("batch repeated", str(batch))
        before = shared.commits.get(batch - 1)
        state = before.state if before else None
        stage = self.stage = Stage(self, session, plan, {} if batch == 0 else state)
        if batch == 0:
            stage.keyless, stage.clock = KeylessState(), Clock()
        elif before is not None:
            stage.keyless, stage.clock = world.keyless.after(before, session), before.clock
        self.second = None
        if config.second:
            self.second = second.begin(self, session, plan, stage, before)
            done = second.run_both(self, query, stage, self.second)
        else:
            done = stage.run(query)
        if config.checked:
            if session not in self.sessions:
                raise QueryFailed("stopped")
            self.sessions[session].check_finished(batch)
        self._commit(query, session, plan, stage, done)

    def _commit(
        self, query: Query, session: str, plan: Plan, stage: Stage, done: dict[int, Attempt]
    ) -> None:
        """The sink, then ``commits/n``: what is in it now is what counts."""
        world, shared = self.world, self.shared
        sched, config = world.sched, world.config
        # Often where that has the epoch repeated which takes in an initial state.
        often = config.initial and plan.batch == 0 and not world.is_calm
        if sched.chance(0.5 if often else config.sink_fails):
            sched.note(Fault.SINK_FAILED)
            raise QueryFailed("the sink failed")
        sched.pause(0.004)
        if not query.isActive:
            raise QueryFailed("stopped")
        # Its plan may have been taken back: Spark has it in memory.
        if plan.batch in shared.commits or shared.offsets.get(plan.batch, plan) is not plan:
            sched.note("concurrent update of the location")
            raise QueryFailed("multiple streaming queries are using the location")
        rows = rows_of(plan, stage.salt, 1, config.keys)[0]
        if stage.state is None:  # a driver that was overtaken, or Spark skipped a batch
            sched.note("batch before is not there")
            raise QueryFailed("the batch before is not there")
        state, model, clock = self._after(stage, plan, rows)
        output: State | None = second.gathered(done)
        if len({attempt.subtask for attempt in done.values()}) < stage.parallelism:
            sched.note(Fault.READ_IN_PART)
            output = None
        keyless = self._keyless(plan, stage)
        committed = Committed(
            plan, stage.salt, state, output, keyless, clock=clock, session=session
        )
        if self.second is not None and (made := second.commit(self, self.second, model)):
            committed = dataclasses.replace(committed, second=made[0])
            world.output.committed(*made)
        shared.commits[plan.batch] = committed
        world.committed(self, session, committed, model)

    def _after(
        self, stage: Stage, plan: Plan, rows: tuple[tuple[bytes, int], ...]
    ) -> tuple[State, State, Clock | None]:
        """The model of the first operator: its state and output after a batch, the next's clock."""
        config, state, clock = self.world.config, stage.state, stage.clock
        assert state is not None
        begun = initial_of(config.keys) if config.initial and plan.batch == 0 else {}
        if not config.timed or clock is None:
            return *after(state | begun, rows), None
        made = timemodel.after(config.timed, state, plan, rows, clock, begun)
        return *made, clock.after(config.timed, plan, rows)

    def _keyless(self, plan: Plan, stage: Stage) -> KeylessState | None:
        """The model of what belongs to no key, after a batch."""
        keys = self.world.config.keys
        if stage.keyless is None or not self.world.config.keyless:
            return None
        rows = rows_of(plan, stage.salt, stage.parallelism, keys)
        return whole_after(stage.keyless, plan, stage.salt, rows)

    # --- what happens to it --------------------------------------------------------------------

    def deliver(self, what: str, attempt: Attempt, failure: StateBackendError | None) -> None:
        """A message of a worker's."""
        stage = self.second if attempt.uid == second.UID else self.stage
        if not self.process.dead and stage is not None:
            stage.deliver(what, attempt, failure)

    def _stages(self) -> list[Stage]:
        return [stage for stage in (self.stage, self.second) if stage is not None]

    def executor_lost(self, executor: Executor) -> None:
        """Another one comes up on the host after a while."""
        place = self.executors.index(executor)

        def again() -> None:
            self.executors[place] = Executor(self, executor.host)
            if self.world.config.rebalance_every_s and self.world.sched.chance(0.5):
                self.rebalance("an executor came back")
            for stage in self._stages():
                stage.nudge()

        later(self, again, 0.3 + self.world.sched.random.random())

    def rebalance(self, why: str) -> None:
        """Place all subtasks anew, over the executors that are there."""
        sched = self.world.sched
        there = [n for n, executor in enumerate(self.executors) if not executor.lost]
        if there:
            sched.random.shuffle(there)
            self.places = {p: there[p % len(there)] for p in self.places}
            sched.note(f"rebalanced: {why}", self.process.name)
            if self.stage is not None:
                sched.note("rebalanced in a batch")
            for stage in self._stages():
                stage.nudge()

    def idle_worker(self, subtask: int, *, uid: str = "op") -> Worker | None:
        """A worker for an attempt: where the subtask's anchor is, if there is one to be had."""
        sched = self.world.sched
        if sched.chance(self.world.config.moved):
            sched.note(Fault.SUBTASK_MOVED)
            self.places[subtask] = sched.random.randrange(len(self.executors))
        place = self.places[subtask]
        for turn in range(len(self.executors)):
            executor = self.executors[(place + turn) % len(self.executors)]
            if executor.lost or (turn and self._waits_for(place)):
                continue
            idle = [worker for worker in executor.workers if worker.idle]
            if idle:
                own = [worker for worker in idle if worker.last_subtask == (uid, subtask)]
                if own and sched.random.random() < self.world.config.same_worker:
                    return own[0]
                return idle[0] if len(idle) == 1 else sched.random.choice(idle)
        return None

    def _waits_for(self, place: int) -> bool:
        """A task waits a while for its own place before it goes elsewhere."""
        return not self.executors[place].lost and self.world.sched.random.random() < 0.8

    def _gone(self) -> None:
        """Executors notice, one after the other, that their driver is no more."""
        sched = self.world.sched
        for executor in self.executors:
            executor.lost = True
            for worker in executor.workers:
                delay_s = 1.5 * sched.random.random()
                sched.call(lambda w=worker: sched.kill(w.process), delay_s)  # type: ignore[misc]
