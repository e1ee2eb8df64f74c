"""As much of HTTP/1.1 as a proxy needs that must be able to break it.

No library: they all insist on well-formed messages, and this is where malformed ones are made.
Heads are passed on byte for byte where they can be, because the signature of a request covers them.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "PIECE_BYTES",
    "BodyReader",
    "BodyWriter",
    "Framing",
    "Head",
    "MalformedError",
    "Wire",
    "request_framing",
    "response_framing",
]

PIECE_BYTES = 64 * 1024
HEAD_LIMIT_BYTES = 64 * 1024
LINE_LIMIT_BYTES = 8 * 1024
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class MalformedError(Exception):
    """The other side does not speak HTTP/1.1, or stopped in the middle of a message."""


@dataclass(frozen=True)
class Head:
    """A start line and header fields, names as they were written."""

    start: bytes
    fields: tuple[tuple[bytes, bytes], ...]

    def get(self, name: str) -> str | None:
        """A field's value by its lower-case name, repeated ones joined by commas."""
        wanted = name.encode("latin-1")
        found = [value for key, value in self.fields if key.lower() == wanted]
        return b", ".join(found).decode("latin-1") if found else None

    def by_name(self) -> dict[str, str]:
        """Every field by its lower-case name, as `get` gives it."""
        names = {key.lower().decode("latin-1") for key, _ in self.fields}
        return {name: self.get(name) or "" for name in names}

    def tokens(self, name: str) -> frozenset[str]:
        """The comma-separated tokens of a field, lower-case."""
        return frozenset(part.strip().lower() for part in (self.get(name) or "").split(","))

    def without(self, *names: str) -> Head:
        """A copy that lacks these fields (lower-case names)."""
        dropped = {name.encode("latin-1") for name in names}
        return Head(self.start, tuple(f for f in self.fields if f[0].lower() not in dropped))

    def plus(self, name: str, value: str) -> Head:
        """A copy with one more field."""
        field = (name.encode("latin-1"), value.encode("latin-1"))
        return Head(self.start, (*self.fields, field))

    def encode(self) -> bytes:
        """The bytes on the wire, the empty line included."""
        lines = (self.start, *(name + b": " + value for name, value in self.fields))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def persistent(self) -> bool:
        """Whether the sender lets the connection live on after this message."""
        if b"HTTP/1.0" in self.start:
            return False
        return "close" not in self.tokens("connection")

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.start.split(b" ", 2)[1])


@dataclass(frozen=True)
class Framing:
    """How a body's end is known: by its length, by chunks, or by the connection's end."""

    kind: str  # "length", "chunked" or "close"
    length: int = 0

    @property
    def known_length(self) -> int | None:
        """In bytes; None if only its end will tell."""
        return self.length if self.kind == "length" else None


def request_framing(head: Head) -> Framing:
    """Of the body that follows this request's head. Raises `MalformedError`."""
    if head.get("transfer-encoding") is not None:
        return _chunked(head)
    return Framing("length", _content_length(head) or 0)


def response_framing(head: Head, method: str) -> Framing:
    """Of the body that follows this answer to a request of that method. Raises `MalformedError`."""
    if method == "HEAD" or head.status in (204, 304) or head.status < 200:
        return Framing("length", 0)
    if head.get("transfer-encoding") is not None:
        return _chunked(head)
    length = _content_length(head)
    return Framing("close") if length is None else Framing("length", length)


def _chunked(head: Head) -> Framing:
    if head.tokens("transfer-encoding") != {"chunked"}:
        raise MalformedError("a transfer encoding other than chunked")
    return Framing("chunked")


def _content_length(head: Head) -> int | None:
    text = head.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise MalformedError("a content length that is no number")
    return int(text)


