"""The subtasks of a job and the channels between them, over the product's machines.

A task does what a task's loop does: it takes one element at a time out of a channel that is not
blocked, has the machines say what to do, and does that in order. What it is, is plain data.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from snapshot.barriers.alignment import (
    Abort,
    Action,
    Alignment,
    Block,
    Captured,
    Forward,
    Keep,
    Overtake,
    Snapshot,
    Unblock,
    Why,
)
from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput, Event, Idle, Watermark
from snapshot.barriers.channel_watermarks import END_MS, START_MS, Watermarks
from snapshot.barriers.pending_checkpoints import Reason, Subtask
from tests.channels.plan import BROADCAST, KEY, Edge, Vertex, final_row, key_of, mix

if TYPE_CHECKING:
    from tests.channels.world import World

__all__ = ["Channel", "ChannelId", "Part", "Row", "Saved", "Task"]

ChannelId: TypeAlias = tuple[int, int, int]  # edge, the sender's index, the receiver's


class Row(NamedTuple):
    """``seq``: its place in its channel. ``row``: which row of the input it is."""

    seq: int
    row: int
    at_ms: int


class Channel:
    """Elements in order; the first ``arrived`` of them are at the receiver."""

    def __init__(
        self, edge: Edge, sender: int, receiver: int, slow: bool, moving: list[Channel]
    ) -> None:
        self.edge, self.id = edge, (edge.number, sender, receiver)
        self.moving = moving  # all channels of which something has not arrived
        self.queue: deque[Row | Event] = deque()
        self.arrived = self.rows = 0
        self.slow = slow
        self.sent = 0
        self.task: Task
        self.number = 0  # among the receiver's inputs

    def push(self, element: Row | Event) -> None:
        if self.arrived == len(self.queue):
            self.moving.append(self)
        self.queue.append(element)
        self.rows += isinstance(element, Row)

    def pop(self) -> Row | Event:
        element = self.queue.popleft()
        self.arrived -= 1
        self.rows -= isinstance(element, Row)
        return element

    def ahead(self, checkpoint: int) -> list[Row]:
        """The rows before a barrier, or before the channel's end."""
        found = []
        for element in list(self.queue)[: self.arrived]:
            if isinstance(element, Row):
                found.append(element)
            elif isinstance(element, EndOfInput) or _is_of(element, checkpoint):
                break
        return found


def _is_of(event: Event, checkpoint: int) -> bool:
    return isinstance(event, Barrier) and event.checkpoint == checkpoint


def _sent(channel: Channel) -> int:
    return channel.sent


@dataclass
class Part:
    """One subtask's part of a checkpoint.

    Attributes:
        delta: what changed since the part of the epoch before. whole: the state, for checkers.
        flight: rows that the barrier overtook, by channel.
    """

    delta: dict[int, tuple[int, int, bool]]
    whole: dict[int, tuple[int, int, bool]]
    positions: dict[int, int]
    rules: tuple[int, int]
    sent: dict[ChannelId, int]
    received: dict[ChannelId, int]
    at_ms: int
    ended: bool
    committables: list[tuple[tuple[int, int, Subtask], tuple[int, ...]]]
    flight: dict[ChannelId, list[Row]] = field(default_factory=dict)


@dataclass
class Saved:
    """What a subtask begins with."""

    state: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    rules: tuple[int, int] = (0, 0)
    at_ms: int = START_MS


