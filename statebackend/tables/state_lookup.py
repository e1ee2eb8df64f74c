"""Looks up values of keys after the newest confirmed epoch: in open stores, else durable copies.

An epoch is *confirmed* when nothing but a person takes it back: it is durable in every operator,
and, of a query with micro-batches, Spark has committed it or has begun the next one.
"""

from __future__ import annotations

import bisect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Row

from recovery.savepoints.state_at_epoch import last_epochs
from snapshot.protocol.running_job import RunningJob
from statebackend.rocks.parted import open_store
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.lookup_messages import Question
from statebackend.system import System
from statebackend.tables.entry_rows import StateRows
from statebackend.tables.state_scan import StateSource, beside_cleaning, state_source
from statebackend.tables.stored_job import StoredJob, StoredOperator, find_job
from statebackend.tables.temporary_copy import READ_SETTINGS, fetch_subtask
from statebackend.tables.wanted_keys import encoded_each

__all__ = ["LookedUp", "StateLookup"]

_ANSWER_S: Final = 2.0  # for a worker's answer; then the durable copy is read
_BEHIND: Final = 3  # epochs that an open store may be behind
_COPIES: Final = 4  # that are kept for the next lookup

_Entries = tuple[list[bytes], list[bytes]]
_Span = tuple[bytes, int, int]  # how the entries of a key begin, and where they are


@dataclass(frozen=True)
class LookedUp:
    """The run that is asked.

    Attributes:
        session: None: the job does not run here.
        committed: the last batch that Spark has committed; None: Spark commits none.
    """

    session: RunSession | None
    committed: Callable[[], int] | None

    def confirmed(self) -> int | None:
        """The newest confirmed epoch; None: as the log says."""
        at = self.session.looked_at(_durable) if self.session is not None else None
        if at is None:
            return None
        durable, running = at
        if self.committed is None or (running is not None and running > durable):
            return durable
        return min(durable, self.committed())


def _durable(run: RunningJob) -> tuple[int, int | None] | None:
    """The newest epoch of all operators, and the one that runs; None: no epoch has begun yet."""
    if not run.operators:
        return None
    return min(one.lineage.last_epoch for one in run.operators.values()), run.epoch


