"""Between micro-batches and continuous jobs: what of a state goes over from the one to the other.

Both keep keyed operators alike: states, timers, states that belong to no key, schemas. What they
do not share is where the sources stand. A query has that in Spark's checkpoint location. A
continuous job has it in its own log, as operators without a key with one subtask, and so it has
what its sinks had prepared.

Watermarks are counted differently, too. A query's follows from the largest event time that each
operator saw, less a delay; in a continuous job it comes with the rows, and an operator's record has
it as its largest event time, without a delay. So each goes over as the watermark that was in force:
by that one rows were late and timers fired.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from recovery.savepoints.state_at_epoch import Needed, StateAt
from snapshot.formats.record import Manifest
from statebackend.errors import CorruptionError, NotRestorableError, UnsupportedFormatError

__all__ = [
    "CONTINUOUS",
    "has_no_key",
    "is_continuous",
    "lists_in",
    "overtaken_in",
    "state_for_query",
    "state_for_stream",
    "state_with_keys",
    "state_with_watermark",
    "without",
]

CONTINUOUS: Final = "continuous"
"""In records of continuous jobs, in the place of a streaming query's id."""
_OVERTAKEN: Final = ("in_flight", "\0in_flight")  # a source's list, and a keyed subtask's
_ELEMENT_FORMAT: Final = 1
_WATERMARK: Final = "at"


class _Element(msgspec.Struct, frozen=True, array_like=True):
    """How an element of such a list begins (see `continuous.worker.overtaken_rows`)."""

    v: int
    direction: str


_DECODER: Final = msgspec.msgpack.Decoder(_Element)


def is_continuous(manifests: Iterable[Manifest]) -> bool:
    """Whether a log's newest checkpoint is of a continuous job; False where there is none."""
    written = [m.query_id for m in manifests if m.kind == "checkpoint"]
    return bool(written) and written[-1] == CONTINUOUS


def has_no_key(manifest: Manifest) -> bool:
    """Whether a record is of lists that a continuous job's driver keeps for a source or a sink.

    Raises:
        CorruptionError: the schema of its key does not read.
    """
    schema = manifest.schemas.get("")
    if schema is None:
        return False
    try:
        return not json.loads(schema)["fields"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"The key's schema of operator {manifest.operator!r} does not read ({error}).",
            todo="Restore the folder from another copy.",
        ) from error


def lists_in(state: StateAt) -> dict[str, Manifest]:
    """The newest record of every operator without a key, by uid."""
    last = {uid: state.last(uid) for uid in state.lineages}
    return {uid: one for uid, one in last.items() if one is not None and has_no_key(one)}


def overtaken_in(state: StateAt, read: Callable[[Needed], bytes]) -> list[str]:
    """The operators of a continuous job with rows in flight in a state: it is unaligned.

    Args:
        read: gives a slice's bytes.

    Raises:
        CorruptionError, UnsupportedFormatError: a list does not read.
    """
    from statebackend.state.operator_state import decode_lists  # brings pyspark along

    found = set()
    last = {one.sequence: one for one in _last(state)}
    for kept in state.records:
        for one in kept.slices if kept.manifest.sequence in last else ():
            if one.entry.kind == "operator":
                lists = decode_lists(read(one), one.entry.object or "")
                name = _OVERTAKEN[0 if has_no_key(kept.manifest) else 1]
                if name in lists and _has_rows(kept.manifest.operator, lists[name].rows):
                    found.add(kept.manifest.operator)
    return sorted(found)


def _has_rows(uid: str, stored: Sequence[bytes]) -> bool:
    """Whether a list holds more than where a subtask's watermark stood; that belongs to no channel.

    So it does no harm: where it does not fit, nobody looks at it.
    """
    from pyspark.sql.types import BinaryType, StructType

    from statebackend.schema.codec import codec_for
    from statebackend.state.operator_state import OperatorList

    codec = codec_for(StructType().add("element", BinaryType()))
    rows = OperatorList("in_flight", codec, stored).get()
    return any(_direction(uid, bytes(row[0])) != _WATERMARK for row in rows)


