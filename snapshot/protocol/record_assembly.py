"""From acks to a record: which slices it names, and the bytes that go into it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snapshot.formats.record import Manifest, SliceEntry
from snapshot.protocol.messages import AckRequest, BaseDone, SlicePart
from snapshot.protocol.operators import CommitWork
from statebackend.keygroups import KeyGroupRange

__all__ = ["assemble"]


def assemble(
    head: Manifest,
    acks: dict[int, AckRequest],
    bases: dict[int, BaseDone],
    key_groups: Sequence[KeyGroupRange],
) -> CommitWork:
    """The record of one operator's epoch.

    Args:
        head: the manifest but for its slices.
        acks: of every subtask.
        bases: made apart since the last record, by subtask; one that comes with an ack wins.
        key_groups: by subtask.
    """
    slices: list[SliceEntry] = []
    bodies: list[bytes | None] = []

    def add(entry: SliceEntry, part: SlicePart) -> None:
        slices.append(entry)
        bodies.append(None if part.name else part.data)

    for subtask in sorted(acks):
        ack, groups = acks[subtask], key_groups[subtask]
        delta = _entry(ack, groups, ack.delta)
        add(msgspec.structs.replace(delta, timings_ms=ack.timings_ms), ack.delta)
        done = bases.get(subtask)
        if ack.base is not None:
            entry = _entry(ack, groups, ack.base)
            size_bytes = ack.base.size_bytes
            add(msgspec.structs.replace(entry, kind="base", state_bytes=size_bytes), ack.base)
        elif done is not None:
            add(_apart(_entry(ack, groups, done.part), done), done.part)
        if ack.operator_state is not None:
            entry = _entry(ack, groups, ack.operator_state)
            add(msgspec.structs.replace(entry, kind="operator"), ack.operator_state)
        if subtask == 0 and ack.broadcast is not None:
            entry = _entry(ack, groups, ack.broadcast)
            add(msgspec.structs.replace(entry, kind="broadcast"), ack.broadcast)
    manifest = msgspec.structs.replace(head, slices=slices)
    return CommitWork(head.operator, head.epoch, acks, dict(bases), manifest, bodies)


def _entry(ack: AckRequest, groups: KeyGroupRange, part: SlicePart) -> SliceEntry:
    return SliceEntry(
        operator=ack.operator,
        subtask=ack.subtask,
        kind="delta",
        epoch=ack.epoch,
        key_group_start=groups.start,
        key_group_end=groups.end,
        attempt=ack.attempt,
        rows=part.rows,
        size_bytes=part.size_bytes,
        digest=part.digest,
        chain=ack.chain,
        object=part.name or None,
    )


def _apart(entry: SliceEntry, done: BaseDone) -> SliceEntry:
    """A base that was made while later epochs ran is of an earlier epoch than the ack."""
    return msgspec.structs.replace(
        entry,
        kind="files" if done.kind == "files" else "base",
        epoch=done.epoch,
        chain=done.chain,
        state_bytes=done.state_bytes,
    )
