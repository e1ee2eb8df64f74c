"""The figures of a run's epochs, as their records hold them.

They are put together when a record is due, from its acks and from when each subtask began. What is
known only afterwards waits for the operator's next record, and so does what failed: it is let go of
when that record is durable, and said again where it was not. Nothing here asks a store.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from snapshot.formats.epoch_figures import (
    FAILED_KEPT,
    RESTORES_KEPT,
    EarlierRecord,
    FailedCheckpoint,
    RecordedRestore,
    RecordFigures,
    RestoreTotals,
    SubtaskColumns,
    encode_figures,
)
from snapshot.protocol.messages import AckRequest, BeginRequest, RestoreReport
from snapshot.protocol.operators import CommitWork
from statebackend.threads import THREADS, Threads

__all__ = ["Barriers", "Began", "EpochSeen", "FiguresBook", "PartFigures", "restore_totals"]

_log = logging.getLogger("statebackend.coordinator")
_EPOCHS_KEPT: Final = 3
_WHY_LIMIT: Final = 200
_EARLIER_KEPT: Final = 4
_UNFINISHED: Final = "the query ended before it was finished"
_NOT_IN_SLICES: Final = ("start_delay", "alignment")


class Began(NamedTuple):
    """When a subtask began an epoch, and where it runs."""

    at_s: float
    executor: str
    host: str


class EpochSeen(NamedTuple):
    """One operator's epoch as far as it has come: its first begin; by subtask, begin and ack."""

    began_s: float
    begins: Mapping[int, Began]
    acked_s: Mapping[int, float]


class PartFigures(NamedTuple):
    """What a continuous job's subtask says of its part of a checkpoint."""

    timings_ms: Mapping[str, float]
    figures: Mapping[str, int]


@dataclass(frozen=True)
class Barriers:
    """A checkpoint of a continuous job that every subtask has acked.

    Attributes:
        checkpoint: the number of the attempt. began_s: when it was triggered.
        parts: by vertex, of its subtasks, ascending.
    """

    checkpoint: int
    began_s: float
    parts: Mapping[str, Sequence[PartFigures]]


@dataclass
class _Epoch:
    """One operator's: its first begin, and by subtask the newest begin and ack."""

    began_s: float
    begins: dict[int, Began] = field(default_factory=dict)
    acked_s: dict[int, float] = field(default_factory=dict)
    durable: bool = False
    why: str = ""  # its record was not written


class _Written(NamedTuple):
    sequence: int
    took_ms: float
    at_s: float


class _Said(NamedTuple):
    """What the record says that is being written: one at a time, whichever operator's."""

    written: Sequence[_Written] = ()
    failed: Sequence[FailedCheckpoint] = ()
    failed_more: int = 0


