"""Rows that barriers have overtaken: a part of an unaligned snapshot, put back where they were.

They lie in a list of operator state of the subtask that kept them: what lay in front of it
(``in``), and what it had emitted and not sent (``out``). A keyed subtask's list is in the record of
its vertex, beside the lists that its processor declares, under a name that none of those can have;
a source's is among its lists in the driver. An element is MessagePack around an Arrow IPC stream,
and says which channel it is of: there it is put back, and nowhere else.

Subtasks of one vertex need not have come to the same watermark where rows were overtaken, and each
must go on from its own: else rows that were in time are late. So it is in that list too (``at``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.types import BinaryType, StructType

from snapshot.barriers.pending_checkpoints import check_in_flight
from statebackend.errors import CorruptionError, StateMismatchError, UnsupportedFormatError
from statebackend.operators.operator_snapshot import StoredOperatorState
from statebackend.schema.codec import codec_for
from statebackend.state.operator_state import OperatorList, StoredList

__all__ = [
    "ELEMENT",
    "FLIGHT_BYTES",
    "ChannelQueue",
    "Flight",
    "Overtaken",
    "Place",
    "batches_of",
    "check_lane",
    "decode",
    "taken_out",
    "watermark",
    "with_elements",
]

FORMAT_VERSION: Final = 1
_NAME: Final = "\0in_flight"  # no declared state's name holds a NUL

FLIGHT_BYTES: Final = 16 << 20
"""More than that in an output is not to be overtaken: it would go through the driver."""

ELEMENT: Final = StructType().add("element", BinaryType())
"""The schema of a list of such rows."""


@dataclass(frozen=True, order=True)
class ChannelQueue:
    """A channel, as one of its ends has it.

    Attributes:
        direction: ``in`` or ``out``, of this end.
        vertex, other: the subtask at the other end.
        edge: its number among the receiver's inputs.
    """

    direction: str
    vertex: str
    edge: int
    other: int


class Overtaken(msgspec.Struct, frozen=True, array_like=True):
    """An element of the list.

    Attributes:
        direction, vertex, edge, other: as of `ChannelQueue`; or ``at``, and ``at_ms`` is all there
            is.
        subtask: this end's. parallelism: of the job.
        schema: of the rows, as their sender's vertex has it (JSON).
        rows: an Arrow IPC stream.
    """

    v: int
    direction: str
    vertex: str
    edge: int
    other: int
    subtask: int
    parallelism: int
    schema: str
    rows: bytes
    at_ms: int = 0

    @property
    def lane(self) -> ChannelQueue:
        """Where they were."""
        return ChannelQueue(self.direction, self.vertex, self.edge, self.other)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Overtaken)


@dataclass(frozen=True)
class Place:
    """Who keeps rows: a subtask, at the job's parallelism; ``schemas``: by vertex, as JSON."""

    vertex: str
    subtask: int
    parallelism: int
    schemas: Mapping[str, str] = field(default_factory=dict)

    def schema_of(self, lane: ChannelQueue) -> str:
        """Of the rows in a lane: its sender's."""
        return self.schemas.get(lane.vertex if lane.direction == "in" else self.vertex, "")


class Flight:
    """What one subtask keeps for one attempt."""

    def __init__(self) -> None:
        self._kept: dict[ChannelQueue, list[pa.RecordBatch]] = {}
        self.size_bytes = 0
        """Of the rows."""

    def add(self, lane: ChannelQueue, rows: Iterable[pa.RecordBatch]) -> None:
        """Rows of a lane, behind those that were added before."""
        for batch in rows:
            self._kept.setdefault(lane, []).append(batch)
            self.size_bytes += batch.nbytes

    def elements(self, place: Place) -> list[bytes]:
        """As they are stored."""
        return [
            _encoded(lane, place, schema=place.schema_of(lane), rows=_stream(rows))
            for lane, rows in sorted(self._kept.items())
        ]


