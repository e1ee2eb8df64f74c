"""One attempt at one subtask's epoch: the real task, its input and its processor played."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from zlib import crc32

from recovery.local.local_copies import LocalSubtask
from snapshot.protocol.messages import BaseGrant, BeginReply, Use
from statebackend.errors import BarrierMissingError, ProcessorError
from statebackend.keygroups import key_group_range
from statebackend.operators.operator_snapshot import OperatorSnapshot, StoredOperatorState
from statebackend.runtime.worker.background_upload import BaseUpload
from statebackend.runtime.worker.participant import (
    JobSubtask,
    Membership,
    Participant,
    RemoteSession,
)
from statebackend.runtime.worker.worker_store import SubtaskStore
from statebackend.spark.worker.task import SubtaskEpoch, _Timings
from statebackend.state.table import StateTable
from tests.sim import initial
from tests.sim.disk import SimSubtask
from tests.sim.kernel import Scheduler
from tests.sim.keyless import KeylessState, Played
from tests.sim.location import GROUPS, Plan, State, clipped
from tests.sim.timed import Timed, event_max_ms
from tests.sim.timemodel import Clock
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.app import App, Worker

__all__ = ["Attempt", "SimEpoch"]


class Attempt:
    """What the driver asks a worker for.

    Attributes:
        number: Spark's task attempt id, growing. stage: which run of the batch's stage.
        uid: of its operator. rows: its input.
        execution: which action on the batch's output.
        task: of its stage; two of them may be for one subtask.
        expected: the state of its key groups after the batch before, by the model.
        keyless: what belongs to no key, after the batch before, by the model.
        clock: the watermarks of the batch, by the model.
    """

    def __init__(
        self,
        app: App,
        session: str,
        plan: Plan,
        subtask: int,
        number: int,
        stage: int,
        salt: int,
        parallelism: int,
        state: State | None,
    ) -> None:
        self.app, self.session, self.plan = app, session, plan
        self.subtask, self.number = subtask, number
        self.stage, self.salt = stage, salt
        self.execution, self.task = 0, subtask
        self.keyless: KeylessState | None = None
        self.clock: Clock | None = None
        self.uid = "op"
        self.rows: tuple[tuple[bytes, int], ...] = ()
        self.parallelism = parallelism
        groups = key_group_range(subtask, parallelism, GROUPS)
        self.key_groups = range(groups.start, groups.end + 1)
        self.expected = None if state is None else clipped(state, self.key_groups)
        self.worker: Worker | None = None
        self.started_s = 0.0
        self.output: State = {}
        self.over = False

    @property
    def anchor(self) -> tuple[str, int]:
        """What has a place of its own."""
        return self.uid, self.subtask

    def __str__(self) -> str:
        return f"{self.app.process}:{self.plan.batch}.{self.subtask}#{self.number}"


class _Stores(SubtaskStore):
    """The real one; it is noted when a base begins to be uploaded."""

    def __init__(self, sched: Scheduler, *given: Any) -> None:
        super().__init__(*given)
        self._sched = sched

    def _upload(self, grant: BaseGrant, generation: int) -> BaseUpload:
        self._sched.note("base upload begins", grant.id)
        return super()._upload(grant, generation)


class SimEpoch(SubtaskEpoch):
    """The real sequence of `SubtaskEpoch.run`, on the simulation's worker."""

    wants_barrier = True

    def __init__(self, attempt: Attempt, worker: Worker) -> None:
        app, config = attempt.app, attempt.app.world.config
        self._attempt, self._worker, self._config = attempt, worker, config
        self._sched = app.world.sched
        self._rows = attempt.rows
        spec: Any = SimpleNamespace(
            **{**vars(worker.spec), "uid": attempt.uid},
            parallelism=attempt.parallelism,
            max_parallelism=GROUPS,
        )
        context: Any = SimpleNamespace(
            epoch=attempt.plan.batch,
            attempt=attempt.number,
            use=Use(attempt.stage, attempt.task, attempt.execution),
        )
        taken: Any = SimpleNamespace(
            subtask=attempt.subtask,
            stamp_ms=attempt.plan.stamp_ms,
            nonce=crc32(f"{attempt.session} {attempt.plan.batch}".encode()),
            max_event_ms=None,
            second_event_ms=None,
            stage=SimpleNamespace(rows=len(self._rows)),
            staged_bytes=0,
        )
        client: Any = worker.client
        endpoint: Any = SimpleNamespace(app=app, session=attempt.session)
        session = RemoteSession(
            client, endpoint, timeout_s=spec.begin_timeout_s, ack_timeout_s=spec.commit_timeout_s
        )
        job = app.world.job
        participant = Participant(
            JobSubtask(job, job, attempt.uid, attempt.subtask, attempt.parallelism),
            Membership(session, attempt.session, app.shared.query_id, attempt.number),
            worker.store,
            worker.system,
        )
        participant.operator_state.cache = worker.blobs
        none: Any = None
        work: Any = SimpleNamespace(path=None)
        super().__init__(
            _Stores(self._sched, spec, participant, self._local, worker.turn),
            none,
            context,
            taken,
            work=work,
            timings=_Timings(worker.system.monotonic_s),
        )
        self._frozen = OperatorSnapshot(StoredOperatorState(), None, None)

    def read(self) -> None:
        """The input, up to the barrier.

        Raises:
            BarrierMissingError: upstream died, which looks like the end of the input.
        """
        sched, config = self._sched, self._config
        cut = None
        if sched.chance(config.truncated):
            cut = sched.random.randint(0, len(self._rows))
        for place in range(0, len(self._rows), 8):
            if cut is not None and place >= cut:
                break
            sched.pause(config.row_s)
        if cut is not None:
            sched.note(Fault.INPUT_TRUNCATED, str(self._attempt))
            self._rows = self._rows[:cut]
            if self.wants_barrier:
                raise BarrierMissingError("The input ended without its barrier.")

    def _process(self, table: StateTable, reply: BeginReply) -> Iterator[Any]:
        """A running total by key; one row is one step."""
        sched, config, output = self._sched, self._config, self._attempt.output
        self._attempt.app.world.restored(self._attempt, table, reply)
        played = self._begin_keyless(reply)
        output.clear()
        timed = self._begin_timed(table, reply)
        fails_at = -1
        if self._rows and sched.chance(config.processor_fails):
            fails_at = sched.random.randrange(len(self._rows))
        pause_s = config.row_s * (0.5 + sched.random.random())
        for place, (key, amount) in enumerate(self._rows):
            if place == fails_at:
                sched.note(Fault.PROCESSOR_RAISES, str(self._attempt))
                raise ProcessorError("The processor raised.")
            if timed is not None:
                if timed.is_late(key, amount):
                    continue
                timed.take(key, amount)
            if amount == 0:
                table.put(key, None)
                output[key] = b""
            else:
                total = b"%d" % (int(table.get(key) or b"0") + amount)
                table.put(key, total)
                output[key] = total
            sched.pause(pause_s)
        if timed is not None:
            self._end_timed(timed)
        if played is not None:
            attempt = self._attempt
            played.process(attempt.plan, attempt.salt, attempt.subtask, self._rows)
            self._frozen = played.snapshot()
        yield output

    def _begin_timed(self, table: StateTable, reply: BeginReply) -> Timed | None:
        """What goes by time, where there is any; and the initial state, where the reply has one."""
        attempt, sched = self._attempt, self._sched
        found: State = {}
        if reply.initial:
            found = initial.read(self._participant.store, reply.initial)
            runs = attempt.app.shared.begun_by
            again = " again" if runs - {attempt.session} else ""
            sched.note(f"initial state taken in{again}", str(attempt))
            runs.add(attempt.session)
        for key, total in found.items():
            table.put(key, total)
        if not self._config.timed or attempt.uid != "op":
            return None
        mode = self._config.timed
        attempt.app.world.times.begun(attempt, reply)
        self._taken.max_event_ms = event_max_ms(mode, attempt.plan, self._rows)
        timed = Timed(mode, attempt.plan, table, reply, self._rows, attempt.output)
        timed.begin_with(found)
        return timed

    def _end_timed(self, timed: Timed) -> None:
        timed.end()
        figures = timed.figures
        self._next_timer_ms = figures.next_timer_ms
        sched, said = self._sched, str(self._attempt)
        if figures.timers_fired:
            sched.note(f"timers fired in {self._config.timed} time", said)
        if figures.expired:
            sched.note("expired state removed", said)
        if timed.late:
            sched.note("late rows left out", said)

    @property
    def _has_keyless(self) -> bool:
        return self._config.keyless and self._attempt.uid == "op"

    def _begin_keyless(self, reply: BeginReply) -> Played | None:
        """What belongs to no key, where there is any."""
        if not self._has_keyless:
            return None
        played = Played(self._participant.operator_state.read(reply))
        self._attempt.app.world.keyless.restored(self._attempt, played.begun)
        return played

    def _local(self) -> LocalSubtask:
        worker, world = self._worker, self._attempt.app.world
        return SimSubtask(
            worker.host.folder,
            key_groups=key_group_range(self._attempt.subtask, self._attempt.parallelism, GROUPS),
            system=worker.system,
            process=worker.process,
            opened=world.opened,
            config=self._config,
            store_pool=worker.store_pool,
            held=worker.held,
            doors=world.doors,
            opener=world.open_store,
            operator=self._attempt.uid,
            job=world.job,
        )
