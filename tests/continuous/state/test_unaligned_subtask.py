"""One keyed subtask with real channels, step by step, while nobody takes what it sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from snapshot.barriers.barrier import Barrier, EndOfInput, Watermark
from statebackend import system
from statebackend.continuous.exchange.channel import LocalChannel
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partitioner import forward
from statebackend.continuous.job.graph import Edge
from statebackend.continuous.job.slot_messages import Aborted, Acked, Completed, Trigger
from statebackend.continuous.worker.batch_sizing import Gathering
from statebackend.continuous.worker.keyed_state import KeyedFrozen
from statebackend.continuous.worker.keyed_subtask import Inputs, KeyedSubtask
from statebackend.continuous.worker.overtaken_rows import (
    ChannelQueue,
    Overtaken,
    Place,
    batches_of,
    decode,
    taken_out,
)
from statebackend.continuous.worker.subtask_output import Output, Route
from statebackend.errors import (
    CorruptionError,
    PeerLostError,
    ProcessorError,
    RescaleError,
    StateMismatchError,
)
from statebackend.operators.operator_snapshot import StoredOperatorState
from statebackend.operators.streaming_operator import StreamTimes
from tests.continuous.exchange.peers import numbers, rows
from tests.continuous.state.streamjob import AtOnce

PLACE = Place("op", 1, 2, {"source": "rows", "op": "counts"})
IN = [ChannelQueue("in", "source", 0, other) for other in range(2)]
OUT = ChannelQueue("out", "next", 3, 0)


def barrier(number: int = 1, timeout_ms: int | None = 0, kind: str = "checkpoint") -> Barrier:
    return Barrier(
        checkpoint=number,
        stamp_ms=system.wall_ms(),
        kind=kind,
        alignment_timeout_ms=timeout_ms,
    )


class State:
    """Stands for a `SubtaskState`: what was frozen of it is how many rows it had seen."""

    def __init__(self, overtaken: list[Overtaken]) -> None:
        self.times, self.overtaken = StreamTimes(), overtaken
        self.persisted: list[KeyedFrozen] = []
        self.heard: list[tuple[str, int]] = []
        self.seen: list[int] = []
        self.closed = False

    def check(self) -> None: ...
    def tidy(self) -> None: ...

    def make_operator(self, processor: Any) -> Any:
        def process(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
            if processor == "fails" and 13 in numbers([batch]):
                raise ProcessorError("It fails.")
            self.seen += numbers([batch])
            return [batch]

        def close() -> None:
            self.closed = True

        return SimpleNamespace(process=process, fire=list, clean=int, close=close, timers_due=False)

    def freeze(self, attempt: int) -> KeyedFrozen:
        figures = {"seen": len(self.seen)}
        at_ms = self.times.watermark_ms
        return KeyedFrozen(attempt, StoredOperatorState(), figures=figures, watermark_ms=at_ms)

    def persist(self, frozen: KeyedFrozen) -> Any:
        self.persisted.append(frozen)
        return SimpleNamespace(timings_ms={}, code="ack")

    def confirmed(self, attempt: int, next_stamp_ms: int) -> None:
        self.heard.append(("completed", attempt))

    def aborted(self, attempt: int) -> None:
        self.heard.append(("aborted", attempt))

    def close(self, error: BaseException | None = None) -> None: ...


class World:
    """The subtask, two senders, one receiver whose channel takes a few rows."""

    def __init__(
        self,
        overtaken: list[Overtaken] = [],  # noqa: B006
        processor: str = "",
        inputs: tuple[Edge, ...] = (Edge("source", (0,)),),
    ) -> None:
        channels = [edge for edge in inputs for _ in range(2)]
        self.inbox = Inbox(len(channels), capacity_bytes=64 << 10)
        self.senders = [LocalChannel(self.inbox, number) for number in range(len(channels))]
        self.after = Inbox(1, capacity_bytes=8192)
        self.state = State(overtaken)
        self.events: list[Any] = []
        self.errors: list[BaseException] = []
        self.task = KeyedSubtask(
            PLACE,
            self._output,
            self,
            state=self.state,  # type: ignore[arg-type]
            opened=lambda: self.state.make_operator(processor),
            inputs=Inputs(self.inbox, channels, "exactly_once", overtakes=True),
            time_mode="event",
            persisting=AtOnce(),
        )

        self.task._gathering = Gathering(target_s=0.0)  # one element at a time

    def _output(self) -> Output:
        outbox = Outbox(
            [LocalChannel(self.after, 0)], forward(), buffer_bytes=1, buffer_timeout_s=0
        )
        return Output([Route("next", 3, outbox)], {})

    def report(self, *events: Any) -> None:
        self.events += events

    def broken(self, vertex: str, subtask: int, error: BaseException) -> bool:
        self.errors.append(error)
        return False

    def begin(self) -> None:
        self.task._open()
        self.task._output = self.task._connect()
        self.task._put_back()

    def steps(self, count: int = 10) -> None:
        for _ in range(count):
            self.task._step()

    def fill(self) -> None:
        """The receiver's channel, and then the output."""
        self.senders[0].send(rows(0, 100))
        for first in range(100, 500, 100):
            self.senders[0].send(rows(first, 100))
        self.steps(6)
        assert not self.task.output.ready()

    def sent(self) -> list[Any]:
        found: list[Any] = []
        while True:
            self.task.output.ready()
            if (taken := self.after.poll(0)) is None:
                return found
            found.append(taken[1])

    def acked(self) -> list[Acked]:
        return [event for event in self.events if isinstance(event, Acked)]

    def overtaken(self) -> dict[ChannelQueue, list[int]]:
        _, elements = taken_out(self.state.persisted[-1].operator_state)
        found = [one for one in decode("op", elements, 2) if one.direction != "at"]
        return {one.lane: numbers(list(batches_of("op", one))) for one in found}


