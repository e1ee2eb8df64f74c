"""What a slot and the driver say to each other beside begins: plain structs in MessagePack.

A *slot* is one process with a subtask of every vertex. It registers, then polls for commands, which
are numbered so that a lost answer is asked for again, and reports what happens in it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from snapshot.barriers.barrier import Barrier
from snapshot.protocol.messages import AckRequest
from statebackend.continuous.sources.split_assignment import Assignment
from statebackend.errors import StateBackendError
from statebackend.rpc.envelope import Decoder, ErrorReply

__all__ = [
    "Aborted",
    "Acked",
    "AtEnd",
    "Command",
    "Commands",
    "Completed",
    "Copy",
    "Declined",
    "Deploy",
    "Event",
    "Failed",
    "Grant",
    "Peer",
    "Poll",
    "Register",
    "Report",
    "Running",
    "SplitAsked",
    "SplitEnded",
    "Stop",
    "Trigger",
    "decode_commands",
    "decode_poll",
    "decode_register",
    "decode_report",
]


class Peer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A slot's exchange server.

    Attributes:
        certificate: that it shows, PEM; b"": it speaks no TLS.
    """

    location: str
    certificate: bytes = b""


# --- from the driver -----------------------------------------------------------------------------


class Deploy(msgspec.Struct, frozen=True, kw_only=True, tag="deploy"):
    """Every slot is there: open the states, connect, run.

    Attributes:
        subtask: the index of the subtasks that the slot has, one of every vertex.
        peers: the slots, by subtask.
        epoch: that the run begins with. stamp_ms: its stamp.
        watermarks_ms: of keyed vertices, where they stood in the restored checkpoint; one that is
            not there begins without.
        in_flight: by source, what lay in the output of its subtask in this slot in the restored
            checkpoint (see `Overtaken`).
    """

    subtask: int
    peers: list[Peer]
    epoch: int
    stamp_ms: int
    watermarks_ms: dict[str, int] = {}
    in_flight: dict[str, list[bytes]] = {}


class Trigger(msgspec.Struct, frozen=True, kw_only=True, tag="trigger"):
    """A checkpoint has begun: sources send its barrier."""

    barrier: Barrier


class Completed(msgspec.Struct, frozen=True, kw_only=True, tag="completed"):
    """A checkpoint is complete and its output is committed; the next epoch has this stamp."""

    checkpoint: int
    epoch: int
    next_stamp_ms: int


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag="aborted"):
    """A checkpoint was given up."""

    checkpoint: int


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """The answer to a request for a split.

    Attributes:
        number: of the request.
        assignment: None: none now, or (``over``) none ever again.
        held_back: of a source whose splits are read by turns: there are some that nobody reads yet,
            and no watermark may run ahead of them.
    """

    vertex: str
    subtask: int
    number: int
    assignment: Assignment | None
    over: bool
    held_back: bool = False


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The run is over: end, and let go of everything.

    Attributes:
        job_ended: its last checkpoint is complete; what then fails to close is reported.
    """

    job_ended: bool = False


Command = Deploy | Trigger | Completed | Aborted | Grant | Stop


class Commands(msgspec.Struct, frozen=True, kw_only=True):
    """Commands of these numbers: ``first``, ``first + 1``, ..."""

    first: int
    commands: list[Command]


# --- from a slot ---------------------------------------------------------------------------------


class Copy(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A copy of a subtask's state on a host.

    Attributes:
        epoch: the newest of which something is there, as far as a look from outside says; -1: that
            says nothing.
    """

    operator: str
    key_group_start: int
    key_group_end: int
    epoch: int


class Register(msgspec.Struct, frozen=True, kw_only=True):
    """A slot is there.

    Attributes:
        slot: its number among Spark's tasks, by which the driver knows it.
        peer: how others reach it. copies: what it sees on its host.
    """

    slot: int
    peer: Peer
    host: str
    executor: str
    pid: int
    copies: list[Copy] = []


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """What is there for the slot from number ``first`` on; waits ``wait_s`` for it."""

    slot: int
    first: int
    wait_s: float


class Running(msgspec.Struct, frozen=True, kw_only=True, tag="running"):
    """A subtask has its state and its channels."""

    vertex: str
    subtask: int


class SplitAsked(msgspec.Struct, frozen=True, kw_only=True, tag="split_asked"):
    """A source's subtask wants a split; see `SplitAssigner.request`."""

    vertex: str
    subtask: int
    number: int


class SplitEnded(msgspec.Struct, frozen=True, kw_only=True, tag="split_ended"):
    """A source's subtask has read a split to its end."""

    vertex: str
    subtask: int
    split: str


class Acked(msgspec.Struct, frozen=True, kw_only=True, tag="acked"):
    """A subtask's part of a checkpoint is safe.

    Attributes:
        ended: it was taken after the subtask had come to its end.
        ack: of a keyed subtask, for its operator's record.
        positions: of a source's: what it is reading.
        in_flight: of a source's: rows in its output that the barrier has overtaken.
        prepared: by the uid of each sink behind the subtask, all that is not known to be committed.
        timings_ms: start_delay, alignment, sync and async.
        figures: counts by name, such as alignment_bytes.
    """

    vertex: str
    subtask: int
    checkpoint: int
    ended: bool
    ack: AckRequest | None = None
    positions: list[Assignment] = []
    in_flight: list[bytes] = []
    prepared: dict[str, list[bytes]] = {}
    timings_ms: dict[str, float] = {}
    figures: dict[str, int] = {}


class Declined(msgspec.Struct, frozen=True, kw_only=True, tag="declined"):
    """A subtask has no part for a checkpoint, and why."""

    vertex: str
    subtask: int
    checkpoint: int
    newer: bool
    why: str


class AtEnd(msgspec.Struct, frozen=True, kw_only=True, tag="at_end"):
    """A subtask's input has ended, and all that was to be done then is done."""

    vertex: str
    subtask: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A subtask failed, and its slot with it.

    Attributes:
        closing: it failed to close after the job had ended.
    """

    vertex: str
    subtask: int
    reply: ErrorReply
    closing: bool = False

    def error(self) -> StateBackendError:
        """As it was raised; the traceback is a note."""
        error = self.reply.error()
        error.add_note(f"In {self.vertex}/{self.subtask}:\n{self.reply.trace}")
        return error


Event = Running | SplitAsked | SplitEnded | Acked | Declined | AtEnd | Failed


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a slot, in order.

    Attributes:
        number: of the report, by slot from 0 on. One whose answer was lost is sent again.
    """

    slot: int
    number: int
    events: list[Event]


# --- bytes ---------------------------------------------------------------------------------------

decode_commands: Final = Decoder[Commands](Commands)
decode_poll: Final = Decoder[Poll](Poll)
decode_register: Final = Decoder[Register](Register)
decode_report: Final = Decoder[Report](Report)
