"""Between processes: who is admitted, who is missed, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from snapshot.barriers.barrier import Barrier, EndOfInput
from statebackend.continuous.exchange import channel_messages as messages
from statebackend.continuous.exchange.channel_client import ExchangeClient
from statebackend.continuous.exchange.channel_messages import (
    Address,
    Hello,
    Identity,
    Rows,
    Signal,
)
from statebackend.continuous.exchange.channel_server import ExchangeServer
from statebackend.continuous.exchange.closing_connections import sever
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.stream_heartbeats import Pulse
from statebackend.errors import (
    PeerLostError,
    ProtocolError,
    SettingError,
    StaleRequestError,
    StateBackendError,
)
from statebackend.rpc.envelope import Decoder, encode
from statebackend.rpc.flight_base import TOKEN_HEADER, read_reply
from statebackend.rpc.tls import Tls, self_signed
from tests.continuous.exchange.peers import (
    ME,
    QUICK,
    address,
    drain,
    numbers,
    process,
    rows,
    wired,
)
from tests.support.waiting import until
from tests.support.wiretap import tapped

pytestmark = pytest.mark.full  # waits for peers that are silent


@pytest.fixture
def server() -> Iterator[ExchangeServer]:
    server = ExchangeServer(ME, host="127.0.0.1", expect_s=0.2, **QUICK)
    yield server
    assert server.close()


def refused(server: ExchangeServer, who: Identity, to: Address | None = None) -> StateBackendError:
    client = ExchangeClient(who, **QUICK)
    try:
        client.connect(server.location, to or address(0))
    except StateBackendError as error:
        return error
    finally:
        client.close()
    raise AssertionError("it was admitted")


def own() -> Tls:
    return self_signed()


# --- who is admitted


@pytest.mark.parametrize(
    ("field", "value"),
    [("token", "guessed"), ("token", ""), ("run", "run-0"), ("generation", 2), ("job", "other")],
)
def test_a_stream_of_another_run_is_refused(
    server: ExchangeServer, field: str, value: object
) -> None:
    inbox = Inbox(1, capacity_bytes=8192)
    server.expect(address(0), inbox, 0)
    other = msgspec.structs.replace(ME, **{field: value})
    error = refused(server, other)
    assert type(error) is StaleRequestError
    assert ME.token not in str(error)
    client = ExchangeClient(ME, **QUICK)
    client.connect(server.location, address(0)).send(EndOfInput())  # nobody took its place
    assert drain(inbox, ends=1)
    client.close()


def test_a_stream_with_a_wrong_token_is_refused_before_anything_is_read(
    server: ExchangeServer,
) -> None:
    with flight.connect(server.location) as peer:
        for headers in ([], [(TOKEN_HEADER.encode(), b"guessed")]):
            options = flight.FlightCallOptions(headers=headers)
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(peer.do_action(flight.Action("hello", b"\xff" * 1000), options))


def test_a_message_over_the_limit_is_refused_before_it_is_decoded(server: ExchangeServer) -> None:
    headers = [(TOKEN_HEADER.encode(), ME.token.encode())]
    hello = Hello(
        protocol=messages.PROTOCOL,
        job=ME.job,
        run="x" * messages.BYTES_MAX,
        generation=ME.generation,
        address=None,
    )
    with flight.connect(server.location) as peer:
        action = flight.Action("hello", encode(hello))
        (answer,) = peer.do_action(action, flight.FlightCallOptions(headers=headers))
    with pytest.raises(ProtocolError, match="over the limit"):
        read_reply([answer.body], Decoder(None))


def test_a_channel_that_nobody_expects_is_refused(server: ExchangeServer) -> None:
    error = refused(server, ME)
    assert type(error) is StaleRequestError
    assert "nobody here expects it" in str(error)


def test_a_stream_waits_for_its_channel_to_be_expected() -> None:
    server = ExchangeServer(ME, host="127.0.0.1", expect_s=20)
    client = ExchangeClient(ME)
    inbox = Inbox(1, capacity_bytes=8192)
    late = threading.Timer(0.1, server.expect, (address(0), inbox, 0))
    late.start()
    client.connect(server.location, address(0)).send(EndOfInput())
    assert drain(inbox, ends=1)
    late.join()
    client.close()
    assert server.close()


def test_who_waits_for_the_welcome_is_woken_when_the_client_is_closed() -> None:
    server = ExchangeServer(ME, host="127.0.0.1", expect_s=120)
    client = ExchangeClient(ME, welcome_s=120)
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            client.connect(server.location, address(0))
        except StateBackendError as error:
            errors.append(error)

    waiting = threading.Thread(target=connect)
    waiting.start()
    until(lambda: bool(client._opening))
    client.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert [type(error) for error in errors] == [PeerLostError]
    assert server.close()


def test_a_channel_has_one_stream_in_a_run(server: ExchangeServer) -> None:
    inbox = Inbox(1, capacity_bytes=8192)
    server.expect(address(0), inbox, 0)
    client = ExchangeClient(ME, **QUICK)
    channel = client.connect(server.location, address(0))
    assert "it has one" in str(refused(server, ME))
    with pytest.raises(ProtocolError):
        server.expect(address(0), inbox, 0)
    channel.send(EndOfInput())
    assert drain(inbox, ends=1)
    client.close()
    assert "it has one" in str(refused(server, ME))


def test_another_protocol_is_refused(
    server: ExchangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statebackend.continuous.exchange.channel_client.PROTOCOL", 99)
    assert type(refused(server, ME)) is ProtocolError


def test_nobody_there_is_a_typed_error() -> None:
    server = ExchangeServer(ME, host="127.0.0.1")
    assert server.close()
    error = refused(server, ME)
    assert type(error) is PeerLostError


def test_tls_carries_and_another_certificate_is_refused() -> None:
    with wired("remote", tls=own()) as pair:
        assert pair.server is not None
        location = pair.server.location
        assert location.startswith("grpc+tls://")
        pair.channels[0].send(rows(0))
        pair.channels[0].send(EndOfInput())
        assert numbers(drain(pair.inbox, ends=1)[0]) == list(range(10))
        stranger = ExchangeClient(ME, tls=True)
        with pytest.raises(PeerLostError, match="certificate"):
            stranger.connect(location, address(0), own().certificate)
        stranger.close()


@pytest.mark.parametrize("tls", [False, True])
def test_only_rows_that_go_without_tls_can_be_read_on_the_network(tls: bool) -> None:
    certified = own() if tls else None
    server = ExchangeServer(ME, host="127.0.0.1", tls=certified)
    client = ExchangeClient(ME, tls=tls)
    inbox = Inbox(1, capacity_bytes=64 << 10)
    server.expect(address(0), inbox, 0)
    said = b"what nobody else is to read " * 10
    batch = pa.record_batch({"said": pa.array([said])})
    with tapped(server.location) as tap:
        certificate = certified.certificate if certified is not None else b""
        channel = client.connect(tap.location, address(0), certificate)
        channel.send(batch)
        channel.send(EndOfInput())
        assert drain(inbox, ends=1)[0][0].equals(batch)  # type: ignore[union-attr]
        heard = tap.heard()
        client.close()
    assert server.close()
    assert len(heard) > len(said)
    for secret in (said, ME.token.encode(), b"run-1"):
        assert (secret in heard) is not tls, secret


def test_with_tls_nothing_is_said_to_who_has_none_and_the_other_way_round() -> None:
    with wired("remote", tls=own()) as secure, wired("remote") as plain:
        assert secure.server is not None
        assert plain.server is not None
        with_tls, without = secure.server.location, plain.server.location
        certificate = own().certificate
        tries = [
            (True, without, b""),
            (True, without, certificate),
            (True, without.replace("grpc:", "grpc+tls:"), certificate),
            (False, with_tls, b""),
            (False, with_tls.replace("grpc+tls:", "grpc:"), b""),
        ]
        for tls, location, shown in tries:
            client = ExchangeClient(ME, tls=tls, connect_s=120)
            began_s = time.monotonic()
            with pytest.raises(PeerLostError):
                client.connect(location, address(1), shown)
            assert time.monotonic() - began_s < 30
            client.close()


def test_the_token_is_in_no_text() -> None:
    assert ME.token not in repr(ME)


# --- what is not as it should be


def test_what_breaks_the_rules_fails_the_reader_and_not_the_process(
    server: ExchangeServer,
) -> None:
    unasked = encode(Rows(0, 100))
    skipped = encode(Signal(1, 0, Barrier(checkpoint=1, stamp_ms=0)))
    overdrawn = encode(Signal(0, 1 << 40, Barrier(checkpoint=1, stamp_ms=0)))
    options = flight.FlightCallOptions(headers=[(TOKEN_HEADER.encode(), ME.token.encode())])
    for number, bad in enumerate([unasked, skipped, overdrawn, b"\xc1", b"", b"x" * 100_000]):
        inbox = Inbox(1, capacity_bytes=8192)
        server.expect(address(number), inbox, 0)
        hello = Hello(
            protocol=messages.PROTOCOL,
            job=ME.job,
            run=ME.run,
            generation=ME.generation,
            address=address(number),
        )
        with flight.connect(server.location) as peer:
            descriptor = flight.FlightDescriptor.for_command(encode(hello))
            writer, reader = peer.do_exchange(descriptor, options)
            writer.write_metadata(bad)
            with pytest.raises(ProtocolError):
                inbox.poll(20)
            reader.cancel()


# --- who is missed


def test_a_killed_sender_fails_its_reader_at_once() -> None:
    server = ExchangeServer(ME, host="127.0.0.1", heartbeat_s=0.2, silence_s=600)
    inbox = Inbox(1, capacity_bytes=64 << 10)
    server.expect(address(0), inbox, 0)
    with process("send", server.location) as (child, said):
        assert said == "sent"
        taken = inbox.poll(20)
        assert taken is not None
        child.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLostError):
            inbox.poll(30)
    assert server.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_receiver_wakes_a_writer_that_waits(how: signal.Signals) -> None:
    client = ExchangeClient(ME, **QUICK)
    with process("receive") as (child, location):
        channel = client.connect(location, address(0))
        while channel.offer(rows(0, 100)):
            pass
        raised: list[BaseException] = []

        def write() -> None:
            try:
                channel.send(rows(0, 100))
            except PeerLostError as error:
                raised.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        child.send_signal(how)
        writer.join(30)
        assert [type(error) for error in raised] == [PeerLostError]
        client.close()  # although the other end answers nothing


def test_a_sender_that_stands_still_fails_its_reader_and_hinders_no_end() -> None:
    server = ExchangeServer(ME, host="127.0.0.1", **QUICK)
    inbox = Inbox(1, capacity_bytes=64 << 10)
    server.expect(address(0), inbox, 0)
    with process("send", server.location) as (child, said):
        assert said == "sent"
        assert inbox.poll(20) is not None
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerLostError, match="not been heard of"):
            inbox.poll(20)
        until(lambda: server.streams == 0)  # its connection was severed
        assert server.close()


def test_a_server_ends_in_time_although_a_sender_stands_still() -> None:
    server = ExchangeServer(ME, host="127.0.0.1")
    inbox = Inbox(1, capacity_bytes=64 << 10)
    server.expect(address(0), inbox, 0)
    with process("send", server.location) as (child, _):
        child.send_signal(signal.SIGSTOP)
        assert server.close(timeout_s=20)
        assert server.streams == 0


def test_two_connections_from_one_port_are_two() -> None:
    """Two servers of one process may be called from the same port of a peer."""
    with contextlib.ExitStack() as stack:
        ends: list[socket.socket] = []
        ports: list[int] = []
        calls: list[socket.socket] = []
        for _ in range(2):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(listening.getsockname()[1])
            call = stack.enter_context(socket.socket())
            call.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            call.bind(("127.0.0.1", calls[0].getsockname()[1] if calls else 0))
            call.connect(("127.0.0.1", ports[-1]))
            calls.append(call)
            ends.append(stack.enter_context(listening.accept()[0]))
        own = calls[0].getsockname()[1]
        assert calls[1].getsockname()[1] == own
        assert sever(f"ipv4:127.0.0.1:{own}", ports[0]) == 1
        calls[1].sendall(b"still here")
        assert ends[1].recv(16) == b"still here"
        assert ends[0].recv(16) == b""


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:1", "unix:/tmp/x", "ipv6:%5B::1%5D:1", "", "x"])
def test_only_the_connections_of_a_peer_are_severed(server: ExchangeServer, peer: str) -> None:
    inbox = Inbox(1, capacity_bytes=8192)
    server.expect(address(0), inbox, 0)
    client = ExchangeClient(ME, **QUICK)
    channel = client.connect(server.location, address(0))
    files = set(os.listdir("/proc/self/fd"))
    assert sever(peer, server.port) == 0
    assert len(set(os.listdir("/proc/self/fd")) - files) <= 1  # that of the listing
    channel.send(EndOfInput())
    assert drain(inbox, ends=1)
    client.close()


def test_quiet_channels_are_not_taken_for_lost() -> None:
    quick = {**QUICK, "silence_s": 1.0}
    server, client = ExchangeServer(ME, host="127.0.0.1", **quick), ExchangeClient(ME, **quick)
    inbox = Inbox(1, capacity_bytes=8192)
    server.expect(address(0), inbox, 0)
    channel = client.connect(server.location, address(0))
    assert inbox.poll(2.5) is None  # two and a half silences
    channel.send(EndOfInput())
    assert drain(inbox, ends=1)
    client.close()
    assert server.close()


class _Listened:
    def __init__(self) -> None:
        self.heard_s = 0.0
        self.silences: list[float] = []

    def beat(self) -> None: ...

    def silent(self, for_s: float) -> None:
        self.silences.append(for_s)


def test_a_process_that_stood_still_itself_blames_nobody() -> None:
    pulse = Pulse("test", heartbeat_s=1000, silence_s=2000, clock=lambda: 0.0)
    stream = _Listened()
    pulse.add(stream)
    pulse.listen(5000.0, late=True)
    assert stream.silences == []
    pulse.listen(7001.0)
    pulse.listen(9999.0)
    assert stream.silences == [2001.0]
    pulse.stop()
    with pytest.raises(SettingError):
        Pulse("test", heartbeat_s=1.0, silence_s=1.5)


# --- what is left behind


def test_nothing_is_left_behind() -> None:
    before = set(threading.enumerate())
    handlers = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(5):
        with wired("remote", 6) as pair:
            for channel in pair.channels:
                channel.send(rows(0))
            for channel in pair.channels[:3]:
                channel.send(EndOfInput())
            drain(pair.inbox, ends=3)
            server = pair.server
        assert server is not None
        assert server.streams == 0
    assert set(threading.enumerate()) == before
    # gRPC keeps some threads of its own for as long as the process lives, not some for each server.
    until(lambda: len(list(Path("/proc/self/task").iterdir())) < handlers + 30)


def test_a_server_that_closes_first_ends_its_senders() -> None:
    inbox = Inbox(1, capacity_bytes=8192)
    server, client = ExchangeServer(ME, host="127.0.0.1"), ExchangeClient(ME)
    server.expect(address(0), inbox, 0)
    channel = client.connect(server.location, address(0))
    assert server.close()
    assert server.close()
    until(lambda: channel.failure is not None)
    with pytest.raises(PeerLostError):
        channel.send(rows(0))
    client.close()
    channel.close()