def _direction(uid: str, element: bytes) -> str:
    try:
        found = _DECODER.decode(element)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(
            f"The rows in flight at {uid!r} in the checkpoint do not read: {error}.",
            todo="Restore the checkpoint from another copy of the store.",
        ) from error
    if found.v != _ELEMENT_FORMAT:
        raise UnsupportedFormatError(
            f"Rows in flight at {uid!r} have the format {found.v}.",
            todo=f"This release reads format {_ELEMENT_FORMAT}: use the one that wrote it.",
        )
    return found.direction


def without(state: StateAt, uids: Collection[str]) -> StateAt:
    """A state but for some operators; nothing says any more that there were these.

    Raises:
        NotRestorableError: there are no others.
    """
    left = tuple(kept for kept in state.records if kept.manifest.operator not in uids)
    if not left:
        raise NotRestorableError(
            "The savepoint holds no keyed operator: there is nothing to begin with.",
            todo="Start the job without savepoint=.",
        )
    settings = dict(state.settings)
    named = settings.get("operators")
    if isinstance(named, dict):
        settings["operators"] = {uid: first for uid, first in named.items() if uid not in uids}
    lineages = {uid: one for uid, one in state.lineages.items() if uid not in uids}
    return StateAt(state.epoch, left, lineages, settings)


def state_for_query(state: StateAt) -> StateAt:
    """What a streaming query takes over of a continuous job's state: the keyed operators.

    One watermark is in force in all of a query: the smallest that an operator had.

    Raises:
        NotRestorableError: there are none.
    """
    kept = without(state, lists_in(state).keys())
    timed = [one for one in _last(kept) if one.time_mode == "event"]
    at_ms = min((_seen_ms(one) for one in timed), default=0)

    def changed(manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, watermark_ms=at_ms or None)

    return _changed(kept, changed)


def state_with_watermark(
    state: StateAt, next_watermark_ms: int, delays: Mapping[str, int | None]
) -> StateAt:
    """A query's state whose records do not say which event times were seen: Spark's own.

    Args:
        next_watermark_ms: in force in the next epoch; 0: nothing was seen.
        delays: of the operators' watermarks, by uid; None: it takes the job's.
    """

    def changed(manifest: Manifest) -> Manifest:
        delay_ms = delays.get(manifest.operator)
        if not next_watermark_ms or delay_ms is None:
            return manifest
        at_ms = next_watermark_ms + delay_ms
        return msgspec.structs.replace(manifest, event_max_ms=at_ms, second_max_ms=at_ms)

    return _changed(state, changed)


def state_with_keys(state: StateAt, renamed: Callable[[str, str], str]) -> StateAt:
    """A state whose operators' keys have other names; their bytes are the same.

    Args:
        renamed: gives the schema that an operator's key is to have, by its uid and the one it has.
    """

    def changed(manifest: Manifest) -> Manifest:
        known = manifest.schemas.get("")
        if known is None:
            return manifest
        key = renamed(manifest.operator, known)
        return msgspec.structs.replace(manifest, schemas={**manifest.schemas, "": key})

    return _changed(state, changed)


def state_for_stream(state: StateAt) -> StateAt:
    """What a continuous job takes over of a streaming query's state: all of it."""

    def changed(manifest: Manifest) -> Manifest:
        if manifest.time_mode != "event":
            return manifest
        at_ms = manifest.watermark_ms or None
        return msgspec.structs.replace(manifest, event_max_ms=at_ms, second_max_ms=at_ms)

    return _changed(state, changed)


def _seen_ms(manifest: Manifest) -> int:
    """A continuous operator's watermark: of two inputs both say the same."""
    return manifest.event_max_ms or 0


def _last(state: StateAt) -> Sequence[Manifest]:
    found = (state.last(uid) for uid in state.lineages)
    return [one for one in found if one is not None]


def _changed(state: StateAt, change: Callable[[Manifest], Manifest]) -> StateAt:
    """With another manifest for each operator's record of the epoch."""
    last = {one.sequence for one in _last(state)}
    records = tuple(
        type(kept)(change(kept.manifest), kept.slices) if kept.manifest.sequence in last else kept
        for kept in state.records
    )
    return StateAt(state.epoch, records, state.lineages, state.settings)
