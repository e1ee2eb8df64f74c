"""What subtasks and the coordinator say to each other.

Plain typed structs, MessagePack on the wire, never pickle. ``PROTOCOL`` is checked at ``begin``: a
driver and an executor that run different releases find out there, and not in the middle of a cut.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

__all__ = [
    "PROTOCOL",
    "AckReply",
    "AckRequest",
    "AncestorCopy",
    "BaseDone",
    "BaseGrant",
    "BaseRenewal",
    "BaseReply",
    "BeginReply",
    "BeginRequest",
    "LocalCopy",
    "RestoreReport",
    "RestoreStep",
    "SlicePart",
    "StatePart",
    "Use",
]

PROTOCOL: Final = 6


class LocalCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found on its host's disk for a subtask.

    ``epoch``, ``chain``, ``applying`` and ``applying_epoch`` are the store's marker (0: the epoch
    after ``epoch``); ``deltas`` are local delta files
    as (epoch, digest in hex). ``epoch`` is None where there is no usable store. ``damaged``:
    durable slices (see `snapshot.formats.record.slice_key`) that were found damaged.
    """

    job_id: str = ""
    epoch: int | None = None
    chain: str = ""
    applying: str = ""
    applying_epoch: int = 0
    deltas: list[tuple[int, str]] = []
    damaged: list[str] = []


class AncestorCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found of a subtask of another parallelism, by its key groups (inclusive)."""

    key_group_start: int
    key_group_end: int
    copy: LocalCopy


class RestoreStep(msgspec.Struct, frozen=True, kw_only=True):
    """One slice to apply, in order.

    ``source``: local (a local delta file), record (its bytes come with the reply) or object
    (``name`` in the store). ``kind``: delta, base, files (the slice is a file index), or store (the
    local store of a subtask of another parallelism). ``keep``: the key groups (first and last) to
    take of it, where not all; ``found_at``: those of the subtask beside whose store it lies, where
    that is another.
    """

    epoch: int
    kind: str
    digest: str
    chain: str
    size_bytes: int
    rows: int
    source: str
    name: str = ""
    keep: tuple[int, int] | None = None
    found_at: tuple[int, int] | None = None


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one subtask got its state back.

    Attributes:
        source: ``local`` (a store on this host, with local deltas on top), ``mixed`` (a local store
            with durable deltas on top), ``durable`` (records and objects alone) or ``empty`` (a new
            operator).
        local_bytes: read from the host's disk.
        durable_bytes: read from the store.
        durable_reads: how many reads that took.
        seconds: from asking the driver to a usable store.
        host: where.
        executor: Spark's number of it.
        reason: why a copy nearer by was not used, if there was one.
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
    """A subtask's attempt is about to process an epoch.

    ``ancestors``: what is here of the subtasks that a reply said to look for; None: not looked yet.
    ``held``: digests of the states of no key that the worker has and need not be sent.
    ``nonce``: a random number of Spark's for this plan and subtask (see
    `snapshot.protocol.stamps`).
    """

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
    ancestors: list[AncestorCopy] | None = None
    held: list[str] = []
    nonce: int = 0

    @property
    def plan(self) -> tuple[str, int, int]:
        """Identifies the batch's plan, for one subtask."""
        return self.operator, self.subtask, self.nonce


class BaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to upload a base of the state after ``epoch``, in the background.

    ``index``: the file index of the base before (empty: none), whose files may be named again.
    ``whole_limit_bytes``: state up to this size is written as one delta, larger state as files.
    ``renew_s``: how often to say that the upload goes on.
    """

    id: str
    epoch: int
    chain: str
    index: bytes
    whole_limit_bytes: int
    renew_s: float


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """A blob of states that belong to no key, as it was after the epoch before.

    ``source``: held (the worker said that it has it), record (its bytes come with the reply, after
    all others, in the order of the parts) or object. ``name``: of its object, where it has one,
    whatever the source. ``subtask``: whose it was, at the parallelism of then.
    """

    digest: str
    size_bytes: int
    source: str
    name: str = ""
    subtask: int = 0


class BeginReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempt must do to stand at the end of ``base_epoch``.

    ``fresh``: start with an empty store (whatever is there is not used; ``reason`` says why).
    ``steps`` bring the store to the end of ``durable_epoch``. Where that is not ``base_epoch``,
    ``layers`` holds what was acked since and is not durable yet: it is laid over the store and
    never written into it. The bytes of the steps whose source is ``record`` follow in order, the
    layers' last. ``chain`` and ``durable_chain`` are the lineage after the two epochs.
    ``restoring``: report how it went with the ack. ``base_due``: send a base along with the delta.
    ``grant``: upload one in the background. ``generation`` goes into the names of objects.

    ``watermark_ms`` is in force in this epoch; rows whose event time is at or before
    ``late_watermark_ms`` (the one of the epoch before) are late. ``initial``: objects with the
    operator's initial state, in its first epoch only. ``dropped``: ids of states whose entries
    must be deleted in this epoch. ``versions``: the value schemas (JSON, oldest first) of states
    that have had more than one, by name. ``lookups``: ask the driver what it wants to look up.

    ``operator_parts``: lists that belong to no key: the subtask's own where the parallelism of then
    (``operator_parallelism``; 0: there are none) was what it is now, else those of all subtasks.
    ``broadcast``: the map that all subtasks share. Both are as they were after ``base_epoch``.
    """

    job_id: str
    generation: int
    base_epoch: int
    durable_epoch: int
    durable_chain: str
    chain: str
    key_group_start: int
    key_group_end: int
    fresh: bool
    reason: str
    steps: list[RestoreStep]
    layers: list[RestoreStep] = []
    states: dict[str, int]
    inline_budget_bytes: int
    restoring: bool
    base_due: bool
    grant: BaseGrant | None = None
    watermark_ms: int = 0
    late_watermark_ms: int = 0
    initial: list[SlicePart] = []
    dropped: list[int] = []
    versions: dict[str, list[str]] = {}
    look_for: list[tuple[int, int]] = []
    settled: bool = False
    lookups: bool = False
    operator_parallelism: int = 0
    operator_parts: list[StatePart] = []
    broadcast: StatePart | None = None


class SlicePart(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of an ack: inline in ``data``, or durable already under ``name``."""

    digest: str
    size_bytes: int
    rows: int
    data: bytes = b""
    name: str = ""


class Use(NamedTuple):
    """What an attempt's output is for, in Spark's numbers: a stage, a task in it, an execution.

    A later stage has a higher number. An execution inside another one (an action on the frame of a
    foreachBatch function) has a higher number than the outer one, but need not be the later one.
    """

    stage: int = 0
    partition: int = 0
    execution: int = 0


class AckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A subtask's snapshot is safe: what is not inline is durable.

    ``large_bytes``: the size of its state, where that is too large for a base in the record.
    ``use``: which evaluation of the operator it is of (see `snapshot.protocol.epoch_acks`).
    ``figures``: counts by name (rows in, keys, changes, ...). ``requests``: what was asked of the
    object store by this attempt: (requests, bytes) by verb. ``request_errors``: how many of them
    failed, by verb.

    ``max_event_ms``: the largest event time over all rows of the attempt, late ones too (of a
    connected operator the left side's, and ``second_event_ms`` the right side's); None for
    no rows, or no event time. ``next_timer_ms``: the earliest timer that is left, in the operator's
    own time mode; None for none.

    ``operator_state``: its lists that belong to no key, whole. ``broadcast``: the operator's
    broadcast state, whole, from subtask 0 alone; ``broadcast_digest``: what this subtask came to.
    """

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
    large_bytes: int = 0
    max_event_ms: int | None = None
    second_event_ms: int | None = None
    next_timer_ms: int | None = None
    timings_ms: dict[str, float] = {}
    figures: dict[str, int] = {}
    requests: dict[str, tuple[int, int]] = {}
    request_errors: dict[str, int] = {}
    restore: RestoreReport | None = None
    operator_state: SlicePart | None = None
    broadcast: SlicePart | None = None
    broadcast_digest: str = ""
    use: Use = Use()


class AckReply(msgspec.Struct, frozen=True, kw_only=True):
    """``durable``: the epoch is durable for the whole operator."""

    durable: bool


class BaseDone(msgspec.Struct, frozen=True, kw_only=True):
    """A base was uploaded under a grant: everything that it names is durable.

    ``kind``: base (one delta that holds everything) or files (the part is a file index).
    ``uploaded_bytes``: what was sent for it; ``part.size_bytes`` is of the slice itself.
    """

    protocol: int
    job: str
    session: str
    operator: str
    subtask: int
    grant: str
    epoch: int
    chain: str
    kind: str
    part: SlicePart
    state_bytes: int
    uploaded_bytes: int
    seconds: float
    requests: dict[str, tuple[int, int]] = {}


class BaseRenewal(msgspec.Struct, frozen=True, kw_only=True):
    """An upload goes on, or (``given_up``) does not: another may be granted at once.

    ``why``: the reason, for the log. ``harmless``: a subtask has moved or was restored anew, and
    nothing is broken.
    """

    protocol: int
    job: str
    session: str
    operator: str
    subtask: int
    grant: str
    given_up: bool = False
    why: str = ""
    harmless: bool = False


class BaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """``lease_s``: how long the grant now stands."""

    lease_s: float
