from __future__ import annotations

import threading

import pytest

from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput, Watermark
from statebackend.continuous.exchange.elements import FREE_EVENTS_MAX, Element
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.errors import PeerLostError, ProtocolError, StateBackendError, UsageError
from tests.continuous.exchange.peers import numbers, rows

ONE = Barrier(checkpoint=1, stamp_ms=0)
TWO = Barrier(checkpoint=2, stamp_ms=5)


class Sender:
    def __init__(self) -> None:
        self.granted: list[int] = []
        self.hung_up: list[StateBackendError] = []

    def grant(self, freed_bytes: int) -> None:
        self.granted.append(freed_bytes)

    def hang_up(self, error: StateBackendError) -> None:
        self.hung_up.append(error)


def inbox(channels: int = 2, capacity_bytes: int = 8192) -> Inbox:
    return Inbox(channels, capacity_bytes=capacity_bytes)


def polled(box: Inbox) -> list[tuple[int, Element]]:
    found = []
    while (taken := box.poll(0)) is not None:
        found.append(taken)
    return found


def test_channels_take_turns_and_each_keeps_its_order() -> None:
    box = inbox(3)
    for i in range(4):
        box.put(0, rows(i, 1), 100)
    box.put(1, rows(10, 1), 100)
    box.put(2, rows(20, 1), 100)
    box.put(1, rows(11, 1), 100)
    order = polled(box)
    assert [channel for channel, _ in order] == [0, 1, 2, 0, 1, 0, 0]
    assert numbers([e for channel, e in order if channel == 0]) == [0, 1, 2, 3]
    assert box.queued() == box.queued_bytes() == 0


def test_a_blocked_channel_is_passed_over_and_loses_nothing() -> None:
    box = inbox()
    box.put(0, rows(0, 1), 100)
    box.block(0)
    box.put(0, rows(1, 1), 100)
    box.put(1, rows(10, 1), 100)
    assert [channel for channel, _ in polled(box)] == [1]
    assert box.queued(0) == 2
    box.unblock(0)
    assert numbers([element for _, element in polled(box)]) == [0, 1]
    box.unblock(0)
    assert polled(box) == []


def test_poll_gives_none_when_nothing_comes_in_time() -> None:
    box = inbox()
    assert box.poll(0.01) is None
    box.block(0)
    box.put(0, rows(0, 1), 100)
    assert box.poll(0.01) is None


def test_poll_wakes_for_what_arrives() -> None:
    box = inbox()
    sender = threading.Timer(0.05, lambda: box.put(1, rows(7, 1), 100))
    sender.start()
    taken = box.poll(20)
    sender.join()
    assert taken is not None
    assert taken[0] == 1


def test_barriers_are_announced_with_what_is_ahead_of_them_before_anything_is_taken() -> None:
    said: list[tuple[object, ...]] = []
    box = inbox()
    box.on_arrival = lambda *arrival: said.append(arrival)
    box.put(0, rows(0, 1), 100)
    box.put(0, Watermark(at_ms=3), 512)
    box.put(0, rows(1, 1), 100)
    box.put(0, ONE, 0)
    assert said == []  # only in the thread that polls
    assert box.poll(0) is not None
    assert said == [(0, ONE, 2, 48)]
    box.put(0, EndOfInput(), 0)
    polled(box)
    assert said[1:] == [(0, EndOfInput(), 1, 24)]


def test_an_arrival_in_a_blocked_channel_ends_the_wait_of_a_poll() -> None:
    said: list[tuple[object, ...]] = []
    box = inbox()
    box.on_arrival = lambda *arrival: said.append(arrival)
    box.block(0)
    box.put(0, rows(0, 1), 100)
    sender = threading.Timer(0.05, lambda: box.put(0, ONE, 0))
    sender.start()
    assert box.poll(None) is None  # the caller may have a deadline now
    sender.join()
    assert said == [(0, ONE, 1, 24)]


def test_an_arrival_may_unblock_its_channel() -> None:
    box = inbox()
    box.on_arrival = lambda channel, event, ahead, ahead_bytes: box.unblock(channel)
    box.block(0)
    box.put(0, rows(5, 1), 100)
    box.put(0, TWO, 0)
    taken = box.poll(20)
    assert taken is not None
    assert numbers([taken[1]]) == [5]


def test_what_a_barrier_overtakes_is_seen_and_stays() -> None:
    box = inbox()
    for element in (rows(0, 1), Watermark(at_ms=1), rows(1, 1), ONE, rows(2, 1), TWO):
        box.put(0, element, 0 if isinstance(element, Barrier) else 100)
    assert numbers(list(box.ahead_of(0, 1))) == [0, 1]
    assert numbers(list(box.ahead_of(0, 2))) == [0, 1, 2]
    assert numbers(list(box.ahead_of(0, 3))) == [0, 1, 2]
    assert box.ahead_of(1, 1) == []
    assert numbers([element for _, element in polled(box)]) == [0, 1, 2]


def test_credit_comes_back_by_the_quarter_of_the_capacity() -> None:
    box, sender = inbox(1, 8192), Sender()
    box.attach(0, sender)
    for i in range(8):
        box.put(0, rows(i, 1), 1024)
    polled(box)
    assert sender.granted == [2048] * 4


