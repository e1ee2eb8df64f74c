"""A subtask of a keyed vertex: reads its channels, runs its operator, takes its snapshots.

One thread does all of it, in this order over and over: what the driver says (the mailbox), rows
that have waited long enough, timers, then the next element of the channels. Snapshots are frozen in
this thread and made durable in another.
"""

from __future__ import annotations

import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from snapshot.actions import Abort, Action, Block, Forward, Snapshot, Unblock, Why
from snapshot.alignment import Alignment, Mode
from snapshot.barrier import Barrier, Cancel, EndOfInput, Event, Idle, Watermark
from snapshot.watermarks import END_MS, Watermarks
from statebackend import system
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.graph import Edge
from statebackend.continuous.messages import (
    Aborted,
    Acked,
    AtEnd,
    Command,
    Completed,
    Declined,
    Running,
    Trigger,
)
from statebackend.continuous.messages import Event as Happened
from statebackend.continuous.output import Output
from statebackend.continuous.subtaskstate import SubtaskState
from statebackend.continuous.vertexstate import Background, Frozen
from statebackend.errors import PeerLostError, StateBackendError, StorageError

__all__ = ["KeyedSubtask", "Link", "Subtask", "stopped"]

_log = logging.getLogger("statebackend.continuous")
# How long the mailbox waits at most while nothing arrives in the channels.
_NAP_S: Final = 0.02
_ROUNDS: Final = 1_000


class Link(Protocol):
    """How a subtask reaches its driver, and whom it tells that it cannot go on."""

    def report(self, *events: Happened) -> None:
        """Say what happened; raises if the driver cannot be reached."""

    def broken(self, vertex: str, subtask: int, error: BaseException) -> None:
        """The subtask has failed."""


def stopped() -> StateBackendError:
    """What wakes a thread that is to end; nobody is told of it."""
    return PeerLostError("The run is over.")


class Subtask(ABC):
    """What all subtasks have: a mailbox, an output, a thread that runs them.

    Args:
        vertex, index: which it is. output: connects it to where its rows go. link: to the driver.
    """

    def __init__(self, vertex: str, index: int, output: Callable[[], Output], link: Link) -> None:
        self.vertex, self.index = vertex, index
        self._connect, self._link = output, link
        self._output: Output | None = None
        self.mailbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = False
        self._last: int | None = None  # the attempt that is the job's last
        self._at_end = False

    def run(self) -> None:
        """In a thread of its own: to the end of the run; failures are told, not raised."""
        error: BaseException | None = None
        try:
            self._open()
            self._output = self._connect()
            self._link.report(Running(vertex=self.vertex, subtask=self.index))
            while not self._stopping:
                self._step()
        except BaseException as caught:
            error = caught
            if not self._stopping:
                self._link.broken(self.vertex, self.index, caught)
        finally:
            self._stopping = True
            self._finish(error)

    def stop(self) -> None:
        """From any thread: end soon."""
        self._stopping = True
        output = self._output
        if output is not None:
            output.fail(stopped())

    @property
    def output(self) -> Output:
        """Where the rows go, once it is connected."""
        assert self._output is not None
        return self._output

    def _finish(self, error: BaseException | None) -> None:
        """Let go of everything; what fails here changes nothing any more."""
        for close in (lambda: self._close(error), self._output.close if self._output else None):
            try:
                if close is not None:
                    close()
            except Exception as failed:
                _log.warning("%s/%d was not closed in order: %s", self.vertex, self.index, failed)

    def _mail(self, wait_s: float = 0.0) -> bool:
        """Do what the driver said; whether it said anything."""
        found = False
        while not self._stopping:
            try:
                command = self.mailbox.get(timeout=wait_s) if wait_s else self.mailbox.get_nowait()
            except queue.Empty:
                return found
            found, wait_s = True, 0.0
            if isinstance(command, Trigger) and command.barrier.kind == "last":
                self._last = command.barrier.checkpoint
            self._told(command)
        return found

    def _ended(self) -> None:
        """The input has ended: so do the channels."""
        self.output.send(Watermark(at_ms=END_MS))
        self.output.send(EndOfInput())
        self._at_end = True
        self._link.report(AtEnd(vertex=self.vertex, subtask=self.index))

    def _acked(self, checkpoint: int, **parts: Any) -> None:
        ended = self._at_end and checkpoint == self._last
        self._link.report(
            Acked(
                vertex=self.vertex,
                subtask=self.index,
                checkpoint=checkpoint,
                ended=ended,
                **parts,
            )
        )

    def _declined(self, checkpoint: int, why: str, *, newer: bool = False) -> None:
        declined = Declined(
            vertex=self.vertex, subtask=self.index, checkpoint=checkpoint, newer=newer, why=why
        )
        self._link.report(declined)

    @abstractmethod
    def _open(self) -> None:
        """Get the state, before anything else."""

    @abstractmethod
    def _step(self) -> None:
        """Do a little, or wait a little."""

    @abstractmethod
    def _told(self, command: Command) -> None:
        """Do what the driver said."""

    @abstractmethod
    def _close(self, error: BaseException | None) -> None:
        """Let go of what was opened."""


