"""A subtask of a keyed vertex: reads its channels, runs its operator, takes its snapshots.

One thread does all of it, in this order over and over: what the driver says (the mailbox), rows
that have waited long enough, barriers that have, timers, then the next element of the channels.
While its output has no room it takes no element and fires no timer, and goes on with the rest.
Snapshots are frozen in this thread and made durable in another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from snapshot.barriers.alignment import Alignment, Mode
from snapshot.barriers.alignment_actions import (
    Abort,
    Action,
    Block,
    Captured,
    Figures,
    Forward,
    Keep,
    Overtake,
    Snapshot,
    Unblock,
    Why,
)
from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput, Event, Idle, Watermark
from snapshot.barriers.channel_watermarks import END_MS, START_MS, Watermarks
from snapshot.protocol.messages import AckRequest
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.job.graph import Edge
from statebackend.continuous.job.slot_messages import Aborted, Command, Completed, Trigger
from statebackend.continuous.worker.batch_sizing import Gathering
from statebackend.continuous.worker.checkpointed_state import Background
from statebackend.continuous.worker.keyed_state import KeyedFrozen, SubtaskState
from statebackend.continuous.worker.overtaken_rows import (
    FLIGHT_BYTES,
    ChannelQueue,
    Flight,
    Place,
    batches_of,
    watermark,
    with_elements,
)
from statebackend.continuous.worker.subtask_base import NAP_S, Link, Subtask, stopped
from statebackend.continuous.worker.subtask_output import Output
from statebackend.errors import StorageError
from statebackend.operators.streaming_operator import StreamOperator
from statebackend.system import SYSTEM, System

__all__ = ["Inputs", "KeyedSubtask"]

_log = logging.getLogger("statebackend.continuous")
_ROUNDS: Final = 1_000


@dataclass
class _Part:
    """A snapshot on its way.

    Attributes:
        has_overtaken: whether its barrier may have overtaken rows, here or elsewhere.
        flight: those, as far as they were kept here.
    """

    frozen: KeyedFrozen
    has_overtaken: bool
    unaligned: bool
    acked: dict[str, Any]
    sync_ms: float
    flight: Flight = field(default_factory=Flight)


@dataclass(frozen=True)
class Inputs:
    """The channels of a keyed subtask, and how barriers come through them.

    Attributes:
        edges: of each channel, upstream subtask by upstream subtask.
        mode: of barriers. overtakes: whether they may come with an alignment timeout.
    """

    inbox: Inbox
    edges: Sequence[Edge]
    mode: Mode
    overtakes: bool = False


class KeyedSubtask(Subtask):
    """See the module.

    Args:
        state: of the subtask, not open. opened: opens it; the operator over it.
        persisting: where snapshots are made durable.
    """

    def __init__(
        self,
        place: Place,
        output: Callable[[], Output],
        link: Link,
        *,
        state: SubtaskState,
        opened: Callable[[], StreamOperator],
        inputs: Inputs,
        time_mode: str,
        persisting: Background,
        system: System = SYSTEM,
    ) -> None:
        super().__init__(place, output, link, system)
        self._state, self._opened = state, opened
        self._inbox = inbox = inputs.inbox
        self._inputs = tuple(inputs.edges)
        parallelism = place.parallelism
        self._lanes = [
            ChannelQueue("in", edge.upstream, channel // parallelism, channel % parallelism)
            for channel, edge in enumerate(self._inputs)
        ]
        in_order = [c for c, edge in enumerate(self._inputs) if not edge.key_positions]
        self._alignment = Alignment(len(self._inputs), mode=inputs.mode, in_order=in_order)
        self._overtakes = inputs.overtakes
        if inputs.overtakes:
            inbox.on_arrival = self._announced
        self._noticed_s: float | None = None  # that a barrier has arrived, while rows are emitted
        self._capturing: dict[int, _Part] = {}
        self._current: pa.RecordBatch | None = None  # taken, and not given to the operator yet
        self._gathering = Gathering()
        self._by_clock = time_mode == "processing"
        self._persisting = persisting

    def _open(self) -> None:
        self._operator = self._opened()
        times = self._state.times
        at_ms = times.watermark_ms + 1 if times.watermark_ms else None
        given = {} if at_ms is None else {"at_ms": at_ms}
        self._watermarks = Watermarks(len(self._inputs), **given)
        if any(edge.timed for edge in self._inputs):
            for channel, edge in enumerate(self._inputs):
                if not edge.timed:  # it says nothing of time, and holds nobody back
                    self._watermarks.take(channel, Idle(idle=True))

    def _put_back(self) -> None:
        overtaken, self._state.overtaken = self._state.overtaken, []
        self._check_overtaken(overtaken, [*self._lanes, *self.output.lanes()])
        for one in overtaken:
            if one.direction == "in":
                channel = self._lanes.index(one.lane)
                self._inbox.preload(channel, batches_of(self.vertex, one))
        self._overtaken = [one for one in overtaken if one.direction == "out"]
        super()._put_back()
        if self._watermarks.at_ms != START_MS:
            # Said before, but a barrier may have overtaken it; and nothing is said until it moves.
            self.output.send(Watermark(at_ms=self._watermarks.at_ms))
        if self._overtakes:
            self.output.call_back(self._is_urgent)

    def stop(self, *, job_ended: bool = False) -> None:
        """As in `Subtask`."""
        super().stop(job_ended=job_ended)
        self._inbox.fail(stopped())

    def _close(self, error: BaseException | None, *, stopped: bool) -> None:
        self._inbox.close()
        try:
            if hasattr(self, "_operator") and stopped:
                self._operator.close()
        finally:
            self._state.close(error)

    # --- what comes ----------------------------------------------------------------------------

    def _step(self) -> None:
        self._mail()
        self._state.check()
        self._state.tidy()
        output = self.output
        now_s = self._system.monotonic_s()
        output.flush_if_due(now_s)
        if self._at_end:  # timers of processing time that are left stay in the state
            if output.ready(NAP_S):
                self._mail(NAP_S)
            return
        self._do(self._alignment.tick(self._now_s()))
        wait_s = self._wait_s(now_s)
        if self._by_clock and output.ready():
            self._state.times.processing_time_ms = self._system.wall_ms()
            self._emit(self._operator.fire())
        if not output.ready(wait_s):
            self._inbox.announce()
            return
        got = self._inbox.poll(wait_s)
        if got is None:
            return
        channel, element = got
        if isinstance(element, pa.RecordBatch):
            self._rows(channel, element)
        else:
            self._event(channel, element)

    def _wait_s(self, now_s: float) -> float:
        """How long nothing else is to be done."""
        wait_s = NAP_S
        if self.output.next_flush_s is not None:
            wait_s = min(wait_s, self.output.next_flush_s - now_s)
        if self._alignment.next_deadline_s is not None:
            wait_s = min(wait_s, self._alignment.next_deadline_s - self._now_s())
        return max(0.0, wait_s)

    def _rows(self, channel: int, rows: pa.RecordBatch) -> None:
        edge, first = self._inputs[channel], channel - channel % self._place.parallelism
        taken = [(channel, rows)]
        if edge.key_positions:
            beside = range(first, first + self._place.parallelism)  # of the same input
            taken += self._inbox.more(beside, self._gathering.more_bytes(rows.nbytes))
        for one, batch in taken:
            self._current = batch
            self._do(self._alignment.data(one, batch.nbytes, self._now_s()))
        self._current = None
        self._state.times.processing_time_ms = self._system.wall_ms()
        if not edge.key_positions:
            self._operator.broadcast(rows)
        else:
            began_s = self._system.monotonic_s()
            if len(taken) > 1:
                rows = pa.concat_batches([batch for _, batch in taken])
            shown = rows if edge.side is None else edge.side.shown(rows)
            self._emit(self._operator.process(shown))
            self._gathering.took(rows.nbytes, self._system.monotonic_s() - began_s)
        if self._by_clock:
            self._emit(self._operator.fire())

    def _event(self, channel: int, event: Event) -> None:
        told = isinstance(event, Watermark | Idle) and self._inputs[channel].timed
        if told or isinstance(event, EndOfInput):
            assert isinstance(event, Watermark | Idle | EndOfInput)
            for event_out in self._watermarks.take(channel, event):
                if isinstance(event_out, Watermark):
                    self._advance(event_out.at_ms)
                self.output.send(event_out)
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
        return self._system.wall_ms() / 1000

    # --- checkpoints ---------------------------------------------------------------------------

    def _on_command(self, command: Command) -> None:
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

    def _announced(self, channel: int, event: Barrier | EndOfInput, ahead: int, size: int) -> None:
        """A barrier, or the end, lies in a channel."""
        now_s, self._noticed_s = self._noticed_s or self._now_s(), None
        self._do(self._alignment.announced(channel, event, ahead, now_s, ahead_bytes=size))

    def _is_urgent(self) -> bool:
        """While rows are emitted: whether a barrier is to overtake them as soon as may be.

        Not if too many lie there: one call of a processor may emit any number of them.
        """
        return self._is_time() and self.output.unsent_bytes <= FLIGHT_BYTES

    def _is_time(self) -> bool:
        now_s = self._now_s()
        deadline_s = self._alignment.next_deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            return True
        arrived = self._inbox.unannounced
        if arrived is None or arrived.alignment_timeout_ms is None or arrived.kind != "checkpoint":
            return False
        if self._alignment.waits_in_order(arrived.checkpoint):
            return False  # it would overtake nothing yet
        if self._noticed_s is None:
            self._noticed_s = now_s
        return now_s - self._noticed_s >= arrived.alignment_timeout_ms / 1000

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
                    self._forward(event)
                case Keep(checkpoint=number, channel=channel):
                    assert self._current is not None
                    self._capturing[number].flight.add(self._lanes[channel], [self._current])
                case Overtake(checkpoint=number, channels=channels):
                    for channel in channels:
                        rows = self._inbox.ahead_of(channel, number)
                        self._capturing[number].flight.add(self._lanes[channel], rows)
                case Captured(checkpoint=number, figures=figures):
                    self._submit(self._capturing.pop(number), figures)
                case Abort(checkpoint=number, why=why):
                    self._capturing.pop(number, None)
                    if why is Why.NEWER:
                        self._declined(number, "a newer barrier came first", newer=True)

    def _forward(self, event: Barrier | Cancel) -> None:
        part = self._capturing.get(event.checkpoint)
        if part is None or isinstance(event, Cancel):
            self.output.forward(event)
            return
        for lane, rows in self.output.overtake(event):
            part.flight.add(lane, rows)

    def _snapshot(self, taken: Snapshot) -> None:
        started_s = self._system.monotonic_s()
        self._state.times.processing_time_ms = self._system.wall_ms()
        self._operator.clean()
        barrier = taken.barrier
        part = _Part(
            self._state.freeze(taken.checkpoint),
            barrier.alignment_timeout_ms is not None and barrier.kind == "checkpoint",
            taken.unaligned,
            {"prepared": self.output.prepare(taken.checkpoint)},
            round((self._system.monotonic_s() - started_s) * 1000, 3),
        )
        if taken.unaligned:
            self._capturing[taken.checkpoint] = part
        else:
            self._submit(part, taken.figures)

    def _submit(self, part: _Part, figures: Figures) -> None:
        """All of it is there: make it durable."""
        part.acked["timings_ms"] = {
            "start_delay": round(figures.start_delay_s * 1000, 3),
            "alignment": round(figures.duration_s * 1000, 3),
            "sync": part.sync_ms,
        }
        part.acked["figures"] = {
            "alignment_bytes": figures.bytes_processed,
            "inflight_bytes": part.flight.size_bytes,
            "unaligned": int(part.unaligned),
            "blocked_ms": round(self.output.blocked_s * 1000),
        }
        self._persisting.submit(lambda: self._persist(part))

    def _persist(self, part: _Part) -> None:
        """In another thread."""
        attempt = part.frozen.attempt
        try:
            ack = self._made_durable(part)
            waited_ms = None if ack is None else self._await_output(attempt)
            if ack is None or waited_ms is None:
                return
            part.acked["timings_ms"]["async"] = ack.timings_ms.get("async", 0.0) + waited_ms
            self._acked(attempt, ack=ack, **part.acked)
        except BaseException as error:
            if not self._stopping:
                self._link.broken(self.vertex, self.index, error)

    def _made_durable(self, part: _Part) -> AckRequest | None:
        """None: the checkpoint was aborted, or cannot be taken.

        The next checkpoint takes the state once more; so a store that failed is no reason to end
        the run. A sink that failed is one: it may have let go of the rows.
        """
        try:
            return self._state.persist(self._with_flight(part))
        except StorageError as error:
            if not self._stopping:
                self._declined(part.frozen.attempt, str(error))
            return None

    def _with_flight(self, part: _Part) -> KeyedFrozen:
        elements = part.flight.elements(self._place)
        at_ms = part.frozen.watermark_ms
        if part.has_overtaken and at_ms is not None:  # 0: none has come yet
            elements.append(watermark(self._place, at_ms))
        if not elements:
            return part.frozen
        stored = with_elements(part.frozen.operator_state, elements)
        return replace(part.frozen, operator_state=stored)
