"""One run of a continuous job on its driver: what its state decides, and the I/O around it.

A loop in one thread takes in what slots say, what was written and what time it is, and does what
the machine answers. Records are written and sinks committed in a second thread, one after the
other; Spark's job runs in a third; sources are looked at in threads of their own. What does not
come to an end there holds nobody up for longer than a checkpoint may take (see `driver_tasks`).
"""

from __future__ import annotations

import functools
import logging
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from snapshot.barriers.checkpoint_trigger import Kind
from snapshot.barriers.pending_checkpoints import Subtask
from statebackend.continuous.driver.checkpoint_book import barriers_of
from statebackend.continuous.driver.driver_endpoint import DriverEndpoint
from statebackend.continuous.driver.driver_lists import DriverLists, prepared_by
from statebackend.continuous.driver.driver_tasks import (
    Failure,
    Found,
    SerialExecutor,
    SplitDiscovery,
    Stopped,
    awaited,
    failure_of,
)
from statebackend.continuous.driver.pending_acks import PendingAcks
from statebackend.continuous.driver.run_state import (
    Broken,
    Ended,
    Out,
    Publish,
    RunState,
    Send,
    Settled,
    Write,
)
from statebackend.continuous.driver.slot_stage import Stage
from statebackend.continuous.driver.takeover import Taken
from statebackend.continuous.job.graph import Graph
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.slot_messages import (
    Acked,
    AtEnd,
    Declined,
    Event,
    Failed,
    Poll,
    Register,
    Report,
    Running,
    SplitAsked,
    SplitEnded,
)
from statebackend.continuous.sinks.sink import Committer, run_name
from statebackend.continuous.sources.split_assigner import SplitAssigner
from statebackend.errors import PeerLostError, SparkLostError, StateBackendError
from statebackend.runtime.driver.job_status import UnderWay
from statebackend.system import SYSTEM, System
from statebackend.threads import Queue, Thread

__all__ = ["JobRun", "StageEnded"]

_log = logging.getLogger("statebackend.continuous")
_TICK_S: Final = 0.02
_STOP_S: Final = 5.0  # for slots to end by themselves
_CANCEL_S: Final = 30.0
_WORK_S: Final = 10.0  # for what is being written or committed to come to its end


@dataclass(frozen=True)
class StageEnded:
    """Spark's job is over; ``error``: how, if it failed."""

    error: BaseException | None


@dataclass(frozen=True)
class _Written:
    checkpoint: int


