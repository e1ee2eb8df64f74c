"""When a subtask takes its snapshot, by what its channels bring."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.barriers.alignment import (
    Abort,
    Action,
    Alignment,
    Block,
    Captured,
    Figures,
    Forward,
    Keep,
    Mode,
    Overtake,
    Snapshot,
    Unblock,
    Why,
)
from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput
from statebackend.errors import ProtocolError

STEP = re.compile(r"([bBXE])(\d+)(?:@(\d+))?")


def barrier(number: int, timeout_ms: int | None = None, kind: str = "checkpoint") -> Barrier:
    return Barrier(checkpoint=number, stamp_ms=0, kind=kind, alignment_timeout_ms=timeout_ms)


class Told:
    """An alignment that is told steps: ``b0`` data on channel 0, ``B2@1``, ``X2@1``, ``E1``."""

    def __init__(self, channels: int, mode: Mode = "exactly_once") -> None:
        self.machine = Alignment(channels, mode=mode)
        self.actions: list[Action] = []
        self.now_s = 0.0

    def tell(self, steps: str, size_bytes: int = 100) -> list[Action]:
        before = len(self.actions)
        for what, number, channel in STEP.findall(steps):
            n, c = int(number), int(channel or 0)
            if what == "b":
                self.actions += self.machine.data(n, size_bytes, self.now_s)
            elif what == "E":
                self.actions += self.machine.event(n, EndOfInput(), self.now_s)
            else:
                event = barrier(n) if what == "B" else Cancel(checkpoint=n)
                self.actions += self.machine.event(c, event, self.now_s)
        return self.actions[before:]

    def announce(self, channel: int, event: Barrier | EndOfInput, ahead: int) -> list[Action]:
        told = self.machine.announced(channel, event, ahead, self.now_s, ahead_bytes=ahead * 100)
        self.actions += told
        return told

    @property
    def triggered(self) -> list[int]:
        return [a.checkpoint for a in self.actions if isinstance(a, Snapshot)]

    @property
    def aborted(self) -> list[int]:
        return [a.checkpoint for a in self.actions if isinstance(a, Abort)]

    @property
    def blocked(self) -> set[int]:
        return set(self.machine.blocked)


def kinds(actions: list[Action], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_the_last_barrier_triggers_and_nothing_is_blocked_after() -> None:
    told = Told(3)
    assert told.tell("b0 b2 b0 B1@1 B1@2 b0") == [Block(1), Block(2)]
    assert told.triggered == []
    done = told.tell("B1@0")
    assert [type(action) for action in done] == [Snapshot, Forward, Unblock, Unblock]
    assert done[1] == Forward(barrier(1))
    assert told.triggered == [1]
    assert not told.blocked
    assert told.tell("b0 b1 b2") == []


def test_a_newer_barrier_aborts_an_incomplete_older_one() -> None:
    told = Told(3)
    told.tell("B2@1 b2 B2@0 b2")
    assert told.blocked == {0, 1}
    told.tell("B3@2")
    assert (told.aborted, told.blocked) == ([2], {2})
    told.tell("B3@0 B4@1")
    assert (told.aborted, told.blocked) == ([2, 3], {1})
    assert told.triggered == []
    assert kinds(told.actions, Abort) == [Abort(2, Why.NEWER), Abort(3, Why.NEWER)]


def test_a_cancelled_attempt_is_aborted_and_told_onward() -> None:
    told = Told(1)
    told.tell("b0 B1 b0 B2 b0 X4 B5 b0 X6 b0")
    assert told.triggered == [1, 2, 5]
    assert told.aborted == [4, 6]
    onward = [action.event for action in kinds(told.actions, Forward)]
    assert [event.checkpoint for event in onward] == [1, 2, 4, 5, 6]
    assert kinds(told.actions, Abort) == [Abort(4, Why.CANCELLED), Abort(6, Why.CANCELLED)]


def test_channels_that_end_count_as_aligned() -> None:
    told = Told(4)
    told.tell("E2 E1 b0 b0 b3 B2@3")
    assert told.triggered == []
    told.tell("B2@0")
    assert told.triggered == [2]
    assert not told.blocked


def test_a_channel_that_ends_during_an_alignment_completes_it() -> None:
    told = Told(3)
    told.tell("B1@0 B1@1")
    assert told.blocked == {0, 1}
    told.tell("E2")
    assert told.triggered == [1]
    assert not told.blocked


def test_figures_of_an_alignment() -> None:
    told = Told(3)
    told.machine.data(0, 100, 4.99)
    told.tell("b0 b1 b2")
    told.now_s = 5.0
    told.tell("B1@1 b0 b2 B1@0 b2")
    told.now_s = 5.010
    told.tell("B1@2")
    taken = kinds(told.actions, Snapshot)[0]
    assert not taken.unaligned
    assert taken.figures.bytes_processed == 300
    assert taken.figures.duration_s >= 0.0099
    assert taken.figures.start_delay_s == 5.0
    assert taken.figures.bytes_persisted == 0


def test_a_clock_behind_the_coordinator_s_gives_no_negative_delay() -> None:
    machine = Alignment(1)
    late = Barrier(checkpoint=1, stamp_ms=9_000)
    (taken, _) = machine.event(0, late, 1.0)
    assert isinstance(taken, Snapshot)
    assert taken.figures == Figures(start_delay_s=0.0, duration_s=0.0, bytes_processed=0)


# --- unaligned -----------------------------------------------------------------------------------


def test_past_its_timeout_a_barrier_overtakes_and_the_next_one_is_aligned_again() -> None:
    told = Told(2)
    timed = barrier(1, timeout_ms=10)
    assert told.announce(0, timed, 2) == []
    assert told.announce(1, timed, 1) == []
    assert told.machine.next_deadline_s == 0.010
    assert told.machine.tick(0.009) == []
    told.now_s = 0.020
    done = told.machine.tick(told.now_s)
    assert [type(action) for action in done] == [Snapshot, Forward, Overtake, Captured]
    assert done[0].unaligned  # type: ignore[union-attr]
    assert done[1] == Forward(barrier(1, timeout_ms=0))  # the next subtask does not wait again
    assert done[2] == Overtake(1, (0, 1))
    assert done[3].figures.bytes_persisted == 300  # type: ignore[union-attr]
    # The three rows are delivered all the same, and the barriers behind them change nothing.
    assert told.tell("b0 b0 b1") == []
    assert told.machine.event(0, timed, told.now_s) == []
    assert told.machine.event(1, timed, told.now_s) == []
    assert told.machine.next_deadline_s is None
    told.tell("B2@0")
    assert told.blocked == {0}
    told.tell("b1 B2@1")
    assert [taken.unaligned for taken in kinds(told.actions, Snapshot)] == [False]


def test_a_barrier_that_was_taken_out_unblocks_when_it_overtakes() -> None:
    told = Told(2)
    timed = barrier(1, timeout_ms=10)
    assert told.machine.event(0, timed, 0.0) == [Block(0)]
    told.announce(1, timed, 5)
    done = told.machine.tick(0.010)
    assert kinds(done, Overtake) == [Overtake(1, (1,))]
    assert done[-1] == Unblock(0)
    assert not told.blocked


def test_what_comes_before_a_barrier_that_has_not_arrived_is_kept() -> None:
    told = Told(3)
    timed = barrier(1, timeout_ms=10)
    told.machine.event(0, timed, 0.0)
    told.announce(1, timed, 1)
    done = told.machine.tick(0.5)
    assert kinds(done, Overtake) == [Overtake(1, (1,))]
    assert not kinds(done, Captured)  # channel 2's has not arrived
    assert told.tell("b0 b1 b2") == [Keep(1, 2)]
    told.now_s = 0.7
    done = told.announce(2, timed, 3)
    assert [type(action) for action in done] == [Overtake, Captured]
    assert done[0] == Overtake(1, (2,))
    assert done[1].figures.bytes_persisted == 100 + 100 + 300  # type: ignore[union-attr]
    assert done[1].figures.duration_s == pytest.approx(0.7)  # type: ignore[union-attr]
    assert told.tell("b2") == []


def test_a_barrier_that_was_never_announced_ends_what_is_kept() -> None:
    told = Told(2)
    timed = barrier(1, timeout_ms=0)
    done = told.machine.event(0, timed, 0.0)
    assert [type(action) for action in done] == [Block, Snapshot, Forward, Unblock]
    assert told.tell("b1 b1") == [Keep(1, 1), Keep(1, 1)]
    assert [type(a) for a in told.machine.event(1, timed, 0.0)] == [Captured]
    assert told.announce(1, timed, 2) == []  # told late


def test_an_end_that_has_arrived_can_be_overtaken_to() -> None:
    told = Told(3)
    timed = barrier(1, timeout_ms=10)
    told.announce(0, timed, 1)
    told.announce(1, EndOfInput(), 4)
    done = told.machine.tick(1.0)
    assert kinds(done, Overtake) == [Overtake(1, (0, 1))]
    assert told.announce(2, EndOfInput(), 1)[0] == Overtake(1, (2,))


def test_the_end_of_a_channel_ends_what_is_kept() -> None:
    told = Told(2)
    told.machine.event(0, barrier(1, timeout_ms=0), 0.0)
    assert told.tell("b1") == [Keep(1, 1)]
    assert [type(action) for action in told.tell("E1")] == [Captured]


def test_what_is_captured_is_given_up_when_its_barrier_will_not_come() -> None:
    told = Told(2)
    told.machine.event(0, barrier(1, timeout_ms=0), 0.0)
    told.tell("b1")
    done = told.tell("B2@1")
    assert done == [Abort(1, Why.NEWER), Forward(Cancel(checkpoint=1)), Block(1)]
    assert told.tell("b0") == []


@pytest.mark.parametrize("kind", ["savepoint", "last"])
def test_only_checkpoints_overtake(kind: str) -> None:
    told = Told(2)
    told.machine.event(0, barrier(1, timeout_ms=0, kind=kind), 0.0)
    assert told.blocked == {0}
    assert told.machine.next_deadline_s is None
    assert told.machine.tick(1e9) == []


def test_a_newer_attempt_never_overtakes_before_an_older_one() -> None:
    told = Told(2)
    told.announce(0, barrier(1), 1)  # without a timeout
    told.announce(0, barrier(2, timeout_ms=10), 3)
    assert told.machine.next_deadline_s is None
    assert told.machine.tick(5.0) == []
    told.now_s = 5.0
    told.tell("B1@0 B1@1")
    assert told.triggered == [1]
    assert told.machine.next_deadline_s == 0.010
    assert kinds(told.machine.tick(5.0), Snapshot)[0].checkpoint == 2


def test_an_attempt_whose_announced_successor_has_passed_it_by_is_given_up() -> None:
    told = Told(2)
    told.tell("B1@0")
    assert told.announce(1, barrier(2), 7)[0] == Abort(1, Why.NEWER)
    assert not told.blocked


# --- at least once -------------------------------------------------------------------------------


def test_at_least_once_nothing_is_blocked_and_several_attempts_may_be_open() -> None:
    told = Told(2, "at_least_once")
    told.tell("B1@0 b0 B2@0 b0 B1@1")
    assert told.triggered == [1]
    told.tell("b1 B2@1")
    assert told.triggered == [1, 2]
    assert not kinds(told.actions, Block)
    assert told.aborted == []


def test_at_least_once_an_attempt_that_a_channel_leaves_out_is_given_up() -> None:
    told = Told(2, "at_least_once")
    told.tell("B1@0 B2@1")
    assert told.aborted == [1]
    told.tell("B2@0")
    assert told.triggered == [2]


def test_in_some_channels_nothing_is_overtaken_and_their_barriers_are_waited_for() -> None:
    machine = Alignment(3, in_order=[1])
    first = barrier(1, timeout_ms=100)
    assert machine.announced(0, first, 5, 0.0) == []
    assert machine.announced(1, first, 5, 0.0) == []
    assert machine.next_deadline_s is None
    assert machine.tick(60.0) == []
    actions = machine.event(1, first, 60.0)
    assert [type(action) for action in actions] == [Block, Snapshot, Forward, Overtake, Unblock]
    assert isinstance(actions[1], Snapshot)
    assert actions[1].unaligned
    assert actions[3] == Overtake(1, (0,))


def test_at_least_once_nothing_is_overtaken() -> None:
    told = Told(2, "at_least_once")
    told.machine.event(0, barrier(1, timeout_ms=0), 0.0)
    assert told.machine.next_deadline_s is None


# --- sources, ends, and the coordinator's word ---------------------------------------------------


def test_a_source_takes_its_snapshot_when_it_is_told() -> None:
    machine = Alignment(0)
    done = machine.triggered(barrier(1), 0.0)
    assert [type(action) for action in done] == [Snapshot, Forward]
    assert machine.triggered(barrier(1), 0.0) == []  # said twice


def test_a_subtask_with_an_open_channel_waits_for_the_barrier_in_it() -> None:
    told = Told(1)
    assert told.machine.triggered(barrier(1), 0.0) == []
    told.tell("B1")
    assert told.triggered == [1]


def test_a_subtask_whose_channels_have_all_ended_goes_by_the_coordinator_s_word() -> None:
    told = Told(2)
    told.tell("E0")
    assert told.machine.triggered(barrier(1), 0.0) == []
    told.tell("E1")  # no barrier will come: what was told before counts now
    assert told.triggered == [1]
    assert [type(a) for a in told.machine.triggered(barrier(2), 0.0)] == [Snapshot, Forward]


def test_all_that_was_told_is_taken_in_its_order_when_the_last_channel_ends() -> None:
    told = Told(1)
    told.machine.triggered(barrier(2), 0.0)
    told.machine.triggered(barrier(1), 0.0)
    told.machine.triggered(barrier(3), 0.0)
    told.machine.aborted(2)
    told.tell("E0")
    assert told.triggered == [1, 3]


def test_what_was_settled_is_not_taken_again_at_the_end() -> None:
    told = Told(1)
    told.machine.triggered(barrier(1), 0.0)
    told.tell("B1 E0")
    assert told.triggered == [1]


def test_an_attempt_that_the_coordinator_gave_up_unblocks_and_does_not_come_back() -> None:
    told = Told(3)
    told.tell("B1@0")
    done = told.machine.aborted(1)
    assert done == [Abort(1, Why.CANCELLED), Forward(Cancel(checkpoint=1)), Unblock(0)]
    assert told.machine.aborted(1) == []
    assert told.tell("B1@1 X1@2") == []
    told.tell("B2@0 B2@1 B2@2")
    assert told.triggered == [2]


def test_an_attempt_that_was_given_up_unseen_leaves_an_older_one_alone() -> None:
    told = Told(1)
    told.machine.aborted(2)
    told.tell("B1")
    assert told.triggered == [1]
    assert told.tell("B2") == []
    told.tell("B3")
    assert told.triggered == [1, 3]


def test_an_older_barrier_that_another_channel_has_left_out_is_given_up() -> None:
    told = Told(2)
    told.tell("B3@1")
    told.machine.aborted(3)
    assert told.tell("B2@0") == [Abort(2, Why.NEWER), Forward(Cancel(checkpoint=2))]
    assert not told.blocked


def test_reading_a_blocked_or_ended_channel_is_a_fault() -> None:
    told = Told(2)
    told.tell("B1@0 E1")
    told.tell("b0")
    with pytest.raises(ProtocolError, match="Channel 1 has ended"):
        told.tell("b1")
    told = Told(2)
    told.tell("B1@0")
    with pytest.raises(ProtocolError, match="Channel 0 is blocked"):
        told.tell("b0")


# --- properties ----------------------------------------------------------------------------------


@given(st.data())
def test_whatever_the_interleaving_a_snapshot_lies_at_its_barriers(data: st.DataObject) -> None:
    """Every channel brings the same barriers: each attempt is taken once, in order, aligned."""
    channels = data.draw(st.integers(1, 4))
    attempts = data.draw(st.integers(1, 4))
    left = []
    for _ in range(channels):
        steps: list[int] = []  # 0: a row, n: barrier n
        for number in range(1, attempts + 1):
            steps += [0] * data.draw(st.integers(0, 2)) + [number]
        left.append(steps)
    machine = Alignment(channels)
    passed = [0] * channels
    taken = []
    while any(left):
        ready = [c for c in range(channels) if left[c] and c not in machine.blocked]
        assert ready, "every channel is blocked, and no snapshot was taken"
        channel = data.draw(st.sampled_from(ready))
        step = left[channel].pop(0)
        if not step:
            assert machine.data(channel, 1, 0.0) == []
            continue
        passed[channel] = step
        for action in machine.event(channel, barrier(step), 0.0):
            assert not isinstance(action, Abort)
            if isinstance(action, Snapshot):
                assert passed == [action.checkpoint] * channels
                taken.append(action.checkpoint)
    assert taken == list(range(1, attempts + 1))
    assert not machine.blocked


@given(st.data())
def test_whatever_the_moment_an_unaligned_snapshot_holds_all_that_lies_before_the_barriers(
    data: st.DataObject,
) -> None:
    """By channel: what was taken out before the snapshot, and what was captured, is what was sent
    before the barrier, in order and once; and all is delivered."""
    channels = data.draw(st.integers(1, 3))
    timed = barrier(1, timeout_ms=data.draw(st.integers(0, 3)))
    before = [data.draw(st.integers(0, 3)) for _ in range(channels)]
    queues: list[list[int | None]] = [[*range(n), None, 100] for n in before]  # None: the barrier
    sent = [list(queue) for queue in queues]
    arrived, taken = [0] * channels, [0] * channels
    at_snapshot: list[int] | None = None
    captured: list[list[int | None]] = [[] for _ in range(channels)]
    machine, whole, now_s = Alignment(channels), False, 0.0

    def do(actions: list[Action], row: int | None = None) -> None:
        nonlocal at_snapshot, whole
        for action in actions:
            match action:
                case Snapshot(unaligned=unaligned):
                    assert at_snapshot is None
                    at_snapshot = [min(n, before[c]) for c, n in enumerate(taken)]
                    whole = not unaligned
                case Overtake(channels=numbers):
                    for c in numbers:
                        captured[c] += sent[c][taken[c] : before[c]]
                case Keep(channel=c):
                    captured[c].append(row)
                case Captured():
                    whole = True
                case Abort():
                    pytest.fail("nobody gave it up")

    while any(taken[c] < len(sent[c]) for c in range(channels)):
        now_s += data.draw(st.sampled_from([0.0, 0.001]))
        do(machine.tick(now_s))
        coming = [c for c in range(channels) if arrived[c] < len(sent[c])]
        ready = [c for c in range(channels) if taken[c] < arrived[c] and c not in machine.blocked]
        c = data.draw(st.sampled_from([*coming, *ready]))
        if c in coming and (c not in ready or data.draw(st.booleans())):
            arrived[c] += 1
            if sent[c][arrived[c] - 1] is None and data.draw(st.booleans()):
                do(machine.announced(c, timed, before[c] - taken[c], now_s))
            continue
        element = sent[c][taken[c]]
        if element is None:
            taken[c] += 1
            do(machine.event(c, timed, now_s))
        else:
            do(machine.data(c, 1, now_s), element)
            taken[c] += 1
    assert at_snapshot is not None
    assert whole
    for c in range(channels):
        assert sent[c][: at_snapshot[c]] + captured[c] == list(range(before[c]))