class KeyedSubtask(Subtask):
    """See the module.

    Args:
        state: of the subtask, not open. processor: makes the user's.
        inbox: its channels. inputs: the edge of each of them. mode: of barriers.
        epoch, stamp_ms: of the run's first epoch.
        persisting: where snapshots are made durable.
    """

    def __init__(
        self,
        vertex: str,
        index: int,
        output: Callable[[], Output],
        link: Link,
        *,
        state: SubtaskState,
        processor: Callable[[], Any],
        inbox: Inbox,
        inputs: Sequence[Edge],
        mode: Mode,
        time_mode: str,
        epoch: int,
        stamp_ms: int,
        persisting: Background,
    ) -> None:
        super().__init__(vertex, index, output, link)
        self._state, self._processor = state, processor
        self._inbox = inbox
        self._inputs = tuple(inputs)
        self._alignment = Alignment(len(inputs), mode=mode)
        self._by_clock = time_mode == "processing"
        self._begins = epoch, stamp_ms
        self._persisting = persisting

    def _open(self) -> None:
        self._state.open(*self._begins)
        self._operator = self._state.make_operator(self._processor())
        times = self._state.times
        at_ms = times.watermark_ms + 1 if times.watermark_ms else None
        given = {} if at_ms is None else {"at_ms": at_ms}
        self._watermarks = Watermarks(len(self._inputs), **given)
        if any(edge.timed for edge in self._inputs):
            for channel, edge in enumerate(self._inputs):
                if not edge.timed:  # it says nothing of time, and holds nobody back
                    self._watermarks.take(channel, Idle(idle=True))

    def stop(self) -> None:
        """As in `Subtask`."""
        super().stop()
        self._inbox.fail(stopped())

    def _close(self, error: BaseException | None) -> None:
        self._inbox.close()
        if hasattr(self, "_operator") and error is None:
            self._operator.close()
        self._state.close(error)

    # --- what comes ----------------------------------------------------------------------------

    def _step(self) -> None:
        self._mail()
        self._state.check()
        self._state.tidy()
        output = self.output
        now_s = system.monotonic_s()
        output.flush_if_due(now_s)
        if self._at_end:  # timers of processing time that are left stay in the state
            self._mail(_NAP_S)
            return
        if self._by_clock:
            self._state.times.processing_time_ms = system.wall_ms()
            self._emit(self._operator.fire())
        wait_s = _NAP_S
        if output.next_flush_s is not None:
            wait_s = min(wait_s, max(0.0, output.next_flush_s - now_s))
        got = self._inbox.poll(wait_s)
        if got is None:
            return
        channel, element = got
        if isinstance(element, pa.RecordBatch):
            self._do(self._alignment.data(channel, element.nbytes, self._now_s()))
            self._state.times.processing_time_ms = system.wall_ms()
            edge = self._inputs[channel]
            if not edge.key_positions:
                self._operator.broadcast(element)
            else:
                rows = element if edge.side is None else edge.side.shown(element)
                self._emit(self._operator.process(rows))
            if self._by_clock:
                self._emit(self._operator.fire())
        else:
            self._event(channel, element)

    def _event(self, channel: int, event: Event) -> None:
        told = isinstance(event, Watermark | Idle) and self._inputs[channel].timed
        if told or isinstance(event, EndOfInput):
            assert isinstance(event, Watermark | Idle | EndOfInput)
            for onward in self._watermarks.take(channel, event):
                if isinstance(onward, Watermark):
                    self._advance(onward.at_ms)
                self.output.send(onward)
        if isinstance(event, Barrier | Cancel | EndOfInput):
            self._do(self._alignment.event(channel, event, self._now_s()))
        if self._alignment.ended and not self._at_end:
            self._ended()

    def _advance(self, at_ms: int) -> None:
        """Rows before ``at_ms`` are late from now on, and timers before it fire."""
        times = self._state.times
        if at_ms == END_MS:  # of this run only: no row comes any more that could be late
            times.watermark_ms = END_MS
        else:
            times.watermark_ms = times.late_watermark_ms = at_ms - 1
        if self._by_clock:
            return
        for _ in range(_ROUNDS):  # timers that timers set for a time that has come
            self._emit(self._operator.fire())
            if at_ms != END_MS or not self._operator.timers_due:
                return
        _log.warning("timers of %r set timers, and so on, after the end of time", self.vertex)

    def _emit(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in batches:
            self.output.emit(batch)

    def _now_s(self) -> float:
        return system.wall_ms() / 1000

    # --- checkpoints ---------------------------------------------------------------------------

    def _told(self, command: Command) -> None:
        match command:
            case Trigger(barrier=barrier):
                self._do(self._alignment.triggered(barrier, self._now_s()))
            case Aborted(checkpoint=number):
                self._do(self._alignment.aborted(number))
                self._state.aborted(number)
            case Completed(checkpoint=number, next_stamp_ms=stamp_ms):
                self._state.confirmed(number, stamp_ms)
                self.output.completed(number)
            case _:
                pass

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Block(channel=channel):
                    self._inbox.block(channel)
                case Unblock(channel=channel):
                    self._inbox.unblock(channel)
                case Snapshot():
                    self._snapshot(action)
                case Forward(event=event):
                    self.output.forward(event)
                case Abort(checkpoint=number, why=why):
                    if why is Why.NEWER:
                        self._declined(number, "a newer barrier came first", newer=True)
                case _:
                    raise AssertionError(f"{action} without an alignment timeout")

    def _snapshot(self, taken: Snapshot) -> None:
        started_s = system.monotonic_s()
        self._state.times.processing_time_ms = system.wall_ms()
        self._operator.clean()
        frozen = self._state.freeze(taken.checkpoint)
        prepared = self.output.prepare(taken.checkpoint)
        sync_ms = round((system.monotonic_s() - started_s) * 1000, 3)
        figures = taken.figures
        timings_ms = {
            "start_delay": round(figures.start_delay_s * 1000, 3),
            "alignment": round(figures.duration_s * 1000, 3),
            "sync": sync_ms,
        }
        counts = {
            "alignment_bytes": figures.bytes_processed,
            "blocked_ms": round(self.output.blocked_s * 1000),
        }
        parts = {"prepared": prepared, "timings_ms": timings_ms, "figures": counts}
        self._persisting.submit(lambda: self._persist(frozen, parts))

    def _persist(self, frozen: Frozen, parts: dict[str, Any]) -> None:
        """In another thread."""
        try:
            ack = self._state.persist(frozen)
            if ack is None:
                return
            parts["timings_ms"]["async"] = ack.timings_ms.get("async", 0.0)
            self._acked(frozen.attempt, ack=ack, **parts)
        except StorageError as error:
            if not self._stopping:
                self._try_to_decline(frozen.attempt, str(error))
        except BaseException as error:
            if not self._stopping:
                self._link.broken(self.vertex, self.index, error)

    def _try_to_decline(self, checkpoint: int, why: str) -> None:
        try:
            self._declined(checkpoint, why)
        except StateBackendError as error:
            self._link.broken(self.vertex, self.index, error)
