"""Reads a job's history from its store: without a claim, without Spark, beside a driver or not.

The newest epochs are in the log's records. Older ones are in the objects of the history, as far as
cleaning has come. A listing of each is one request, and so is each record and each object; neither
ever changes, so a `HistoryReader` reads none twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from recovery.inspect.describe import ClaimInfo, claim_in
from recovery.inspect.history import (
    CheckpointFigures,
    History,
    JobMode,
    RestoreSummary,
)
from recovery.inspect.history_figures import (
    Late,
    checkpoint_of,
    failed_of,
    restores_of,
    subtasks_of,
)
from recovery.inspect.tolerant_log import read_one
from recovery.savepoints.between_modes import CONTINUOUS
from snapshot.formats.history_object import (
    HISTORY_PREFIX,
    HistoryName,
    RecordSummary,
    decode_history,
    parse_history_name,
    summary_of,
)
from snapshot.formats.record import LOG_PREFIX, parse_record_name
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import FormatError, NotRestorableError, ObjectNotFoundError, SettingError

__all__ = ["HistoryReader", "read_checkpoint", "read_history"]

_AT_A_TIME: Final = 32
_OBJECTS_CACHED: Final = 512


def read_history(
    store: ObjectStore, job: str, *, limit: int = 100, before_epoch: int | None = None
) -> History:
    """The newest checkpoints of a job, or those before one; see `HistoryReader.read`."""
    return HistoryReader(store, job).read(limit=limit, before_epoch=before_epoch)


def read_checkpoint(store: ObjectStore, job: str, epoch: int) -> CheckpointFigures | None:
    """One checkpoint, with its subtasks while its record is there; see `HistoryReader.read`."""
    return HistoryReader(store, job).checkpoint(epoch)


@dataclass
class _Page:
    """What is gathered from the newest record to older ones.

    Attributes:
        wanted: epochs below `before`, and what is known of each operator's in them.
        lowest: by operator, the lowest epoch of its newer records: what is not below it, and was
            not made durable anew, was discarded.
    """

    before: int | None
    seen: set[int] = field(default_factory=set)
    late: Late = field(default_factory=dict)
    lowest: dict[str, int] = field(default_factory=dict)
    wanted: dict[int, dict[str, RecordSummary]] = field(default_factory=dict)
    discarded: set[int] = field(default_factory=set)
    repeated: dict[int, int] = field(default_factory=dict)
    failing: list[RecordSummary] = field(default_factory=list)  # records that say what failed

    def add(self, one: RecordSummary) -> None:
        if one.sequence in self.seen:
            return
        self.seen.add(one.sequence)
        for earlier in one.figures.earlier:
            self.late.setdefault(earlier.sequence, earlier)
        lowest = self.lowest.get(one.operator)
        self.lowest[one.operator] = min(one.epoch, one.epoch if lowest is None else lowest)
        if self.before is not None and one.epoch >= self.before:
            return
        if one.figures.failed:
            self.failing.append(one)
        known = self.wanted.setdefault(one.epoch, {})
        if one.operator in known:
            self.repeated[one.epoch] = self.repeated.get(one.epoch, 0) + 1
            return
        if lowest is not None and one.epoch >= lowest:
            self.discarded.add(one.epoch)
        known[one.operator] = one


class HistoryReader:
    """The history of one job; remembers what it read. For one thread at a time.

    Args:
        store: the job's folder. job: its name.
        read_all: as ``map``, perhaps from several threads.
    """

    def __init__(
        self,
        store: ObjectStore,
        job: str,
        *,
        read_all: Callable[..., Iterable[Any]] = map,
    ) -> None:
        self._store, self._job, self._read_all = store, job, read_all
        self._records: dict[int, RecordSummary | ClaimInfo] = {}
        self._generations: dict[int, int] = {}
        self._objects: dict[str, list[RecordSummary]] = {}
        self._cleaned_below = 0  # there are only claims, one of each start that ever was

    def read(self, *, limit: int = 100, before_epoch: int | None = None) -> History:
        """The newest checkpoints, or the newest of those before an epoch.

        Args:
            limit: how many epochs. before_epoch: `History.next_before` of the page before.

        Raises:
            NotRestorableError: there is no log.
            StoreUnreachableError: from the store. What does not read is among the problems.
        """
        if limit < 1:
            raise SettingError(f"A history of {limit} epochs.", todo="Ask for one or more.")
        problems: list[str] = []
        page = _Page(before_epoch)
        listed = self._listed()
        newest: RecordSummary | None = None
        for one in self._all(listed, before_epoch, problems):
            newest = newest or one
            page.add(one)
            if len(page.wanted) > limit:  # of those before the oldest, every operator was seen
                break
        epochs = sorted(page.wanted, reverse=True)
        return self._history(page, epochs[:limit], listed, newest, problems, len(epochs) > limit)

    def checkpoint(self, epoch: int) -> CheckpointFigures | None:
        """One checkpoint; None: there is none, or nothing is known of it any more. As `read`."""
        found = self.read(limit=1, before_epoch=epoch + 1).checkpoints
        one = next((c for c in found if c.epoch == epoch and c.status != "failed"), None)
        if one is None or not one.has_detail:
            return one
        return subtasks_of(one, lambda sequence: read_one(self._store, sequence, self._job))

    # --- how -------------------------------------------------------------------------------------

    def _listed(self) -> dict[int, int | None]:
        """Every record that is there, and when it was written by the store's clock."""
        found = {parse_record_name(i.name): i.modified_ms for i in self._store.list(LOG_PREFIX)}
        listed = {sequence: ms for sequence, ms in found.items() if sequence is not None}
        if not listed:
            raise NotRestorableError(
                f"There is no job in {self._store.uri}: it has no commit log.",
                todo="Check the URI and the job's name (statebackend list shows what is there).",
            )
        for gone in self._records.keys() - listed.keys():
            del self._records[gone]
        return listed

    def claims(self, limit: int) -> list[ClaimInfo]:
        """The newest takeovers by drivers, the newest first; what does not read is left out.

        Where a claim does not say when it was made, its time is that of the store.

        Raises:
            NotRestorableError, StoreUnreachableError: as `read`.
        """
        found: list[ClaimInfo] = []
        listed = self._listed()
        for some in _chunks(sorted(listed, reverse=True)):
            read = self._of_records(some, [])
            found += [one for one in read if isinstance(one, ClaimInfo)]
            if len(found) >= limit:
                break
        return [
            one if one.stamp_ms >= 0 else replace(one, stamp_ms=listed.get(one.sequence) or -1)
            for one in found[:limit]
        ]

    def _all(
        self, listed: Iterable[int], before: int | None, problems: list[str]
    ) -> Iterator[RecordSummary]:
        """From the newest record to older ones, those in objects of the history among them.

        By sequence: a cleaning that was cut leaves records older than what an object tells, and a
        newer epoch that comes after an older one would be taken for discarded.
        """
        # One epoch more: it says when the epoch before was durable.
        names = ((n, k) for n, k in self._names() if before is None or k.first_epoch <= before)
        unread, ties = deque(names), count()
        heads: list[tuple[int, int, RecordSummary, Iterator[RecordSummary]]] = []

        def begin(rest: Iterator[RecordSummary]) -> None:
            head = next(rest, None)
            if head is not None:
                heappush(heads, (-head.sequence, next(ties), head, rest))

        begin(self._records_down(listed, problems))
        while unread or heads:
            if unread and (not heads or unread[0][1].newest_sequence > -heads[0][0]):
                begin(reversed(self._of_object(unread.popleft()[0], problems)))
                continue
            _, _, head, rest = heappop(heads)
            yield head
            begin(rest)

    def _records_down(self, listed: Iterable[int], problems: list[str]) -> Iterator[RecordSummary]:
        for some in _chunks(sorted(listed, reverse=True)):
            some = [sequence for sequence in some if sequence >= self._cleaned_below]
            read = self._of_records(some, problems)
            yield from (one for one in read if isinstance(one, RecordSummary))

    def _of_records(
        self, sequences: Sequence[int], problems: list[str]
    ) -> list[RecordSummary | ClaimInfo]:
        new = [sequence for sequence in sequences if sequence not in self._records]
        for sequence, problem in zip(new, self._read_all(self._take_in, new), strict=True):
            if problem:
                problems.append(problem)
                self._records.pop(sequence, None)
        found = (self._records.get(sequence) for sequence in sequences)
        return [one for one in found if one is not None]

    def _take_in(self, sequence: int) -> str:
        try:
            manifest = read_one(self._store, sequence, self._job)
        except ObjectNotFoundError:
            return ""  # cleaned since it was listed
        except FormatError as error:
            return error.what
        self._generations[sequence] = manifest.generation
        self._cleaned_below = max(self._cleaned_below, manifest.cleaned_below)
        made = summary_of if manifest.kind == "checkpoint" else claim_in
        self._records[sequence] = made(manifest)
        return ""

    def _names(self) -> list[tuple[str, HistoryName]]:
        """Objects of the history, the newest first."""
        names = (info.name for info in self._store.list(HISTORY_PREFIX))
        found = [(name, known) for name in names if (known := parse_history_name(name)) is not None]
        return sorted(found, key=lambda one: one[1], reverse=True)

    def _of_object(self, name: str, problems: list[str]) -> list[RecordSummary]:
        found = self._objects.get(name)
        if found is None:
            try:
                found = decode_history(name, self._store.get(name))
            except ObjectNotFoundError:
                return []  # beyond the bounds since
            except FormatError as error:
                problems.append(error.what)
                return []
            if len(self._objects) >= _OBJECTS_CACHED:
                self._objects.clear()
            self._objects[name] = found
        return found

    def _history(
        self,
        page: _Page,
        epochs: Sequence[int],
        listed: dict[int, int | None],
        newest: RecordSummary | None,
        problems: list[str],
        more: bool,
    ) -> History:
        mode: JobMode = "continuous" if newest and newest.query_id == CONTINUOUS else "micro-batch"
        made: list[CheckpointFigures] = []
        restores: list[RestoreSummary] = []
        newest_epoch = None
        for epoch in epochs:
            records = page.wanted[epoch]
            one = checkpoint_of(
                records,
                late=page.late,
                listed=listed,
                discarded=epoch in page.discarded,
                followed=newest_epoch is not None,
                repeated=page.repeated.get(epoch, 0),
            )
            if one.status == "complete" and newest_epoch is None:
                newest_epoch = epoch
            made.append(one)
            restores += restores_of(records.values())
        failed = {(f.epoch, f.attempt, f.started_ms): f for r in page.failing for f in failed_of(r)}
        oldest = epochs[-1] if epochs else 0
        made += [one for one in failed.values() if not more or one.epoch >= oldest]
        made.sort(key=lambda c: (-c.epoch, c.status == "failed", -(c.started_ms or 0)))
        return History(
            job=self._job,
            uri=self._store.uri,
            mode=mode,
            generation=self._generations.get(max(listed), newest.generation if newest else 0),
            newest_epoch=newest_epoch if page.before is None else None,
            checkpoints=made,
            restores=restores,
            next_before=oldest if more else None,
            problems=problems,
        )


def _chunks(sequences: Sequence[int]) -> Iterator[Sequence[int]]:
    """So many as are read at a time."""
    return (sequences[at : at + _AT_A_TIME] for at in range(0, len(sequences), _AT_A_TIME))
