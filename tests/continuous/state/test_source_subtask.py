"""One subtask of a source, step by step: what it says of time, and barriers without room."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from snapshot.barrier import Barrier, Watermark
from statebackend import system
from statebackend.continuous.exchange.channel import LocalChannel
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partition import forward
from statebackend.continuous.inflight import Lane, Place, batches_of, decode
from statebackend.continuous.messages import Acked, Grant, SplitAsked, Trigger
from statebackend.continuous.output import Output, Route
from statebackend.continuous.sources.base import Assignment, Split
from statebackend.continuous.sourcetask import SourceSubtask
from statebackend.errors import RescaleError
from tests.continuous.runtime.jobs import FIRST_MS, Numbers

PLACE = Place("source", 0, 2, {"source": "rows"})


class World:
    """The subtask, and the channel of one receiver."""

    def __init__(self, in_flight: list[bytes] = [], *, in_order: bool = False) -> None:  # noqa: B006
        self.after = Inbox(1, capacity_bytes=8192)
        self.events: list[Any] = []
        self.in_order = in_order
        source = Numbers(10_000, splits=3, event_time="at", watermark_delay="0 ms")
        self.splits = source.discover(None).splits
        self.task = SourceSubtask(
            PLACE, self._output, self, source=source, batch_rows=100, in_flight=in_flight
        )
        self.task._output = self.task._connect()
        self.task._put_back()

    def _output(self) -> Output:
        channels = [LocalChannel(self.after, 0)]
        outbox = Outbox(channels, forward(), buffer_bytes=1, buffer_timeout_s=0)
        return Output([Route("next", 0, outbox, in_order=self.in_order)], {})

    def report(self, *events: Any) -> None:
        self.events += events

    def broken(self, vertex: str, subtask: int, error: BaseException) -> None:
        raise error

    def granted(self, split: Split | None, *, held_back: bool) -> None:
        self.task._step()
        asked = [event for event in self.events if isinstance(event, SplitAsked)][-1]
        grant = Grant(
            vertex="source",
            subtask=0,
            number=asked.number,
            assignment=Assignment(split=split) if split else None,
            over=False,
            held_back=held_back,
        )
        self.task.mailbox.put(grant)

    def trigger(self, timeout_ms: int | None, kind: str = "checkpoint") -> None:
        barrier = Barrier(
            checkpoint=1,
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
    assert world.task._due is not None
    world.task._due_s -= 61.0
    world.task._step()
    [acked] = world.acked()
    [one] = decode("source", acked.in_flight, 2)
    assert one.lane == Lane("out", "next", 0, 0)
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
    assert values(again.sent()) == held
    with pytest.raises(RescaleError, match="unaligned"):
        decode("source", acked.in_flight, 3)


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
    assert acked.in_flight == []
    arrived = world.sent()
    place = next(i for i, e in enumerate(arrived) if isinstance(e, Barrier))
    assert len(values(arrived[:place])) == acked.positions[0].position["rows"]  # type: ignore[index]
