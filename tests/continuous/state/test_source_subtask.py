"""One subtask of a source, step by step: what it says of time, and barriers without room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from snapshot.barriers.barrier import Barrier, EndOfInput, Watermark
from snapshot.barriers.channel_watermarks import START_MS
from statebackend import system
from statebackend.continuous.driver.driver_lists import IN_FLIGHT, DriverLists
from statebackend.continuous.exchange.channel import LocalChannel
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partitioner import forward
from statebackend.continuous.job.slot_messages import Aborted, Acked, Grant, SplitAsked, Trigger
from statebackend.continuous.sources.source import Split, SplitReader
from statebackend.continuous.sources.split_assignment import Assignment
from statebackend.continuous.worker.overtaken_rows import (
    ChannelQueue,
    Place,
    batches_of,
    decode,
    watermark,
)
from statebackend.continuous.worker.source_subtask import SourceSubtask
from statebackend.continuous.worker.subtask_output import Output, Route
from statebackend.errors import RescaleError
from tests.continuous.runtime.jobs import FIRST_MS, Numbers

PLACE = Place("source", 0, 2, {"source": "rows"})


class OnePosition(Numbers):
    """Its readers give one object, and go on with it."""

    def open(self, split: Split, position: Any) -> SplitReader:
        reader = super().open(split, position)

        class Live(SplitReader):
            def __init__(self) -> None:
                self.at: dict[str, Any] = {}

            def read(self, max_rows: int) -> pa.RecordBatch | None:
                return reader.read(max_rows)

            @property
            def position(self) -> Any:
                self.at["next"] = reader.position
                return self.at

            @property
            def ended(self) -> bool:
                return reader.ended

        return Live()


class World:
    """The subtask, and the channel of one receiver."""

    def __init__(
        self,
        in_flight: list[bytes] = [],  # noqa: B006
        *,
        in_order: bool = False,
        rows: int = 10_000,
        splits: int = 3,
        kind: type[Numbers] = Numbers,
    ) -> None:
        self.after = Inbox(1, capacity_bytes=8192)
        self.events: list[Any] = []
        self.in_order = in_order
        self.beside: deque[Callable[[], Any]] | None = None  # what waits for the other thread
        source = kind(rows, splits=splits, event_time="at", watermark_delay="0 ms")
        self.splits = source.discover(None).splits
        self.task = SourceSubtask(
            PLACE,
            self._output,
            self,
            source=source,
            batch_rows=100,
            reporting=self,
            ask_again_s=60.0,
            in_flight=in_flight,
        )
        self.task._output = self.task._connect()
        self.task._put_back()

    def _output(self) -> Output:
        channels = [LocalChannel(self.after, 0)]
        outbox = Outbox(channels, forward(), buffer_bytes=1, buffer_timeout_s=0)
        return Output([Route("next", 0, outbox, in_order=self.in_order)], {})

    def submit(self, fn: Callable[[], Any], /) -> Any:
        fn() if self.beside is None else self.beside.append(fn)

    def report(self, *events: Any) -> None:
        self.events += events

    def broken(self, vertex: str, subtask: int, error: BaseException) -> bool:
        raise error

    def granted(self, split: Split | None, *, held_back: bool, over: bool = False) -> None:
        self.task._step()
        asked = [event for event in self.events if isinstance(event, SplitAsked)][-1]
        grant = Grant(
            vertex="source",
            subtask=0,
            number=asked.number,
            assignment=Assignment(split=split) if split else None,
            over=over,
            held_back=held_back,
        )
        self.task.mailbox.put(grant)

    def trigger(
        self, timeout_ms: int | None, kind: str = "checkpoint", checkpoint: int = 1
    ) -> None:
        barrier = Barrier(
            checkpoint=checkpoint,
            stamp_ms=system.wall_ms(),
            kind=kind,
            alignment_timeout_ms=timeout_ms,
        )
        self.task.mailbox.put(Trigger(barrier=barrier))

    def sent(self) -> list[Any]:
        found = []
        while (taken := self.after.poll(0)) is not None:
            found.append(taken[1])
            self.task.output.ready()
        return found

    def acked(self) -> list[Acked]:
        return [event for event in self.events if isinstance(event, Acked)]

    def fill(self) -> None:
        """One split is read until there is no room."""
        self.granted(self.splits[0], held_back=False)
        for _ in range(8):
            self.task._step()
        self.granted_nothing()
        assert not self.task.output.ready()

    def granted_nothing(self) -> None:
        self.granted(None, held_back=False)
        self.task._step()


def values(elements: list[Any]) -> list[int]:
    return [n for e in elements if isinstance(e, pa.RecordBatch) for n in e.column(1).to_pylist()]


def marks(elements: list[Any]) -> list[int]:
    return [element.at_ms for element in elements if isinstance(element, Watermark)]


def test_no_watermark_is_said_while_there_are_splits_that_nobody_reads() -> None:
    world = World()
    world.granted(world.splits[0], held_back=True)
    world.task._step()
    world.granted(world.splits[2], held_back=True)
    world.task._step()
    arrived = world.sent()
    assert values(arrived)
    assert marks(arrived) == []
    world.granted(None, held_back=False)
    world.task._step()
    [at_ms, *_] = marks(world.sent())
    assert at_ms >= FIRST_MS


def test_a_barrier_waits_for_room_and_then_overtakes_what_has_none() -> None:
    world = World()
    world.fill()
    world.trigger(60_000)
    for _ in range(3):
        world.task._step()
    assert world.acked() == [], "it may come through in time"
    [(barrier, since_s)] = world.task._due
    world.task._due[0] = barrier, since_s - 61.0
    world.task._step()
    [acked] = world.acked()
    [one, at] = decode("source", acked.in_flight, 2)
    assert one.lane == ChannelQueue("out", "next", 0, 0)
    assert at.direction == "at"
    held = values(list(batches_of("source", one)))
    assert acked.figures["inflight_bytes"] > 0
    assert acked.figures["unaligned"] == 1
    position = acked.positions[0].position
    arrived = world.sent()
    place = next(i for i, e in enumerate(arrived) if isinstance(e, Barrier))
    assert arrived[place].alignment_timeout_ms == 0
    assert values(arrived[place:])[: len(held)] == held
    assert values(arrived[:place]) + held == [3 * n for n in range(position["rows"])]  # type: ignore[index]

    again = World(acked.in_flight)
    *put_back, last = again.sent()
    assert values(put_back) == held
    # The receivers may not have come to it: the barrier overtook it with the rows.
    assert last == Watermark(at_ms=at.at_ms)
    assert at.at_ms == max(marks(arrived))
    with pytest.raises(RescaleError, match="unaligned"):
        decode("source", acked.in_flight, 3)


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_barriers_that_are_due_together_go_on_in_their_order(aborted: int) -> None:
    """Several checkpoints may be under way, and each wants its barrier."""
    world = World()
    world.granted(world.splits[0], held_back=False)
    for _ in range(2):
        world.task._step()
    assert world.task._unanswered
    for number in (1, 2, 3):
        world.trigger(None, checkpoint=number)
    world.task._step()
    assert world.acked() == [], "the answer may be a split of all of them"
    if aborted:
        world.task.mailbox.put(Aborted(checkpoint=aborted))
    world.granted_nothing()
    wanted = [number for number in (1, 2, 3) if number != aborted]
    assert [one.checkpoint for one in world.acked()] == wanted
    arrived = world.sent()
    events = [one for one in arrived if isinstance(one, Barrier)]
    assert [one.checkpoint for one in events] == wanted
    for acked, event in zip(world.acked(), events, strict=True):
        before = values(arrived[: arrived.index(event)])
        assert acked.positions[0].position["rows"] == len(before)  # type: ignore[index]


@pytest.mark.parametrize("given", [(None, "checkpoint"), (0, "savepoint"), (0, "last")])
def test_other_barriers_stay_in_their_place(given: tuple[int | None, str]) -> None:
    world = World()
    world.fill()
    world.trigger(*given)
    world.task._step()
    [acked] = world.acked()
    assert acked.in_flight == []
    position = acked.positions[0].position
    arrived = world.sent()
    place = next(i for i, e in enumerate(arrived) if isinstance(e, Barrier))
    assert len(values(arrived[:place])) == position["rows"]  # type: ignore[index]


def test_what_goes_to_every_subtask_is_not_overtaken() -> None:
    world = World(in_order=True)
    world.fill()
    world.trigger(0)
    world.task._step()
    [acked] = world.acked()
    assert [one.direction for one in decode("source", acked.in_flight, 2)] == ["at"]
    arrived = world.sent()
    place = next(i for i, e in enumerate(arrived) if isinstance(e, Barrier))
    assert len(values(arrived[:place])) == acked.positions[0].position["rows"]  # type: ignore[index]


def test_a_source_whose_end_is_near_takes_a_barrier_that_waited_for_room() -> None:
    full = World(splits=1)
    full.fill()
    read = full.task._open_splits[0].reader.position["rows"]  # type: ignore[index]
    world = World(rows=read + 100, splits=1)
    world.granted(world.splits[0], held_back=False)
    for _ in range(8):
        world.task._step()
    world.granted(None, held_back=False, over=True)
    world.task._step()
    assert world.task._over
    assert not world.task.output.ready()
    world.trigger(60_000)
    really, arrived = world.task.output.ready, []

    def ready(timeout_s: float = 0.0) -> bool:
        """The receiver takes what there is while the subtask waits."""
        while (taken := world.after.poll(0)) is not None:
            arrived.append(taken[1])
            really()
        return really(timeout_s)

    world.task.output.ready = ready  # type: ignore[method-assign]
    for _ in range(20):
        world.task._step()
        if world.task._at_end:
            break
    [acked] = world.acked()
    assert acked.figures["unaligned"] == 0
    ready()
    assert values(arrived) == list(range(read + 100))
    place = next(i for i, e in enumerate(arrived) if isinstance(e, Barrier))
    assert len(values(arrived[:place])) == acked.positions[0].position["rows"]  # type: ignore[index]


def test_a_source_that_stops_before_its_first_request_asks_all_the_same() -> None:
    """The driver answers nobody before all have asked, and theirs is the barrier it waits for."""
    world = World()
    world.trigger(None, "last")
    world.task._step()
    assert [one.checkpoint for one in world.acked()] == [1]
    assert [one.number for one in world.events if isinstance(one, SplitAsked)] == [1]
    world.granted(world.splits[0], held_back=False)
    for _ in range(3):
        world.task._step()
    assert values(world.sent()) == [], "the job ends here"
    world.task.mailbox.put(Aborted(checkpoint=1))
    for _ in range(3):
        world.task._step()
    assert values(world.sent())


def test_a_source_at_its_end_takes_a_barrier_that_is_due() -> None:
    """Whatever it waited for: nobody else says anything of it any more."""
    world = World(rows=10, splits=1)
    world.granted(None, held_back=False, over=True)
    world.task._step()
    assert isinstance(world.sent()[-1], EndOfInput)
    barrier = Barrier(checkpoint=1, stamp_ms=0, alignment_timeout_ms=60_000)
    world.task._due.append((barrier, system.monotonic_s()))
    world.task._step()
    [acked] = world.acked()
    assert acked.in_flight == []


def restored(elements: list[bytes], parallelism: int = 2) -> dict[int, list[bytes]]:
    """What each subtask of a source is given."""
    lists = object.__new__(DriverLists)
    kept = SimpleNamespace(lists={IN_FLIGHT: SimpleNamespace(get=lambda: [(e,) for e in elements])})
    lists._sources = {"source": kept}  # type: ignore[dict-item]
    lists._graph = SimpleNamespace(parallelism=parallelism)  # type: ignore[assignment]
    return {subtask: of["source"] for subtask, of in lists.in_flight().items()}


def test_a_sources_watermark_is_the_smallest_of_its_subtasks_when_it_is_restored() -> None:
    """A split may be read by another subtask then."""
    stood = [watermark(Place("source", subtask, 2), 700 + subtask) for subtask in (0, 1)]
    for subtask, elements in restored(stood).items():
        assert elements == [watermark(Place("source", subtask, 2), 700)]
    assert sorted(restored(stood)) == [0, 1]
    assert restored([*stood, watermark(PLACE, START_MS)]) == {}, "one had said nothing"
    assert restored(stood, 3) == {}, "at another parallelism it says nothing"
    assert restored([]) == {}


def test_a_subtask_that_reads_nothing_does_not_say_where_its_watermark_stood() -> None:
    world = World()
    world.granted_nothing()
    world.task._step()
    world.trigger(0)
    world.task._step()
    [acked] = world.acked()
    assert acked.in_flight == []


def test_a_split_that_comes_behind_the_next_request_is_read_all_the_same() -> None:
    """The driver hands out late what it could not when it was asked, and counts it as read here."""
    world = World()
    world.granted(world.splits[0], held_back=False)
    world.granted(None, held_back=True)
    first = [event for event in world.events if isinstance(event, SplitAsked)][-1].number
    for _ in range(2):
        world.task._step()
    system.sleep_s(0.15)
    world.task._step()  # asks again
    assert [event for event in world.events if isinstance(event, SplitAsked)][-1].number > first
    late = Grant(
        vertex="source",
        subtask=0,
        number=first,
        assignment=Assignment(split=world.splits[1]),
        over=False,
        held_back=False,
    )
    world.task.mailbox.put(late)
    world.task._step()
    assert [one.id for one in world.task._open_splits][-1] == world.splits[1].id
    assert world.task._unanswered


def test_rows_are_read_between_checkpoints_that_follow_on_each_other() -> None:
    """Where a report to the driver takes as long as it takes to begin the next one."""
    world = World(rows=9000)
    world.granted(world.splits[0], held_back=False)
    world.granted_nothing()
    report, number = world.report, iter(range(2, 1000))

    def slow(*events: Any) -> None:
        report(*events)
        if any(isinstance(event, Acked) for event in events):
            barrier = Barrier(checkpoint=next(number), stamp_ms=system.wall_ms(), kind="checkpoint")
            world.task.mailbox.put(Trigger(barrier=barrier))

    world.report = slow  # type: ignore[method-assign]
    world.trigger(None)
    before = len(values(world.sent()))
    for _ in range(20):
        world.task._step()
        before += len(values(world.sent()))
    assert before > 300
    assert len(world.acked()) >= 10


def test_an_ack_has_the_positions_of_its_barrier_though_rows_are_read_before_it_is_sent() -> None:
    world = World(kind=OnePosition)
    world.fill()
    world.beside = deque()
    world.trigger(None)
    world.task._step()
    for _ in range(5):
        world.sent()
        world.task._step()
    world.trigger(None, checkpoint=2)
    world.task._step()
    for said in world.beside:
        said()
    first, second = (one.positions[0].position["next"]["rows"] for one in world.acked())  # type: ignore[index,call-overload]
    assert first < second


def test_a_checkpoint_that_was_given_up_is_neither_waited_for_nor_acked() -> None:
    world = World()
    world.fill()
    waited: list[int] = []
    world.task.output.await_prepared = waited.append  # type: ignore[method-assign]
    world.beside = deque()
    for number in (1, 2):
        world.trigger(None, checkpoint=number)
        world.task._step()
    world.task.mailbox.put(Aborted(checkpoint=1))
    world.task._step()
    for said in world.beside:
        said()
    assert [one.checkpoint for one in world.acked()] == waited == [2]
