"""The driver: it begins checkpoints, writes records, has sinks committed, and restarts the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recovery.decide.restart_strategy import ExponentialDelay, Restarts
from snapshot.barriers.checkpoint_trigger import Request, Trigger, TriggerPolicy
from snapshot.barriers.pending_checkpoints import (
    Aborted,
    Action,
    Checkpoints,
    Commit,
    Complete,
    Inject,
    Reason,
    Subtask,
    check_in_flight,
)
from snapshot.barriers.tolerable_failures import Failures
from statebackend.errors import RescaleError
from tests.channels.checkers.base import Violation
from tests.channels.plan import Config
from tests.channels.tasks import ChannelId, Part, Row, Saved, Task
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.channels.world import World

__all__ = ["Driver", "Record"]


@dataclass
class Record:
    """A durable checkpoint, as restores and checkers read it."""

    epoch: int
    checkpoint: int
    kind: str
    parallelism: list[int]
    parts: dict[Subtask, Part]
    state: dict[Subtask, dict[int, tuple[int, int, bool]]]

    @property
    def flight(self) -> dict[ChannelId, list[Row]]:
        parts = self.parts.values()
        return {channel: rows for part in parts for channel, rows in part.flight.items() if rows}


class Driver:
    """One driver process; the log outlives it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.trigger = Trigger(_policy(world.config), world.now_s)
        self.failures = Failures(world.config.tolerable)
        self.restarts = Restarts(ExponentialDelay(initial_s=0.002, max_s=0.02, reset_after_s=0.1))
        self.number = world.log[-1].checkpoint if world.log else 0
        self.checkpoints: Checkpoints[Part]
        self.requests: dict[int, Request] = {}
        self.writing: tuple[float, Commit[Part]] | None = None
        self.uncommitted: list[tuple[float, Record, Complete]] = []
        self.restart_s: float | None = world.now_s
        self.last_asked = False
        self.calm_from = sys.maxsize  # the first attempt that nothing went wrong in
        self.state: dict[Subtask, dict[int, tuple[int, int, bool]]] = {}
        self.parts: dict[Subtask, Part] = {}

    def calm(self) -> None:
        """From now on there is time enough."""
        self.trigger.policy = _policy(self.world.config)
        self.failures.tolerable = self.world.config.tolerable
        self.checkpoints = getattr(self, "checkpoints", None) or self._checkpoints()
        self.checkpoints._timeout_s = self.world.config.timeout_s

    def _checkpoints(self) -> Checkpoints[Part]:
        world = self.world
        return Checkpoints(
            world.tasks,
            epoch=world.log[-1].epoch if world.log else 0,
            before=self.number,
            timeout_s=world.config.timeout_s,
            may_leave=world.config.may_leave,
        )

    # --- a step --------------------------------------------------------------------------------

    def step(self) -> None:
        world = self.world
        if self.writing is not None and self.writing[0] <= world.now_s:
            self.write(durable=world.random.random() >= world.config.write_fails)
        while self.uncommitted and self.uncommitted[0][0] <= world.now_s:
            self.commit_sinks(*self.uncommitted.pop(0)[1:])
        if world.driver is not self:
            return
        if self.restart_s is not None:
            # A record whose outcome is not known may be the one to restore.
            if self.restart_s <= world.now_s and self.writing is None and not self.uncommitted:
                self.restore()
            return
        if world.done:
            return
        self.do(self.checkpoints.tick(world.now_s))
        if self.restart_s is not None:
            return
        if world.random.random() < world.config.savepoints:
            self.trigger.request("savepoint", world.now_s)
        if world.random.random() < world.config.stops:
            self.last_asked = self.trigger.request("last", world.now_s) is not None
        if self.checkpoints.last_is_due and not self.last_asked:
            self.last_asked = self.trigger.request("last", world.now_s) is not None
        for request in self.trigger.poll(world.now_s):
            self.begin(request)

    def begin(self, request: Request) -> None:
        world = self.world
        actions = self.checkpoints.begin(
            world.now_s,
            stamp_ms=int(world.now_s * 1000),
            kind=request.kind,
            alignment_timeout_ms=world.config.alignment_timeout_ms,
        )
        self.requests[self.checkpoints.number] = request
        if world.is_calm:
            self.calm_from = min(self.calm_from, self.checkpoints.number)
        self.do(actions)

    def do(self, actions: Sequence[Action[Part]]) -> None:
        world = self.world
        for action in actions:
            match action:
                case Inject(barrier, epoch):
                    world.numbers.begun(barrier.checkpoint, epoch)
                    world.epochs[barrier.checkpoint] = epoch
                    self.tell("trigger", barrier)
                case Commit():
                    assert self.writing is None
                    due_s = world.now_s + world.config.write_s * world.random.random()
                    self.writing = (due_s, action)
                case Complete(checkpoint):
                    self.over(checkpoint)
                    self.failures.succeeded(checkpoint)
                    due_s = world.now_s + 0.002 * world.random.random()
                    self.uncommitted.append((due_s, world.log[-1], action))
                case Aborted(checkpoint, _, reason):
                    world.note(f"attempt aborted: {reason.value}")
                    if reason is Reason.EXPIRED and checkpoint >= self.calm_from:
                        raise Violation("liveness", f"attempt {checkpoint} came to no end")
                    self.over(checkpoint)
                    self.tell("aborted", checkpoint)
                    if self.failures.failed(checkpoint, reason):
                        world.note("too many checkpoints failed")
                        self.fail()

    def over(self, checkpoint: int) -> None:
        request = self.requests.pop(checkpoint)
        self.last_asked = self.last_asked and request.kind != "last"
        self.trigger.ended(request, self.world.now_s)

    def tell(self, what: str, *about: object) -> None:
        for task in self.world.tasks.values():
            self.world.send(task, what, *about)

    def heard(self, what: str, task: Task, *about: object) -> None:
        """A task says something."""
        if self.restart_s is not None:
            return
        if what == "at end":
            self.checkpoints.at_end(task.me)
        elif what == "ack":
            checkpoint, part = about
            assert isinstance(checkpoint, int)
            assert isinstance(part, Part)
            self.do(self.checkpoints.ack(task.me, checkpoint, part, ended=part.ended))
        elif what == "decline":
            self.do(self.checkpoints.decline(task.me, *about))  # type: ignore[arg-type]

    # --- records -------------------------------------------------------------------------------

    def write(self, *, durable: bool) -> None:
        assert self.writing is not None
        commit, self.writing = self.writing[1], None
        if not durable:
            self.world.note("record not written")
            self.world.note(Fault.REQUEST_LOST)
            self.do(self.checkpoints.not_committed(commit.checkpoint))
            return
        self.append(commit)
        self.do(self.checkpoints.committed(commit.checkpoint))

    def append(self, commit: Commit[Part]) -> None:
        """The record is in the log."""
        world = self.world
        parts = {s: self.parts[s] for s in commit.finished} | dict(commit.parts)
        for subtask, part in commit.parts.items():
            self.state.setdefault(subtask, {}).update(part.delta)
        self.parts = parts
        record = Record(
            commit.epoch,
            commit.checkpoint,
            commit.kind,
            list(world.parallelism),
            parts,
            {subtask: dict(state) for subtask, state in self.state.items()},
        )
        world.numbers.appended(record)
        world.log.append(record)
        world.note("checkpoint durable")
        if record.flight:
            world.note("unaligned checkpoint durable")
        if commit.kind == "savepoint":
            world.note("savepoint durable")
        if commit.finished:
            world.note("checkpoint with finished subtasks")
        world.cut.appended(record)

    def commit_sinks(self, record: Record, complete: Complete | None = None) -> None:
        """First what sinks have prepared, then the word to everybody."""
        for part in record.parts.values():
            for name, rows in part.committables:
                self.world.visible.setdefault(name, rows)
        self.world.output.committed(record)
        if complete is not None:
            self.tell("complete", complete.checkpoint)
            if complete.is_last:
                self._end(record)

    def _end(self, record: Record) -> None:
        """The job is over; if its input is not, somebody starts it again."""
        world = self.world
        world.done = all(part.ended for part in record.parts.values())
        if not world.done:
            world.note("stopped, and started again")
            world.note(Fault.QUERY_STOPPED)
            world.tear_down()
            world.driver = Driver(world)

    # --- failures ------------------------------------------------------------------------------

    def fail(self) -> None:
        """The job fails: every task goes, and it is started again."""
        if self.restart_s is not None:
            return
        world = self.world
        self.restarts, delay_s = self.restarts.failed(world.now_s, world.random.random())
        assert delay_s is not None
        self.restart_s = world.now_s + delay_s
        world.tear_down()
        self.do(self.checkpoints.abort_all(Reason.FAILOVER))
        self.number = self.checkpoints.number

    def die(self) -> None:
        """The process is killed; a record on its way may land all the same."""
        if self.writing is not None and self.world.random.random() < 0.5:
            self.append(self.writing[1])
            self.world.note(Fault.LATE_WRITE)
            self.world.note("record landed after its driver's death")
        if self.uncommitted:
            self.world.note("driver died before the sinks were committed")
        self.world.tear_down()
        self.world.driver = Driver(self.world)

    def restore(self) -> None:
        """From the last record, or from nothing."""
        world = self.world
        record = world.log[-1] if world.log else None
        if record is not None:
            self.commit_sinks(record)
            world.note("restored")
            if world.done:
                return
        wanted = self._parallelism(record)
        rescaled = record is not None and wanted != record.parallelism
        world.parallelism = wanted
        world.build(record, rescaled=rescaled)
        self.state = {task.me: dict(task.saved.state) for task in world.tasks.values()}
        self.parts = {}
        self.checkpoints = self._checkpoints()
        world.numbers.restored()
        self.trigger.reset(world.now_s)
        self.requests.clear()
        self.last_asked = False
        self.restart_s = None

    def _parallelism(self, record: Record | None) -> list[int]:
        world = self.world
        if record is None or world.random.random() >= world.config.rescale:
            return list(world.parallelism)
        wanted = [world.random.randint(1, 3) for _ in world.parallelism]
        names = [vertex.name for vertex in world.config.vertices]
        edges = world.config.edges
        with_rows = {names[edges[channel[0]].receiver] for channel in record.flight}
        try:
            saved = dict(zip(names, record.parallelism, strict=True))
            check_in_flight(with_rows, saved, dict(zip(names, wanted, strict=True)))
        except RescaleError:
            world.note("rescale refused: rows in flight")
            return list(record.parallelism)
        if wanted != record.parallelism:
            world.note(Fault.RESCALED)
        return wanted


def _policy(config: Config) -> TriggerPolicy:
    return TriggerPolicy(
        interval_s=config.interval_s,
        min_pause_s=config.min_pause_s,
        max_share=config.max_share,
        max_concurrent=config.max_concurrent,
    )


def saved_of(record: Record, vertex: str, index: int, parallelism: int, *, rescaled: bool) -> Saved:
    """What a subtask begins with at any parallelism: keys and splits go by their number."""
    old = [part for subtask, part in sorted(record.parts.items()) if subtask.vertex == vertex]
    same = len(old) == parallelism and not rescaled
    states = [state for subtask, state in record.state.items() if subtask.vertex == vertex]
    return Saved(
        state={k: v for state in states for k, v in state.items() if k % parallelism == index},
        positions={
            split: at
            for part in old
            for split, at in part.positions.items()
            if split % parallelism == index
        },
        rules=old[index if same else 0].rules,
        at_ms=old[index].at_ms if same else min(part.at_ms for part in old),
    )