def test_a_barrier_overtakes_what_its_channels_and_its_output_hold() -> None:
    world = World()
    world.begin()
    world.fill()
    seen = len(world.state.seen)
    world.senders[0].send(barrier())
    world.senders[1].send(rows(1000, 10))
    world.steps(3)
    assert world.state.persisted == [], "the other channel's barrier has not come"
    world.senders[1].send(barrier())
    world.steps(3)
    [frozen] = world.state.persisted
    assert frozen.figures == {"seen": seen}
    held = world.overtaken()
    assert held[IN[0]] == list(range(seen, 500))
    assert held[IN[1]] == list(range(1000, 1010))
    [acked] = world.acked()
    total = sum(map(len, held.values()))
    assert acked.figures["inflight_bytes"] == 24 * total
    assert acked.figures["unaligned"] == 1
    arrived = world.sent()
    while len(world.state.seen) < 510 or not world.task.output.ready():
        world.steps(1)
        arrived += world.sent()
    place = next(i for i, one in enumerate(arrived) if isinstance(one, Barrier))
    before, after = numbers(arrived[:place]), numbers(arrived[place + 1 :])
    assert before == list(range(seen - len(held[OUT])))
    assert after[: len(held[OUT])] == held[OUT]
    assert sorted(before + after) == [*range(500), *range(1000, 1010)]


def test_what_was_overtaken_is_put_back_ahead_of_what_comes_anew() -> None:
    world = World()
    world.begin()
    world.fill()
    seen = len(world.state.seen)
    for sender in world.senders:
        sender.send(barrier())
    world.steps(3)
    held = world.overtaken()
    _, elements = taken_out(world.state.persisted[-1].operator_state)
    again = World([one for one in decode("op", elements, 2) if one.direction != "at"])
    again.senders[0].send(rows(500, 1))  # a sender may be quicker
    again.begin()
    again.steps()
    arrived = again.sent()
    while len(again.state.seen) < 501 - seen or not again.task.output.ready():
        again.steps(1)
        arrived += again.sent()
    assert again.state.seen == [*held[IN[0]], 500]
    assert numbers(arrived) == [*held[OUT], *held[IN[0]], 500]


