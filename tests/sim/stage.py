"""The tasks of one batch: attempts, twins, failures, and evaluations that are done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statebackend.errors import BroadcastDivergedError, StaleRequestError, StateBackendError
from statebackend.spark import session_settings as atstart
from tests.sim.kernel import TimedOutError, current
from tests.sim.keyless import KeylessState
from tests.sim.location import Plan, State, rows_of
from tests.sim.task import Attempt
from tests.sim.timemodel import Clock
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.app import App, Query

__all__ = ["Stage"]

_FAILURES_MAX = 4  # of a task, then the query fails: spark.task.maxFailures
_LOOK_S = 0.25
# With these, a stage whose rows differ from its first run's is run again whole; else in part.
_RETRIED_WHOLE = (
    "spark.sql.shuffle.orderIndependentChecksum.enabled",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch",
)


class Stage:
    """Runs every subtask until one attempt of each has ended well.

    Attributes:
        uid: of the operator. rows_by: its rows by subtask, for a salt.
        counted: the attempts that count, of one that runs beside another.
        attempts: of all operators, in this batch.
        salt: which rows the upstream gave: another one when an indeterminate stage is run again.
        state, keyless, clock: what it is before the batch, by the model.
    """

    def __init__(
        self,
        app: App,
        session: str,
        plan: Plan,
        state: State | None,
        *,
        uid: str = "op",
        parallelism: int = 0,
    ) -> None:
        self._app, self._session, self.plan = app, session, plan
        self.uid = uid
        self.state = state
        self.keyless: KeylessState | None = None
        self.clock: Clock | None = None
        world = app.world
        self._sched, self._config = world.sched, world.config
        self.number = self.execution = 0
        self.salt = 0
        if self._config.indeterminate:
            world.salts += 1
            self.salt = world.salts
        self.parallelism = parallelism or app.parallelism
        keys = self._config.keys
        self.rows_by: Callable[[int], tuple[tuple[tuple[bytes, int], ...], ...]] = lambda salt: (
            rows_of(plan, salt, self.parallelism, keys)
        )
        self.counted: dict[int, Attempt] = {}
        # By task: as many as subtasks, or twice as many.
        tasks = self.parallelism * (2 if self._sched.chance(self._config.joined) else 1)
        self._wanted = list(range(tasks))
        self._inbox: list[tuple[Attempt, StateBackendError | None]] = []
        self._waiting: tuple[object, int] | None = None
        self._running: dict[int, list[Attempt]] = {}
        self._failures: dict[int, int] = {}
        self._done: dict[int, Attempt] = {}
        self._abandoned = False
        self.attempts: set[Attempt] = set()
        asked = atstart.wanted_at_start(narrow=False, file_manager=None)
        self._retried_whole = all(asked.get(name) == "true" for name in _RETRIED_WHOLE)

    # --- from outside --------------------------------------------------------------------------

    def deliver(self, what: str, attempt: Attempt, failure: StateBackendError | None) -> None:
        """An attempt has ended."""
        self._inbox.append((attempt, failure))
        self.nudge()

    def nudge(self) -> None:
        """Something may have changed."""
        if self._waiting is not None:
            actor, number = self._waiting
            self._waiting = None
            self._sched.wake(actor, number)  # type: ignore[arg-type]

    def abandon(self) -> None:
        """The query has ended: what runs is killed, sooner or later."""
        self._abandoned = True
        for attempts in self._running.values():
            for attempt in attempts:
                self._kill(attempt)

    # --- the loop ------------------------------------------------------------------------------

    def run(self, query: Query) -> dict[int, Attempt]:
        """Until all is done; the attempt that counts, by subtask.

        Raises:
            StateBackendError: a task failed too often.
        """
        sched, config = self._sched, self._config
        # Two in a row are refused for good, as the atlas says: nobody could go on from there.
        shared = self._app.world.shared
        # Before the first claim nothing shows that a batch was the job's: then whoever starts the
        # query again is refused, and asked for a new location. That is known and left.
        claimed = self._app.world.newest is not None
        if sched.chance(config.partial) and shared.in_part < self.plan.batch - 1 and claimed:
            shared.in_part = self.plan.batch
            sched.random.shuffle(self._wanted)
            self._wanted = sorted(self._wanted[: sched.random.randrange(self.parallelism)])
        self._evaluate(query)
        done, salt = self._done, self.salt
        if len(done) == self.parallelism > 1 and sched.chance(config.looks):
            self._look()
            self._evaluate(query)
        self.salt = salt
        return done

    def _evaluate(self, query: Query) -> None:
        while True:
            if self._abandoned or not query.isActive:
                self.abandon()
                return
            self._launch()
            if len(self._done) >= len(self._wanted) and not self._again():
                break
            self._wait()
            while self._inbox:
                self._ended(*self._inbox.pop(0))
        for attempts in self._running.values():
            for attempt in attempts:
                self._kill(attempt)  # twins

    def _look(self) -> None:
        """Another action wants a part of the output, which may be of other rows: nothing counts."""
        sched = self._sched
        sched.note(Fault.EVALUATED_AGAIN)
        self.execution, self.number = self.execution + 1, self.number + 1
        if self._config.indeterminate:
            self._app.world.salts += 1
            self.salt = self._app.world.salts
        sched.random.shuffle(self._wanted)
        self._wanted = sorted(self._wanted[: sched.random.randrange(1, self.parallelism)])
        self._done, self._running, self._failures = {}, {}, {}

    def _wait(self) -> None:
        actor = current()
        if self._inbox:
            return
        self._waiting = (actor, actor.wait)
        try:
            self._sched.park(_LOOK_S)
        except TimedOutError:
            self._speculate()
        self._waiting = None

    def _launch(self) -> None:
        for subtask in self._wanted:
            if subtask not in self._done and not self._running.get(subtask):
                self._start(subtask)

    def _start(self, task: int) -> bool:
        app, subtask = self._app, task % self.parallelism
        worker = app.idle_worker(subtask, uid=self.uid)
        if worker is None:
            return False
        app.world.attempts += 1
        attempt = Attempt(
            app,
            self._session,
            self.plan,
            subtask,
            app.world.attempts,
            self.number,
            self.salt,
            self.parallelism,
            self.state,
        )
        self.attempts.add(attempt)
        attempt.execution, attempt.task = self.execution, task
        attempt.keyless, attempt.uid, attempt.clock = self.keyless, self.uid, self.clock
        attempt.rows = self.rows_by(self.salt)[subtask]
        attempt.worker, attempt.started_s = worker, self._sched.now_s
        self._running.setdefault(task, []).append(attempt)
        worker.run(attempt)
        return True

    def _speculate(self) -> None:
        """A task that takes long gets a twin."""
        for subtask, attempts in sorted(self._running.items()):
            late = len(attempts) == 1 and self._sched.now_s - attempts[0].started_s > _LOOK_S
            wanted = late and subtask not in self._done and self._sched.chance(self._config.twins)
            if wanted and self._start(subtask):
                self._sched.note(Fault.SPECULATIVE_TWIN, str(attempts[0]))

    def _ended(self, attempt: Attempt, failure: StateBackendError | None) -> None:
        self._check_accused(attempt, failure)
        if attempt.over:
            return
        attempt.over = True
        running = self._running.get(attempt.task, [])
        if attempt not in running:
            return  # of an evaluation, or a batch, that is over
        running.remove(attempt)
        task = attempt.task
        if task in self._done:
            return
        self._check_needed(attempt, failure)
        if failure is None:
            if self._sched.chance(self._config.lost_results):
                # Its executor is lost with the output before anybody has fetched it.
                self._sched.note(Fault.RESULT_LOST, str(attempt))
                return
            self._done[task] = attempt
            for twin in running:
                self._kill(twin)
            if self._config.indeterminate and self._sched.chance(self._config.reruns / 3):
                self._run_again()  # while others still run
            return
        if running:
            return  # its twin goes on
        self._failures[task] = self._failures.get(task, 0) + 1
        if self._failures[task] >= _FAILURES_MAX:
            raise failure

    def _check_accused(self, attempt: Attempt, failure: StateBackendError | None) -> None:
        """No attempt is told that the subtasks disagree: here they go by their rows alone.

        Unless the epoch is recorded: then the batch has to fail.
        """
        if not isinstance(failure, BroadcastDivergedError):
            return
        if "is recorded" in failure.what:
            self._sched.note("diverged after the record", str(attempt))
        else:
            self._app.world.violated("needed", f"{attempt} is accused of nothing: {failure}")

    def _check_needed(self, attempt: Attempt, failure: StateBackendError | None) -> None:
        """Nobody is told that he is late whose output is still waited for, and no newer one's is.

        With `local[n]` a task is not tried again: this would be the end of the query.
        """
        world, same = self._app.world, _task_of(attempt)
        if not isinstance(failure, StaleRequestError) or world.newest is not self._app:
            return
        others = [one for one in self.attempts if _task_of(one) == same]
        if max(one.number for one in others) == attempt.number:
            world.violated("needed", f"{attempt} is the newest of its task, and refused: {failure}")

    def _again(self) -> bool:
        """Whether outputs are lost and what was done is done again; by all, if rows may differ."""
        sched, config = self._sched, self._config
        if not self._done or not sched.chance(config.reruns):
            return False
        self._run_again()
        return len(self._done) < len(self._wanted)

    def _run_again(self) -> None:
        sched, config = self._sched, self._config
        self.number += 1
        if config.indeterminate:
            self._app.world.salts += 1
            self.salt = self._app.world.salts
            sched.note(Fault.OTHER_ROWS)
        else:
            sched.note(Fault.STAGE_AGAIN)
        if config.indeterminate and self._retried_whole:
            self._done.clear()
            self._running.clear()  # they go on, and are not listened to
        else:
            for subtask in sorted(self._done):
                if sched.random.random() < 0.5:
                    del self._done[subtask]
                    self._running[subtask] = []
        self._launch()

    def _kill(self, attempt: Attempt) -> None:
        """Spark ends a task by ending its Python worker."""
        worker = attempt.worker
        assert worker is not None

        def kill() -> None:
            if worker.attempt is attempt:
                worker.kill("task")

        self._sched.call(kill, 0.001 + 0.05 * self._sched.random.random())


def _task_of(attempt: Attempt) -> tuple[str, int, int, int]:
    return attempt.uid, attempt.stage, attempt.execution, attempt.task