class StateLookup:
    """Of one job.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self.job: Final = job
        self._known: tuple[RunSession | None, StoredJob] | None = None
        self._copies = _Copies(job.system)

    def values(self, at: LookedUp, uid: str, state: str, keys: Sequence[Any]) -> list[Any]:
        """See `StateBackend.lookup_all`."""
        # What an epoch needs may be cleaned when the next one is confirmed.
        source, entries = beside_cleaning(
            lambda: self._confirmed(at),
            lambda epoch: self._entries(at, uid, state, keys, epoch),
            lambda epoch: epoch,
        )
        operator = source.operator
        wanted = encoded_each(keys, operator.key_schema, operator.lineage.max_parallelism)
        return _Reading(source, entries, self.job.system.wall_ms()).values(wanted)

    def _confirmed(self, at: LookedUp) -> int | None:
        """The newest confirmed epoch; None: the newest that the log has."""
        epoch = at.confirmed()
        if epoch is None and at.committed is not None:
            durable = min(last_epochs(self.job.manifests()).values(), default=-1)
            return min(durable, at.committed())
        return epoch

    def _entries(
        self, at: LookedUp, uid: str, state: str, keys: Sequence[Any], epoch: int | None
    ) -> tuple[StateSource, _Entries]:
        """The entries of the keys, in order."""
        found = self._described(at, uid, state, epoch)
        source = state_source(found.operator(uid), state, keys)
        held = None
        if at.session is not None and epoch is not None:
            held = self._from_workers(at.session, source, epoch)
        if held is not None:
            return source, held
        found = self._found(epoch)
        source = state_source(found.operator(uid), state, keys)
        return source, self._copies.entries(found, source)

    def _described(self, at: LookedUp, uid: str, state: str, epoch: int | None) -> StoredJob:
        """The job with this state, if it has it; read once in a run, since no run changes it."""
        if self._known is not None and self._known[0] is at.session and at.session is not None:
            operator = self._known[1].operators.get(uid)
            if operator is not None and state in operator.states:
                return self._known[1]
        found = self._found(epoch)
        self._known = at.session, found
        return found

    def _found(self, epoch: int | None) -> StoredJob:
        job = self.job
        return find_job(job.uri, job.name, epoch=epoch, options=job.options, system=job.system)

    def _from_workers(
        self, session: RunSession, source: StateSource, epoch: int
    ) -> _Entries | None:
        """What the workers answer that have the stores open; None: one is not open anywhere."""
        assert source.rows is not None
        assert source.keys is not None
        uid, name = source.operator.uid, self.job.local_name
        asked = session.looked_at(lambda run: _questions(run, uid, name, epoch, source.keys or []))
        session.lookups.wanted = True
        if asked is None:
            return None
        ranged = [_with_ranges(one, list(source.rows.ranges((), own))) for one, own in asked]
        answers = session.lookups.ask(ranged, _ANSWER_S)
        if answers is None:
            return None
        keys = [key for one in answers for key in one.keys]
        return keys, [value for one in answers for value in one.values]


def _questions(
    run: RunningJob, uid: str, local_name: str, epoch: int, keys: Sequence[bytes]
) -> list[tuple[Question, list[bytes]]] | None:
    """A question for each subtask that has some of the keys, with these keys, in their order."""
    operator = run.operators.get(uid)
    if operator is None:
        return None
    found = []
    for subtask in operator.lineage.subtasks:
        groups = subtask.key_groups
        own = [key for key in keys if int.from_bytes(key[:2], "big") in groups]
        if not own:
            continue
        epochs = range(epoch - _BEHIND, epoch + 1)
        chains = {e: one for e in epochs if (one := subtask.chain_at(e)) is not None}
        if epoch not in chains:
            return None
        deltas = {e: subtask.deltas[e].entry.digest for e in epochs if e in subtask.deltas}
        place = groups.start, groups.end
        found.append((Question(0, local_name, uid, place, epoch, chains, deltas, []), own))
    return found


def _with_ranges(question: Question, ranges: list[tuple[bytes, bytes]]) -> Question:
    return Question(
        question.id,
        question.local_name,
        question.operator,
        question.key_groups,
        question.epoch,
        question.chains,
        question.deltas,
        ranges,
    )


class _Reading:
    """Values out of the entries that were found.

    Args:
        now_ms: what expires by then is not there.
    """

    def __init__(self, source: StateSource, entries: _Entries, now_ms: int) -> None:
        assert isinstance(source.rows, StateRows)
        assert source.state is not None
        self._rows, self._kind = source.rows, source.state.declared.kind
        self._keys, self._values = entries
        self._now_ms = now_ms

    def values(self, keys: Sequence[bytes]) -> list[Any]:
        """Of each key, in this order; None: it has none."""
        wanted = sorted(set(keys))
        spans = [self._span(*one) for one in self._rows.ranges((), wanted)]
        stored: list[bytes | None] = [*self._values]
        if self._kind == "list":
            for _, head, _ in self._headed(spans):
                stored[head] = None
        rows, made = self._rows.decoded(stored, self._now_ms), Row(*self._rows.value_names)
        cells = [None if one is None else made(*one) for one in rows]
        named = self._named(spans) if self._kind == "map" else []
        found = {
            key: self._value(cells[first:end], named[first:end])
            for key, (_, first, end) in zip(wanted, spans, strict=True)
        }
        return [found[key] for key in keys]

    def _span(self, start: bytes, end: bytes) -> _Span:
        first = bisect.bisect_left(self._keys, start)
        return start, first, bisect.bisect_left(self._keys, end, first)

    def _headed(self, spans: Iterable[_Span]) -> Iterator[_Span]:
        """The spans of lists that begin with their head, which is no element."""
        return (one for one in spans if one[1] < one[2] and self._keys[one[1]] == one[0])

    def _named(self, spans: Iterable[_Span]) -> list[Row]:
        """The keys of a map's entries."""
        places = (len(start) for start, first, end in spans for _ in range(first, end))
        return self._rows.map_keys(self._keys, places)

    def _value(self, cells: Sequence[Row | None], named: Sequence[Row]) -> Any:
        there = [one for one in cells if one is not None]
        if not there:
            return None
        if self._kind == "list":
            return there
        if self._kind == "map":
            return {key: one for key, one in zip(named, cells, strict=True) if one is not None}
        return there[0]


class _Copies:
    """The last few subtasks that were fetched, for lookups of the same state.

    Threads take turns: one may remove what another reads.
    """

    def __init__(self, system: System) -> None:
        self._folder: Path | None = None
        self._paths: dict[tuple[str, int], tuple[str, Path]] = {}
        self._turn = system.threads.lock()

    def entries(self, job: StoredJob, source: StateSource) -> _Entries:
        """The entries of a source, in order."""
        assert source.rows is not None
        keys, values = list[bytes](), list[bytes]()
        with self._turn:
            for number in source.subtasks():
                path = self._path(job, source.operator, number)
                with closing(open_store(str(path), READ_SETTINGS)) as store:
                    for some_keys, some in store.scan_ranges(
                        source.rows.ranges(*source.wanted(number))
                    ):
                        keys += some_keys
                        values += some
        return keys, values

    def _path(self, job: StoredJob, operator: StoredOperator, number: int) -> Path:
        # By its digest: an epoch is another state once it was repeated, or keys were erased in it.
        subtask = operator.lineage.subtasks[number]
        chain = f"{job.job_id} {job.epoch} {subtask.key_groups} {subtask.chain_at(job.epoch)}"
        place = operator.uid, number
        if place in self._paths and self._paths[place][0] == chain:
            return self._paths[place][1]
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="statebackend-lookup-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        for old in [place, *list(self._paths)[: 1 - _COPIES]]:
            self._paths.pop(old, None)
            shutil.rmtree(self._own(old), ignore_errors=True)
        path = fetch_subtask(job, operator, number, self._own(place))
        self._paths[place] = chain, path
        return path

    def _own(self, place: tuple[str, int]) -> Path:
        assert self._folder is not None
        return self._folder / place[0].encode().hex() / str(place[1])
