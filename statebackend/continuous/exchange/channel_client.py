"""The sending end between processes: a connection to each, a stream for each channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from statebackend import system
from statebackend.continuous.exchange.channel import ChannelSender
from statebackend.continuous.exchange.channel_messages import (
    PROTOCOL,
    Address,
    Beat,
    Down,
    Grant,
    Hello,
    Identity,
    Rows,
    Signal,
    Welcome,
    brief,
    decode_down,
    peer_lost,
)
from statebackend.continuous.exchange.elements import Element
from statebackend.continuous.exchange.stream_heartbeats import HEARTBEAT_S, SILENCE_S, Pulse
from statebackend.errors import ProtocolError, StaleRequestError, StateBackendError
from statebackend.rpc.envelope import Decoder, ErrorReply, encode
from statebackend.rpc.flight_base import BROKEN, ask, call_options, read_reply
from statebackend.rpc.tls import connect

__all__ = ["ExchangeClient", "RemoteChannel"]

_BEAT = encode(Beat())
_ADMITTED = Decoder[None](None)
# How long an orderly end may take before the stream is given up.
_CLOSE_S = 5.0


class ExchangeClient:
    """Opens the channels from one process to others, for one run of a job.

    Args:
        identity: who it is.
        tls: whether it speaks TLS, and to nobody without.
        connect_s: how long a connection may take.
        welcome_s: how long the answer to a stream's opening may: the receiver may not expect it
            yet. Default: as ``connect_s``.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        tls: bool = False,
        connect_s: float = 15.0,
        welcome_s: float | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = system.monotonic_s,
    ) -> None:
        self.identity = identity
        self._tls = tls
        self._connect_s = connect_s
        self._welcome_s = connect_s if welcome_s is None else welcome_s
        self._clock = clock
        self._peers: dict[tuple[str, bytes], Any] = {}
        self._channels: list[RemoteChannel] = []
        self._opening: set[_End] = set()  # not welcomed yet
        self._closed = False
        self._lock = threading.Lock()
        self._pulse = Pulse(
            "exchange-client-pulse", heartbeat_s=heartbeat_s, silence_s=silence_s, clock=clock
        )

    def connect(self, location: str, address: Address, certificate: bytes = b"") -> RemoteChannel:
        """Open a channel.

        Args:
            location: of the receiver's `ExchangeServer`.
            certificate: that it must show; b"": it speaks no TLS.

        Raises:
            PeerLostError: nobody answers there in time, with that certificate; or only one of both
                speaks TLS; or the client is closed meanwhile.
            StaleRequestError: the token, the run or the generation is not the receiver's, or it
                does not expect the channel.
            ProtocolError: the receiver is of another release.
        """
        peer = self._peer(location, certificate)
        options = call_options(self.identity.token)
        descriptor = flight.FlightDescriptor.for_command(encode(self._hello(address)))
        try:
            writer, reader = peer.do_exchange(descriptor, options)
        except BROKEN as error:
            raise _unreachable(location, error) from error
        end = _End(f"{address} at {location}", writer, reader, self._clock)
        with self._lock:
            self._opening.add(end)
            closed = self._closed
        if closed:
            end.give_up()
        try:
            capacity_bytes = end.welcomed(self._welcome_s)
        except StateBackendError:
            with self._lock:
                self._opening.discard(end)
            end.close()
            raise
        channel = RemoteChannel(capacity_bytes, end, self._pulse)
        with self._lock:
            self._opening.discard(end)
            self._channels.append(channel)
        return channel

    def close(self) -> None:
        """Let go of all channels and connections; whoever waits in `connect` is woken."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, []
            opening = list(self._opening)
            peers, self._peers = self._peers, {}
        for end in opening:
            end.give_up()
        for channel in channels:
            channel.begin_close()
        for channel in channels:
            channel.close()
        self._pulse.stop()
        for peer in peers.values():
            peer.close()

    def _hello(self, address: Address | None) -> Hello:
        mine = self.identity
        return Hello(
            protocol=PROTOCOL,
            job=mine.job,
            run=mine.run,
            generation=mine.generation,
            address=address,
        )

    def _peer(self, location: str, certificate: bytes) -> Any:
        """A connection that has been used: the opening of a stream knows no time limit."""
        key = location, certificate
        with self._lock:
            peer = self._peers.get(key)
        if peer is not None:
            return peer
        options = call_options(self.identity.token, self._connect_s)
        try:
            if self._tls and not certificate:
                raise ConnectionError("its certificate is not known")
            peer = connect(location, certificate)
            answer = ask(peer, "hello", self._hello(None), options)
        except BROKEN as error:
            raise _unreachable(location, error) from error
        try:
            read_reply(answer, _ADMITTED)
        except StateBackendError:
            peer.close()
            raise
        with self._lock:
            return self._peers.setdefault(key, peer)


class _End:
    """The sending end of one stream: its writer, its reader, and the thread that reads it."""

    def __init__(self, name: str, writer: Any, reader: Any, clock: Callable[[], float]) -> None:
        self.heard_s = clock()
        self._name = name
        self._clock = clock
        self._writer = writer
        self._writing = threading.Lock()
        self._reader = reader
        self._begun = False
        self._closing = False
        self._close_until_s = 0.0
        self._answered = threading.Event()
        self._capacity_bytes = 0
        self._error: StateBackendError | None = None
        self._channel: RemoteChannel | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="exchange-credits", daemon=True)
        self._thread.start()

    def welcomed(self, timeout_s: float) -> int:
        """The capacity that the receiver grants.

        Raises:
            StateBackendError: it refused, or did not answer in time.
        """
        if not self._answered.wait(timeout_s):
            raise peer_lost(f"The receiver of the {self._name} did not answer in {timeout_s:g} s.")
        if self._error is not None:
            raise self._error
        return self._capacity_bytes

    def belongs_to(self, channel: RemoteChannel) -> None:
        """Who is told of grants and of the end, from now on."""
        with self._lock:
            self._channel = channel
            error = self._error
        if error is not None:
            channel.fail(error)

    def write(self, message: Rows | Signal, rows: pa.RecordBatch | None = None) -> None:
        """One element; may wait for the network, until the stream is given up.

        Raises:
            StateBackendError: the stream is no more.
        """
        data = encode(message)
        try:
            with self._writing:
                if rows is None:
                    self._writer.write_metadata(data)
                    return
                if not self._begun:
                    self._writer.begin(rows.schema)
                    self._begun = True
                self._writer.write_with_metadata(rows, data)
        except BROKEN as broken:
            self._fail(peer_lost(f"The receiver of the {self._name} is gone ({brief(broken)})."))
            assert self._error is not None
            raise self._error from broken

    def beat(self) -> None:
        """Say that this end is there."""
        if self._writing.acquire(blocking=False):  # else somebody is saying something
            try:
                self._writer.write_metadata(_BEAT)
            except BROKEN:
                pass  # whoever reads learns of it
            finally:
                self._writing.release()

    def silent(self, for_s: float) -> None:
        """The receiver is taken for gone; who waits in a write is woken."""
        what = f"The receiver of the {self._name} has not been heard of for {for_s:.1f} s."
        self._fail(peer_lost(what))
        self._reader.cancel()

    def give_up(self) -> None:
        """Wake who waits for the welcome: nobody wants the stream any more."""
        self._fail(peer_lost(f"The {self._name} was closed before its receiver answered."))
        self._reader.cancel()
        self._thread.join()

    def begin_close(self) -> None:
        """End the stream in order, if that can be; does not wait."""
        if self._closing:
            return
        self._closing = True
        self._close_until_s = self._clock()
        if self._error is None and self._writing.acquire(blocking=False):
            try:
                self._writer.done_writing()
                self._close_until_s += _CLOSE_S
            except BROKEN:
                pass  # whoever reads learns of it
            finally:
                self._writing.release()

    def close(self) -> None:
        """Wait for the stream's end for a while, then give it up."""
        self.begin_close()
        self._thread.join(max(0.0, self._close_until_s - self._clock()))
        if self._thread.is_alive():
            self._reader.cancel()
            self._thread.join()
        with suppress(*BROKEN):  # how it ended is known
            self._writer.close()

    def _read(self) -> None:
        error: StateBackendError
        try:
            while True:
                metadata = self._reader.read_chunk().app_metadata
                self.heard_s = self._clock()
                self._heard(decode_down(metadata))
        except StopIteration:
            error = peer_lost(f"The receiver of the {self._name} has ended the stream.")
        except flight.FlightUnauthenticatedError:
            error = _not_admitted(self._name)
        except BROKEN as broken:
            error = peer_lost(f"The receiver of the {self._name} is gone ({brief(broken)}).")
        except StateBackendError as said:
            error = said
        self._fail(error)
        if not self._closing:
            # Nothing is granted any more: a write that waits must not go on waiting.
            self._reader.cancel()

    def _heard(self, message: Down) -> None:
        if isinstance(message, Grant) and self._channel is not None:
            self._channel.grant(message.freed_bytes)
        elif isinstance(message, Welcome) and not self._answered.is_set():
            self._capacity_bytes = message.capacity_bytes
            self._answered.set()
        elif isinstance(message, ErrorReply):
            raise message.error()
        elif not isinstance(message, Beat):
            raise ProtocolError(f"The receiver of the {self._name} said {message} out of turn.")

    def _fail(self, error: StateBackendError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            error, channel = self._error, self._channel
        self._answered.set()
        if channel is not None:
            channel.fail(error)


class RemoteChannel(ChannelSender):
    """Sends to an inbox of another process; made by `ExchangeClient.connect`."""

    def __init__(self, capacity_bytes: int, end: _End, pulse: Pulse) -> None:
        super().__init__(capacity_bytes)
        self._end = end
        self._pulse = pulse
        self._number = 0
        self._closed = False
        end.belongs_to(self)
        pulse.add(end)

    def grant(self, freed_bytes: int) -> None:
        """As the receiver says."""
        self._credits.grant(freed_bytes)

    def begin_close(self) -> None:
        """As in `ChannelSender`."""
        self._end.begin_close()

    def close(self) -> None:
        """As in `ChannelSender`; waits a few seconds at most for what was sent to arrive."""
        if self._closed:
            return
        self._closed = True
        self._end.close()
        self._pulse.remove(self._end)
        self.fail(peer_lost("The channel is closed."))

    def _transmit(self, element: Element, cost: int) -> None:
        number, self._number = self._number, self._number + 1
        if isinstance(element, pa.RecordBatch):
            self._end.write(Rows(number, cost), element)
        else:
            self._end.write(Signal(number, cost, element))


def _not_admitted(where: str) -> StaleRequestError:
    return StaleRequestError(
        f"The {where} refused the token of this process.",
        todo="Nothing to do if the job restarts: its earlier run is over.",
    )


def _unreachable(location: str, error: Exception) -> StateBackendError:
    if isinstance(error, flight.FlightUnauthenticatedError):
        return _not_admitted(f"receiver at {location}")
    return peer_lost(f"The process at {location} cannot be reached ({brief(error)}).")
