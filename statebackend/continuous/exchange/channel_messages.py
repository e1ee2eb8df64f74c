"""What the two ends of a channel say to each other over a Flight stream, beside the rows.

The sender opens the stream with ``do_exchange``: as quick as ``do_put``, and pyarrow can give up
only the former while somebody waits in it. Its descriptor is a `Hello`, its token a header. The
receiver answers with a `Welcome`, or a `Refusal` and the stream's end. From then on the sender
sends `Rows` (with a record batch), `Told` (an event) and now and then `Beat`; the receiver `Grant`,
`Beat`, and `Refusal` when it hangs up. Elements are numbered from 0, so that a lost or repeated one
is noticed.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from snapshot.barriers.barrier import Event
from statebackend.errors import PeerLostError, ProtocolError, StateBackendError, error_for_code

__all__ = [
    "BROKEN",
    "BYTES_MAX",
    "PROTOCOL",
    "TOKEN_HEADER",
    "Address",
    "Beat",
    "Down",
    "Grant",
    "Hello",
    "Identity",
    "Refusal",
    "Rows",
    "Told",
    "Up",
    "Welcome",
    "brief",
    "decode_as",
    "decode_down",
    "decode_up",
    "encode",
    "peer_lost",
]

T = TypeVar("T")

PROTOCOL: Final = 1
"""Raised with every change that the other end would not understand."""

TOKEN_HEADER: Final = "x-statebackend-exchange-token"

BYTES_MAX: Final = 64 << 10
"""No message beside the rows is larger."""

BROKEN: Final = (pa.ArrowException, flight.FlightError, OSError)
"""What pyarrow raises when a stream is no more."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which run of which job a process works for, and the secret that all of its processes know.

    Attributes:
        run: differs in each start or restart of the job.
        generation: the driver's, raised when another takes over.
        token: drawn by the driver for this run; in no log.
    """

    job: str
    run: str
    generation: int
    token: str

    def __repr__(self) -> str:
        return f"Identity(job={self.job!r}, run={self.run!r}, generation={self.generation})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # else rich shows all fields
        return [("job", self.job), ("run", self.run), ("generation", self.generation)]


class Address(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A channel, by its receiving end."""

    vertex: str
    subtask: int
    channel: int

    def __str__(self) -> str:
        return f"channel {self.channel} of {self.vertex}/{self.subtask}"


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who calls, and for which channel; None: only to see whether somebody is there."""

    protocol: int
    job: str
    run: str
    generation: int
    address: Address | None


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Goes with a record batch."""

    number: int
    cost: int


class Told(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An event."""

    number: int
    cost: int
    event: Event


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Still there."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The stream is admitted, with so much credit."""

    capacity_bytes: int


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """So much credit more."""

    freed_bytes: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The stream is not admitted, or no longer read: a typed error."""

    code: str
    what: str
    todo: str

    @classmethod
    def of(cls, error: StateBackendError) -> Refusal:
        """As it goes over the wire."""
        return cls(error.code, error.what, error.todo)

    def error(self) -> StateBackendError:
        """As it is raised."""
        return error_for_code(self.code, self.what, self.todo)


Up = Rows | Told | Beat
Down = Welcome | Grant | Refusal | Beat

_ENCODER: Final = msgspec.msgpack.Encoder()
_UP: Final = msgspec.msgpack.Decoder(Up)
_DOWN: Final = msgspec.msgpack.Decoder(Down)


def encode(message: Hello | Up | Down) -> bytes:
    """As it goes over the wire."""
    return _ENCODER.encode(message)


def decode_up(metadata: pa.Buffer | None) -> Up:
    """What a sender said.

    Raises:
        ProtocolError: it is nothing of the kind.
    """
    message: Up = _decoded(_UP, metadata)
    return message


def decode_down(metadata: pa.Buffer | None) -> Down:
    """What a receiver said.

    Raises:
        ProtocolError: it is nothing of the kind.
    """
    message: Down = _decoded(_DOWN, metadata)
    return message


def decode_as(kind: type[T], data: bytes | pa.Buffer | None) -> T:
    """One message of a kind.

    Raises:
        ProtocolError: it is nothing of the kind.
    """
    return _decoded(msgspec.msgpack.Decoder(kind), data)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: Any) -> T:
    try:
        view = memoryview(data if data is not None else b"")
        if view.nbytes > BYTES_MAX:
            raise msgspec.DecodeError(f"{view.nbytes} bytes")
        return decoder.decode(view)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"A malformed message came in a channel ({error}).",
            todo="Install the same statebackend release on driver and executors.",
        ) from error


def brief(error: Exception) -> str:
    """What pyarrow says of a broken stream, without gRPC's inner life."""
    return str(error).partition(". gRPC client debug context")[0].partition(". Detail")[0]


def peer_lost(what: str) -> PeerLostError:
    """The other end of a channel is not there any more, as said in ``what``."""
    return PeerLostError(
        what,
        todo="The job goes on from its last complete checkpoint; see the log of that process, and "
        "that executors reach each other.",
    )
