"""What holds in every channel, with and without a network."""

from __future__ import annotations

import pyarrow as pa
import pytest

from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput, Idle, Watermark
from statebackend.continuous.exchange.channel import ChannelSender
from statebackend.continuous.exchange.elements import Element
from statebackend.errors import PeerLostError, UsageError
from tests.continuous.exchange.peers import drain, numbers, rows, wired
from tests.support.waiting import until

KINDS = pytest.mark.parametrize("kind", ["local", "remote"])


@KINDS
def test_concurrent_senders_lose_and_repeat_nothing_and_keep_their_order(kind: str) -> None:
    channels, batches = 4, 300
    with wired(kind, channels, capacity_bytes=16 << 10) as pair:
        lowest: list[int] = []

        def send(index: int, channel: ChannelSender) -> None:
            for i in range(batches):
                channel.send(rows(i * 10, 10, sender=index))
                lowest.append(channel.available_bytes)
                if i % 50 == 0:
                    channel.send(Barrier(checkpoint=i, stamp_ms=0))
            channel.send(EndOfInput())

        for index, channel in enumerate(pair.channels):
            pair.start(lambda index=index, channel=channel: send(index, channel))
        found = drain(pair.inbox, ends=channels)
        for index in range(channels):
            elements = found[index]
            assert numbers(elements) == list(range(batches * 10))
            assert {s for e in elements[:1] for s in e.column(0).to_pylist()} == {index}  # type: ignore[union-attr]
            barriers = [e.checkpoint for e in elements if isinstance(e, Barrier)]
            assert barriers == list(range(0, batches, 50))
            assert elements[-1] == EndOfInput()
        assert min(lowest) >= 0
        assert all(c.available_bytes <= c.capacity_bytes for c in pair.channels)


@KINDS
def test_events_keep_their_place_among_rows(kind: str) -> None:
    sent: list[Element] = [
        Watermark(at_ms=1),
        rows(0),
        Idle(idle=True),
        Barrier(checkpoint=7, stamp_ms=8, kind="savepoint", alignment_timeout_ms=9),
        rows(10),
        Cancel(checkpoint=7),
        EndOfInput(),
    ]
    with wired(kind) as pair:
        for element in sent:
            pair.channels[0].send(element)
        assert drain(pair.inbox, ends=1)[0] == sent
        with pytest.raises(UsageError):
            pair.channels[0].send(rows(0))


@KINDS
def test_a_consumer_that_reads_nothing_bounds_what_is_sent(kind: str) -> None:
    capacity = 1 << 20
    with wired(kind, capacity_bytes=capacity) as pair:
        channel, batch = pair.channels[0], rows(0, 1000)  # 24 KB
        sent_bytes = 0
        while channel.offer(batch):
            sent_bytes += batch.nbytes
        assert capacity - 50_000 < sent_bytes <= capacity  # rows, and their heads
        writer = pair.start(lambda: channel.send(batch))
        writer.join(0.3)
        assert writer.is_alive()
        assert channel.sent_bytes <= capacity
        until(lambda: pair.inbox.queued() == channel.sent)
        assert pair.inbox.queued_bytes() == channel.sent_bytes
        assert channel.offer(Barrier(checkpoint=1, stamp_ms=0))  # that needs no room
        until(lambda: len(pair.inbox.ahead_of(0, 1)) == channel.sent - 1)
        for _ in range(channel.sent):
            assert pair.inbox.poll(20) is not None
        writer.join(20)
        assert not writer.is_alive()


@KINDS
def test_a_blocked_channel_holds_its_sender_and_no_other(kind: str) -> None:
    with wired(kind, 2, capacity_bytes=16 << 10) as pair:
        first, second = pair.channels
        pair.inbox.block(0)
        while first.offer(rows(0, 100)):
            pass
        for i in range(50):
            second.send(rows(i, 1))
            taken = pair.inbox.poll(20)
            assert taken is not None
            assert taken[0] == 1
        assert not first.offer(rows(0, 100))
        assert pair.inbox.poll(0.05) is None
        pair.inbox.unblock(0)
        assert pair.inbox.poll(20) is not None
        for _ in range(first.sent - 1):
            assert pair.inbox.poll(20) is not None
        assert first.ready(first.capacity_bytes // 2, 20)


@KINDS
def test_a_sender_that_lets_go_before_the_end_fails_its_reader(kind: str) -> None:
    with wired(kind) as pair:
        pair.channels[0].send(rows(0))
        pair.channels[0].close()
        until(lambda: pair.inbox.queued() == 1)
        with pytest.raises(PeerLostError):
            drain(pair.inbox, ends=1)


@KINDS
def test_a_sender_that_is_done_leaves_what_it_sent(kind: str) -> None:
    with wired(kind) as pair:
        for i in range(20):
            pair.channels[0].send(rows(i * 10))
        pair.channels[0].send(EndOfInput())
        pair.channels[0].close()
        assert numbers(drain(pair.inbox, ends=1)[0]) == list(range(200))


@KINDS
def test_a_reader_that_closes_wakes_a_sender_that_waits(kind: str) -> None:
    with wired(kind, capacity_bytes=8192) as pair:
        raised: list[BaseException] = []

        def write() -> None:
            try:
                while True:
                    pair.channels[0].send(rows(0, 100))
            except PeerLostError as error:
                raised.append(error)

        writer = pair.start(write)
        until(lambda: pair.inbox.queued() == 2)
        pair.inbox.close()
        writer.join(20)
        assert [error.code for error in raised] == ["SB5009"]  # type: ignore[attr-defined]
        assert pair.channels[0].failure is not None


@KINDS
def test_rows_of_every_shape_arrive_as_they_were(kind: str) -> None:
    text = pa.array(["a", None, "ccc", "", "dä"] * 20)
    batch = pa.RecordBatch.from_arrays(
        [
            text,
            text.dictionary_encode(),
            pa.array([[1, 2], None, [], [3], [4]] * 20),
            pa.array([{"x": 1, "y": "z"}, None, {"x": None, "y": ""}, None, {"x": 2}] * 20),
            pa.array([True, False, None, True, True] * 20),
            pa.nulls(100),
        ],
        names=list("abcdef"),
    )
    other = batch.set_column(1, "b", pa.array(["other", "words"] * 50).dictionary_encode())
    with wired(kind, capacity_bytes=1 << 20) as pair:
        sent = [batch, batch.slice(3, 50), other, batch.slice(0, 0), batch.slice(99)]
        for part in sent:
            pair.channels[0].send(part)
        for part in sent:
            taken = pair.inbox.poll(20)
            assert taken is not None
            assert taken[1].equals(part)  # type: ignore[union-attr]
            taken[1].validate(full=True)  # type: ignore[union-attr]


@KINDS
def test_what_waits_keeps_no_neighbours_alive(kind: str) -> None:
    whole = rows(0, 10_000)
    with wired(kind) as pair:
        pair.channels[0].send(whole.slice(500, 10))
        taken = pair.inbox.poll(20)
        assert taken is not None
        assert numbers([taken[1]]) == list(range(500, 510))
        assert taken[1].get_total_buffer_size() < 2000  # type: ignore[union-attr]
