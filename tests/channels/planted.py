"""What a planted bug changes: names in modules and classes, and what is put there."""

from __future__ import annotations

from typing import Any

import snapshot.barriers.channel_watermarks
import tests.channels.driver
from snapshot.barriers.alignment import Alignment, Captured, Overtake, Unblock
from snapshot.barriers.barrier import EndOfInput
from snapshot.barriers.channel_watermarks import Watermarks
from snapshot.barriers.pending_checkpoints import Aborted, Checkpoints, Commit, Complete, Reason
from tests.channels.driver import Driver
from tests.channels.tasks import Channel, Task
from tests.channels.world import World
from tests.planted.bug import Patches

# --- alignment -----------------------------------------------------------------------------------


def nothing_is_blocked() -> Patches:
    really = Alignment.__init__

    def init(self: Alignment, channels: int, *, mode: str = "") -> None:
        really(self, channels, mode="at_least_once")

    yield Alignment, "__init__", init


def first_barrier_triggers() -> Patches:
    really = Alignment._begin

    def begin(self: Alignment, barrier: Any, now_s: float) -> Any:
        actions = really(self, barrier, now_s)
        for attempt in self._aligning.values():
            attempt.missing.clear()
        return actions

    yield Alignment, "_begin", begin


def abort_unblocks_nothing() -> Patches:
    really = Alignment._give_up

    def give_up(self: Alignment, number: int, why: Any) -> Any:
        blocked = set(self._blocked)
        actions = really(self, number, why)
        self._blocked = blocked
        return [action for action in actions if not isinstance(action, Unblock)]

    yield Alignment, "_give_up", give_up


def older_attempt_stays() -> Patches:
    yield Alignment, "_never", lambda self, channel, number: []


def word_is_not_heeded() -> Patches:
    really = Alignment.triggered

    def triggered(self: Alignment, barrier: Any, now_s: float) -> Any:
        return [] if self._taken else really(self, barrier, now_s)

    yield Alignment, "triggered", triggered


def overtaken_rows_are_not_kept() -> Patches:
    really = Alignment._overtake

    def overtake(self: Alignment, attempt: Any, now_s: float) -> Any:
        actions = really(self, attempt, now_s)
        return [action for action in actions if not isinstance(action, Overtake)]

    yield Alignment, "_overtake", overtake


def rows_before_a_barrier_on_its_way_are_not_kept() -> Patches:
    really = Alignment.data

    def data(self: Alignment, channel: int, size_bytes: int, now_s: float) -> Any:
        really(self, channel, size_bytes, now_s)
        return []

    yield Alignment, "data", data


def acked_before_all_is_captured() -> Patches:
    def whole(self: Alignment, number: int, now_s: float) -> Any:
        attempt = self._capturing.pop(number)
        return [Captured(number, attempt.figures(now_s))]

    yield Alignment, "_whole", whole


def overtaken_rows_are_kept_twice() -> Patches:
    really = Alignment._overtake

    def overtake(self: Alignment, attempt: Any, now_s: float) -> Any:
        actions = really(self, attempt, now_s)
        for action in actions:
            if isinstance(action, Overtake) and action.checkpoint in self._capturing:
                attempt.open |= set(action.channels)
        return actions

    yield Alignment, "_overtake", overtake


def only_the_newest_word_counts() -> Patches:
    really = Alignment.triggered

    def triggered(self: Alignment, barrier: Any, now_s: float) -> Any:
        if self._live:
            self._from_coordinator.clear()
        return really(self, barrier, now_s)

    yield Alignment, "triggered", triggered


# --- the coordinator's part ----------------------------------------------------------------------


def late_ack_counts() -> Patches:
    really = Checkpoints.ack

    def ack(self: Any, subtask: Any, checkpoint: int, part: Any, *, ended: bool = False) -> Any:
        pending = self.pending
        if pending and checkpoint not in pending:
            checkpoint = pending[0]
        return really(self, subtask, checkpoint, part, ended=ended)

    yield Checkpoints, "ack", ack


def ack_counts_as_often_as_it_comes() -> Patches:
    really = Checkpoints.ack

    def ack(self: Any, subtask: Any, checkpoint: int, part: Any, *, ended: bool = False) -> Any:
        pending = self._pending.get(checkpoint)
        if pending is not None and subtask in pending.parts and pending.waiting:
            pending.waiting.discard(max(pending.waiting))
            return self._advance()
        return really(self, subtask, checkpoint, part, ended=ended)

    yield Checkpoints, "ack", ack


def aborted_attempt_keeps_its_epoch() -> Patches:
    really = Checkpoints._give_up

    def give_up(self: Any, *about: Any, **more: Any) -> Any:
        actions = really(self, *about, **more)
        self._epoch += sum(isinstance(action, Aborted) for action in actions)
        return actions

    yield Checkpoints, "_give_up", give_up


def numbers_begin_anew() -> Patches:
    really = Checkpoints.__init__

    def init(self: Any, subtasks: Any, **more: Any) -> None:
        really(self, subtasks, **{**more, "before": 0})

    yield Checkpoints, "__init__", init