def test_what_was_under_way_in_a_snapshot_comes_first_and_costs_no_credit() -> None:
    box, sender = inbox(1, 8192), Sender()
    box.attach(0, sender)
    box.put(0, rows(1000, 1), 8192)  # a sender may be quicker
    box.preload(0, [rows(0, 500), rows(500, 500)])
    assert numbers([element for _, element in polled(box)]) == list(range(1001))
    assert sender.granted == [8192]
    with pytest.raises(UsageError):
        box.preload(0, [rows(0)])


def test_what_has_arrived_can_be_announced_without_taking_anything() -> None:
    box = inbox(2)
    heard: list[tuple[int, int]] = []
    box.on_arrival = lambda channel, event, ahead, size: heard.append((channel, ahead))
    assert not box.announce()
    box.put(1, rows(0, 1), 1024)
    box.put(1, Barrier(checkpoint=1, stamp_ms=0), 0)
    assert box.unannounced == Barrier(checkpoint=1, stamp_ms=0)
    assert box.announce()
    assert (heard, box.unannounced) == ([(1, 1)], None)
    assert box.queued() == 2
    box.fail(PeerLostError("It is gone."))
    with pytest.raises(PeerLostError):
        box.announce()


def test_what_comes_without_credit_is_refused() -> None:
    box = inbox(1, 8192)
    box.put(0, rows(0, 1), 8192)
    with pytest.raises(ProtocolError):
        box.put(0, rows(1, 1), 1)
    box.poll(0)
    with pytest.raises(ProtocolError):  # taken, but nobody granted it: there is no sender
        Inbox(1, capacity_bytes=8192).put(0, rows(1, 1), 8193)


def test_events_that_cost_nothing_are_bounded_too() -> None:
    box = inbox(1)
    for number in range(FREE_EVENTS_MAX):
        box.put(0, Cancel(checkpoint=number), 0)
    with pytest.raises(ProtocolError):
        box.put(0, Cancel(checkpoint=0), 0)


def test_nothing_comes_after_the_end_of_a_channel() -> None:
    box = inbox(1)
    box.put(0, EndOfInput(), 0)
    with pytest.raises(ProtocolError):
        box.put(0, rows(0, 1), 100)


def test_a_lost_sender_fails_the_reader_unless_its_end_has_arrived() -> None:
    box = inbox()
    box.put(0, EndOfInput(), 0)
    box.lost(0, PeerLostError("Nobody minds."))
    assert box.poll(0) == (0, EndOfInput())
    reader: list[BaseException] = []

    def read() -> None:
        try:
            box.poll(None)
        except PeerLostError as error:
            reader.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    box.lost(1, PeerLostError("It is gone."))
    thread.join(20)
    assert len(reader) == 1
    box.fail(ProtocolError("Later."))
    with pytest.raises(PeerLostError, match="It is gone"):
        box.poll(0)


def test_a_closed_inbox_hangs_up_and_takes_nothing() -> None:
    box, sender = inbox(), Sender()
    box.attach(1, sender)
    box.put(0, rows(0, 1), 100)
    box.close()
    box.close()
    assert [error.code for error in sender.hung_up] == ["SB5009"]
    assert box.queued() == 0
    with pytest.raises(PeerLostError):
        box.put(0, rows(0, 1), 100)
    with pytest.raises(PeerLostError):
        box.attach(0, sender)
    with pytest.raises(UsageError):
        box.poll(0)


def test_a_channel_has_one_sender() -> None:
    box = inbox()
    box.attach(0, Sender())
    with pytest.raises(UsageError):
        box.attach(0, Sender())


def test_more_takes_rows_up_to_the_next_event_and_no_further() -> None:
    box = inbox()
    for i in range(3):
        box.put(0, rows(i, 1), 100)
    box.put(0, ONE, 0)
    box.put(0, rows(9, 1), 100)
    box.put(1, rows(10, 1), 100)
    assert box.poll(0) is not None
    taken = box.more(range(2), 1 << 20)
    assert sorted(numbers([batch for _, batch in taken])) == [1, 2, 10]
    assert polled(box)[0] == (0, ONE)


def test_more_leaves_blocked_channels_other_inputs_and_what_is_too_large() -> None:
    box = inbox(4)
    for channel in range(4):
        box.put(channel, rows(channel, 1), 100)
        box.put(channel, rows(10 + channel, 4), 100)
    box.block(1)
    small = rows(0, 1).nbytes
    assert [channel for channel, _ in box.more((0, 1), small)] == [0]
    assert box.more((0, 1), small) == []
    assert [channel for channel, _ in box.more((2,), 1 << 20)] == [2, 2]
    assert box.queued(1) == box.queued(3) == 2


def test_more_announces_nothing_and_grants_what_it_frees() -> None:
    found: list[int] = []
    box = Inbox(1, capacity_bytes=8192, on_arrival=lambda *said: found.append(said[0]))
    sender = Sender()
    box.attach(0, sender)
    box.put(0, rows(0, 1), 3000)
    box.put(0, rows(1, 1), 3000)
    box.put(0, ONE, 0)
    assert len(box.more((0,), 1 << 20)) == 2
    assert sum(sender.granted) == 6000
    assert found == []
    assert box.poll(0) == (0, ONE)
    assert found == [0]