def test_a_restored_watermark_is_said_again_behind_what_is_put_back() -> None:
    """A barrier may have overtaken it, and nothing is said until it moves."""
    world = World()
    world.begin()
    for sender in world.senders:
        sender.send(Watermark(at_ms=701))
    world.fill()
    for sender in world.senders:
        sender.send(barrier())
    world.steps(3)
    held = world.overtaken()
    said = [one for one in world.sent() if isinstance(one, Watermark)]
    assert said == [Watermark(at_ms=701)]
    _, elements = taken_out(world.state.persisted[-1].operator_state)
    [at] = [one for one in decode("op", elements, 2) if one.direction == "at"]
    again = World([one for one in decode("op", elements, 2) if one.lane == OUT])
    again.state.times.watermark_ms = again.state.times.late_watermark_ms = at.at_ms
    again.begin()
    *put_back, last = again.sent()
    assert numbers(put_back) == held[OUT]
    assert last == said[0]


def test_a_processor_that_emits_much_at_once_waits_though_a_barrier_is_urgent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that lies in the output would be overtaken, and go through the driver."""
    monkeypatch.setattr("statebackend.continuous.worker.keyed_subtask.FLIGHT_BYTES", 20_000)
    world = World()
    world.begin()
    most_bytes = 0

    def many(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        nonlocal most_bytes
        world.senders[1].send(barrier())
        for first in range(0, 20_000, 200):
            yield rows(first, 200)
            most_bytes = max(most_bytes, world.task.output.pending_bytes)

    def receive() -> None:
        while len(numbers(arrived)) < 20_000:
            if (taken := world.after.poll(10.0)) is None:
                return
            arrived.append(taken[1])
            system.sleep_s(0.002)

    arrived: list[Any] = []
    world.task._operator.process = many
    world.senders[0].send(rows(0, 1))
    receiver = threading.Thread(target=receive)
    receiver.start()
    while receiver.is_alive():
        world.steps(1)
    receiver.join()
    assert numbers(arrived) == list(range(20_000))
    size_bytes = rows(0, 200).nbytes
    assert 20_000 < most_bytes <= 20_000 + size_bytes
    world.steps(3)


def test_no_barrier_is_urgent_while_rules_may_not_be_overtaken() -> None:
    world = World(inputs=(Edge("source", (0,)), Edge("rules", ())))
    world.begin()
    for sender in world.senders[:2]:
        sender.send(barrier())
    assert not world.task._is_urgent(), "nothing is overtaken before the rules' barriers have come"
    for sender in world.senders[2:]:
        sender.send(barrier())
    assert not world.task._is_urgent()
    world.senders[0].send(barrier(2))
    world.steps(6)
    assert [one.checkpoint for one in world.acked()] == [1]
    world.senders[2].send(EndOfInput())
    world.senders[3].send(EndOfInput())
    world.steps(4)
    world.senders[1].send(barrier(2))
    world.steps(2)
    assert [one.checkpoint for one in world.acked()] == [1, 2]
    world.senders[0].send(barrier(3))
    assert world.task._is_urgent(), "there are no rules any more"


def test_while_there_is_no_room_the_driver_is_heard_and_no_rows_are_taken() -> None:
    world = World()
    world.begin()
    world.fill()
    seen = len(world.state.seen)
    for sender in world.senders:
        sender.send(barrier(1))
    world.task.mailbox.put(Trigger(barrier=barrier(1)))
    world.task.mailbox.put(Completed(checkpoint=0, epoch=0, next_stamp_ms=1))
    world.task.mailbox.put(Aborted(checkpoint=7))
    world.steps(1)
    assert world.state.heard == [("completed", 0), ("aborted", 7)]
    world.steps(2)
    assert len(world.acked()) == 1
    assert len(world.state.seen) == seen


def test_an_attempt_that_is_aborted_while_it_is_captured_gives_no_ack() -> None:
    world = World()
    world.begin()
    world.fill()
    world.senders[0].send(barrier(1))
    world.steps(3)
    world.task.mailbox.put(Aborted(checkpoint=1))
    world.senders[1].send(barrier(1))
    world.steps(3)
    assert world.state.heard == [("aborted", 1)]
    assert world.acked() == []
    for sender in world.senders:
        sender.send(barrier(2))
    world.steps(3)
    assert [one.checkpoint for one in world.acked()] == [2]


@pytest.mark.parametrize("given", [{"timeout_ms": None}, {"kind": "last"}, {"kind": "savepoint"}])
def test_other_barriers_stay_behind_the_rows(given: dict[str, Any]) -> None:
    world = World()
    world.begin()
    world.fill()
    for sender in world.senders:
        sender.send(barrier(1, **given))
    world.steps(3)
    assert world.acked() == []
    arrived = []
    while not world.acked():
        arrived += world.sent()
        world.steps(1)
    arrived += world.sent()
    assert isinstance(arrived.pop(), Barrier)
    assert numbers(arrived) == list(range(500))
    assert world.overtaken() == {}
    assert world.acked()[0].figures["unaligned"] == 0


@pytest.mark.parametrize("at_ms", [0, 700])
def test_each_subtask_keeps_its_own_watermark(at_ms: int) -> None:
    """Another one of the vertex may have come further; 0: none has come here."""
    world = World()
    world.begin()
    if at_ms:
        for sender in world.senders:
            sender.send(Watermark(at_ms=at_ms + 1))
        world.steps(3)
    for sender in world.senders:
        sender.send(barrier())
    world.steps()
    _, elements = taken_out(world.state.persisted[-1].operator_state)
    [one] = decode("op", elements, 2)
    assert (one.direction, one.at_ms) == ("at", at_ms)
    assert decode("op", elements, 3) == [], "at another parallelism it says nothing"


def test_what_does_not_fit_any_more_is_refused() -> None:
    world = World()
    world.begin()
    world.fill()
    for sender in world.senders:
        sender.send(barrier())
    world.steps(3)
    _, elements = taken_out(world.state.persisted[-1].operator_state)
    with pytest.raises(RescaleError, match="unaligned"):
        decode("op", elements, 3)
    with pytest.raises(CorruptionError, match="do not read"):
        decode("op", [elements[0][:-9]], 2)
    for one in decode("op", elements, 2):
        with pytest.raises(CorruptionError, match="do not read"):
            batches_of("op", Overtaken(**{**_fields(one), "rows": one.rows[:-40] + b"x" * 30}))
        for changed in ({"schema": "other"}, {"vertex": "gone"}, {"edge": 5}, {"subtask": 0}):
            again = World([Overtaken(**{**_fields(one), **changed})])
            with pytest.raises(StateMismatchError, match="unaligned"):
                again.begin()


def _fields(one: Overtaken) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


@pytest.mark.parametrize(("processor", "closes"), [("", True), ("fails", False)])
def test_a_processor_is_closed_when_the_job_is_stopped_and_not_when_it_failed(
    processor: str, closes: bool
) -> None:
    world = World(processor=processor)
    thread = threading.Thread(target=world.task.run)
    thread.start()
    world.senders[0].send(rows(0, 20))
    if closes:
        while not world.state.seen:
            system.sleep_s(0.01)
        world.task.stop()
    thread.join(20)
    assert world.state.closed == closes
    assert [type(error) for error in world.errors] == ([] if closes else [ProcessorError])


def test_an_end_closes_a_channel_that_was_being_captured() -> None:
    world = World()
    world.begin()
    world.senders[0].send(barrier())
    world.steps(2)
    world.senders[1].send(rows(0, 5))
    world.steps(2)
    assert world.acked() == []
    world.senders[1].send(EndOfInput())
    world.steps(2)
    assert world.overtaken() == {IN[1]: [0, 1, 2, 3, 4]}
    assert len(world.acked()) == 1
    world.inbox.fail(PeerLostError("The end."))
