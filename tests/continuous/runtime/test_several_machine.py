"""What the driver decides while several checkpoints are under way at the same time."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import pytest

from snapshot.barriers.pending_checkpoints import Reason, Subtask
from statebackend.continuous.driver.run_state import Broken, Ended, Out, Publish, Settled, Write
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.slot_messages import (
    Aborted,
    Acked,
    Completed,
    Declined,
    Grant,
    Stop,
    Trigger,
)
from statebackend.continuous.sources.split_assignment import Assignment
from statebackend.errors import SettingError
from tests.continuous.runtime.test_machine import COUNTS, SOURCES, Driver, P, begun, told


def up(splits: int = 4, **options: Any) -> Driver:
    driver = Driver(splits, **{"checkpoint_interval_s": 10.0, "max_concurrent": 3, **options})
    driver.up()
    return driver


def the(kind: type[Any], outs: list[Out]) -> Any:
    [found] = [one for one in outs if isinstance(one, kind)]
    return found


def numbers(outs: list[Out]) -> list[int]:
    return [number for number, _ in begun(outs)]


@pytest.mark.parametrize(("limit", "under_way"), [(1, [21]), (2, [21, 22]), (3, [21, 22, 23])])
def test_as_many_begin_as_may_be_under_way(limit: int, under_way: list[int]) -> None:
    driver = up(max_concurrent=limit)
    outs = [out for at_s in (10.0, 20.0, 30.0, 40.0, 45.0) for out in driver.at(at_s)]
    assert numbers(outs) == under_way
    [write] = driver.all_ack(21)
    driver.machine.written(21, 46.0)
    assert numbers(driver.at(47.0)) == [], "it is under way until its output is committed"
    driver.machine.published(Publish(21, 5, write.parts, False), 48.0, 50_000)
    assert numbers(driver.at(48.1)) == [under_way[-1] + 1]


def test_they_are_written_in_their_order_each_when_the_one_before_is_committed() -> None:
    driver = up()
    for at_s in (10.0, 20.0, 30.0):
        driver.at(at_s)
    assert driver.all_ack(22) == [], "its epoch comes after that of 21"
    write = the(Write, driver.all_ack(21))
    assert (write.checkpoint, write.epoch) == (21, 5)
    publish = the(Publish, driver.machine.written(21, 31.0))
    # A savepoint is a cut of the log at that moment: nothing of the next one may be in it.
    outs = driver.machine.published(publish, 32.0, 40_000)
    assert [type(one).__name__ for one in outs] == ["Send", "Settled", "Write"]
    assert outs[0].command == Completed(checkpoint=21, epoch=5, next_stamp_ms=40_000)  # type: ignore[union-attr]
    assert (outs[2].checkpoint, outs[2].epoch) == (22, 6)  # type: ignore[union-attr]
    publish = the(Publish, driver.machine.written(22, 33.0))
    outs = driver.machine.published(publish, 34.0, 40_000)
    assert told(outs) == [Completed(checkpoint=22, epoch=6, next_stamp_ms=40_001)]
    assert the(Write, driver.all_ack(23)).epoch == 7


def test_what_is_acked_while_output_is_committed_is_not_written_meanwhile() -> None:
    driver = up()
    for at_s in (10.0, 20.0):
        driver.at(at_s)
    driver.all_ack(21)
    publish = the(Publish, driver.machine.written(21, 21.0))
    assert driver.all_ack(22) == []
    assert the(Write, driver.machine.published(publish, 22.0, 30_000)).checkpoint == 22


def test_with_one_that_is_given_up_go_the_newer_ones_and_it_counts_once() -> None:
    driver = up(tolerable_failures=1)
    for at_s in (10.0, 20.0, 30.0):
        driver.at(at_s)
    driver.ack(COUNTS[0], 22)
    declined = Declined(vertex="count", subtask=1, checkpoint=22, newer=False, why="disk")
    outs = driver.machine.declined(declined, 31.0)
    assert told(outs) == [Aborted(checkpoint=22), Aborted(checkpoint=23)]
    settled = [one for one in outs if isinstance(one, Settled)]
    assert [one.reason for one in settled] == [Reason.DECLINED, Reason.EARLIER]
    assert COUNTS[0] not in settled[0].waited_for
    assert not [one for one in outs if isinstance(one, Broken)]
    assert numbers(driver.at(40.0)) == [24]
    the(Write, driver.all_ack(21))
    publish = the(Publish, driver.machine.written(21, 41.0))
    driver.machine.published(publish, 42.0, 50_000)
    assert the(Write, driver.all_ack(24)).epoch == 6, "22 and 23 left their epochs to it"


def test_one_that_expires_takes_those_behind_it_and_not_the_one_that_is_written() -> None:
    driver = up(timeout_s=15.0, tolerable_failures=1)
    driver.at(10.0)
    driver.at(20.0)
    the(Write, driver.all_ack(21))
    assert told(driver.at(26.0)) == []
    driver.at(30.0)
    outs = driver.at(35.0)
    assert [one.checkpoint for one in told(outs)] == [22, 23]
    assert the(Publish, driver.machine.written(21, 36.0)).checkpoint == 21


@pytest.mark.parametrize("kind", ["savepoint", "checkpoint"])
def test_what_a_user_asks_for_begins_beside_what_is_under_way(kind: Any) -> None:
    driver = up(max_concurrent=2)
    driver.at(10.0)
    assert driver.machine.requested(kind, 11.0)
    assert begun(driver.at(11.0)) == [(22, kind)]
    assert driver.machine.requested(kind, 12.0), "one that has begun may be too early for it"
    assert begun(driver.at(12.0)) == []


def test_behind_the_last_checkpoint_none_begins_unless_it_is_given_up() -> None:
    driver = up(tolerable_failures=9)
    driver.at(10.0)
    driver.machine.requested("last", 11.0)
    driver.machine.requested("checkpoint", 11.0)
    assert begun(driver.at(11.0)) == [(22, "last")]
    assert begun(driver.at(30.0)) == []
    declined = Declined(vertex="count", subtask=1, checkpoint=21, newer=False, why="disk")
    assert [one.checkpoint for one in told(driver.machine.declined(declined, 31.0))] == [21, 22]
    assert begun(driver.at(32.0)) == [(23, "checkpoint"), (24, "checkpoint")]


def test_none_begins_while_the_output_of_the_last_is_committed() -> None:
    driver = up(tolerable_failures=0)
    driver.machine.requested("last", 1.0)
    assert begun(driver.at(1.0)) == [(21, "last")]
    write = the(Write, driver.all_ack(21))
    done = the(Publish, driver.machine.written(write.checkpoint, 2.0))
    assert done.is_last
    assert begun(driver.at(12.0)) == []
    assert isinstance(driver.machine.published(done, 13.0, 13_000)[-1], Ended)


def test_the_job_ends_with_its_last_checkpoint_though_one_was_under_way() -> None:
    driver = up()
    driver.at(10.0)
    for subtask in (*SOURCES, *COUNTS):
        driver.machine.at_end(subtask)
    assert begun(driver.at(20.0)) == [(22, "last")]
    assert begun(driver.at(30.0)) == []
    driver.all_ack(22, ended=True)
    the(Write, driver.all_ack(21))
    publish = the(Publish, driver.machine.written(21, 31.0))
    assert not publish.is_last
    the(Write, driver.machine.published(publish, 32.0, 40_000))
    publish = the(Publish, driver.machine.written(22, 33.0))
    assert publish.is_last
    outs = driver.machine.published(publish, 34.0, 41_000)
    assert told(outs)[-1] == Stop(job_ended=True)
    assert outs[-1] == Ended()


def test_none_begins_while_a_subtask_waits_for_a_split_until_a_barrier_is_through() -> None:
    """With another one always on its way it would wait for ever."""
    driver = up(splits=3)
    driver.machine.splits.asked(SOURCES[0], 1)
    driver.machine.splits.asked(SOURCES[1], 1)
    driver.at(10.0)
    [wait] = told(driver.machine.splits.asked(SOURCES[0], 2))
    assert wait.assignment is None
    assert numbers(driver.at(20.0)) == []
    [given] = told(driver.ack(SOURCES[0], 21))
    assert given.assignment.split.id == "00002"
    assert numbers(driver.at(20.1)) == [22]
    [none] = told(driver.machine.splits.asked(SOURCES[0], 3))
    assert (none.over, none.assignment) == (True, None)
    assert numbers(driver.at(30.0)) == [23], "there is none that anybody could wait for"


def test_one_that_is_given_up_holds_no_split_back() -> None:
    driver = up(splits=3, timeout_s=15.0, tolerable_failures=9)
    driver.machine.splits.asked(SOURCES[0], 1)
    driver.machine.splits.asked(SOURCES[1], 1)
    driver.at(10.0)
    driver.machine.splits.asked(SOURCES[0], 2)
    assert numbers(driver.at(20.0)) == []
    outs = driver.at(25.0)
    assert numbers(outs) == [22]
    assert Aborted(checkpoint=21) in told(outs)


def test_checkpoints_take_their_share_of_the_time_and_users_do_not_wait_for_it() -> None:
    driver = up(max_concurrent=1, max_share=0.25, checkpoint_interval_s=1.0)
    assert numbers(driver.at(1.0)) == [21]
    write = the(Write, driver.all_ack(21))
    driver.machine.written(21, 3.0)
    driver.machine.published(Publish(21, 5, write.parts, False), 3.0, 5000)
    for now_s in (3.1, 5.0, 8.9):  # two seconds of it, six without
        assert numbers(driver.at(now_s)) == []
    driver.machine.requested("savepoint", 8.9)
    assert begun(driver.at(8.95)) == [(22, "savepoint")]
    declined = Declined(vertex="count", subtask=1, checkpoint=22, newer=True, why="")
    driver.now_s = 9.05
    driver.machine.declined(declined, 9.05)
    assert numbers(driver.at(9.3)) == []
    assert numbers(driver.at(9.36)) == [23]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_concurrent": 0}, "0 checkpoints"),
        ({"max_concurrent": 9}, "up to 8"),
        ({"max_concurrent": 2, "min_pause_s": 1.0}, "min_pause_s"),
        ({"max_concurrent": 2, "max_share": 0.5}, "max_share"),
        ({"max_concurrent": 2, "alignment_timeout_s": 1.0}, "alignment_timeout_s"),
        ({"max_share": 0.0}, "over 0"),
        ({"max_share": 1.1}, "at most 1"),
        ({"max_share": 0.5, "checkpoint_interval_s": None}, "interval"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        RunOptions(**options)
    assert RunOptions(max_concurrent=8, mode="at_least_once").policy.limit == 8
    assert RunOptions(max_share=0.1, min_pause_s=1.0, alignment_timeout_s=1.0).policy.limit == 1


# --- any order of events --------------------------------------------------------------------------


class Reader:
    """A source's subtask, as `SourceSubtask` has it: what it is told comes in order, and late."""

    def __init__(self, me: Subtask) -> None:
        self.me = me
        self.mail: deque[Any] = deque()
        self.due: deque[int] = deque()
        self.holds: set[str] = set()
        self.read: set[str] = set()
        self.number = self.got = 0
        self.asking = self.over = False


