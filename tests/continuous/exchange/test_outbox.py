from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from snapshot.barriers.barrier import Barrier, EndOfInput, Idle, Watermark
from statebackend.continuous.exchange.channel import LocalChannel
from statebackend.continuous.exchange.elements import Element
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partitioner import by_key_group, forward, rebalance
from statebackend.errors import PeerLostError, SchemaError, SettingError
from tests.continuous.exchange.peers import numbers, rows
from tests.support.waiting import until

BARRIER = Barrier(checkpoint=1, stamp_ms=0)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Line:
    """An outbox into local channels, one inbox for each receiver."""

    def __init__(
        self,
        receivers: int = 1,
        *,
        capacity_bytes: int = 64 << 10,
        buffer_bytes: int = 1000,
        buffer_timeout_s: float | None = 0.1,
    ) -> None:
        self.clock = Clock()
        self.inboxes = [Inbox(1, capacity_bytes=capacity_bytes) for _ in range(receivers)]
        self.outbox = Outbox(
            [LocalChannel(inbox, 0) for inbox in self.inboxes],
            rebalance(receivers),
            buffer_bytes=buffer_bytes,
            buffer_timeout_s=buffer_timeout_s,
            clock=self.clock,
        )

    def arrived(self, receiver: int = 0) -> list[Element]:
        found = []
        while (taken := self.inboxes[receiver].poll(0)) is not None:
            found.append(taken[1])
        return found


def test_rows_are_gathered_until_they_are_a_buffer() -> None:
    line = Line()
    for i in range(0, 40, 10):  # 240 bytes each
        line.outbox.emit(rows(i))
        assert line.arrived() == []
    assert line.outbox.held_bytes == 960
    line.outbox.emit(rows(40))
    (batch,) = line.arrived()
    assert numbers([batch]) == list(range(50))
    assert line.outbox.held_bytes == 0
    assert line.outbox.next_flush_s is None


def test_rows_are_sent_when_they_are_old_enough() -> None:
    line = Line(2)
    line.outbox.emit(rows(0))
    line.clock.now_s = 100.06
    line.outbox.emit(rows(10))
    assert line.outbox.next_flush_s == 100.1
    line.outbox.flush_if_due(100.09)
    assert line.arrived(0) == []
    line.outbox.flush_if_due(100.1)
    assert numbers(line.arrived(0)) == list(range(10))
    assert line.arrived(1) == []
    assert line.outbox.next_flush_s == pytest.approx(100.16)
    line.outbox.flush()
    assert numbers(line.arrived(1)) == list(range(10, 20))


def test_without_a_timeout_only_size_counts_and_with_zero_nothing_is_gathered() -> None:
    line = Line(buffer_timeout_s=None)
    line.outbox.emit(rows(0))
    assert line.outbox.next_flush_s is None
    line.outbox.flush_if_due(1e9)
    assert line.arrived() == []
    line = Line(buffer_timeout_s=0)
    line.outbox.emit(rows(0))
    line.outbox.send(Watermark(at_ms=1))
    assert [type(element).__name__ for element in line.arrived()] == ["RecordBatch", "Watermark"]


def test_large_batches_are_cut_and_keep_their_order() -> None:
    line = Line(buffer_bytes=50_000, capacity_bytes=1 << 20)
    line.outbox.emit(rows(0, 10_000))  # 240,000 bytes
    elements = line.arrived()
    assert numbers(elements) == list(range(10_000))
    assert [e.num_rows for e in elements] == [3334, 3334, 3332]  # type: ignore[union-attr]


def test_a_row_larger_than_the_channel_still_goes_through() -> None:
    line = Line(capacity_bytes=8192, buffer_bytes=1 << 20, buffer_timeout_s=0)
    batch = rows(0, 3)
    wide = batch.append_column("text", pa.array(["y" * 100_000] * 3))
    line.outbox.emit(wide)
    done = threading.Thread(target=line.outbox.flush)
    done.start()
    found: list[int] = []
    while len(found) < 3:
        taken = line.inboxes[0].poll(20)
        assert taken is not None
        found += numbers([taken[1]])
    done.join(20)
    assert found == [0, 1, 2]


