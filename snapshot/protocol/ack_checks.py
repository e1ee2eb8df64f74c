"""Checks what a worker sends of a snapshot: its bytes, and the objects that it names. Pure.

A snapshot names only objects that were made for it or given to it. Only these are sure to exist and
to be spared by garbage collection. Any other may be deleted at any time, and a record that names it
could never be restored.
"""

from __future__ import annotations

from collections.abc import Collection

from blake3 import blake3

from snapshot.formats.object_names import parse_base_name, parse_data_name
from snapshot.protocol.messages import AckRequest, BaseDone, SlicePart
from snapshot.protocol.operator_state_slices import OperatorBlobs, Source
from statebackend.errors import ForeignObjectError, ProtocolError

__all__ = ["check_ack_objects", "check_base_objects", "check_part"]


def check_ack_objects(ack: AckRequest, generation: int, given: OperatorBlobs) -> None:
    """Refuse an ack that names an object which was not made for it.

    Args:
        generation: that of the run.
        given: the operator state that the epoch began with; what has not changed keeps its object.

    Raises:
        ForeignObjectError: naming the object.
    """
    parts = ack.delta, ack.base, ack.operator_state, ack.broadcast
    foreign = [p for p in parts if p and p.name and not _is_made_for(p, generation, ack.epoch)]
    if not foreign:
        return
    sources = [*given.lists.values(), *([given.broadcast] if given.broadcast else [])]
    known = {_name(source) for source in sources}
    for part in foreign:
        if part is ack.delta or part is ack.base or part.name not in known:
            raise _foreign(ack, part.name)


def _name(source: Source) -> str:
    return source.name if isinstance(source, SlicePart) else source.entry.object or ""


def _is_made_for(part: SlicePart, generation: int, epoch: int) -> bool:
    made = parse_data_name(part.name)
    return made is not None and (made.generation, made.epoch) == (generation, epoch)


def check_base_objects(
    done: BaseDone, objects: Collection[str], generation: int, given: Collection[str]
) -> None:
    """Refuse a base that names an object which was not uploaded for it.

    Args:
        objects: those of its files.
        generation: that of the run.
        given: those of the previous base's files, as they came with the grant.

    Raises:
        ForeignObjectError: naming the object.
    """
    for name in (done.part.name, *objects):
        made = parse_base_name(name)
        own = made is not None and (made.generation, made.grant) == (generation, done.grant)
        if name and not own and name not in given:
            raise _foreign(done, name)


def _foreign(said: AckRequest | BaseDone, name: str) -> ForeignObjectError:
    return ForeignObjectError(
        f"The snapshot of operator {said.operator!r}, subtask {said.subtask}, for epoch "
        f"{said.epoch} names the object {name!r}, which was neither made for it nor given to it: "
        f"it may be deleted at any time.",
        todo="Nothing was kept of it, and it is made anew. If this comes again, report it; driver "
        "and executors may run different releases.",
    )


def check_part(request: AckRequest | BaseDone, part: SlicePart | None) -> None:
    """Refuse a slice that was damaged on its way: its sender can send it again, later none can."""
    if part is None or part.name:
        return
    if len(part.data) != part.size_bytes or blake3(part.data).hexdigest() != part.digest:
        raise ProtocolError(
            f"The snapshot of operator {request.operator!r}, subtask {request.subtask}, for epoch "
            f"{request.epoch} is not the bytes that it names.",
            todo="The task is tried again; if it happens again, look at the network.",
        )