class Play:
    """A driver and its subtasks, step by step as a seed says."""

    def __init__(self, seed: int, limit: int) -> None:
        self.random = random.Random(seed)
        options = {"max_concurrent": limit, "checkpoint_interval_s": 2.0, "timeout_s": 40.0}
        self.driver = up(splits=12, tolerable_failures=10_000, **options)
        self.readers = [Reader(one) for one in SOURCES]
        self.to_driver: dict[Subtask, deque[Any]] = {one: deque() for one in (*SOURCES, *COUNTS)}
        self.counting = {one: deque[int]() for one in COUNTS}  # barriers on their way
        self.parts: dict[int, dict[int, tuple[set[str], set[str]]]] = {}
        self.work: deque[Write | Publish] = deque()
        self.ended = False
        self.most = self.complete = self.aborted = self.late = 0
        self.epoch, self.newest = 4, 20

    def step(self) -> None:
        driver, drawn = self.driver, self.random
        driver.now_s += drawn.choice([0.0, 0.05, 0.5])
        choice = drawn.random()
        if choice < 0.2:
            self.do(driver.at(driver.now_s))
        elif choice < 0.5:
            self.reader(drawn.choice(self.readers))
        elif choice < 0.6:
            self.counts(drawn.choice(COUNTS))
        elif choice < 0.85:
            self.hear(drawn.choice([*SOURCES, *COUNTS]))
        elif choice < 0.95:
            self.written()
        elif choice < 0.97:
            driver.machine.requested(drawn.choice(["checkpoint", "savepoint"]), driver.now_s)
        self.most = max(self.most, len(driver.machine._attempts))

    # --- the driver's loop

    def do(self, outs: list[Out]) -> None:
        for out in outs:
            assert not isinstance(out, Broken), out.error
            match out:
                case Write() | Publish():
                    assert not self.work, "one thing after the other"
                    self.work.append(out)
                case Settled(reason=reason):
                    self.complete += reason is None
                    self.aborted += reason is not None
                case Ended():
                    self.ended = True
        for command in told(outs):
            if isinstance(command, Grant):
                self.readers[command.subtask].mail.append(command)
            else:
                for reader in self.readers:
                    reader.mail.append(command)
            if isinstance(command, Trigger):
                self.parts[command.barrier.checkpoint] = {}

    def written(self) -> None:
        if not self.work:
            return
        work, machine, now_s = self.work.popleft(), self.driver.machine, self.driver.now_s
        if isinstance(work, Write):
            self.check(work)
            self.do(machine.written(work.checkpoint, now_s))
        else:
            self.do(machine.published(work, now_s, 0))

    def check(self, write: Write) -> None:
        """Each split is pending, with one subtask, or read: in one of these places."""
        assert write.epoch == self.epoch + 1
        assert write.checkpoint > self.newest
        self.epoch, self.newest = write.epoch, write.checkpoint
        pending = msgspec.json.decode(write.cuts["source"])["pending"]
        found = [one["split"]["id"] for one in pending]
        for holds, read in self.parts[write.checkpoint].values():
            found += [*holds, *read]
        assert sorted(found) == [f"{n:05}" for n in range(12)], write.checkpoint

    def hear(self, of: Subtask) -> None:
        """The next that a subtask has said arrives."""
        if not self.to_driver[of]:
            return
        said, machine, now_s = self.to_driver[of].popleft(), self.driver.machine, self.driver.now_s
        if isinstance(said, Acked):
            outs = machine.acked(said, now_s)
            self.late += sum(isinstance(one, Grant) for one in told(outs))
            self.do(outs)
        elif isinstance(said, Declined):
            self.do(machine.declined(said, now_s))
        elif isinstance(said, int):
            self.do(machine.splits.asked(of, said))
        else:
            machine.splits.ended(of, said)

    # --- the subtasks

    def reader(self, one: Reader) -> None:
        if one.mail and self.random.random() < 0.7:
            self.mailed(one, one.mail.popleft())
        elif one.holds and self.random.random() < 0.5:
            split = min(one.holds)
            one.holds.remove(split)
            one.read.add(split)
            self.to_driver[one.me].append(split)
        elif not (one.due or one.asking or one.over or len(one.holds) > 2):
            one.number, one.asking = one.number + 1, True
            self.to_driver[one.me].append(one.number)
        while one.due and not one.asking:
            number = one.due.popleft()
            self.parts[number][one.me.index] = set(one.holds), set(one.read)
            self.to_driver[one.me].append(self.part(one.me, number))
            for barriers in self.counting.values():
                if number not in barriers:
                    barriers.append(number)

    def mailed(self, one: Reader, command: Any) -> None:
        match command:
            case Trigger(barrier=barrier):
                one.due.append(barrier.checkpoint)
            case Aborted(checkpoint=number):
                one.due = deque(n for n in one.due if n != number)
            case Grant(assignment=assignment, number=number):
                if isinstance(assignment, Assignment) and number > one.got:
                    one.got = number
                    one.holds.add(assignment.split.id)
                if number == one.number:
                    one.asking, one.over = False, command.over

    def counts(self, me: Subtask) -> None:
        if not self.counting[me]:
            return
        number = self.counting[me].popleft()
        if self.random.random() < 0.05:
            declined = Declined(
                vertex="count", subtask=me.index, checkpoint=number, newer=False, why=""
            )
            self.to_driver[me].append(declined)
        else:
            self.to_driver[me].append(self.part(me, number))

    @staticmethod
    def part(me: Subtask, number: int) -> Acked:
        return Acked(vertex=me.vertex, subtask=me.index, checkpoint=number, ended=False)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_every_checkpoint_has_each_split_once_whatever_the_order(limit: int) -> None:
    most = complete = aborted = late = read = 0
    for seed in range(60):
        play = Play(seed, limit)
        for _ in range(1500):
            play.step()
        most, complete = max(most, play.most), complete + play.complete
        aborted, late = aborted + play.aborted, late + play.late
        read += sum(len(one.read) for one in play.readers)
    assert most == limit
    assert min(complete, aborted, late) > 100, (complete, aborted, late)
    assert read > 60 * 12 * 0.9, "nobody waits for a split for ever"
    assert P == 2