def test_a_watermark_follows_what_is_gathered_and_the_newest_counts() -> None:
    line = Line()
    line.outbox.emit(rows(0))
    line.outbox.send(Watermark(at_ms=1))
    line.outbox.emit(rows(10))
    line.outbox.send(Watermark(at_ms=2))
    assert line.arrived() == []
    line.outbox.flush_if_due(100.1)
    first, second = line.arrived()
    assert numbers([first]) == list(range(20))
    assert second == Watermark(at_ms=2)


def test_a_watermark_alone_is_sent_when_it_is_old_enough() -> None:
    line = Line(2)
    line.outbox.send(Watermark(at_ms=1))
    assert line.outbox.next_flush_s == 100.1
    line.outbox.flush_if_due(100.1)
    assert [line.arrived(0), line.arrived(1)] == [[Watermark(at_ms=1)]] * 2


@pytest.mark.parametrize("event", [BARRIER, Idle(idle=True), EndOfInput()])
def test_an_event_goes_to_every_channel_after_all_rows_before_it(event: Element) -> None:
    line = Line(2)
    line.outbox.emit(rows(0))
    line.outbox.send(Watermark(at_ms=1))
    line.outbox.send(event)  # type: ignore[arg-type]
    first = line.arrived(0)
    assert numbers(first) == list(range(10))
    assert first[1:] == line.arrived(1) == [Watermark(at_ms=1), event]


def test_a_barrier_can_overtake_what_is_gathered_without_credit() -> None:
    line = Line(2, capacity_bytes=8192, buffer_bytes=2000)
    for _ in range(3):  # 2912 of 8192 bytes each, in turn
        assert line.outbox.channels[0].offer(rows(1000, 84)) in (True, False)
    line.outbox.emit(rows(0))
    line.outbox.emit(rows(10))
    line.outbox.emit(rows(20))
    overtaken = line.outbox.overtake(BARRIER)
    assert [numbers(list(part)) for part in overtaken] == [
        [*range(10), *range(20, 30)],
        list(range(10, 20)),
    ]
    assert line.arrived(0)[-1] == BARRIER
    assert line.arrived(1) == [BARRIER]
    line.outbox.flush()  # they are delivered all the same
    assert numbers(line.arrived(0)) == [*range(10), *range(20, 30)]
    assert numbers(line.arrived(1)) == list(range(10, 20))


def test_a_writer_waits_for_room_and_says_for_how_long() -> None:
    line = Line(capacity_bytes=8192, buffer_bytes=1, buffer_timeout_s=0)
    assert line.outbox.ready()

    def write() -> None:
        for i in range(0, 300, 10):
            line.outbox.emit(rows(i))

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: line.inboxes[0].queued_bytes() > 8192 - 752)
    until(lambda: line.outbox._blocked_since_s is not None)
    line.clock.now_s = 102.5
    assert line.outbox.blocked_s == 2.5
    assert thread.is_alive()
    sent = line.outbox.channels[0].sent
    found: list[int] = []
    while len(found) < 300:
        taken = line.inboxes[0].poll(20)
        assert taken is not None
        found += numbers([taken[1]])
    thread.join(20)
    assert sent < 30
    assert found == list(range(300))
    assert line.outbox.blocked_s >= 2.5


def test_who_has_room_is_served_before_a_writer_waits() -> None:
    line = Line(2, capacity_bytes=8192, buffer_bytes=4000)
    while line.outbox.channels[0].offer(rows(0)):
        pass
    line.outbox.emit(rows(0))
    line.outbox.emit(rows(10))
    assert not line.outbox.ready()
    thread = threading.Thread(target=line.outbox.flush)
    thread.start()
    until(lambda: line.inboxes[1].queued() == 1)
    assert thread.is_alive()
    line.arrived(0)
    thread.join(20)
    assert line.outbox.ready()


def stuck_line() -> Line:
    """Whose first receiver has no room."""
    line = Line(2, capacity_bytes=8192, buffer_bytes=1, buffer_timeout_s=0)
    while line.outbox.channels[0].offer(rows(900, 10)):
        pass
    return line


def test_what_has_no_room_lies_here_until_somebody_asks_whether_there_is_some() -> None:
    line = stuck_line()
    line.outbox.emit(rows(0, 100))
    line.outbox.send(Watermark(at_ms=1))
    line.outbox.send(BARRIER)
    assert not line.outbox.ready()
    assert not line.outbox.try_flush()
    assert line.outbox.pending_bytes == 2400
    before = line.arrived(0)
    assert set(numbers(before)) == set(range(900, 910))
    assert line.outbox.ready()
    assert line.outbox.try_flush()
    first, *events = line.arrived(0)
    assert numbers([first]) == list(range(100))
    assert events == line.arrived(1) == [Watermark(at_ms=1), BARRIER]


