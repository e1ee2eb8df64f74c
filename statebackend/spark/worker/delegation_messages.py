"""What two workers say about a delegated epoch: the request, Arrow batches, and few words.

A frame is a letter, the length (4 bytes, big-endian), and that many bytes. Nothing is pickled.
Every few seconds each side says that it is alive; one that is frozen is not waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from recovery.local.local_sockets import connect
from snapshot.protocol.messages import Use
from statebackend import system
from statebackend.errors import ProtocolError
from statebackend.rpc.envelope import Decoder, ErrorReply, encode
from statebackend.rpc.session_endpoint import Credentials, Endpoint
from statebackend.spark.worker.batch_context import EpochContext

__all__ = ["ConnectionClosed", "Failed", "Frames", "Request"]

_HEAD: Final = struct.Struct(">cI")
_TEXT, _YES, _NO, _BATCH, _END, _FAILED = b"T", b"Y", b"N", b"B", b"E", b"X"
_ALIVE: Final = b"A"
_TEXT_BYTES: Final = 1 << 20


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that looks for a callee. Nothing secret is in it: the callee has its credentials.

    ``endpoint``: as its local property. ``daemon``: the process that makes this executor's workers.
    ``store_path``: the path of the store; a smaller one than ``at_least_bytes`` is not worth it.
    """

    endpoint: str
    daemon: int
    uid: str
    executor: str
    store_path: str
    at_least_bytes: int
    epoch: int
    query_id: str
    attempt: int
    use: Use = Use()

    @classmethod
    def of(cls, uid: str, store_path: Path, context: EpochContext, at_least_bytes: int) -> Request:
        """Of an attempt in this process."""
        return cls(
            endpoint=context.endpoint.to_property(),
            daemon=os.getppid(),
            uid=uid,
            executor=system.executor_name(),
            store_path=str(store_path),
            at_least_bytes=at_least_bytes,
            epoch=context.epoch,
            query_id=context.query_id,
            attempt=context.attempt,
            use=context.use,
        )

    def context(self, credentials: Credentials) -> EpochContext:
        """The attempt's place."""
        return EpochContext(
            epoch=self.epoch,
            query_id=self.query_id,
            attempt=self.attempt,
            use=self.use,
            endpoint=Endpoint.from_property(self.endpoint, credentials),
        )

    @classmethod
    def read(cls, data: bytes) -> Request:
        """What a caller has sent. Raises ProtocolError if it is none."""
        return _request(data)


_request: Final = Decoder[Request](Request)


class ConnectionClosed(Exception):
    """The other side is gone or silent, or sends what it must not."""


_failure: Final = Decoder[ErrorReply](ErrorReply)


