"""What the two ends of a channel say to each other over a Flight stream, beside the rows.

The sender opens the stream with ``do_exchange``: as quick as ``do_put``, and pyarrow can give up
only the former while somebody waits in it. Its descriptor is a `Hello`, its token a header. The
receiver answers with a `Welcome`, or an `ErrorReply` and the stream's end. From then on the sender
sends `Rows` (with a record batch), `Signal` (an event) and now and then `Beat`; the receiver
`Grant`, `Beat`, and `ErrorReply` when it closes the stream. Elements are numbered from 0, so that a
lost or repeated one is noticed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from snapshot.barriers.barrier import Event
from statebackend.errors import PeerLostError
from statebackend.rpc.envelope import Decoder, ErrorReply

__all__ = [
    "BYTES_MAX",
    "PROTOCOL",
    "Address",
    "Beat",
    "Down",
    "Grant",
    "Hello",
    "Identity",
    "Rows",
    "Signal",
    "Up",
    "Welcome",
    "brief",
    "decode_down",
    "decode_hello",
    "decode_up",
    "peer_lost",
]

PROTOCOL: Final = 2
"""Raised with every change that the other end would not understand."""

BYTES_MAX: Final = 64 << 10
"""No message beside the rows is larger."""


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


class Signal(msgspec.Struct, frozen=True, array_like=True, tag=2):
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


Up = Rows | Signal | Beat
Down = Welcome | Grant | ErrorReply | Beat

decode_hello: Final = Decoder[Hello](Hello, limit_bytes=BYTES_MAX)
decode_up: Final = Decoder[Up](Up, limit_bytes=BYTES_MAX)
"""What a sender said."""
decode_down: Final = Decoder[Down](Down, limit_bytes=BYTES_MAX)
"""What a receiver said."""


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