class FiguresBook:
    """Of one job in one driver, over all its runs; thread-safe.

    Times are the caller's monotonic seconds, but for those that are called wall.
    """

    def __init__(self, threads: Threads = THREADS) -> None:
        self._lock = threads.lock()
        self._epochs: dict[tuple[str, int], _Epoch] = {}
        self._barriers: dict[int, Barriers] = {}
        self._written: dict[str, list[_Written]] = {}  # by operator
        self._failed: list[FailedCheckpoint] = []
        self._failed_more = 0
        self._said = _Said()

    def run_begins(self, now_s: float, wall_ms: int, *, continuous: bool) -> None:
        """A run begins; a micro-batch that the one before did not finish has failed.

        A continuous job says itself which of its checkpoints failed.
        """
        with self._lock:
            newest = max((epoch for _, epoch in self._epochs), default=-1)
            begun = [one for key, one in self._epochs.items() if key[1] == newest]
            self._epochs.clear()
            self._barriers.clear()
        if continuous or all(one.durable for one in begun):
            return
        why = next((one.why for one in begun if one.why), _UNFINISHED)
        began_ms = round((now_s - min(one.began_s for one in begun)) * 1000)
        self.failed(FailedCheckpoint(epoch=newest, started_ms=wall_ms - began_ms, reason=why))

    # --- what happens ----------------------------------------------------------------------------

    def begun(self, request: BeginRequest, now_s: float) -> None:
        """An attempt was admitted."""
        key = request.operator, request.epoch
        with self._lock:
            epoch = self._epochs.get(key)
            if epoch is None:
                epoch = self._epochs[key] = _Epoch(now_s)
                self._forget_before(request.epoch - _EPOCHS_KEPT)
            epoch.begins[request.subtask] = Began(now_s, request.executor, request.host)

    def _forget_before(self, epoch: int) -> None:
        for key in [key for key in self._epochs if key[1] < epoch]:
            del self._epochs[key]
        for old in [one for one in self._barriers if one < epoch]:
            del self._barriers[old]

    def acked(self, ack: AckRequest, now_s: float) -> None:
        """A snapshot was taken in."""
        with self._lock:
            epoch = self._epochs.get((ack.operator, ack.epoch))
            if epoch is not None:
                epoch.acked_s[ack.subtask] = now_s

    def aligned(self, epoch: int, barriers: Barriers) -> None:
        """All subtasks of a continuous job have acked what is going to be ``epoch``."""
        with self._lock:
            self._barriers[epoch] = barriers

    def failed(self, failed: FailedCheckpoint) -> None:
        """A checkpoint was given up, or an epoch will not be finished by this run."""
        with self._lock:
            kept = [*self._failed, failed]
            self._failed = kept[-FAILED_KEPT:]
            self._failed_more += len(kept) - len(self._failed)

    def gave_up(self, work: CommitWork, why: str) -> None:
        """A record was not written, or that is not known; its run is over."""
        with self._lock:
            epoch = self._epochs.get((work.operator, work.epoch))
            if epoch is not None:
                epoch.why = why

    def committed(self, work: CommitWork, sequence: int, started_s: float, ended_s: float) -> None:
        """A record is durable, with all that it said."""
        with self._lock:
            epoch = self._epochs.get((work.operator, work.epoch))
            if epoch is not None:
                epoch.durable = True
            said, self._said = self._said, _Said()
            left = [one for one in self._written.get(work.operator, ()) if one not in said.written]
            now = _Written(sequence, _ms(ended_s - started_s), ended_s)
            self._written[work.operator] = [*left, now][-_EARLIER_KEPT:]
            self._failed = [one for one in self._failed if one not in said.failed]
            self._failed_more -= said.failed_more

    def seen(self, operator: str, epoch: int) -> EpochSeen | None:
        """An operator's epoch as far as it has come; None: it has not begun, or is long over."""
        with self._lock:
            found = self._epochs.get((operator, epoch))
            if found is None:
                return None
            return EpochSeen(found.began_s, dict(found.begins), dict(found.acked_s))

    # --- what a record says ----------------------------------------------------------------------

    def of(self, work: CommitWork, now_s: float, wall_ms: int) -> msgspec.Raw | msgspec.UnsetType:
        """The figures of a record that is about to be written; without them, if need be."""
        try:
            return self._of(work, now_s, wall_ms)
        except Exception:  # no figure may keep an epoch from being durable
            _log.exception("the record of %s, epoch %d, has no figures", work.operator, work.epoch)
            return msgspec.UNSET

    def _of(self, work: CommitWork, now_s: float, wall_ms: int) -> msgspec.Raw:
        key = work.operator, work.epoch
        with self._lock:
            epoch = self._epochs.get(key) or _Epoch(now_s)
            begins, acked_s = dict(epoch.begins), dict(epoch.acked_s)
            barriers = self._barriers.get(work.epoch)
            written = list(self._written.get(work.operator, ()))
            failed, failed_more = list(self._failed), self._failed_more
            self._said = _Said(written, failed, failed_more)
        began_s = epoch.began_s if barriers is None else barriers.began_s
        columns = _columns(work.acks, begins, acked_s, began_s, now_s)
        parts = barriers.parts.get(work.operator) if barriers is not None else None
        if parts is not None:
            columns = _with_parts(columns, parts, work.acks)
        figures = _totals(work, columns, parts or ())
        figures = msgspec.structs.replace(
            figures,
            started_ms=wall_ms - round((now_s - began_s) * 1000),
            checkpoint=-1 if barriers is None else barriers.checkpoint,
            acks_ms=_ms(now_s - began_s),
            earlier=[
                EarlierRecord(one.sequence, one.took_ms, wall_ms - round((now_s - one.at_s) * 1000))
                for one in written
            ],
            failed=failed,
            failed_more=failed_more,
        )
        return encode_figures(figures, columns)


def _columns(
    acks: Mapping[int, AckRequest],
    begins: Mapping[int, Began],
    acked_s: Mapping[int, float],
    began_s: float,
    now_s: float,
) -> SubtaskColumns:
    places: dict[tuple[str, str], int] = {}
    ran_on, begun_ms, acked_ms, rows = [], [], [], []
    for subtask in sorted(acks):
        began = begins.get(subtask)
        if began is None:
            ran_on.append(-1)
            begun_ms.append(-1)
        else:
            ran_on.append(places.setdefault((began.executor, began.host), len(places)))
            begun_ms.append(max(0, round((began.at_s - began_s) * 1000)))
        # The ack that completes an epoch is noted beside the record's write.
        acked_ms.append(max(0, round((acked_s.get(subtask, now_s) - began_s) * 1000)))
        rows.append(acks[subtask].figures.get("rows", -1))
    return SubtaskColumns(
        executors=list(places), ran_on=ran_on, begun_ms=begun_ms, acked_ms=acked_ms, rows=rows
    )


