"""The ends of channels for tests: in this process, between its threads, or in one of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from snapshot.barriers.barrier import EndOfInput
from statebackend.continuous.exchange.channel import ChannelSender, LocalChannel
from statebackend.continuous.exchange.channel_client import ExchangeClient
from statebackend.continuous.exchange.channel_messages import Address, Identity
from statebackend.continuous.exchange.channel_server import ExchangeServer
from statebackend.continuous.exchange.elements import Element
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.rpc.tls import Tls

ME = Identity(job="sums", run="run-1", generation=3, token="a secret of this run")
QUICK = {"heartbeat_s": 0.2, "silence_s": 3.0}


def address(channel: int) -> Address:
    return Address(vertex="sum", subtask=0, channel=channel)


def rows(first: int, count: int = 10, *, sender: int = 0) -> pa.RecordBatch:
    """Numbered rows of one sender."""
    columns = [np.full(count, sender), np.arange(first, first + count), np.zeros(count)]
    return pa.RecordBatch.from_arrays([pa.array(c) for c in columns], names=["s", "n", "x"])


def numbers(elements: list[Element]) -> list[int]:
    """Of the rows among elements, in order."""
    return [n for e in elements if isinstance(e, pa.RecordBatch) for n in e.column(1).to_pylist()]


def drain(inbox: Inbox, ends: int, timeout_s: float = 20.0) -> dict[int, list[Element]]:
    """Everything by channel, until so many channels have ended."""
    found: dict[int, list[Element]] = {}
    while ends:
        taken = inbox.poll(timeout_s)
        assert taken is not None, "nothing came"
        found.setdefault(taken[0], []).append(taken[1])
        ends -= isinstance(taken[1], EndOfInput)
    return found


@dataclass
class Wired:
    """An inbox and a sender for each of its channels."""

    inbox: Inbox
    channels: list[ChannelSender]
    server: ExchangeServer | None = None
    client: ExchangeClient | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="test-sender")
        self.threads.append(thread)
        thread.start()
        return thread


@contextmanager
def wired(
    kind: str, channels: int = 1, *, capacity_bytes: int = 64 << 10, tls: Tls | None = None
) -> Iterator[Wired]:
    """``local`` or ``remote`` (over loopback); all is closed in the end."""
    inbox = Inbox(channels, capacity_bytes=capacity_bytes)
    if kind == "local":
        yield from _run(Wired(inbox, [LocalChannel(inbox, i) for i in range(channels)]))
        return
    server = ExchangeServer(ME, host="127.0.0.1", tls=tls)
    client = ExchangeClient(ME, tls=tls is not None)
    certificate = tls.certificate if tls is not None else b""
    for i in range(channels):
        server.expect(address(i), inbox, i)
    ends: list[ChannelSender] = [
        client.connect(server.location, address(i), certificate) for i in range(channels)
    ]
    yield from _run(Wired(inbox, ends, server, client))


def _run(pair: Wired) -> Iterator[Wired]:
    try:
        yield pair
    finally:
        pair.inbox.close()
        for channel in pair.channels:
            channel.close()
        for thread in pair.threads:
            thread.join(20)
        if pair.client is not None and pair.server is not None:
            pair.client.close()
            assert pair.server.close()
        assert not [thread for thread in pair.threads if thread.is_alive()]


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A peer in a process of its own, and the first line it says; killed in the end."""
    command = [sys.executable, "-m", "tests.continuous.exchange.peers", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.communicate()


def _receive(pulse: dict[str, float]) -> None:
    """Expect channel 0, say where, and read nothing."""
    inbox = Inbox(1, capacity_bytes=64 << 10)
    server = ExchangeServer(ME, host="127.0.0.1", **pulse)
    server.expect(address(0), inbox, 0)
    print(server.location, flush=True)
    sys.stdin.read()


def _send(location: str) -> None:
    """Send some rows into channel 0, say so, and stay."""
    client = ExchangeClient(ME, **QUICK)
    channel = client.connect(location, address(0))
    channel.send(rows(0))
    print("sent", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", "patient"]:
            _receive({})
        case ["receive"]:
            _receive(QUICK)
        case ["send", location]:
            _send(location)
