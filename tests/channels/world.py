"""One seed's world: a driver, tasks, channels, messages between them, faults and the checkers."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from snapshot.barriers.barrier import Barrier, EndOfInput
from snapshot.barriers.pending_checkpoints import Reason, Subtask
from statebackend.errors import StateBackendError
from tests.channels.checkers.base import Violation
from tests.channels.checkers.cut import Cut
from tests.channels.checkers.numbers import Numbers
from tests.channels.checkers.order import Order
from tests.channels.checkers.output import Output
from tests.channels.driver import Driver, Record, saved_of
from tests.channels.plan import FORWARD, Config, draw
from tests.channels.tasks import Channel, Part, Saved, Task
from tests.planted.bug import PlantedBug, adjust, planted
from tests.support.faults import Fault

__all__ = ["Result", "World", "simulate"]

_CALM_STEPS = 40_000
_STEP_S = 0.0004


@dataclass
class Result:
    """What became of one seed."""

    seed: int
    steps: int
    cuts: int
    digest: str
    counts: Counter[str]
    violations: list[tuple[str, str]] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class World:
    """Everything that one seed simulates."""

    def __init__(self, seed: int, config: Config, *, keep_trace: bool = False) -> None:
        self.random = Random(f"run {seed}")
        self.config = config
        self.now_s = 0.0
        self.steps = self.digest = self.run = self.built = 0
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if keep_trace else None
        self.log: list[Record] = []
        self.epochs: dict[int, int] = {}
        self.visible: dict[tuple[int, int, Subtask], tuple[int, ...]] = {}
        self.parallelism = list(config.parallelism)
        self.tasks: dict[Subtask, Task] = {}
        self.order_of: list[Task] = []
        self.channels: list[Channel] = []
        self.moving: list[Channel] = []
        self.messages: list[tuple[float, Task, bool, str, tuple[object, ...]]] = []
        self.done = self.is_calm = False
        self.in_order = config.max_concurrent > 1
        self.order = Order(self)
        self.cut = Cut(self)
        self.numbers = Numbers(self)
        self.output = Output(self)
        self.driver = Driver(self)

    def note(self, kind: str) -> None:
        self.counts[kind] += 1
        self.digest = zlib.crc32(f"{self.steps} {kind}".encode(), self.digest)
        if self.trace is not None:
            self.trace.append(f"{self.steps:>6} {self.now_s:8.4f} {kind}")

    @property
    def begun(self) -> bool:
        """Whether the run has a checkpoint of its own, or one that is being written."""
        return self.built < len(self.log) or self.driver.writing is not None

    # --- messages between tasks and the driver, in any order -----------------------------------

    def send(self, task: Task, what: str, *about: object) -> None:
        """From the driver to a task; with several attempts at a time, in their order."""
        if self.config.messages_lost and self.random.random() < self.config.messages_lost:
            self.note(Fault.MESSAGE_LOST)
            return
        due_s = self.now_s + 0.003 * self.random.random()
        self.messages.append((due_s, task, True, what, about))

    def post(self, what: str, task: Task, *about: object) -> None:
        """From a task to the driver. That a task is at its end is said until it is heard."""
        lost = self.config.messages_lost
        if lost and what != "at end" and self.random.random() < lost:
            self.note(Fault.MESSAGE_LOST)
            return
        due_s = self.now_s + 0.003 * self.random.random()
        self.messages.append((due_s, task, False, what, about))
        if self.random.random() < 0.05:
            self.note(Fault.MESSAGE_TWICE)
            self.messages.append((due_s, task, False, what, about))

    def persist(self, task: Task, checkpoint: int, part: Part) -> None:
        """In the background; it may fail."""
        self.note("part whole")
        if self.random.random() < self.config.persist_fails:
            self.note(Fault.REQUEST_LOST)
            self.post("decline", task, checkpoint, Reason.DECLINED)
        else:
            self.post("ack", task, checkpoint, part)

    def _deliver(self) -> None:
        messages = self.messages
        number = int(self.random.random() * len(messages))
        due_s, task, to_task, what, about = messages[number]
        if due_s > self.now_s:
            return
        if to_task and self.in_order:
            number = next(i for i, one in enumerate(messages) if one[1] is task and one[2])
        _, task, to_task, what, about = messages.pop(number)
        if task.run != self.run:
            self.note("message of another run")
        elif to_task:
            task.told(what, *about)
        else:
            self.driver.heard(what, task, *about)

    # --- the job -------------------------------------------------------------------------------

    def tear_down(self) -> None:
        """Every task of the run is gone, with what was in its channels."""
        self.tasks, self.order_of, self.channels, self.moving = {}, [], [], []
        self.run += 1

    def build(self, record: Record | None, *, rescaled: bool) -> None:
        """The tasks and channels of a new run."""
        self.built = len(self.log)
        self.run += 1
        for vertex in self.config.vertices:
            parallelism = self.parallelism[vertex.number]
            for index in range(parallelism):
                task = Task(self, vertex, index, self.run)
                self.tasks[task.me] = task
                if record is not None:
                    task.saved = saved_of(
                        record, vertex.name, index, parallelism, rescaled=rescaled
                    )
                else:
                    mine = [s for s in vertex.splits if s % parallelism == index]
                    task.saved = Saved(positions=dict.fromkeys(mine, 0))
        self.order_of = list(self.tasks.values())
        for edge in self.config.edges:
            self._connect(edge.number)
        if record is not None and not rescaled:
            self._resume(record)
        for task in self.order_of:
            task.start()

    def _connect(self, number: int) -> None:
        edge = self.config.edges[number]
        senders, receivers = self.parallelism[edge.sender], self.parallelism[edge.receiver]
        names = [vertex.name for vertex in self.config.vertices]
        direct = edge.how == FORWARD and senders == receivers
        for i in range(senders):
            out = []
            for j in [i] if direct else range(receivers):
                slow = self.random.random() < self.config.slow
                channel = Channel(edge, i, j, slow, self.moving)
                channel.task = self.tasks[Subtask(names[edge.receiver], j)]
                channel.number = len(channel.task.inputs)
                channel.task.inputs.append(channel)
                channel.task.received[channel.id] = 0
                out.append(channel)
                self.channels.append(channel)
            self.tasks[Subtask(names[edge.sender], i)].outputs.append((edge, out))

    def _resume(self, record: Record) -> None:
        """At the same parallelism: counts go on, and rows in flight lie in front."""
        sent = {c: n for part in record.parts.values() for c, n in part.sent.items()}
        received = {c: n for part in record.parts.values() for c, n in part.received.items()}
        flight = record.flight
        for channel in self.channels:
            channel.sent = sent[channel.id]
            rows = flight.get(channel.id, [])
            channel.queue.extend(rows)
            channel.rows = len(rows)
            if rows:
                self.note("rows in flight put back")
            channel.arrived = len(rows)
            resumed = received if self.config.mode == "exactly_once" else sent
            channel.task.received[channel.id] = resumed[channel.id]

    # --- running -------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """The next element of a channel gets through."""
        random = self.random
        number = int(random.random() * len(self.moving))
        channel = self.moving[number]
        if channel.slow and random.random() < 0.9:
            return
        event = channel.queue[channel.arrived]
        channel.arrived += 1
        if channel.arrived == len(channel.queue):
            self.moving[number] = self.moving[-1]
            self.moving.pop()
        if isinstance(event, Barrier | EndOfInput):
            task = channel.task
            hook = (channel.number, event, channel.arrived - 1)
            # What one channel announces stays in order.
            if task.hooks or random.random() < self.config.hooks_late:
                task.hooks.append(hook)
            else:
                task.announce(*hook)

    def step(self) -> None:
        self.steps += 1
        random, config = self.random, self.config
        self.now_s += _STEP_S * random.random()
        drawn = random.random()
        if drawn < 0.35:
            if self.moving:
                self._arrive()
        elif drawn < 0.75:
            if self.order_of:
                task = self.order_of[int(random.random() * len(self.order_of))]
                task.tick()
                task.step()
        elif drawn < 0.95:
            if self.messages:
                self._deliver()
        else:
            self.driver.step()
        drawn = random.random()
        if drawn < config.fails + config.driver_dies and (self.begun or not config.patient):
            if drawn < config.driver_dies:
                self.note(Fault.DRIVER_KILLED)
                self.driver.die()
            elif self.tasks:
                self.note(Fault.SLOT_FAILED)
                self.driver.fail()

    def play(self) -> None:
        """With its faults, then without any until the input is at its end and all is committed."""
        config = self.config
        while self.steps < config.steps and not self.done:
            self.step()
        self.is_calm = True
        config.fails = config.driver_dies = config.persist_fails = config.write_fails = 0.0
        config.messages_lost = config.idle = config.savepoints = config.stops = 0.0
        config.slow = config.hooks_late = 0.0
        config.capacity, config.tolerable = 5, 1_000_000
        for channel in self.channels:
            channel.slow = False
        config.timeout_s = 2.0
        config.max_concurrent = 1 if len(self.channels) > 20 else config.max_concurrent
        # Every channel's barrier is one thing to do: there must be time for rows as well.
        config.interval_s = max(config.interval_s, 0.03, 0.001 * len(self.channels))
        self.driver.calm()
        last = self.steps + _CALM_STEPS
        while not self.done:
            if self.steps > last:
                raise Violation("liveness", "no end although nothing goes wrong")
            self.step()
        self.output.at_the_end()


def simulate(
    seed: int,
    *,
    bug: PlantedBug | None = None,
    config: Config | None = None,
    keep_trace: bool = False,
) -> Result:
    """Run one seed to its end."""
    config = config or draw(Random(f"config {seed}"))
    adjust(config, bug)
    violations: list[tuple[str, str]] = []
    with planted(bug):
        world = World(seed, config, keep_trace=keep_trace)
        try:
            world.play()
        except Violation as found:
            violations.append((found.checker, found.what))
        except (StateBackendError, KeyError, AssertionError) as error:
            violations.append(("unexpected", f"{type(error).__name__}: {error}"))
    return Result(
        seed=seed,
        steps=world.steps,
        cuts=len(world.log),
        digest=f"{world.digest:08x}",
        counts=world.counts,
        violations=violations,
        trace=world.trace or [],
    )