def test_a_writer_that_is_wanted_elsewhere_does_not_wait() -> None:
    line = stuck_line()
    wanted = iter([False, True, True])
    line.outbox.urgent = lambda: next(wanted)
    line.outbox.emit(rows(0, 100))
    line.outbox.emit(rows(100, 100))
    line.outbox.emit(rows(200, 100))
    first, second = line.outbox.overtake(BARRIER)
    assert numbers(list(first)) == [*range(100), *range(200, 300)]
    assert second == []
    assert next(wanted, None) is None


def test_what_lay_here_in_a_snapshot_goes_first() -> None:
    line = stuck_line()
    line.outbox.put_back(0, [rows(0), rows(10)])
    line.outbox.put_back(1, [rows(20)])
    line.outbox.send(BARRIER)
    assert numbers(line.arrived(1)) == list(range(20, 30))
    line.arrived(0)
    assert line.outbox.ready()
    arrived = line.arrived(0)
    assert numbers(arrived) == list(range(20))
    assert arrived[-1] == BARRIER
    with pytest.raises(SchemaError):  # the rows of a changed job do not follow those
        line.outbox.emit(rows(0).select([0, 1]))


def test_a_writer_that_waits_for_one_receiver_wakes_when_another_is_lost() -> None:
    line = Line(2, capacity_bytes=8192, buffer_bytes=1, buffer_timeout_s=0)
    while line.outbox.channels[0].offer(rows(0, 100)):
        pass
    line.outbox.emit(rows(0, 100))  # lies there; the next one waits
    raised: list[BaseException] = []

    def write() -> None:
        try:
            line.outbox.emit(rows(0, 100))
        except PeerLostError as error:
            raised.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: line.outbox._blocked_since_s is not None)
    line.inboxes[1].close()
    thread.join(20)
    assert [type(error) for error in raised] == [PeerLostError]
    with pytest.raises(PeerLostError):
        line.outbox.emit(rows(0))
    with pytest.raises(PeerLostError):
        line.outbox.ready()


def test_receivers_that_are_done_early_do_not_disturb_the_others() -> None:
    line = Line(2)
    line.outbox.send(EndOfInput())
    line.inboxes[0].close()
    assert line.arrived(1) == [EndOfInput()]
    line.outbox.close()
    line.inboxes[1].close()


def test_rows_of_two_schemas_are_refused() -> None:
    line = Line()
    line.outbox.emit(rows(0).slice(0, 0))
    line.outbox.emit(rows(0))
    with pytest.raises(SchemaError):
        line.outbox.emit(rows(0).select([0, 1]))


@pytest.mark.parametrize(("size", "timeout_s"), [(0, 1.0), (1, -1.0)])
def test_sizes_that_mean_nothing_are_refused(size: int, timeout_s: float) -> None:
    with pytest.raises(SettingError):
        Line(buffer_bytes=size, buffer_timeout_s=timeout_s)


def test_keyed_rows_reach_their_owners_once() -> None:
    inboxes = [Inbox(1, capacity_bytes=1 << 20) for _ in range(4)]
    channels = [LocalChannel(inbox, 0) for inbox in inboxes]
    keyed = by_key_group([1], 4, 128)
    outbox = Outbox(channels, keyed, buffer_bytes=5000, buffer_timeout_s=None)
    for i in range(0, 10_000, 1000):
        outbox.emit(rows(i, 1000))
    outbox.send(EndOfInput())
    found: list[int] = []
    for receiver, inbox in enumerate(inboxes):
        mine: list[Element] = []
        while (taken := inbox.poll(0)) is not None:
            mine.append(taken[1])
        assert mine[-1] == EndOfInput()
        for batch in mine[:-1]:
            assert {channel for channel, _ in keyed(batch)} == {receiver}  # type: ignore[arg-type]
        assert numbers(mine) == sorted(numbers(mine))
        found += numbers(mine)
    assert sorted(found) == list(range(10_000))
    assert forward()(rows(0))[0][0] == 0
