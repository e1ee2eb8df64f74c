"""A subtask of a source: asks for splits, reads them, sends the barriers that the driver triggers.

A barrier is not sent while a request for a split is unanswered: the split would be in neither the
assigner's part of the checkpoint nor this subtask's. Nothing is read while the output has no room.
A barrier with an alignment timeout waits so long for what lies in the output to go before it, and
then overtakes it; what it overtook is a part of the checkpoint.

What it says to the driver is said by another thread, in its order: rows are read meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from snapshot.barriers.barrier import Barrier, Idle, Watermark
from snapshot.barriers.channel_watermarks import START_MS
from statebackend.continuous.job.graph import reads_together
from statebackend.continuous.job.slot_messages import (
    Aborted,
    Acked,
    Command,
    Completed,
    Grant,
    SplitAsked,
    SplitEnded,
    Trigger,
)
from statebackend.continuous.job.slot_messages import Event as Happened
from statebackend.continuous.sources.source import Source, SplitReader
from statebackend.continuous.sources.split_assignment import Assignment
from statebackend.continuous.worker.checkpointed_state import Background
from statebackend.continuous.worker.overtaken_rows import (
    FLIGHT_BYTES,
    Flight,
    Place,
    decode,
    watermark,
)
from statebackend.continuous.worker.subtask_base import NAP_S, Link, Subtask
from statebackend.continuous.worker.subtask_output import Output
from statebackend.system import SYSTEM, System

__all__ = ["SourceSubtask", "SourceTimes"]

_NAP_S: Final = 0.002  # between two looks at splits that have nothing now
_ROOM_S: Final = 0.01  # between two looks at the mailbox while there is no room
_GIVEN_UP: Final = 64  # so many are remembered; an ack of an older one is in vain, and harmless
_ASK_AGAIN_S: Final = 0.1  # while it has no split, or is held back


class SourceTimes:
    """The watermark of the splits that a subtask reads: the smallest of those that are not idle.

    A split's is the largest event time of its rows, less the delay. Until a split has given rows it
    holds the watermark where it is. It never goes back: a split that begins later, with earlier
    rows, has late rows.

    Args:
        position: of the event-time column; None: there is no watermark.
        idle_after_s: a split without rows for so long is idle; None: never. One that nobody asked
            in that time is not: there may be rows in it.
    """

    def __init__(self, position: int | None, delay_ms: int, idle_after_s: float | None) -> None:
        self._position, self._delay_ms = position, delay_ms
        self._idle_after_s = idle_after_s
        self._max_ms: dict[str, int | None] = {}
        self._heard_s: dict[str, float] = {}
        self._empty_s: dict[str, float] = {}  # when it was last seen to have no rows
        self._at_ms: int | None = None
        self._idle = False

    def began(self, split: str, now_s: float) -> None:
        """A split is read from now on."""
        self._max_ms[split] = None
        self._heard_s[split] = self._empty_s[split] = now_s

    def had_none(self, split: str, now_s: float) -> None:
        """A split was asked, and has no rows."""
        self._empty_s[split] = now_s

    def took(self, split: str, batch: pa.RecordBatch, now_s: float) -> None:
        """A split gave rows."""
        self._heard_s[split] = now_s
        if self._position is None:
            return
        largest = pc.max(batch.column(self._position).cast(pa.int64())).as_py()
        if largest is not None:
            before = self._max_ms[split]
            found = largest // 1000
            self._max_ms[split] = found if before is None else max(before, found)

    def ended(self, split: str) -> list[Watermark | Idle]:
        """A split has ended: what it came to counts, unless another one is behind."""
        last_ms = self._max_ms[split]
        others = [ms for one, ms in self._max_ms.items() if one != split]
        self._max_ms.pop(split)
        self._heard_s.pop(split)
        self._empty_s.pop(split)
        return self._advanced([last_ms, *others])

    def due(self) -> list[Watermark | Idle]:
        """The watermark or idleness that is due to be sent, if any."""
        if self._position is None:
            return []
        awake = [one for one in self._max_ms if not self._is_idle(one)]
        out: list[Watermark | Idle] = []
        if self._idle and awake:
            self._idle = False
            out.append(Idle(idle=False))
        out += self._advanced([self._max_ms[one] for one in awake])
        if not awake and not self._idle:
            self._idle = True
            out.append(Idle(idle=True))
        return out

    def _is_idle(self, split: str) -> bool:
        after_s = self._idle_after_s
        return after_s is not None and self._empty_s[split] - self._heard_s[split] >= after_s

    def _advanced(self, held_ms: list[int | None]) -> list[Watermark | Idle]:
        if self._position is None or not held_ms or any(ms is None for ms in held_ms):
            return []
        at_ms = min(ms for ms in held_ms if ms is not None) - self._delay_ms
        if self._at_ms is not None and at_ms <= self._at_ms:
            return []
        self._at_ms = at_ms
        return [Watermark(at_ms=at_ms)]


@dataclass
class _Open:
    assignment: Assignment
    reader: SplitReader

    @property
    def id(self) -> str:
        return self.assignment.split.id

    def position(self) -> Assignment:
        """A copy: a reader may go on with the object that it gives, and this is sent later."""
        position = msgspec.json.decode(msgspec.json.encode(self.reader.position))
        return Assignment(split=self.assignment.split, position=position)


class SourceSubtask(Subtask):
    """See the module.

    Args:
        source: the job's. batch_rows: read at once, at most.
        reporting: has one thread, which says to the driver what happened.
        ask_again_s: how often it asks for more splits beside those that it reads.
        in_flight: what lay in the output when the restored checkpoint was taken, and where the
            watermark stood.
    """

    def __init__(
        self,
        place: Place,
        output: Callable[[], Output],
        link: Link,
        *,
        source: Source,
        batch_rows: int,
        reporting: Background,
        ask_again_s: float = _ASK_AGAIN_S,
        in_flight: Iterable[bytes] = (),
        system: System = SYSTEM,
    ) -> None:
        super().__init__(place, output, link, system)
        self._in_flight = list(in_flight)
        self._source, self._batch_rows = source, batch_rows
        self._reporting, self._ask_again_s = reporting, max(_ASK_AGAIN_S, ask_again_s)
        self._unsaid: deque[Happened] = deque()
        self._failure: BaseException | None = None  # of what could not be said
        self._aborted: tuple[int, ...] = ()  # the newest checkpoints that were given up
        self._together = reads_together(source)
        position = None
        if source.event_time is not None:
            position = source.schema.names.index(source.event_time)
        self._timed = position is not None
        self._said_ms, self._said_idle = START_MS, False  # to the receivers
        self._times = SourceTimes(position, source.watermark_delay_ms, source.idle_after_s)
        self._open_splits: list[_Open] = []
        self._number = 0  # of the newest request
        self._unanswered = False
        self._got = 0  # the newest request that gave a split
        self._has_none = False  # told that there is no split for it now
        self._ask_at_s = 0.0  # not before; a request that was answered with none is repeated
        self._over = False
        self._due: deque[tuple[Barrier, float]] = deque()  # wait for an answer, or for room; since
        self._halted = -1  # the checkpoint with which the job ends: nothing is read after it
        # There are splits that nobody reads yet, whose rows may be older than what is read here.
        self._held_back = self._together

    def _open(self) -> None:
        """Nothing: the driver has the state, and hands it out split by split."""

    def _put_back(self) -> None:
        found = decode(self.vertex, self._in_flight, self._place.parallelism)
        self._in_flight = []
        overtaken = [one for one in found if one.direction != "at"]
        self._check_overtaken(overtaken, self.output.lanes())
        self._overtaken = overtaken
        super()._put_back()
        # Said before, but a barrier may have overtaken it.
        self._send_times([Watermark(at_ms=one.at_ms) for one in found if one.direction == "at"])

    def _close(self, error: BaseException | None, *, stopped: bool) -> None:
        for one in self._open_splits:
            one.reader.close()

    # --- rows ----------------------------------------------------------------------------------

    def _report(self, event: Happened) -> None:
        self._unsaid.append(event)
        self._reporting.submit(self._say_next)

    def _say_next(self) -> None:
        """In another thread, one at a time."""
        event = self._unsaid.popleft()
        if self._failure is not None:  # nothing may be said after what could not be
            return
        try:
            if isinstance(event, Acked):
                waited_ms = None
                if event.checkpoint not in self._aborted:
                    waited_ms = self._await_output(event.checkpoint)
                if waited_ms is None:
                    return
                event.timings_ms["async"] = waited_ms
            self._link.report(event)
        except BaseException as error:
            self._failure = error

    def _step(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._mail()
        now_s = self._system.monotonic_s()
        self.output.flush_if_due(now_s)
        self._snapshot_if_due()
        if self._at_end or self._halted >= 0:
            if not self._number:  # nobody is answered before all have asked for their first split
                self._ask(now_s)
            if self.output.ready(NAP_S):
                self._mail(0.1)
            return
        if not self._due:
            self._ask(now_s)
        waits = bool(self._due) and not self._unanswered  # for room, and there may be now
        if not self.output.ready(_ROOM_S) or waits:
            return
        got = False
        for one in list(self._open_splits):
            if not self.output.ready():
                break
            self._open_splits.remove(one)  # to the end: the next one goes first the next time
            self._open_splits.append(one)
            got |= self._read(one, now_s)
        # Who has not been told yet whether there is a split for it holds the watermark.
        if (self._open_splits or self._has_none) and not self._held_back:
            self._send_times(self._times.due())
        if self._over and not self._open_splits and not self._unanswered:
            self._ended()
        elif not got and not self._stopping:
            self._mail(_NAP_S if self._open_splits else 0.02)

    def _ask(self, now_s: float) -> None:
        wanted = not self._open_splits or self._together
        if self._over or self._unanswered or not wanted or now_s < self._ask_at_s:
            return
        self._number += 1
        self._unanswered = True
        self._report(SplitAsked(vertex=self.vertex, subtask=self.index, number=self._number))

    def _lag(self) -> dict[str, int]:
        """The rows that wait to be read, if that is known of every split."""
        lags = [one.reader.lag for one in self._open_splits]
        known = [lag for lag in lags if lag is not None]
        return {"lag": sum(known)} if known and len(known) == len(lags) else {}

    def _read(self, one: _Open, now_s: float) -> bool:
        batch = one.reader.read(self._batch_rows)
        if batch is not None and batch.num_rows:
            self._times.took(one.id, batch, now_s)
            self.output.emit(batch)
        elif not one.reader.lag:  # else there are rows, which have not come yet
            self._times.had_none(one.id, now_s)
        if one.reader.ended:
            one.reader.close()
            self._open_splits.remove(one)
            ended = self._times.ended(one.id)
            self._send_times(ended if not self._held_back else [])
            self._report(SplitEnded(vertex=self.vertex, subtask=self.index, split=one.id))
            self._ask_at_s = now_s
        return batch is not None

    def _send_times(self, times: Iterable[Watermark | Idle]) -> None:
        for one in times:
            if isinstance(one, Watermark):
                self._said_ms = max(self._said_ms, one.at_ms)
            self._said_idle = isinstance(one, Idle) and one.idle
            self.output.send(one)

    # --- what the driver says ------------------------------------------------------------------

    def _on_command(self, command: Command) -> None:
        match command:
            case Trigger(barrier=barrier):
                self._due.append((barrier, self._system.monotonic_s()))
                self._snapshot_if_due()
            case Aborted(checkpoint=number):
                self._aborted = (*self._aborted[-_GIVEN_UP:], number)
                self._due = deque(one for one in self._due if one[0].checkpoint != number)
                if self._halted == number:
                    self._halted = -1
            case Completed(checkpoint=number):
                self.output.completed(number)
            case Grant():
                self._granted(command)
            case _:
                pass

    def _granted(self, grant: Grant) -> None:
        now_s = self._system.monotonic_s()
        if grant.assignment is not None and grant.number > self._got:
            # It may come later than the answer that there is none now, and behind the next request.
            self._got = grant.number
            self._has_none = False
            assignment = grant.assignment
            reader = self._source.open(assignment.split, assignment.position)
            self._open_splits.append(_Open(assignment, reader))
            self._times.began(assignment.split.id, now_s)
        if grant.number != self._number:
            return
        self._held_back = grant.held_back
        if not self._unanswered:
            return
        self._unanswered = False
        if grant.over:
            self._over = True
        elif grant.assignment is None:
            reads = self._open_splits and not self._held_back
            self._ask_at_s = now_s + (self._ask_again_s if reads else _ASK_AGAIN_S)
            self._has_none = not self._open_splits
        self._snapshot_if_due()

    def _snapshot_if_due(self) -> None:
        while self._due and not self._unanswered and self._snapshot(*self._due[0]):
            self._due.popleft()

    def _snapshot(self, barrier: Barrier, since_s: float) -> bool:
        """Take it, and send the barrier on; False: it still waits for room."""
        waited_s = self._system.monotonic_s() - since_s
        overtakes = barrier.kind == "checkpoint" and barrier.alignment_timeout_ms is not None
        unaligned = overtakes and not self._at_end and not self.output.try_flush()
        if unaligned:
            assert barrier.alignment_timeout_ms is not None
            too_soon = waited_s * 1000 < barrier.alignment_timeout_ms
            if too_soon or self.output.pending_bytes > FLIGHT_BYTES:
                return False  # nothing is read meanwhile
        started_s = self._system.monotonic_s()
        positions = [one.position() for one in self._open_splits]
        prepared = self.output.prepare(barrier.checkpoint)
        flight = Flight()
        if unaligned:
            sent = msgspec.structs.replace(barrier, alignment_timeout_ms=0)
            for lane, rows in self.output.overtake(sent):
                flight.add(lane, rows)
        else:
            self.output.forward(barrier)
        if barrier.kind == "last":
            self._halted = barrier.checkpoint
        in_flight = flight.elements(self._place)
        if overtakes and self._timed and not self._at_end and not self._said_idle:
            in_flight.append(watermark(self._place, self._said_ms))
        delay_ms = max(0, self._system.wall_ms() - barrier.stamp_ms - round(waited_s * 1000))
        sync_ms = round((self._system.monotonic_s() - started_s) * 1000, 3)
        self._acked(
            barrier.checkpoint,
            positions=positions,
            prepared=prepared,
            in_flight=in_flight,
            timings_ms={
                "start_delay": float(delay_ms),
                "alignment": round(waited_s * 1000, 3) if overtakes else 0.0,
                "sync": sync_ms,
            },
            figures={
                "rows": self.output.rows,
                "alignment_bytes": 0,
                "inflight_bytes": flight.size_bytes,
                "unaligned": int(unaligned),
                **self._lag(),
            },
        )
        return True