class Wire:
    """One connection, read through a bounded buffer. Used by one thread at a time.

    `sever` alone may be called from another thread: it wakes whoever reads or writes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def read_head(self) -> Head | None:
        """The next message's head; None if the peer ended the connection before it.

        Raises:
            MalformedError, OSError
        """
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_LIMIT_BYTES:
                raise MalformedError("a head without end")
            if not self._fill():
                if self._buffer:
                    raise MalformedError("half a head")
                return None
        text = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return _parse_head(text)

    def read_some(self, limit: int) -> bytes:
        """At least one byte and at most `limit`; raises `MalformedError` at the end."""
        if not self._buffer and not self._fill():
            raise MalformedError("half a body")
        piece = bytes(self._buffer[:limit])
        del self._buffer[: len(piece)]
        return piece

    def read_rest(self) -> bytes:
        """Up to a piece; empty when the peer has ended the connection."""
        if not self._buffer and not self._fill():
            return b""
        return self.read_some(PIECE_BYTES)

    def read_line(self) -> bytes:
        """Up to the next CRLF, without it. Raises `MalformedError`."""
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > LINE_LIMIT_BYTES or not self._fill():
                raise MalformedError("a line without end")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def write(self, data: bytes) -> None:
        """All of it. Raises OSError."""
        self._sock.sendall(data)

    def is_stale(self) -> bool:
        """Whether an idle connection was ended, or spoke out of turn."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0) or self._buffer)

    def sever(self) -> None:
        """End both directions, so that nobody waits for this connection any more."""
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: it would take the TLS state away from under the reader.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End it in order: what was written still arrives."""
        with contextlib.suppress(OSError, ValueError):
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.settimeout(0)  # say goodbye, but do not wait for the other's
                self._sock.unwrap()
            else:
                self._sock.shutdown(socket.SHUT_WR)
        self._sock.close()

    def abandon(self) -> None:
        """End it as a dying peer does: what was written arrives, TLS says no goodbye."""
        self.sever()
        self._sock.close()

    def reset(self) -> None:
        """End it with a TCP reset."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def _fill(self) -> bool:
        data = self._sock.recv(PIECE_BYTES)
        self._buffer += data
        return bool(data)


def _parse_head(text: bytes) -> Head:
    start, *lines = text.lstrip(b"\r\n").split(b"\r\n")
    if start.count(b" ") < 2 and not re.fullmatch(rb"HTTP/1\.[01] [0-9]{3}", start):
        raise MalformedError("a start line without its parts")
    if start.startswith(b"HTTP/") and not re.match(rb"HTTP/1\.[01] [1-5][0-9]{2}( |$)", start):
        raise MalformedError("a status line that is none")
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise MalformedError("a header field without a name")
        fields.append((name, value.strip()))
    return Head(start, tuple(fields))


class BodyReader:
    """The pieces of one body, each of at most 64 KiB, without what frames them.

    Attributes:
        trailer: the lines after the last chunk; empty until the pieces are read to the end.
        finished: whether they were.
    """

    def __init__(self, wire: Wire, framing: Framing) -> None:
        self._wire = wire
        self._framing = framing
        self.trailer = b""
        self.finished = framing.known_length == 0

    def __iter__(self) -> Iterator[bytes]:
        """Read on. Raises `MalformedError` or OSError where the body stops early."""
        if self._framing.kind == "length":
            yield from self._exactly(self._framing.length)
        elif self._framing.kind == "chunked":
            yield from self._chunks()
        else:
            while piece := self._wire.read_rest():
                yield piece
        self.finished = True

    def _exactly(self, length: int) -> Iterator[bytes]:
        while length > 0:
            piece = self._wire.read_some(min(length, PIECE_BYTES))
            length -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while True:
            match = _CHUNK_SIZE.fullmatch(self._wire.read_line())
            if match is None:
                raise MalformedError("a chunk without a size")
            size = int(match[1], 16)
            if size == 0:
                break
            yield from self._exactly(size)
            if self._wire.read_line():
                raise MalformedError("a chunk longer than its size")
        lines = []
        while line := self._wire.read_line():
            lines.append(line + b"\r\n")
            if len(lines) > 100:
                raise MalformedError("a trailer without end")
        self.trailer = b"".join(lines)


class BodyWriter:
    """Writes a body the way that its head announced."""

    def __init__(self, wire: Wire, framing: Framing) -> None:
        self._wire = wire
        self._chunked = framing.kind == "chunked"

    def write(self, piece: bytes) -> None:
        """One piece. Raises OSError."""
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
        if piece:
            self._wire.write(piece)

    def finish(self, trailer: bytes = b"") -> None:
        """Say that this was all. Raises OSError."""
        if self._chunked:
            self._wire.write(b"0\r\n" + trailer + b"\r\n")