class Task:
    """One subtask of one run."""

    def __init__(self, world: World, vertex: Vertex, index: int, run: int) -> None:
        self.world, self.vertex, self.run = world, vertex, run
        self.me = Subtask(vertex.name, index)
        self.inputs: list[Channel] = []
        self.outputs: list[tuple[Edge, list[Channel]]] = []
        self.received: dict[ChannelId, int] = {}
        self.saved = Saved()
        self.changed: set[int] = set()
        self.frozen: dict[int, dict[int, tuple[int, int, bool]]] = {}  # by epoch
        self.pending: list[tuple[tuple[int, int, Subtask], tuple[int, ...]]] = []
        self.written: list[int] = []
        self.captured: dict[int, Part] = {}
        self.blocked: set[int] = set()
        self.hooks: list[tuple[int, Barrier | EndOfInput, int]] = []
        self.current: Row | None = None
        self.at_end = self.gone = self.is_idle = False
        self.ended_in: set[int] = set()
        self.stops_at = 0  # a source reads no further than its part of the job's last checkpoint

    def start(self) -> None:
        """Once the channels are there."""
        self.alignment = Alignment(len(self.inputs), mode=self.world.config.mode)
        self.watermarks = Watermarks(len(self.inputs), at_ms=self.saved.at_ms)

    # --- a step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do one thing; False: there is nothing to do."""
        if self.gone or self.at_end:
            return False
        random = self.world.random
        if self.hooks and random.random() < 0.3:
            self.announce(*self.hooks.pop(0))
            return True
        if any(c.rows >= self.world.config.capacity for _, out in self.outputs for c in out):
            return False
        if self.vertex.kind == "source":
            return not self.stops_at and self._read()
        ready = [c for c in self.inputs if c.arrived and c.number not in self.blocked]
        if not ready:
            return False
        channel = ready[int(random.random() * len(ready))]
        element = channel.pop()
        if isinstance(element, Row):
            self._row(channel, element)
        else:
            self._event(channel, element)
        return True

    def tick(self) -> None:
        deadline_s = self.alignment.next_deadline_s
        if deadline_s is not None and deadline_s <= self.world.now_s:
            self.do(self.alignment.tick(self.world.now_s))

    def _read(self) -> bool:
        """A source: the next row of one of its splits, or their end."""
        positions, random = self.saved.positions, self.world.random
        left = [s for s, at in positions.items() if at < self.vertex.splits[s]]
        if not left:
            self._finish()
            return True
        if self.world.config.idle and self._idles():
            return True
        split = left[int(random.random() * len(left))]
        at = positions[split]
        positions[split] = at + 1
        self.emit(split * 1_000 + at, at)
        if random.random() < 0.3:
            open_ = [positions[s] for s in left if positions[s] < self.vertex.splits[s]]
            if open_ and min(open_) > self.saved.at_ms:
                self.saved.at_ms = min(open_)
                self.send(Watermark(at_ms=min(open_)))
        return True

    def _idles(self) -> bool:
        if self.is_idle and self.world.random.random() < 0.8:
            return True
        if self.is_idle or self.world.random.random() < self.world.config.idle:
            self.is_idle = not self.is_idle
            self.send(Idle(idle=self.is_idle))
        return self.is_idle

    def _row(self, channel: Channel, row: Row) -> None:
        world = self.world
        world.order.row(self, channel, row)
        self.current = row
        self.do(self.alignment.data(channel.number, 100, world.now_s))
        self.received[channel.id] = row.seq + 1
        if channel.edge.how == BROADCAST:
            count, total = self.saved.rules
            self.saved.rules = (count + 1, total + mix(row.row))
        elif self.vertex.kind == "sink":
            self.written.append(row.row)
        else:
            key = key_of(row.row, world.config.keys)
            count, total, said = self.saved.state.get(key, (0, 0, False))
            self.saved.state[key] = (count + 1, total + mix(row.row), said)
            self.changed.add(key)
            self.emit(row.row, row.at_ms)

    def _event(self, channel: Channel, event: Event) -> None:
        if isinstance(event, Watermark | Idle | EndOfInput):
            for out in self.watermarks.take(channel.number, event):
                self.send(out)
            self.saved.at_ms = self.watermarks.at_ms
        if isinstance(event, Barrier | Cancel | EndOfInput):
            self.do(self.alignment.event(channel.number, event, self.world.now_s))
        if isinstance(event, EndOfInput) and self.alignment.ended:
            self._finish()

    def _finish(self) -> None:
        """Every input has ended: say what there is to say, once for each key, and end."""
        for key, (count, total, said) in sorted(self.saved.state.items()):
            if not said:
                self.saved.state[key] = (count, total, True)
                self.changed.add(key)
                self.emit(final_row(self.vertex.number, key, count, total), END_MS)
        self.send(EndOfInput())  # it stands for the end of time as well
        self.at_end = True
        self.world.order.ended(self)
        self.world.post("at end", self)

    # --- output --------------------------------------------------------------------------------

    def emit(self, row: int, at_ms: int) -> None:
        for edge, out in self.outputs:
            if edge.how == BROADCAST:
                chosen = out
            elif edge.how == KEY:
                chosen = [out[key_of(row, self.world.config.keys) % len(out)]]
            else:
                chosen = [out[0] if len(out) == 1 else min(out, key=_sent)]
            for channel in chosen:
                channel.push(Row(channel.sent, row, at_ms))
                channel.sent += 1

    def send(self, event: Event) -> None:
        if not self.at_end:
            for _, out in self.outputs:
                for channel in out:
                    channel.push(event)

    # --- what the machines say -----------------------------------------------------------------

    def announce(self, channel: int, event: Barrier | EndOfInput, ahead: int) -> None:
        """The inbox says what has arrived in it, perhaps late."""
        self.do(self.alignment.announced(channel, event, ahead, self.world.now_s))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self._do(action)
        if actions:
            self.world.order.blocked(self)

    def _do(self, action: Action) -> None:
        world = self.world
        match action:
            case Block(channel):
                self.blocked.add(channel)
            case Unblock(channel):
                self.blocked.discard(channel)
            case Forward(event):
                self.send(event)
            case Snapshot(checkpoint, barrier, unaligned, _):
                part = self.freeze(checkpoint)
                self.stops_at = checkpoint if barrier.kind == "last" else 0
                world.note("unaligned snapshot" if unaligned else "aligned snapshot")
                if unaligned:
                    self.captured[checkpoint] = part
                else:
                    world.persist(self, checkpoint, part)
            case Overtake(checkpoint, channels):
                for overtaken in (self.inputs[number] for number in channels):
                    rows = self.captured[checkpoint].flight.setdefault(overtaken.id, [])
                    rows += overtaken.ahead(checkpoint)
                    world.note("rows overtaken")
            case Keep(checkpoint, number):
                assert self.current is not None
                rows = self.captured[checkpoint].flight.setdefault(self.inputs[number].id, [])
                rows.append(self.current)
                world.note("rows kept")
            case Captured(checkpoint, _):
                world.persist(self, checkpoint, self.captured.pop(checkpoint))
            case Abort(checkpoint, why):
                self.captured.pop(checkpoint, None)
                world.note(f"alignment given up: {why.value}")
                reason = Reason.NEWER if why is Why.NEWER else Reason.DECLINED
                world.post("decline", self, checkpoint, reason)

    def freeze(self, checkpoint: int) -> Part:
        """The state now. A delta holds what attempts of this epoch or later ones held before it."""
        epoch = self.world.epochs[checkpoint]
        delta = {}
        for older in sorted(e for e in self.frozen if e >= epoch):
            delta.update(self.frozen.pop(older))
        delta.update((key, self.saved.state[key]) for key in self.changed)
        self.changed = set()
        self.frozen[epoch] = delta
        if self.written:
            name = (self.run, checkpoint, self.me)
            self.pending.append((name, tuple(self.written)))
            self.written = []
        if self.at_end:
            self.ended_in.add(checkpoint)
        return Part(
            delta=delta,
            whole=dict(self.saved.state),
            positions=dict(self.saved.positions),
            rules=self.saved.rules,
            sent={c.id: c.sent for _, out in self.outputs for c in out},
            received=dict(self.received),
            at_ms=self.saved.at_ms,
            ended=self.at_end,
            committables=list(self.pending),
        )

    # --- what the driver says ------------------------------------------------------------------

    def told(self, what: str, *about: Any) -> None:
        if self.gone:
            return
        if what == "trigger":
            self.do(self.alignment.triggered(about[0], self.world.now_s))
        elif what == "aborted":
            self.stops_at = 0 if self.stops_at == about[0] else self.stops_at
            self.do(self.alignment.aborted(about[0]))
        elif what == "complete":
            self.pending = [one for one in self.pending if one[0][1] > about[0]]
            if about[0] in self.ended_in and self.world.config.may_leave:
                self.gone = True
                self.world.note("a subtask has finished before the job")
