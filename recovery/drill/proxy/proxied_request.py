"""One request on its way through the proxy: passed on, refused, kept, doubled or cut there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import IO, NoReturn

from recovery.drill.proxy.body_faults import BodyFaults
from recovery.drill.proxy.controls import Controls, CutError
from recovery.drill.proxy.fault_plan import Fault, Kind
from recovery.drill.proxy.http import (
    PIECE_BYTES,
    BodyReader,
    BodyWriter,
    Head,
    MalformedError,
    Wire,
    request_framing,
    response_framing,
)
from recovery.drill.proxy.ledger import Ledger
from recovery.drill.proxy.s3_requests import classify, error_answer
from recovery.drill.proxy.upstream import Upstream

__all__ = ["ProxiedRequest"]

KEPT_BYTES_MAX = 256 * 1024 * 1024
KEPT_IN_MEMORY_BYTES = 1024 * 1024


class _Answer:
    """A response whose body is still to be read."""

    def __init__(self, wire: Wire, method: str) -> None:
        head = wire.read_head()
        while head is not None and head.status < 200:
            head = wire.read_head()
        if head is None:
            raise MalformedError("no answer")
        self.head = head
        self.framing = response_framing(head, method)
        self.body = BodyReader(wire, self.framing)
        self.persistent = head.persistent and self.framing.kind != "close"

    def drain(self) -> None:
        for _ in self.body:
            pass


class ProxiedRequest:
    """One request. `run` is called once; True means that the connection may carry another."""

    def __init__(
        self, controls: Controls, ledger: Ledger, client: Wire, upstream: Upstream, head: Head
    ) -> None:
        self._controls = controls
        self._ledger = ledger
        self._client = client
        self._upstream = upstream
        self._head = head
        parts = head.start.decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise MalformedError("a request line that is none")
        self._method = parts[0]
        self._framing = request_framing(head)
        self._body = BodyReader(client, self._framing)
        self._invited = "100-continue" not in head.tokens("expect") or self._body.finished
        self._ticket, self._facts = ledger.begin(
            *classify(parts[0], parts[1], head.get), head.by_name()
        )
        self._bodies = BodyFaults(controls, upstream, self._strike)

    def run(self) -> bool:
        """Pass the request on, or do to it what the plan says.

        Raises:
            CutError: the connection must be cut now.
            StoppedError, MalformedError, OSError: it has no use any more.
        """
        controls = self._controls
        try:
            fault = controls.plan.decide(self._facts, seed=controls.seed)
            if controls.down:
                fault = Fault(kind=Kind.DOWN)
            controls.pause(controls.latency_s)
            return self._deal(fault)
        finally:
            self._ledger.end(self._ticket)

    def _deal(self, fault: Fault | None) -> bool:
        kind = None if fault is None else fault.kind
        if fault is None:
            return self._pass(None)
        if kind in (Kind.DOWN, Kind.DROP_BEFORE):
            self._strike(fault)
            raise CutError
        if kind is Kind.STATUS:
            return self._refuse(fault)
        if kind is Kind.LOSE_ANSWER:
            return self._lose_answer(fault)
        if kind in (Kind.DUPLICATE, Kind.HOLD):
            return self._with_kept_body(fault)
        if kind is Kind.STALL and fault.where == "before":
            self._strike(fault)
            self._controls.pause(fault.seconds)
        return self._pass(fault)

    def _strike(self, fault: Fault) -> None:
        self._ledger.note(self._ticket, fault=fault.kind)

    # --- the ways that a request can go --------------------------------------------------------

    def _pass(self, fault: Fault | None) -> bool:
        wire = self._upstream.wire()
        self._send(wire, self._request_pieces(fault))
        return self._relay(_Answer(wire, self._method), fault)

    def _refuse(self, fault: Fault) -> bool:
        self._strike(fault)
        if self._invited:  # else the client waits with its body for exactly this answer
            for _ in self._incoming():
                pass
        keep = self._head.persistent and self._body.finished
        self._ledger.note(self._ticket, status=fault.status)
        self._client.write(
            error_answer(
                fault.status,
                fault.error,
                body=fault.body,
                close=not keep,
                head_only=self._method == "HEAD",
            )
        )
        return keep

    def _lose_answer(self, fault: Fault) -> NoReturn:
        wire = self._upstream.wire()
        self._send(wire, self._request_pieces(None))
        # Only a whole answer shows that the server has done it.
        _Answer(wire, self._method).drain()
        self._strike(fault)
        raise CutError

    def _with_kept_body(self, fault: Fault) -> bool:
        """A held or doubled request; one whose body is too large to keep passes unharmed."""
        with SpooledTemporaryFile(max_size=KEPT_IN_MEMORY_BYTES) as file:
            incoming = self._incoming()
            size = 0
            if (self._framing.known_length or 0) <= KEPT_BYTES_MAX:
                for piece in incoming:
                    file.write(piece)
                    size += len(piece)
                    if size > KEPT_BYTES_MAX:
                        break
            if not self._body.finished:
                wire = self._upstream.wire()
                self._send(wire, chain(_again(file), incoming))
                return self._relay(_Answer(wire, self._method), None)
            self._strike(fault)
            if fault.kind is Kind.HOLD:
                self._controls.hold(self._facts.number)
                wire = self._upstream.wire()
                self._send(wire, _again(file))
                return self._relay(_Answer(wire, self._method), None)
            return self._twice(file, fault.answer)

    def _twice(self, file: IO[bytes], which: int) -> bool:
        first_wire = self._upstream.wire()
        self._send(first_wire, _again(file))
        first = _Answer(first_wire, self._method)
        # The second on a connection of its own: the first answer may be too large to keep.
        second_wire = self._upstream.another()
        try:
            self._send(second_wire, _again(file))
            second = _Answer(second_wire, self._method)
            if which == 1:
                second.drain()
                return self._relay(first, None)
            first.drain()
            if not first.persistent:
                self._upstream.close()
            return self._relay(second, None, kept_wire=False)
        finally:
            second_wire.close()

    # --- the request ---------------------------------------------------------------------------

    def _incoming(self) -> Iterator[bytes]:
        """The body as it comes from the client, invited and counted."""
        if not self._invited:
            self._invited = True
            self._client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        for piece in self._body:
            self._ledger.note(self._ticket, in_bytes=len(piece))
            yield piece

    def _request_pieces(self, fault: Fault | None) -> Iterator[bytes]:
        decoded = self._head.get("x-amz-decoded-content-length")
        signed_chunks = "aws-chunked" in self._head.tokens("content-encoding")

        def place(first: bytes, fraction: float) -> int:
            if signed_chunks and decoded is not None and decoded.isdigit():
                # Past the first chunk's size, so that it is the payload that is struck.
                return first.find(b"\r\n") + 2 + int(int(decoded) * fraction)
            return int((self._framing.known_length or len(first)) * fraction)

        return self._bodies.of_request(self._incoming(), fault, place)

    def _send(self, wire: Wire, pieces: Iterator[bytes]) -> None:
        """Write the request to the server; a server that answers early may stop reading it."""
        dropped = ["connection", "keep-alive", "proxy-connection", "expect"]
        if self._framing.kind == "chunked":
            dropped.append("content-length")
        writer = BodyWriter(wire, self._framing)
        listens = _succeeds(wire.write, self._head.without(*dropped).encode())
        for piece in pieces:  # read to the end in any case, for the client's connection's sake
            listens = listens and _succeeds(writer.write, piece)
        if listens and _succeeds(writer.finish, self._body.trailer):
            self._ledger.note(self._ticket, deliveries=1)

    # --- the response --------------------------------------------------------------------------

    def _relay(self, answer: _Answer, fault: Fault | None, *, kept_wire: bool = True) -> bool:
        head = answer.head.without("connection", "keep-alive")
        if answer.framing.kind == "chunked":
            head = head.without("content-length")
        pieces = self._response_pieces(answer, fault)
        if fault is not None and fault.kind is Kind.TRUNCATE and fault.fixed_length:
            length = answer.framing.known_length
            if length:
                self._strike(fault)  # before the head: with it the client may have all it gets
                length = int(length * fault.fraction)
                head = head.without("content-length").plus("Content-Length", str(length))
        keep = self._head.persistent and answer.framing.kind != "close"
        if not keep:
            head = head.plus("Connection", "close")
        self._ledger.note(self._ticket, status=answer.head.status)
        self._client.write(head.encode())
        writer = BodyWriter(self._client, answer.framing)
        for piece in pieces:
            self._ledger.note(self._ticket, out_bytes=len(piece))
            writer.write(piece)
        writer.finish(answer.body.trailer)
        if kept_wire and not answer.persistent:
            self._upstream.close()
        return keep

    def _response_pieces(self, answer: _Answer, fault: Fault | None) -> Iterator[bytes]:
        def place(first: bytes, fraction: float) -> int:
            return int((answer.framing.known_length or len(first)) * fraction)

        return self._bodies.of_response(iter(answer.body), fault, place)


def _succeeds(write: Callable[[bytes], None], data: bytes) -> bool:
    """Whether the server took it. Why it did not shows when its answer is read."""
    try:
        write(data)
    except OSError:
        return False
    return True


def _again(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(PIECE_BYTES):
        yield piece
