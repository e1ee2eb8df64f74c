"""The receiving end between processes: one Flight server, a stream for each channel."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from statebackend import system
from statebackend.continuous.exchange.channel_messages import (
    PROTOCOL,
    Address,
    Beat,
    Grant,
    Hello,
    Identity,
    Rows,
    Signal,
    Welcome,
    brief,
    decode_hello,
    decode_up,
    peer_lost,
)
from statebackend.continuous.exchange.closing_connections import sever
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.stream_heartbeats import HEARTBEAT_S, SILENCE_S, Pulse
from statebackend.errors import ProtocolError, StaleRequestError, StateBackendError
from statebackend.rpc.envelope import ErrorReply, encode
from statebackend.rpc.flight_base import BROKEN, FlightService, same_token
from statebackend.rpc.tls import Tls

__all__ = ["ExchangeServer"]

_BEAT = encode(Beat())
# How long whoever is told that nobody reads may take to end its stream.
_GRACE_S = 1.0


class ExchangeServer:
    """Takes in the channels of one process, for one run of a job.

    Args:
        identity: whose streams it admits.
        host: the address it listens on. port: 0 for any free one.
        advertised: the name that others reach it by; as ``host``, if not given.
        tls: this process's own; None: it speaks no TLS.
        expect_s: how long a stream may wait for its channel to be expected.

    Raises:
        SettingError: times that mean nothing.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        host: str,
        port: int = 0,
        advertised: str | None = None,
        tls: Tls | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        expect_s: float = 10.0,
        clock: Callable[[], float] = system.monotonic_s,
    ) -> None:
        self.identity = identity
        self._expect_s = expect_s
        self._clock = clock
        self._changed = threading.Condition()
        self._expected: dict[Address, tuple[Inbox, int]] = {}
        self._taken: set[Address] = set()
        self._lanes: set[_Lane] = set()
        self._peers: set[str] = set()
        self._closed = False
        self._service = _Service(self, bind=host, advertised=advertised or host, port=port, tls=tls)
        self.port: int = self._service.port
        self.location = self._service.location
        self._pulse = Pulse(
            "exchange-server-pulse", heartbeat_s=heartbeat_s, silence_s=silence_s, clock=clock
        )
        # pyarrow has the interpreter's end wait for all streams, whoever else forgot to close.
        atexit.register(self.close)

    def expect(self, address: Address, inbox: Inbox, channel: int) -> None:
        """Admit one stream for a channel, into channel ``channel`` of an inbox.

        Raises:
            ProtocolError: it is expected already.
        """
        with self._changed:
            if address in self._expected or address in self._taken:
                raise ProtocolError(f"The {address} is expected already.")
            self._expected[address] = (inbox, channel)
            self._changed.notify_all()

    @property
    def streams(self) -> int:
        """How many are open."""
        return len(self._lanes)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Hang up on everybody, and end.

        Returns:
            Whether all has ended in time, as it does but where connections cannot be severed: see
            `severing`.
        """
        with self._changed:
            if self._closed:
                return True
            self._closed = True
            lanes = list(self._lanes)
            self._changed.notify_all()
        atexit.unregister(self.close)
        for lane in lanes:
            lane.hang_up(peer_lost("The receiver of a channel has ended."))
        self._pulse.stop()
        # It waits for its streams without a limit, so it is waited for with one.
        ending = threading.Thread(
            target=self._service.shutdown, name="exchange-server-end", daemon=True
        )
        ending.start()
        ending.join(min(_GRACE_S, timeout_s / 2))
        if ending.is_alive():
            # Also who has no stream any more: its connection, too, is waited for.
            with self._changed:
                peers = list(self._peers)
            for peer in peers:
                sever(peer, self.port)
            ending.join(timeout_s)
        return not ending.is_alive()

    # --- called by the service, in gRPC's threads

    def check(self, hello: Hello, peer: str) -> None:
        """Refuse who belongs to another run.

        Args:
            peer: the caller's end of the connection.

        Raises:
            ProtocolError: another protocol. StaleRequestError: another run.
        """
        with self._changed:
            self._peers.add(peer)
        mine = self.identity
        if hello.protocol != PROTOCOL:
            raise ProtocolError(
                f"A sender speaks exchange protocol {hello.protocol}, its receiver {PROTOCOL}.",
                todo="Install the same statebackend release on all executors.",
            )
        if (hello.job, hello.run, hello.generation) != (mine.job, mine.run, mine.generation):
            raise StaleRequestError(
                f"A channel of run {hello.run!r}, generation {hello.generation}, of job "
                f"{hello.job!r} was refused: here is run {mine.run!r}, generation "
                f"{mine.generation}, of job {mine.job!r}.",
                todo="Nothing to do: the process that asked belongs to a run that is over.",
            )

    def serve(self, hello: Hello, peer: str, reader: Any, writer: Any) -> None:
        """Take in one channel until it ends.

        Args:
            peer: the sender's end of the connection.

        Raises:
            StateBackendError: it is refused.
        """
        self.check(hello, peer)
        assert hello.address is not None
        inbox, channel = self._claimed(hello.address)
        lane = _Lane(hello.address, inbox, channel, peer, self.port, writer, self._clock)
        inbox.attach(channel, lane)
        with self._changed:
            self._lanes.add(lane)
            closed = self._closed
        if closed:
            lane.hang_up(peer_lost("The receiver of a channel has ended."))
        self._pulse.add(lane)
        try:
            lane.run(reader)
        finally:
            self._pulse.remove(lane)
            with self._changed:
                self._lanes.discard(lane)

    def _claimed(self, address: Address) -> tuple[Inbox, int]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or address in self._expected or address in self._taken,
                self._expect_s,
            )
            found = self._expected.pop(address, None)
            if found is None or self._closed:
                raise StaleRequestError(
                    f"A stream for the {address} was refused: "
                    + ("it has one." if address in self._taken else "nobody here expects it."),
                    todo="Nothing to do if the job restarts; a channel has one stream in a run.",
                )
            self._taken.add(address)
            return found


class _Lane:
    """The receiving end of one stream. What is written to it comes from several threads."""

    def __init__(
        self,
        address: Address,
        inbox: Inbox,
        channel: int,
        peer: str,
        port: int,
        writer: Any,
        clock: Callable[[], float],
    ) -> None:
        self.heard_s = 0.0
        self.peer, self._port = peer, port
        self._address = address
        self._inbox = inbox
        self._channel = channel
        self._clock = clock
        self._next = 0
        # Flight's writer is gone when the call has returned; nobody may be in it then.
        self._writer = writer
        self._writing = threading.Lock()

    def run(self, reader: Any) -> None:
        """Read to the end."""
        error: StateBackendError | None = None
        try:
            self._write(encode(Welcome(self._inbox.capacity_bytes)))
            while self._take(reader.read_chunk()):
                pass
        except StopIteration:
            # A killed sender looks like one that is done: only its end tells them apart.
            error = peer_lost(f"The sender of the {self._address} is gone.")
        except BROKEN as broken:
            error = peer_lost(f"The sender of the {self._address} is gone ({brief(broken)}).")
        except StateBackendError as refused:
            error = refused
            self._write(encode(ErrorReply.of(refused)))
        except Exception as bug:  # never a receiver that waits for what nobody reads
            error = ProtocolError(f"The {self._address} failed: {type(bug).__name__}: {bug}.")
            self._write(encode(ErrorReply.of(error)))
        finally:
            with self._writing:
                self._writer = None
        if error is not None:
            self._inbox.lost(self._channel, error)

    def _take(self, chunk: Any) -> bool:
        self.heard_s = self._clock()
        message = decode_up(chunk.app_metadata)
        if isinstance(message, Beat):
            return True
        if not isinstance(message, Rows | Signal) or message.number != self._next:
            raise ProtocolError(
                f"In the {self._address} element {self._next} was due, not {message}.",
                todo="Install the same statebackend release on all executors.",
            )
        self._next += 1
        if isinstance(message, Signal):
            self._inbox.put(self._channel, message.event, message.cost)
            return True
        if chunk.data is None:
            raise ProtocolError(f"In the {self._address} rows were due, and none came.")
        chunk.data.validate()
        self._inbox.put(self._channel, chunk.data, message.cost)
        return True

    def grant(self, freed_bytes: int) -> None:
        """As the inbox frees it."""
        self._write(encode(Grant(freed_bytes)))

    def hang_up(self, error: StateBackendError) -> None:
        """Nobody reads any more: the sender is asked to end the stream."""
        self._write(encode(ErrorReply.of(error)))

    def beat(self) -> None:
        """Say that this end is there."""
        if self._writing.acquire(blocking=False):  # else somebody is saying something
            try:
                self._write_locked(_BEAT)
            finally:
                self._writing.release()

    def silent(self, for_s: float) -> None:
        """The sender is taken for gone."""
        what = f"The sender of the {self._address} has not been heard of for {for_s:.1f} s."
        self._inbox.lost(self._channel, peer_lost(what))
        sever(self.peer, self._port)

    def _write(self, data: bytes) -> None:
        with self._writing:
            self._write_locked(data)

    def _write_locked(self, data: bytes) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write_metadata(data)
        except BROKEN:
            self._writer = None  # whoever reads learns of it


class _Service(FlightService):
    """Flight's entry."""

    def __init__(
        self, server: ExchangeServer, *, bind: str, advertised: str, port: int, tls: Tls | None
    ) -> None:
        self._server = server
        token = server.identity.token
        super().__init__(
            lambda given: same_token(token, given),
            bind=bind,
            advertised=advertised,
            port=port,
            tls=tls,
        )

    def answer(self, context: Any, kind: str, body: Any) -> tuple[None, list[bytes]]:
        """Whether the caller is admitted."""
        self._server.check(decode_hello(body), context.peer())
        return None, []

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Take in a channel; a refusal is a typed answer."""
        try:
            hello = decode_hello(descriptor.command)
            if hello.address is None:
                raise ProtocolError("A stream for no channel.")
            self._server.serve(hello, context.peer(), reader, writer)
        except StateBackendError as error:
            with suppress(*BROKEN):  # the caller does not wait for it any more
                writer.write_metadata(encode(ErrorReply.of(error)))
