"""One run of a continuous job on its driver: the machine's decisions, with the I/O around them.

A loop in one thread takes in what slots say, what was written and what time it is, and does what
the machine answers. Records are written and sinks committed in a second thread, one after the
other; Spark's job runs in a third.
"""

from __future__ import annotations

import functools
import logging
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from pyspark import InheritableThread

from snapshot.checkpoints import Subtask
from snapshot.trigger import Kind
from statebackend import system
from statebackend.continuous.cluster import Stage
from statebackend.continuous.door import Door
from statebackend.continuous.driverlists import DriverLists, prepared_by
from statebackend.continuous.graph import Graph
from statebackend.continuous.heldacks import HeldAcks
from statebackend.continuous.machine import (
    Broken,
    Ended,
    Out,
    Publish,
    RunMachine,
    Settled,
    Tell,
    Write,
)
from statebackend.continuous.messages import (
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
from statebackend.continuous.options import RunOptions
from statebackend.continuous.sinks.base import Committer
from statebackend.continuous.sources.assigner import SplitAssigner
from statebackend.continuous.sources.base import Discovery
from statebackend.continuous.takeover import Taken
from statebackend.errors import PeerLostError, StateBackendError

__all__ = ["JobRun", "StageEnded", "Stopped"]

_log = logging.getLogger("statebackend.continuous")
_TICK_S: Final = 0.02
_STOP_S: Final = 5.0  # for slots to end by themselves
_CANCEL_S: Final = 30.0


class Stopped(Exception):
    """The user ended the job."""


@dataclass(frozen=True)
class StageEnded:
    """Spark's job is over; ``error``: how, if it failed."""

    error: Exception | None


@dataclass(frozen=True)
class _Written:
    checkpoint: int


@dataclass(frozen=True)
class _Found:
    vertex: str
    found: Discovery


@dataclass(frozen=True)
class _Failed:
    error: StateBackendError


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
    ) -> None:
        self._graph, self._options, self._taken, self._lists = graph, options, taken, lists
        self._on_settled = on_settled
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.door = Door(taken.session, graph.parallelism, self._said)
        parallelism = dict.fromkeys(graph.keyed, graph.parallelism)
        parallelism |= dict.fromkeys([*graph.sources, *graph.sinks], 1)
        self._held = HeldAcks(taken.session, parallelism)
        self._committers: dict[str, Committer] = {}
        self._before = before
        self._machine: RunMachine | None = None
        self._worker = ThreadPoolExecutor(1, "statebackend-checkpoints")
        self._stage: InheritableThread | None = None
        self._cancel: Callable[[], None] = lambda: None
        self._assigners: dict[str, SplitAssigner] = {}
        self._looked_s: dict[str, float] = {}
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

    # --- from other threads --------------------------------------------------------------------

    def stop(self) -> None:
        """The user ends the job."""
        self._said.put(Stopped())

    def request(self, kind: Kind) -> None:
        """A user wants a checkpoint."""
        self._said.put(kind)

    # --- the run -------------------------------------------------------------------------------

    def prepare(self, job: str) -> None:
        """Commit what the restored checkpoint holds, sweep what earlier runs left, find splits.

        Raises:
            StateBackendError: that cannot be done.
        """
        taken = self._taken
        self._lists.open(taken.epoch + 1, taken.stamp_ms)
        prepared = self._lists.committables()
        for uid, node in self._graph.sinks.items():
            committer = self._committers[uid] = node.sink.committer(job, uid)
            committer.commit(prepared[uid])
            committer.sweep(taken.run)
        assigners = self._lists.assigners()
        for uid, assigner in assigners.items():
            if not assigner.done:
                found = self._graph.sources[uid].source.discover(assigner.discovery_state)
                assigner.add(found)
                self._looked_s[uid] = system.monotonic_s()
        self._assigners = assigners
        self._machine = RunMachine(
            self._graph,
            self._options,
            assigners,
            epoch=taken.epoch,
            before=self._before,
            stamp_ms=taken.stamp_ms,
            now_s=system.monotonic_s(),
        )

    def launch(self, stage: Stage) -> None:
        """Start the slots."""

        def go() -> None:
            error: Exception | None = None
            try:
                stage.run()
            except Exception as caught:
                error = caught
            self._said.put(StageEnded(error))

        self._cancel = stage.cancel
        # A job group is a thread's, with all that Spark keeps of it.
        self._stage = InheritableThread(target=go, name="statebackend-stage", daemon=True)
        self._stage.start()

    def loop(self) -> None:
        """To the end of the run.

        Raises:
            StateBackendError: why it failed. Stopped: the user ended it.
        """
        assert self._machine is not None
        try:
            while not self._ended and self._error is None and not self._stopping:
                self._take_in()
                now_s = system.monotonic_s()
                self._do(self._machine.tick(now_s, system.wall_ms()))
                self._look(now_s)
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        if self._stopping:
            raise Stopped()

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

    def _heard(self, said: Any) -> list[Out]:
        machine, now_s = self._machine, system.monotonic_s()
        assert machine is not None
        match said:
            case Poll(slot=slot):
                machine.heard(slot, now_s)
            case Register(slot=slot, location=location):
                return machine.registered(slot, location, now_s)
            case Report(slot=slot, events=events):
                machine.heard(slot, now_s)
                return [out for event in events for out in self._event(machine, event, now_s)]
            case _Written(checkpoint=checkpoint):
                return machine.written(checkpoint, now_s)
            case Publish():
                out = machine.published(said, now_s, system.wall_ms())
                self._parts = said.parts
                if not said.is_last:
                    self._lists.confirmed(said.checkpoint, machine.stamp_ms)
                return out
            case _Found(vertex=vertex, found=found):
                return machine.discovered(vertex, found)
            case _Failed(error=error):
                return machine.failed(error)
            case StageEnded(error=error):
                return machine.failed(_stage_error(error))
            case Stopped():
                self._stopping = True
            case "checkpoint" | "savepoint":
                machine.requested(said, now_s)
        return []

    def _event(self, machine: RunMachine, event: Event, now_s: float) -> list[Out]:
        match event:
            case Running(vertex=vertex, subtask=index):
                return machine.started(Subtask(vertex, index), now_s)
            case SplitAsked(vertex=vertex, subtask=index, number=number):
                return machine.split_asked(Subtask(vertex, index), number)
            case SplitEnded(vertex=vertex, subtask=index, split=split):
                machine.split_ended(Subtask(vertex, index), split)
            case Acked():
                return machine.acked(event, now_s)
            case Declined(checkpoint=number, why=why):
                _log.warning("%s declined checkpoint %d: %s", event.vertex, number, why)
                return machine.declined(event, now_s)
            case AtEnd(vertex=vertex, subtask=index):
                machine.at_end(Subtask(vertex, index))
            case Failed():
                _log.error("%s/%d failed:\n%s", event.vertex, event.subtask, event.trace)
                return machine.failed(event.error())
        return []

    def _do(self, outs: list[Out]) -> None:
        for out in outs:
            match out:
                case Tell(slot=slot, command=command):
                    self.door.tell(slot, command)
                case Write():
                    self._in_worker(functools.partial(self._write, out))
                case Publish():
                    self._in_worker(functools.partial(self._publish, out))
                case Settled():
                    self._on_settled(out, self._parts if out.reason is None else {})
                case Ended():
                    self._ended = True
                case Broken(error=error):
                    self._error = self._error or error

    # --- in the second thread ------------------------------------------------------------------

    def _in_worker(self, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                said = work()
            except StateBackendError as error:
                said = _Failed(error)
            except Exception as error:
                what = f"The driver failed: {type(error).__name__}: {error}."
                said = _Failed(StateBackendError(what, todo="See the log."))
                _log.exception("a checkpoint")
            self._said.put(said)

        self._worker.submit(guarded)

    def _write(self, write: Write) -> _Written:
        acks = [part.ack for part in write.parts.values() if part.ack is not None]
        acks += self._lists.acks(write.checkpoint, write.parts, write.cuts)
        for ack in acks:
            self._held.take(ack)
        self._held.commit(write.checkpoint)
        return _Written(write.checkpoint)

    def _publish(self, publish: Publish) -> Publish:
        for uid, prepared in prepared_by(publish.parts).items():
            self._committers[uid].commit(prepared)
        return publish

    def _look(self, now_s: float) -> None:
        """Have sources looked at that may have more splits."""
        for uid, looked_s in self._looked_s.items():
            assigner = self._assigners[uid]
            if assigner.done or now_s - looked_s < self._options.discover_every_s:
                continue
            self._looked_s[uid] = float("inf")  # until it is found
            source, state = self._graph.sources[uid].source, assigner.discovery_state

            def look(uid: str = uid, source: Any = source, state: Any = state) -> _Found:
                found = _Found(uid, source.discover(state))
                self._looked_s[uid] = system.monotonic_s()
                return found

            self._in_worker(look)

    # --- the end -------------------------------------------------------------------------------

    def _end(self) -> None:
        self.door.close()
        if self._stage is not None:
            self._stage.join(_STOP_S)
            if self._stage.is_alive():
                self._cancel()
                self._stage.join(_CANCEL_S)
        self._worker.shutdown(wait=True)
        self._lists.close()


def _stage_error(error: Exception | None) -> StateBackendError:
    if error is None:
        return PeerLostError("Spark's stage ended, and the job had not.")
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "SparkException" in line), lines[0] if lines else "")
    return PeerLostError(
        f"Spark's stage failed: {said.strip()[:500]}",
        todo="The job goes on from its last complete checkpoint; see Spark's log for the task.",
    )
