"""Several slots at once: every subtask sends to every subtask, by key, with barriers aligned."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pyarrow as pa

from snapshot.barriers.barrier import Barrier, EndOfInput, Watermark
from statebackend.continuous.exchange.channel import ChannelSender, LocalChannel
from statebackend.continuous.exchange.channel_client import ExchangeClient
from statebackend.continuous.exchange.channel_messages import Address
from statebackend.continuous.exchange.channel_server import ExchangeServer
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partitioner import by_key_group
from tests.continuous.exchange.peers import ME, process, rows

SLOTS, BATCHES, ROWS = 3, 60, 200
MAX_PARALLELISM = 16


def place(subtask: int, channel: int) -> Address:
    return Address(vertex="sum", subtask=subtask, channel=channel)


@dataclass
class Slot:
    """A source subtask and a keyed one, in a thread each."""

    index: int
    inbox: Inbox = field(default_factory=lambda: Inbox(SLOTS, capacity_bytes=16 << 10))
    cuts: list[dict[int, int]] = field(default_factory=list)  # rows by sender at each barrier
    seen: list[tuple[int, int]] = field(default_factory=list)
    watermarks: dict[int, int] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)

    def send(self, outbox: Outbox) -> None:
        try:
            for i in range(BATCHES):
                outbox.emit(rows(i * ROWS, ROWS, sender=self.index))
                outbox.send(Watermark(at_ms=i))
                if i % 20 == 19:
                    outbox.send(Barrier(checkpoint=i, stamp_ms=0))
            outbox.send(EndOfInput())
            outbox.flush()
            outbox.close()
        except BaseException as error:
            self.failures.append(error)

    def receive(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            self.failures.append(error)

    def _receive(self) -> None:
        live, aligned = set(range(SLOTS)), set[int]()
        counts = dict.fromkeys(range(SLOTS), 0)
        while live:
            taken = self.inbox.poll(30)
            assert taken is not None
            channel, element = taken
            assert channel not in aligned
            if isinstance(element, Barrier):
                self.inbox.block(channel)
                aligned.add(channel)
            elif isinstance(element, EndOfInput):
                live.discard(channel)
            elif isinstance(element, Watermark):
                assert element.at_ms > self.watermarks.get(channel, -1)
                self.watermarks[channel] = element.at_ms
            else:
                assert isinstance(element, pa.RecordBatch)
                counts[channel] += element.num_rows
                self.seen += zip(
                    element.column(0).to_pylist(), element.column(1).to_pylist(), strict=True
                )
            if aligned and aligned >= live:
                self.cuts.append(dict(counts))
                for one in aligned:
                    self.inbox.unblock(one)
                aligned.clear()
        self.inbox.close()


def test_keyed_rows_of_all_senders_arrive_once_and_cuts_are_consistent() -> None:
    slots = [Slot(index) for index in range(SLOTS)]
    servers = [ExchangeServer(ME, host="127.0.0.1") for _ in slots]
    clients = [ExchangeClient(ME) for _ in slots]
    for slot, server in zip(slots, servers, strict=True):
        for sender in range(SLOTS):
            if sender != slot.index:
                server.expect(place(slot.index, sender), slot.inbox, sender)
    threads = []
    for slot in slots:
        channels: list[ChannelSender] = [
            LocalChannel(receiver.inbox, slot.index)
            if receiver is slot
            else clients[slot.index].connect(
                servers[receiver.index].location, place(receiver.index, slot.index)
            )
            for receiver in slots
        ]
        keyed = by_key_group([1], SLOTS, MAX_PARALLELISM)
        outbox = Outbox(channels, keyed, buffer_bytes=2000, buffer_timeout_s=None)
        threads.append(threading.Thread(target=slot.send, args=(outbox,)))
        threads.append(threading.Thread(target=slot.receive))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for client in clients:
        client.close()
    assert [server.close() for server in servers] == [True] * SLOTS
    assert [error for slot in slots for error in slot.failures] == []
    seen = [one for slot in slots for one in slot.seen]
    assert sorted(seen) == [(s, n) for s in range(SLOTS) for n in range(BATCHES * ROWS)]
    assert all(slot.watermarks == dict.fromkeys(range(SLOTS), BATCHES - 1) for slot in slots)
    for cut in range(BATCHES // 20):
        for sender in range(SLOTS):  # all that it sent before its barrier, and nothing after
            assert sum(slot.cuts[cut][sender] for slot in slots) == (cut + 1) * 20 * ROWS


FORGETFUL = """
from tests.continuous.exchange.peers import *
server, client = ExchangeServer(ME, host="127.0.0.1"), ExchangeClient(ME)
inbox = Inbox(1, capacity_bytes=8192)
server.expect(address(0), inbox, 0)
mine = client.connect(server.location, address(0))
other = ExchangeClient(ME).connect({location!r}, address(0))
mine.send(rows(0)); other.send(rows(0))
"""


def test_a_process_that_forgets_to_close_ends_all_the_same() -> None:
    with process("receive", "patient") as (_, location):  # the program says nothing for a while
        program = FORGETFUL.format(location=location)
        done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert done.returncode == 0