def watermark(place: Place, at_ms: int) -> bytes:
    """The element that says where a subtask's watermark stood."""
    return _encoded(ChannelQueue("at", "", 0, 0), place, at_ms=at_ms)


def _encoded(
    lane: ChannelQueue, place: Place, *, schema: str = "", rows: bytes = b"", at_ms: int = 0
) -> bytes:
    made = Overtaken(
        FORMAT_VERSION,
        lane.direction,
        lane.vertex,
        lane.edge,
        lane.other,
        place.subtask,
        place.parallelism,
        schema,
        rows,
        at_ms,
    )
    return _ENCODER.encode(made)


def _stream(batches: Sequence[pa.RecordBatch]) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    found: bytes = out.getvalue().to_pybytes()
    return found


# --- and back ------------------------------------------------------------------------------------


def decode(vertex: str, elements: Iterable[bytes], parallelism: int) -> list[Overtaken]:
    """The elements that a vertex's list holds, for a run at a parallelism.

    Raises:
        CorruptionError: they are nothing of the kind.
        UnsupportedFormatError: a later release wrote them.
        RescaleError: they are rows, and the parallelism was another.
    """
    found = []
    for element in elements:
        try:
            one = _DECODER.decode(element)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _damaged(vertex, error) from error
        if one.v != FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"Rows in flight at {vertex!r} have the format {one.v}.",
                todo=f"This release reads format {FORMAT_VERSION}: use the one that wrote it.",
            )
        found.append(one)
    for one in found:
        if one.direction != "at":
            check_in_flight([vertex], {vertex: one.parallelism}, {vertex: parallelism})
    return [one for one in found if one.parallelism == parallelism]


def batches_of(vertex: str, one: Overtaken) -> list[pa.RecordBatch]:
    """An element's rows.

    Raises:
        CorruptionError: they do not read.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(one.rows)) as reader:
            batches = list(reader)
        for batch in batches:
            batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(vertex, error) from error
    return batches


def check_lane(place: Place, one: Overtaken, known: Iterable[ChannelQueue]) -> None:
    """Whether there is still the channel that rows are to be put back into.

    Raises:
        StateMismatchError: there is not, or its rows have other columns now.
    """
    lane, what = one.lane, ""
    if lane not in known or one.subtask != place.subtask:
        what = f"the channel that they were in ({lane.direction}, {lane.vertex!r}) is gone"
    elif one.schema != place.schema_of(lane):
        what = "the columns of that channel were changed since"
    if what:
        raise StateMismatchError(
            f"The checkpoint is unaligned: it holds rows in flight at {place.vertex!r}, and "
            f"{what}.",
            todo="Start the job as it was, without alignment_timeout_s=, have a checkpoint "
            "complete, and change it then.",
        )


def _damaged(vertex: str, error: Exception) -> CorruptionError:
    return CorruptionError(
        f"The rows in flight at {vertex!r} in the checkpoint do not read: {error}.",
        todo="Restore the checkpoint from another copy of the store.",
    )


# --- in a keyed vertex's record ------------------------------------------------------------------


def with_elements(stored: StoredOperatorState, elements: Iterable[bytes]) -> StoredOperatorState:
    """Operator state, and such a list with it."""
    codec = codec_for(ELEMENT)
    rows = OperatorList(_NAME, codec)
    rows.update([(one,) for one in elements])
    made = StoredList("split", ELEMENT.json(), codec.version, rows.stored())
    return replace(stored, lists={**stored.lists, _NAME: made})


def taken_out(stored: StoredOperatorState) -> tuple[StoredOperatorState, list[bytes]]:
    """Operator state as processors know it, and the elements of that list."""
    kept = stored.lists.get(_NAME)
    if kept is None:
        return stored, []
    rows = OperatorList(_NAME, codec_for(ELEMENT), kept.rows).get()
    others = {name: one for name, one in stored.lists.items() if name != _NAME}
    return replace(stored, lists=others), [bytes(row[0]) for row in rows]