class Failed(Exception):
    """The epoch raised on the other side."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.what)
        self._reply = reply

    def error(self) -> Exception:
        """What it raised, as far as it is ours; how it came to it is a note."""
        reply = self._reply
        found: Exception = reply.error() if reply.code else RuntimeError(reply.what)
        found.add_note(f"In the worker that has the store open:\n\n{reply.trace}")
        return found


class Frames:
    """One connection. Whatever fails on it is `ConnectionClosed`: it is of no use any more."""

    def __init__(self, connection: socket.socket, timeout_s: float | None = None) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        connection.settimeout(timeout_s)

    @property
    def timeout_s(self) -> float | None:
        """For each word."""
        return self._connection.gettimeout()

    @timeout_s.setter
    def timeout_s(self, seconds: float | None) -> None:
        self._connection.settimeout(seconds)

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def connect(self, path: Path) -> None:
        """Connect to a process of this user that listens there.

        Raises:
            OSError: nobody listens. ConnectionClosed: another user does.
        """
        if not connect(self._connection, path):
            raise ConnectionClosed("a process of another user listens there")

    def hang_up(self) -> None:
        """End it, also for a thread of this process that waits in it."""
        with contextlib.suppress(OSError):  # it is not connected, or not any more
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def send_text(self, text: bytes) -> None:
        """Some bytes."""
        self._send(_TEXT, text)

    def text(self) -> bytes:
        """The other side's bytes."""
        return bytes(self._take(_TEXT))

    def send_flag(self, yes: bool) -> None:
        """Yes or no."""
        self._send(_YES if yes else _NO)

    def receive_flag(self) -> bool:
        """What the other side says."""
        kind, _ = self._receive()
        if kind not in (_YES, _NO):
            raise ConnectionClosed(f"neither yes nor no: {kind!r}")
        return kind == _YES

    def alive(self) -> None:
        """Say that this process runs, whatever the epoch does. It never waits."""
        if not self._sending.acquire(blocking=False):
            return  # something is being sent
        try:
            # With a timeout of its own a socket waits for room, whatever MSG_DONTWAIT says.
            room = select.poll()
            room.register(self._connection, select.POLLOUT)
            if room.poll(0):
                # A Unix socket takes so few bytes whole or not at all.
                self._connection.send(_HEAD.pack(_ALIVE, 0), socket.MSG_DONTWAIT)
        except (OSError, ValueError):  # the other side takes nothing just now, or is gone
            pass
        finally:
            self._sending.release()

    def send_batch(self, batch: pa.RecordBatch) -> None:
        """A record batch, with its schema."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self._send(_BATCH, memoryview(sink.getvalue()))

    def end(self) -> None:
        """No batch follows."""
        self._send(_END)

    def batch(self) -> pa.RecordBatch | None:
        """The next one; None: there is none.

        Raises:
            Failed: the other side did.
        """
        kind, data = self._receive()
        if kind == _END:
            return None
        if kind == _FAILED:
            try:
                raise Failed(_failure(data))
            except ProtocolError as error:
                raise ConnectionClosed(str(error)) from error
        if kind != _BATCH:
            raise ConnectionClosed(f"no batch: {kind!r}")
        try:
            with pa.ipc.open_stream(data) as reader:
                found: pa.RecordBatch = reader.read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise ConnectionClosed(f"a batch does not read ({error})") from error
        return found

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All up to the end."""
        while (batch := self.batch()) is not None:
            yield batch

    def fail(self, error: BaseException) -> None:
        """Say why no more comes, and wait until the other side has heard it."""
        # Within what a socket takes unread: the other side may still be sending its input.
        self._send(_FAILED, encode(ErrorReply.of(error, traced=error)))
        # Closed with input unread, the connection would be reset.
        while self._receive():
            pass

    def _take(self, wanted: bytes) -> pa.Buffer:
        kind, data = self._receive(limit_bytes=_TEXT_BYTES)
        if kind != wanted:
            raise ConnectionClosed(f"{kind!r} instead of {wanted!r}")
        return data

    def _send(self, kind: bytes, data: bytes | memoryview = b"") -> None:
        try:
            with self._sending:
                self._connection.sendall(_HEAD.pack(kind, len(data)))
                if data:
                    self._connection.sendall(data)
        except (OSError, struct.error) as error:
            # Also where the connection lives: the other side must not wait for the rest.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
            raise ConnectionClosed(str(error)) from error

    def _receive(self, limit_bytes: int = 1 << 32) -> tuple[bytes, pa.Buffer]:
        kind = _ALIVE
        while kind == _ALIVE:
            kind, size_bytes = _HEAD.unpack(memoryview(self._exactly(_HEAD.size)))
        if size_bytes > limit_bytes:
            raise ConnectionClosed(f"{size_bytes} bytes at once")
        return kind, self._exactly(size_bytes)

    def _exactly(self, size_bytes: int) -> pa.Buffer:
        data = pa.allocate_buffer(size_bytes)
        left = memoryview(data)
        try:
            while left:
                count = self._connection.recv_into(left)
                if not count:
                    raise ConnectionClosed("the connection ended")
                left = left[count:]
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        return data
