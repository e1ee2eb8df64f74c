"""What subtasks and the coordinator say to each other.

Plain typed structs, MessagePack on the wire, never pickle. ``PROTOCOL`` is checked at ``begin``: a
driver and an executor that run different releases find out there, and not in the middle of a cut.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = [
    "PROTOCOL",
    "AckReply",
    "AckRequest",
    "BeginReply",
    "BeginRequest",
    "ErrorReply",
    "LocalCopy",
    "RestoreReport",
    "RestoreStep",
    "SlicePart",
]

PROTOCOL: Final = 1


class LocalCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found on its host's disk for a subtask.

    ``epoch``, ``chain`` and ``applying`` are the store's marker; ``deltas`` are local delta files
    as (epoch, digest in hex). ``epoch`` is None where there is no usable store.
    """

    job_id: str = ""
    epoch: int | None = None
    chain: str = ""
    applying: str = ""
    deltas: list[tuple[int, str]] = []


class RestoreStep(msgspec.Struct, frozen=True, kw_only=True):
    """One slice to apply, in order.

    ``source``: local (a local delta file), record (its bytes come with the reply) or object
    (``name`` in the store).
    """

    epoch: int
    kind: str
    digest: str
    chain: str
    size_bytes: int
    rows: int
    source: str
    name: str = ""


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one subtask got its state back.

    ``source``: ``local`` (a store on this host, with local deltas on top), ``mixed`` (a local store
    with durable deltas on top), ``durable`` (records and objects alone) or ``empty`` (a new
    operator). ``seconds`` is from asking the coordinator to a usable store. ``reason`` says why a
    copy nearer by was not used, where there was one.
    """

    operator: str
    subtask: int
    epoch: int
    source: str
    local_bytes: int
    durable_bytes: int
    durable_reads: int
    seconds: float
    host: str
    executor: str
    reason: str = ""


class BeginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A subtask's attempt is about to process an epoch."""

    protocol: int
    job: str
    session: str
    operator: str
    subtask: int
    epoch: int
    stamp_ms: int
    query_id: str
    attempt: int
    host: str
    executor: str
    copy: LocalCopy


class BeginReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempt must do to stand at the end of ``base_epoch``.

    ``fresh``: start with an empty store (whatever is there is not used; ``reason`` says why).
    The bytes of the steps whose source is ``record`` follow in order. ``restoring``: report how it
    went with the ack. ``base_due``: send a base along with the delta.
    """

    job_id: str
    base_epoch: int
    chain: str
    key_group_start: int
    key_group_end: int
    fresh: bool
    reason: str
    steps: list[RestoreStep]
    states: dict[str, int]
    inline_budget_bytes: int
    restoring: bool
    base_due: bool


class SlicePart(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of an ack: inline in ``data``, or durable already under ``name``."""

    digest: str
    size_bytes: int
    rows: int
    data: bytes = b""
    name: str = ""


class AckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A subtask's snapshot is safe: what is not inline is durable."""

    protocol: int
    job: str
    session: str
    operator: str
    subtask: int
    epoch: int
    stamp_ms: int
    attempt: int
    chain: str
    delta: SlicePart
    base: SlicePart | None = None
    timings_ms: dict[str, float] = {}
    restore: RestoreReport | None = None


class AckReply(msgspec.Struct, frozen=True, kw_only=True):
    """``durable``: the epoch is durable for the whole operator."""

    durable: bool


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error on its way to the other side."""

    code: str
    what: str
    todo: str