def newer_attempts_stay() -> Patches:
    def give_up(self: Any, checkpoint: int, reason: Reason, by: Any = None, **_: Any) -> Any:
        pending = self._pending.get(checkpoint)
        if pending is None or pending.writing:
            return []
        del self._pending[checkpoint]
        return [Aborted(checkpoint, pending.epoch, reason, by)]

    yield Checkpoints, "_give_up", give_up


def committed_as_they_are_acked() -> Patches:
    def advance(self: Any) -> Any:
        if any(pending.writing for pending in self._pending.values()):
            return []
        for number, pending in self._pending.items():
            if not pending.waiting:
                pending.writing = True
                parts = dict(pending.parts)
                others = self._subtasks - parts.keys()
                ended = frozenset(pending.ended | self._finished)
                kind = pending.barrier.kind
                return [Commit(number, pending.epoch, kind, parts, others, ended)]
        return []

    yield Checkpoints, "_advance", advance


def record_being_written_is_given_up() -> Patches:
    really = Checkpoints._give_up

    def give_up(self: Any, checkpoint: int, *about: Any, **more: Any) -> Any:
        pending = self._pending.get(checkpoint)
        if pending is not None:
            pending.writing = False
        return really(self, checkpoint, *about, **more)

    def tick(self: Any, now_s: float) -> Any:
        late = [n for n, pending in self._pending.items() if pending.deadline_s <= now_s]
        return self._give_up(late[0], Reason.EXPIRED) if late else []

    yield Checkpoints, "_give_up", give_up
    yield Checkpoints, "tick", tick


def an_aborted_attempt_lets_go() -> Patches:
    really = Checkpoints.ack

    def ack(self: Any, subtask: Any, checkpoint: int, part: Any, *, ended: bool = False) -> Any:
        actions = really(self, subtask, checkpoint, part, ended=ended)
        if ended:
            self._finished.add(subtask)
        return actions

    yield Checkpoints, "ack", ack


def rows_in_flight_are_rescaled() -> Patches:
    yield tests.channels.driver, "check_in_flight", lambda *about: None


# --- watermarks ----------------------------------------------------------------------------------


def largest_watermark() -> Patches:
    yield snapshot.barriers.channel_watermarks, "min", max


def ended_channel_holds_the_watermark() -> Patches:
    really = Watermarks.take

    def take(self: Watermarks, channel: int, event: Any) -> Any:
        return [] if isinstance(event, EndOfInput) else really(self, channel, event)

    yield Watermarks, "take", take


# --- rules for the loop and the driver -----------------------------------------------------------


def overtaken_rows_are_taken_out() -> Patches:
    really = Channel.ahead

    def ahead(self: Channel, checkpoint: int) -> Any:
        rows = really(self, checkpoint)
        for row in rows:
            self.queue.remove(row)
            self.arrived -= 1
            self.rows -= 1
        return rows

    yield Channel, "ahead", ahead


def rows_in_flight_are_not_put_back() -> Patches:
    really = World._resume

    def resume(self: World, record: Any) -> None:
        really(self, record)
        for channel in self.channels:
            channel.queue.clear()
            channel.arrived = channel.rows = 0

    yield World, "_resume", resume


def committed_at_the_barrier() -> Patches:
    really = World.persist

    def persist(self: World, task: Task, checkpoint: int, part: Any) -> None:
        for name, rows in part.committables:
            self.visible.setdefault(name, rows)
        really(self, task, checkpoint, part)

    yield World, "persist", persist


def notified_before_the_sinks_are_committed() -> Patches:
    really = Driver.do

    def do(self: Driver, actions: Any) -> None:
        really(self, actions)
        for action in actions:
            if isinstance(action, Complete):
                for task in self.world.tasks.values():
                    task.told("complete", action.checkpoint)
                # The next record may be written before they are.
                self.uncommitted[-1] = (self.world.now_s + 0.3, *self.uncommitted[-1][1:])

    yield Driver, "do", do


def aborted_output_is_dropped() -> Patches:
    really = Task.told

    def told(self: Task, what: str, *about: Any) -> None:
        if what == "aborted":
            self.pending = [one for one in self.pending if one[0][1] != about[0]]
        really(self, what, *about)

    yield Task, "told", told


def aborted_delta_is_dropped() -> Patches:
    really = Task.freeze

    def freeze(self: Task, checkpoint: int) -> Any:
        self.frozen.clear()
        return really(self, checkpoint)

    yield Task, "freeze", freeze


def sinks_are_not_committed_again() -> Patches:
    really = Driver.restore

    def restore(self: Driver) -> None:
        commit, self.commit_sinks = self.commit_sinks, lambda *_: None  # type: ignore[method-assign]
        really(self)
        self.commit_sinks = commit  # type: ignore[method-assign]

    yield Driver, "restore", restore


def the_end_is_said_again() -> Patches:
    really = Task._finish

    def finish(self: Task) -> None:
        state = self.saved.state
        self.saved.state = {key: (n, total, False) for key, (n, total, _) in state.items()}
        really(self)

    yield Task, "_finish", finish