class JobRun:
    """One run, from its claim to its end.

    Args:
        taken: what the claim gave. lists: of its sources and sinks, not open.
        before: the highest number of an attempt that the job's earlier runs made here.
        on_settled: told of every checkpoint that is over.
    """

    def __init__(
        self,
        graph: Graph,
        options: RunOptions,
        taken: Taken,
        lists: DriverLists,
        *,
        before: int,
        on_settled: Callable[[Settled, Mapping[Subtask, Acked]], None],
        system: System = SYSTEM,
    ) -> None:
        self._system, threads = system, system.threads
        self._graph, self._options, self._taken, self._lists = graph, options, taken, lists
        self._on_settled = on_settled
        self._said: Queue[Any] = threads.queue()
        self.endpoint = DriverEndpoint(taken.session, graph.parallelism, self._said, threads)
        parallelism = dict.fromkeys(graph.keyed, graph.parallelism)
        parallelism |= dict.fromkeys([*graph.sources, *graph.sinks], 1)
        self._held = PendingAcks(taken.session, parallelism, threads)
        self._committers: dict[str, Committer] = {}
        self._before = before
        self._machine: RunState | None = None
        self._row = SerialExecutor("statebackend-checkpoints", system)
        self._work_s = _WORK_S
        self._over = threads.event()
        self._stage: Thread | None = None
        self._cancel: Callable[[], None] = lambda: None
        self._assigners: dict[str, SplitAssigner] = {}
        self._looks = SplitDiscovery(
            {uid: node.source for uid, node in graph.sources.items()},
            every_s=options.discover_every_s,
            warn_s=options.timeout_s,
            said=self._said.put,
            system=system,
        )
        self._parts: Mapping[Subtask, Acked] = {}
        self._error: StateBackendError | None = None
        self._ended = False
        self._stopping = False

    @property
    def number(self) -> int:
        """Of the newest attempt."""
        return self._machine.number if self._machine is not None else self._before

    @property
    def running(self) -> bool:
        """Whether every subtask runs."""
        return self._machine is not None and self._machine.running

    @property
    def has_run(self) -> bool:
        """Whether every subtask has had its state, also after the run is over."""
        return self._machine is not None and self._machine.has_run

    @property
    def restored(self) -> tuple[int, int]:
        """How many subtasks have their state, and of how many; (0, 0): not known, or it failed."""
        if self._machine is None or self._error is not None:
            return 0, 0
        return self._machine.slots.restored

    # --- from other threads --------------------------------------------------------------------

    def under_way(self) -> UnderWay | None:
        """The oldest checkpoint that is not complete; None: none has begun."""
        machine = self._machine
        return machine.under_way() if machine is not None else None

    def stop(self) -> None:
        """The user ends the job."""
        self._over.set()
        self._said.put(Stopped())

    def request(self, kind: Kind) -> None:
        """A user wants a checkpoint."""
        self._said.put(kind)

    # --- the run -------------------------------------------------------------------------------

    def prepare(self, job: str) -> None:
        """Commit what the restored checkpoint holds, sweep what earlier runs left, find splits.

        Raises:
            StateBackendError: that cannot be done. Stopped: the user ended it.
            Exception: what a source or a committer raised.
        """
        taken, timeout_s = self._taken, self._options.timeout_s
        what = "Restoring the lists of sources and sinks"
        lists = self._row.put(what, lambda: self._lists.open(taken.epoch + 1, taken.stamp_ms))
        awaited(lists, what, timeout_s, self._over, self._system)
        in_flight = self._lists.in_flight()
        prepared = self._lists.committables()
        for uid in self._graph.sinks:
            what = f"The commit of what sink {uid!r} had prepared"
            work = functools.partial(self._commit_again, job, uid, prepared[uid])
            done = self._row.put(what, work)
            awaited(done, what, timeout_s, self._over, self._system)
        assigners = self._lists.assigners()
        for uid, assigner in assigners.items():
            if not assigner.done:
                self._looks.first(uid, assigner, timeout_s, self._over)
        self._assigners = assigners
        self._machine = RunState(
            self._graph,
            self._options,
            assigners,
            epoch=taken.epoch,
            before=self._before,
            stamp_ms=taken.stamp_ms,
            now_s=self._system.monotonic_s(),
            watermarks_ms=taken.watermarks_ms,
            in_flight=in_flight,
        )

    def _commit_again(self, job: str, uid: str, prepared: list[bytes]) -> None:
        taken = self._taken
        committer = self._committers[uid] = self._graph.sinks[uid].sink.committer(job, uid)
        committer.commit(prepared)
        self._row.goes_on(f"The sweep of sink {uid!r}")  # not once a later run may be there
        committer.sweep(run_name(taken.tenure.generation, taken.run))

    def launch(self, stage: Stage) -> None:
        """Start the slots."""

        def go() -> None:
            error: BaseException | None = None
            try:
                stage.run()
            except BaseException as caught:
                error = caught
            self._said.put(StageEnded(error))

        self._cancel = stage.cancel
        self._stage = stage.start(go)

    def loop(self) -> None:
        """To the end of the run.

        Raises:
            StateBackendError: why it failed. Stopped: the user ended it.
        """
        assert self._machine is not None
        while not self._ended and self._error is None and not self._stopping:
            self._take_in()
            now_s = self._system.monotonic_s()
            self._do(self._machine.tick(now_s, self._system.wall_ms()))
            late = self._row.overdue(self._options.timeout_s, now_s)
            if late is not None:
                self._work_s = 0.0  # it has had its time
                self._do(self._machine.failed(late))
            self._looks.go_on(self._assigners, now_s)
        if self._error is not None:
            raise self._error
        if self._stopping:
            raise Stopped()

    def closed(self) -> None:
        """Wait until the slots of a job that has ended have closed processors and sinks.

        It waits as long as a checkpoint may take, and gives up sooner if it hears of no slot at
        all.

        Raises:
            StateBackendError: what did not close. All output is committed nevertheless.
        """
        until_s = self._system.monotonic_s() + self._options.timeout_s
        while not self._stopping and (left_s := until_s - self._system.monotonic_s()) > 0:
            try:
                said = self._said.get(timeout=min(left_s, self._options.silence_s))
            except queue.Empty:
                break
            match said:
                case Report(events=events):
                    for failed in (one for one in events if isinstance(one, Failed)):
                        _log_failure(failed)
                        if failed.closing:  # the others came before the end
                            raise failed.error()
                case StageEnded(error=error):
                    if error is not None:  # a slot died before it had closed, or said why not
                        raise _stage_error(error)
                    return
                case Stopped():
                    return
        _log.warning("the job has ended, and its slots did not close in time")

    def _take_in(self) -> None:
        """What was said, for at most as long as it takes to look at the time again."""
        timeout_s = _TICK_S
        for _ in range(1000):
            try:
                said = self._said.get(timeout=timeout_s) if timeout_s else self._said.get_nowait()
            except queue.Empty:
                return
            timeout_s = 0.0
            self._do(self._heard(said))
            if self._ended:
                return  # what comes from here on is for `closed`

    def _heard(self, said: Any) -> list[Out]:
        machine, now_s = self._machine, self._system.monotonic_s()
        assert machine is not None
        match said:
            case Poll(slot=slot):
                machine.slots.heard(slot, now_s)
            case Register(slot=slot, peer=peer, copies=copies):
                return machine.registered(slot, peer, now_s, copies)
            case Report(slot=slot, events=events):
                machine.slots.heard(slot, now_s)
                return [out for event in events for out in self._event(machine, event, now_s)]
            case _Written(checkpoint=checkpoint):
                return machine.written(checkpoint, now_s)
            case Publish():
                out = machine.published(said, now_s, self._system.wall_ms())
                self._parts = said.parts
                if not said.is_last:
                    self._lists.confirmed(said.checkpoint, machine.stamp_ms)
                return out
            case Found(vertex=vertex, found=found):
                out = machine.discovered(vertex, found)
                self._looks.found(vertex, now_s)
                return out
            case Failure(error=error):
                return machine.failed(error)
            case StageEnded(error=error):
                return machine.failed(_stage_error(error))
            case Stopped():
                self._stopping = True
            case "checkpoint" | "savepoint" | "last":
                machine.requested(said, now_s)
        return []

    def _event(self, machine: RunState, event: Event, now_s: float) -> list[Out]:
        match event:
            case Running(vertex=vertex, subtask=index):
                return machine.started(Subtask(vertex, index), now_s)
            case SplitAsked(vertex=vertex, subtask=index, number=number):
                return [*machine.splits.asked(Subtask(vertex, index), number)]
            case SplitEnded(vertex=vertex, subtask=index, split=split):
                machine.splits.ended(Subtask(vertex, index), split)
            case Acked():
                return machine.acked(event, now_s)
            case Declined(checkpoint=number, why=why):
                _log.warning("%s declined checkpoint %d: %s", event.vertex, number, why)
                return machine.declined(event, now_s)
            case AtEnd(vertex=vertex, subtask=index):
                machine.at_end(Subtask(vertex, index))
            case Failed():
                _log_failure(event)
                return machine.failed(event.error())
        return []

    def _do(self, outs: list[Out]) -> None:
        for out in outs:
            match out:
                case Send(slot=slot, command=command):
                    self.endpoint.send(slot, command)
                case Write():
                    what = f"The records of checkpoint {out.checkpoint}"
                    self._in_row(what, functools.partial(self._write, out))
                case Publish():
                    what = f"The output of checkpoint {out.checkpoint}"
                    self._in_row(what, functools.partial(self._publish, out))
                case Settled():
                    self._on_settled(out, self._parts if out.reason is None else {})
                case Ended():
                    self._ended = True
                case Broken(error=error):
                    self._error = self._error or error

    # --- in the second thread ------------------------------------------------------------------

    def _in_row(self, what: str, work: Callable[[], Any]) -> None:
        def guarded() -> Any:
            try:
                return work()
            except Stopped:
                return None  # nobody waits for it any more
            except BaseException as error:  # whatever it is: else nobody hears of it
                return Failure(failure_of(error, what))

        self._row.put(what, guarded).add_done_callback(lambda done: self._said.put(done.result()))

    def _write(self, write: Write) -> _Written:
        acks = [part.ack for part in write.parts.values() if part.ack is not None]
        acks += self._lists.acks(write.checkpoint, write.parts, write.cuts)
        self._taken.session.progress.figures.aligned(write.epoch, barriers_of(write))
        for ack in acks:
            self._held.take(ack)
        self._held.commit(write.checkpoint)
        return _Written(write.checkpoint)

    def _publish(self, publish: Publish) -> Publish:
        for uid, prepared in prepared_by(publish.parts).items():
            self._row.goes_on(f"The commit of checkpoint {publish.checkpoint} by sink {uid!r}")
            self._committers[uid].commit(prepared)
        return publish

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the slots, and whatever else was begun; waits for none of it without a limit."""
        self._over.set()
        self.endpoint.close()
        if self._stage is not None:
            self._stage.join(_STOP_S)
            if self._stage.is_alive():
                self._cancel()
                self._stage.join(_CANCEL_S)
        if self._row.close(self._work_s):  # else they are in use
            self._lists.close()
            for committer in self._committers.values():
                committer.close()


def _stage_error(error: BaseException | None) -> StateBackendError:
    if error is None:
        return PeerLostError("Spark's stage ended, and the job had not.")
    if isinstance(error, SparkLostError):
        return error
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "SparkException" in line), lines[0] if lines else "")
    raised = _raised_in_python(lines)
    return PeerLostError(
        f"Spark's stage failed: {said.strip()[:500]}" + (f": {raised}" if raised else ""),
        todo="The job goes on from its last complete checkpoint; see Spark's log for the task.",
    )


def _raised_in_python(lines: list[str]) -> str:
    """The error at the end of a worker's traceback: its first line that is not indented."""
    begun = False
    for line in lines:
        if begun and not line.startswith(" "):
            return line.strip()[:500]
        begun = begun or line.startswith("Traceback (most recent call last)")
    return ""


def _log_failure(failed: Failed) -> None:
    _log.error("%s/%d failed:\n%s", failed.vertex, failed.subtask, failed.reply.trace)