def _with_parts(
    columns: SubtaskColumns, parts: Sequence[PartFigures], acks: Mapping[int, AckRequest]
) -> SubtaskColumns:
    """Of a continuous job: its subtasks' own times; a source's subtasks have no slices at all."""
    of_driver = len(parts) != len(acks)
    names = sorted({name for part in parts for name in part.timings_ms})
    timings_ms = {
        name: [round(part.timings_ms.get(name, -1.0)) for part in parts]
        for name in names
        if of_driver or name in _NOT_IN_SLICES
    }
    return SubtaskColumns(
        executors=[] if of_driver else columns.executors,
        ran_on=[] if of_driver else columns.ran_on,
        acked_ms=[round(sum(part.timings_ms.values())) for part in parts],
        rows=[part.figures.get("rows", -1) for part in parts] if of_driver else columns.rows,
        timings_ms=timings_ms,
    )


def _totals(
    work: CommitWork, columns: SubtaskColumns, parts: Iterable[PartFigures]
) -> RecordFigures:
    phases: dict[str, float] = {}
    counts: dict[str, int] = {}
    requests: dict[str, tuple[int, int]] = {}
    delta_bytes = delta_rows = 0
    for ack in work.acks.values():
        delta_bytes += ack.delta.size_bytes
        delta_rows += ack.delta.rows
        for verb, (n, size_bytes) in ack.requests.items():
            before = requests.get(verb, (0, 0))
            requests[verb] = before[0] + n, before[1] + size_bytes
        _add(ack.timings_ms, ack.figures, phases, counts)
    for part in parts:
        _add(part.timings_ms, part.figures, phases, counts)
    acked, own_ms = sorted(columns.acked_ms) or [-1], _own_ms(columns)
    slowest = own_ms.index(max(own_ms)) if own_ms else -1
    on = columns.ran_on[slowest] if slowest < len(columns.ran_on) else -1
    bases = [entry for entry in work.manifest.slices if entry.kind in ("base", "files")]
    return RecordFigures(
        median_ms=acked[len(acked) // 2],
        p95_ms=acked[len(acked) * 95 // 100],
        slowest=slowest,
        slowest_on=" on ".join(filter(None, columns.executors[on])) if on >= 0 else "",
        record_bytes=sum(map(len, filter(None, work.bodies))),
        delta_bytes=delta_bytes,
        delta_rows=delta_rows,
        bases=len(bases),
        base_bytes=sum(max(entry.size_bytes, entry.state_bytes) for entry in bases),
        uploaded_bytes=sum(done.uploaded_bytes for done in work.bases.values()),
        upload_s=max((done.seconds for done in work.bases.values()), default=0.0),
        phases_ms=phases,
        counts=counts,
        requests=requests,
        restores=restore_totals([one for ack in work.acks.values() if (one := ack.restore)]),
    )


def _own_ms(columns: SubtaskColumns) -> list[int]:
    """By subtask, its own time: with more subtasks than cores, most wait until they can begin."""
    begun_ms = columns.begun_ms or [0] * len(columns.acked_ms)
    pairs = zip(begun_ms, columns.acked_ms, strict=True)
    return [acked - max(0, begun) for begun, acked in pairs]


def _add(
    timings_ms: Mapping[str, float],
    figures: Mapping[str, int],
    phases: dict[str, float],
    counts: dict[str, int],
) -> None:
    for name, ms in timings_ms.items():
        if ms > phases.get(name, -1.0):
            phases[name] = ms
    for name, n in figures.items():
        counts[name] = counts.get(name, 0) + n


def restore_totals(reports: Sequence[RestoreReport]) -> RestoreTotals | None:
    """Totals of all, and the slowest one by one: a record must not grow with the parallelism."""
    if not reports:
        return None
    by_source = Counter(report.source for report in reports)
    slowest = heapq.nlargest(RESTORES_KEPT, reports, key=lambda report: report.seconds)
    return RestoreTotals(
        by_source=dict(by_source),
        local_bytes=sum(report.local_bytes for report in reports),
        durable_bytes=sum(report.durable_bytes for report in reports),
        max_seconds=slowest[0].seconds,
        slowest=[
            RecordedRestore(
                subtask=report.subtask,
                source=report.source,
                local_bytes=report.local_bytes,
                durable_bytes=report.durable_bytes,
                durable_reads=report.durable_reads,
                seconds=report.seconds,
                host=report.host,
                executor=report.executor,
                reason=report.reason[:_WHY_LIMIT],
            )
            for report in slowest
        ],
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
