"""What a checkpoint was like, in figures: a part of its record that no restore reads.

`Manifest.figures` holds it as JSON that is not looked into until somebody asks. So figures that do
not read, or are of a later release, never keep a record from being read. What is known only after
a record was written (how long that took, what failed since) is in the operator's next one.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = [
    "FAILED_KEPT",
    "RESTORES_KEPT",
    "EarlierRecord",
    "FailedCheckpoint",
    "RecordFigures",
    "RecordedRestore",
    "RestoreTotals",
    "SubtaskColumns",
    "decode_figures",
    "encode_figures",
]

RESTORES_KEPT: Final = 16  # in one record; all others are in its totals
FAILED_KEPT: Final = 16
_TEXT_LIMIT: Final = 300


class EarlierRecord(msgspec.Struct, frozen=True, array_like=True):
    """An earlier record of the operator: how long its write took, and when it was durable."""

    sequence: int
    commit_ms: float
    durable_ms: int


class FailedCheckpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint that was given up, or an epoch that its run did not finish.

    Attributes:
        epoch: that it would have become.
        checkpoint: the number of the attempt, of a continuous job; -1: there is none.
        started_ms: when it began. took_ms: until it was given up; -1: not known.
        waited_for: subtasks that had not acked; some of them.
    """

    epoch: int
    checkpoint: int = -1
    started_ms: int
    took_ms: float = -1.0
    reason: str
    waited_for: list[str] = []

    def __post_init__(self) -> None:
        if len(self.reason) > _TEXT_LIMIT:
            msgspec.structs.force_setattr(self, "reason", self.reason[:_TEXT_LIMIT])


class RecordedRestore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one subtask got its state back (see `snapshot.protocol.messages.RestoreReport`)."""

    subtask: int
    source: str
    local_bytes: int = 0
    durable_bytes: int = 0
    durable_reads: int = 0
    seconds: float = 0.0
    host: str = ""
    executor: str = ""
    reason: str = ""


class RestoreTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All restores of an operator in an epoch. ``by_source``: how many; ``slowest``: of some."""

    by_source: dict[str, int]
    local_bytes: int = 0
    durable_bytes: int = 0
    max_seconds: float = 0.0
    slowest: list[RecordedRestore] = []


class SubtaskColumns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of each subtask and not in its slices: lists, in the subtasks' order.

    Attributes:
        executors: each executor and its host, once.
        ran_on: by subtask, the place in `executors`; -1: not known.
        begun_ms: from the epoch's first begin to this subtask's; -1: not known.
        acked_ms: from the start to the ack; -1: not known.
        rows: that came in; -1: not known.
        timings_ms: by phase; -1: not known.
    """

    executors: list[tuple[str, str]] = []
    ran_on: list[int] = []
    begun_ms: list[int] = []
    acked_ms: list[int] = []
    rows: list[int] = []
    timings_ms: dict[str, list[int]] = {}


class RecordFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operator's epoch in figures.

    Attributes:
        started_ms: when it began, by the driver's clock.
        checkpoint: the number of the attempt, of a continuous job; -1: there is none.
        acks_ms: from there to the last ack. median_ms, p95_ms: over the subtasks.
        slowest: the subtask that took longest, from its begin to its ack. slowest_on: where it ran.
        record_bytes: of the slices in the record.
        delta_bytes, delta_rows: of what changed, over all subtasks.
        bases, base_bytes: full states that the record names. uploaded_bytes, upload_s: of those
            that were uploaded beside the log: bytes that were sent, and the longest time.
        phases_ms: the longest of any subtask, by phase.
        counts: over all subtasks: rows, late_rows, timers_fired, stored_bytes, ...
        requests: over all subtasks: (requests, bytes) by verb.
        earlier: what became known of earlier records.
        failed: checkpoints that failed since. failed_more: how many besides.
        columns: of each subtask (see `by_subtask`); not looked into either.
    """

    started_ms: int = -1
    checkpoint: int = -1
    acks_ms: float = -1.0
    median_ms: float = -1.0
    p95_ms: float = -1.0
    slowest: int = -1
    slowest_on: str = ""
    record_bytes: int = 0
    delta_bytes: int = 0
    delta_rows: int = 0
    bases: int = 0
    base_bytes: int = 0
    uploaded_bytes: int = 0
    upload_s: float = 0.0
    phases_ms: dict[str, float] = {}
    counts: dict[str, int] = {}
    requests: dict[str, tuple[int, int]] = {}
    restores: RestoreTotals | None = None
    earlier: list[EarlierRecord] = []
    failed: list[FailedCheckpoint] = []
    failed_more: int = 0

    columns: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def by_subtask(self) -> SubtaskColumns | None:
        """What is known of each subtask; None: nothing, or it does not read."""
        if self.columns is msgspec.UNSET:
            return None
        try:
            return msgspec.json.decode(self.columns, type=SubtaskColumns)
        except msgspec.MsgspecError:
            return None

    def totals(self) -> RecordFigures:
        """Without what is of single subtasks."""
        if self.columns is msgspec.UNSET:
            return self
        return msgspec.structs.replace(self, columns=msgspec.UNSET)


_decoder = msgspec.json.Decoder(RecordFigures)


def encode_figures(figures: RecordFigures, columns: SubtaskColumns | None = None) -> msgspec.Raw:
    """As a manifest holds them."""
    if columns is not None:
        raw = msgspec.Raw(msgspec.json.encode(columns))
        figures = msgspec.structs.replace(figures, columns=raw)
    return msgspec.Raw(msgspec.json.encode(figures))


def decode_figures(raw: msgspec.Raw | msgspec.UnsetType) -> RecordFigures | None:
    """What a manifest holds; None: nothing, or nothing that this release reads."""
    if raw is msgspec.UNSET:
        return None
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
