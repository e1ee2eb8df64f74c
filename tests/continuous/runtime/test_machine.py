"""What the driver decides in a run, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot.barriers.pending_checkpoints import Reason, Subtask
from statebackend.continuous.driver.run_state import (
    Broken,
    Ended,
    Out,
    Publish,
    RunState,
    Send,
    Settled,
    Write,
)
from statebackend.continuous.job.graph import Edge, Graph, KeyedVertex, SinkNode, SourceVertex
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.slot_messages import (
    Aborted,
    Acked,
    Completed,
    Copy,
    Declined,
    Deploy,
    Grant,
    Stop,
    Trigger,
)
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.sources.split_assigner import SplitAssigner
from statebackend.errors import PeerLostError, ProcessorError
from tests.continuous.runtime.jobs import Numbers

P = 2
SOURCES = [Subtask("source", i) for i in range(P)]
COUNTS = [Subtask("count", i) for i in range(P)]


class Driver:
    """A machine and the moments that it is told."""

    def __init__(self, splits: int = 4, **options: Any) -> None:
        source = Numbers(100, splits=splits)
        graph = Graph(
            P,
            8,
            sources={"source": SourceVertex("source", source)},
            keyed={"count": KeyedVertex("count", (Edge("source", (0,)),))},
            sinks={"sink": SinkNode("sink", CollectSink(), "count")},
        )
        self.assigner = SplitAssigner(P, splits_end=True)
        self.assigner.add(source.discover(None))
        given = {"checkpoint_interval_s": 10.0, "start_timeout_s": 60.0, **options}
        self.machine = RunState(
            graph,
            RunOptions(**given),
            {"source": self.assigner},
            epoch=4,
            before=20,
            stamp_ms=1000,
            now_s=0.0,
        )
        self.now_s = 0.0

    def up(self) -> None:
        for slot in range(P):
            self.machine.registered(slot, f"grpc://host{slot}", self.now_s)
        for subtask in (*SOURCES, *COUNTS):
            assert not self.machine.started(subtask, self.now_s)

    def at(self, now_s: float) -> list[Out]:
        self.now_s = now_s
        for slot in range(P):
            self.machine.slots.heard(slot, now_s)
        return self.machine.tick(now_s, int(now_s * 1000) + 2000)

    def ack(self, subtask: Subtask, number: int, *, ended: bool = False) -> list[Out]:
        part = Acked(vertex=subtask.vertex, subtask=subtask.index, checkpoint=number, ended=ended)
        return self.machine.acked(part, self.now_s)

    def all_ack(self, number: int, *, ended: bool = False) -> list[Out]:
        outs = [self.ack(one, number, ended=ended) for one in (*SOURCES, *COUNTS)]
        assert not any(outs[:-1])
        return outs[-1]


def copy(operator: str, first: int, last: int, epoch: int) -> Copy:
    return Copy(operator=operator, key_group_start=first, key_group_end=last, epoch=epoch)


def told(outs: list[Out]) -> list[Any]:
    return [out.command for out in outs if isinstance(out, Send)]


def test_a_run_is_deployed_once_every_slot_is_there() -> None:
    driver = Driver()
    assert driver.machine.registered(1, "b", 0.0) == []
    assert driver.machine.registered(1, "b", 0.0) == []  # asked again
    outs = driver.machine.registered(0, "a", 0.0)
    assert outs == [
        Send(i, Deploy(subtask=i, peers=["a", "b"], epoch=5, stamp_ms=1000)) for i in range(P)
    ]


def test_subtasks_go_where_their_copies_are_and_so_do_their_splits() -> None:
    driver = Driver(splits=2)
    sees = {slot: [copy("count", 4 - 4 * slot, 7 - 4 * slot, 3)] for slot in range(P)}
    driver.machine.registered(0, "a", 0.0, sees[0])
    outs = driver.machine.registered(1, "b", 0.0, sees[1])
    assert [(out.slot, out.command.subtask) for out in outs] == [(0, 1), (1, 0)]  # type: ignore[union-attr]
    assert [out.command.peers for out in outs] == [["b", "a"]] * 2  # type: ignore[union-attr]
    driver.machine.splits.asked(SOURCES[0], 1)
    grants = driver.machine.splits.asked(SOURCES[1], 1)
    assert [(out.slot, out.command.subtask) for out in grants] == [(1, 0), (0, 1)]  # type: ignore[union-attr]


def test_a_slot_that_spark_starts_again_within_a_run_ends_it() -> None:
    driver = Driver()
    driver.up()
    [broken] = driver.machine.registered(1, "elsewhere", 1.0)
    assert isinstance(broken, Broken)


def test_slots_that_do_not_come_end_the_run_and_the_error_says_what_to_do() -> None:
    driver = Driver()
    driver.machine.registered(0, "a", 0.0)
    assert driver.at(59.0) == []
    [broken] = driver.at(61.0)
    assert isinstance(broken, Broken)
    assert "slots [1]" in str(broken.error)
    assert "cores" in broken.error.todo


def test_a_silent_slot_is_lost() -> None:
    driver = Driver(silence_s=5.0)
    driver.up()
    driver.machine.slots.heard(0, 4.0)
    [broken] = driver.machine.tick(6.0, 8000)
    assert isinstance(broken, Broken)
    assert isinstance(broken.error, PeerLostError)
    assert "Slot 1" in str(broken.error)


def test_a_checkpoint_goes_from_its_trigger_to_the_commit_of_its_output() -> None:
    driver = Driver()
    driver.up()
    assert driver.at(9.0) == []
    [trigger] = told(driver.at(10.0))
    assert isinstance(trigger, Trigger)
    number = trigger.barrier.checkpoint
    assert number == 21  # attempts rise over the restarts of a job
    [write] = driver.all_ack(number)
    assert isinstance(write, Write)
    assert write.epoch == 5
    assert set(write.parts) == {*SOURCES, *COUNTS}
    assert write.cuts["source"]
    [publish] = driver.machine.written(number, 11.0)
    assert isinstance(publish, Publish)
    assert driver.at(20.0) == []  # none begins before the output is committed
    outs = driver.machine.published(publish, 20.5, 30_000)
    assert told(outs) == [Completed(checkpoint=number, epoch=5, next_stamp_ms=30_000)]
    [settled] = [one for one in outs if isinstance(one, Settled)]
    assert settled.reason is None
    assert settled.took_s == pytest.approx(10.5)
    [next_one] = told(driver.at(20.6))
    assert next_one.barrier.checkpoint == 22


def test_a_declined_checkpoint_leaves_its_epoch_to_the_next() -> None:
    driver = Driver(tolerable_failures=1)
    driver.up()
    driver.at(10.0)
    declined = Declined(vertex="count", subtask=1, checkpoint=21, newer=False, why="disk")
    outs = driver.machine.declined(declined, 10.5)
    assert told(outs) == [Aborted(checkpoint=21)]
    assert [o.reason for o in outs if isinstance(o, Settled)] == [Reason.DECLINED]
    assert driver.ack(COUNTS[0], 21) == []  # late
    driver.at(20.0)
    [write] = driver.all_ack(22)
    assert isinstance(write, Write)
    assert (write.checkpoint, write.epoch) == (22, 5)


def test_more_failures_in_a_row_than_are_tolerable_end_the_run() -> None:
    driver = Driver(tolerable_failures=0, timeout_s=5.0)
    driver.up()
    driver.at(10.0)
    outs = driver.at(15.0)
    assert isinstance(outs[-1], Broken)
    assert "expired; it waited for count/0, count/1, source/0, source/1" in str(outs[-1].error)
    [settled] = [one for one in outs if isinstance(one, Settled)]
    assert settled.waited_for == {*SOURCES, *COUNTS}
    assert driver.machine.failed(ProcessorError("later")) == []  # only the first counts


def test_splits_are_handed_out_when_every_subtask_has_asked() -> None:
    driver = Driver(splits=3)
    driver.up()
    assert driver.machine.splits.asked(SOURCES[1], 1) == []
    outs = driver.machine.splits.asked(SOURCES[0], 1)
    grants = [(out.slot, out.command.assignment.split.id) for out in outs]  # type: ignore[union-attr]
    assert grants == [(0, "00000"), (1, "00001")]
    [third] = told(driver.machine.splits.asked(SOURCES[0], 2))
    assert third.assignment.split.id == "00002"
    [over] = told(driver.machine.splits.asked(SOURCES[0], 3))
    assert (over.assignment, over.over) == (None, True)


def test_while_nobody_reads_a_split_no_watermark_may_run_ahead_of_it() -> None:
    driver = Driver(splits=3)
    driver.up()
    driver.machine.splits.asked(SOURCES[0], 1)
    first = told(driver.machine.splits.asked(SOURCES[1], 1))
    assert [grant.held_back for grant in first] == [True, True]
    driver.at(10.0)
    [wait] = told(driver.machine.splits.asked(SOURCES[0], 2))
    assert (wait.assignment, wait.held_back) == (None, True)
    [third] = told(driver.ack(SOURCES[0], 21))
    assert third.assignment.split.id == "00002"
    assert not third.held_back
    [over] = told(driver.machine.splits.asked(SOURCES[1], 2))
    assert (over.over, over.held_back) == (True, False)


def test_barriers_have_the_alignment_timeout_of_the_job() -> None:
    driver = Driver(alignment_timeout_s=0.25)
    driver.up()
    [trigger] = told(driver.at(10.0))
    assert trigger.barrier.alignment_timeout_ms == 250


def test_a_split_waits_for_the_barrier_of_the_subtask_that_asks() -> None:
    driver = Driver(splits=3)
    driver.up()
    driver.machine.splits.asked(SOURCES[0], 1)
    driver.machine.splits.asked(SOURCES[1], 1)
    driver.at(10.0)
    [wait] = told(driver.machine.splits.asked(SOURCES[0], 2))
    assert isinstance(wait, Grant)
    assert (wait.assignment, wait.over) == (None, False)
    # Once it is through, and before another is on its way: else it would never get one.
    [given] = told(driver.ack(SOURCES[0], 21))
    assert isinstance(given, Grant)
    assert (given.subtask, given.number) == (0, 2)
    assert given.assignment is not None
    assert given.assignment.split.id == "00002"
    [more] = told(driver.machine.splits.asked(SOURCES[0], 3))
    assert more.assignment is None


def test_the_job_is_over_with_a_last_checkpoint_of_all_who_have_ended() -> None:
    driver = Driver(checkpoint_interval_s=None)
    driver.up()
    for subtask in (*SOURCES, *COUNTS):
        assert driver.at(driver.now_s + 1) == []
        driver.machine.at_end(subtask)
    [trigger] = told(driver.at(100.0))
    assert trigger.barrier.kind == "last"
    [write] = driver.all_ack(trigger.barrier.checkpoint, ended=True)
    assert isinstance(write, Write)
    [publish] = driver.machine.written(write.checkpoint, 101.0)
    assert isinstance(publish, Publish)
    assert publish.is_last
    outs = driver.machine.published(publish, 102.0, 110_000)
    assert told(outs)[-1] == Stop(job_ended=True)
    assert outs[-1] == Ended()
    assert driver.at(1000.0) == []


def test_a_user_may_ask_before_the_run_is_up() -> None:
    driver = Driver(checkpoint_interval_s=None)
    assert driver.machine.requested("checkpoint", 0.0)
    driver.up()
    [trigger] = told(driver.at(1.0))
    assert isinstance(trigger, Trigger)


def begun(outs: list[Out]) -> list[tuple[int, str]]:
    barriers = [one.barrier for one in told(outs) if isinstance(one, Trigger)]
    return [(one.checkpoint, one.kind) for one in barriers]


def complete(driver: Driver, number: int) -> None:
    [write] = driver.all_ack(number)
    assert isinstance(write, Write)
    [publish] = driver.machine.written(number, driver.now_s)
    assert isinstance(publish, Publish)
    driver.machine.published(publish, driver.now_s, 110_000)


@pytest.mark.parametrize("is_up", [False, True])
def test_one_checkpoint_that_has_not_begun_serves_all_who_ask_for_its_kind(is_up: bool) -> None:
    """Else the queue would be full, and whoever asks next waits for nothing."""
    driver = Driver(checkpoint_interval_s=None)
    if is_up:
        driver.up()
    for _ in range(20):
        assert driver.machine.requested("checkpoint", 0.0)
    for _ in range(20):
        assert driver.machine.requested("savepoint", 0.0)
    if not is_up:
        driver.up()
    assert begun(driver.at(1.0)) == [(21, "savepoint")]
    assert driver.machine.requested("savepoint", 1.0)  # one that has begun may be too early
    complete(driver, 21)
    assert begun(driver.at(2.0)) == [(22, "savepoint")]
    complete(driver, 22)
    assert begun(driver.at(3.0)) == [(23, "checkpoint")]
    complete(driver, 23)
    assert begun(driver.at(4.0)) == []


def test_a_periodic_checkpoint_does_not_stand_for_one_that_was_asked_for() -> None:
    """It may be dropped from the queue."""
    driver = Driver(checkpoint_interval_s=10.0)
    driver.up()
    assert begun(driver.at(10.0)) == [(21, "checkpoint")]
    driver.at(20.0)
    assert driver.machine.requested("checkpoint", 20.0)
    complete(driver, 21)
    assert begun(driver.at(20.5)) == [(22, "checkpoint")]
