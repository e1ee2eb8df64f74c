"""A job as its store shows it: read without a claim, whether it runs, or where."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from recovery.inspect.describe import OperatorInfo, operators_in
from recovery.inspect.history import CheckpointFigures, History
from recovery.inspect.history_reader import HistoryReader
from recovery.inspect.job_list import split_jobs, summarise
from recovery.inspect.tolerant_log import read_one
from recovery.savepoints.savepoint import below, savepoints_folder
from recovery.savepoints.savepoint_list import SavepointInfo, list_savepoints
from recovery.savepoints.state_at_epoch import last_epochs
from snapshot.formats.record import LOG_PREFIX, Manifest, parse_record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import OperatorLineage, resolve
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import S3_SCHEMES, open_store
from snapshot.storage.uris import job_folder
from statebackend.errors import FormatError
from statebackend.system import SYSTEM, System
from statebackend.tables.read_state import read_state, state_rows
from statebackend.tables.stored_job import restored_bytes
from statebackend.ui.job_figures import (
    JobLine,
    LookedUpValue,
    OperatorState,
    RunFacts,
    SettingLine,
    StateLine,
    StoredFacts,
    Takeover,
)

__all__ = ["StoredJobView", "StoredJobs", "as_text"]

_TEXT_LIMIT: Final = 20_000
_ROWS: Final = 500  # of a list or a map
_TAKEOVERS: Final = 50
_READERS: Final = 8
_VIEWS: Final = 32


class StoredJobView:
    """One job under a URI; thread-safe.

    Args:
        place: the folder of all jobs. options: how S3 is reached.
    """

    is_running: Final = False  # not here

    def __init__(
        self, place: str, job: str, options: StoreOptions, system: System = SYSTEM
    ) -> None:
        self.place, self.job, self.options = place, job, options
        self.uri: Final = job_folder(place, job)
        self._system = system
        self.store: Final = self._at(self.uri)
        self._lock = system.threads.lock()
        self._seen: tuple[list[ObjectInfo], list[OperatorState], list[StateLine]] | None = None
        self._reader = HistoryReader(self.store, job, read_all=self._read_all)

    def _read_all(self, read: Callable[..., Any], *wanted: Iterable[Any]) -> list[Any]:
        """As ``map``, several at a time: an object is a round trip."""
        with self._system.threads.pool(_READERS, "statebackend-page-reads") as pool:
            return list(pool.map(read, *wanted))

    def _at(self, uri: str) -> ObjectStore:
        options = self.options if uri.partition(":")[0] in S3_SCHEMES else None
        return open_store(uri, new_id=self._system.new_id, options=options)

    def _in_log(self) -> tuple[list[OperatorState], list[StateLine]]:
        """What the log says; read again when the listing of its records is another one."""
        listing = list(self.store.list(LOG_PREFIX))
        with self._lock:
            known = self._seen
        if known is None or known[0] != listing:
            system = self._system
            log = CommitLog(
                self.store,
                job=self.job,
                writer="page",
                new_id=system.new_id,
                read_all=self._read_all,
                threads=system.threads,
            )
            known = listing, *_operators_and_states(log.manifests())
            with self._lock:
                self._seen = known
        return known[1:]

    def facts(self) -> RunFacts | StoredFacts:
        """As the newest record says: no lineage is followed for it."""
        history = self.history(None, 1)
        listed = {
            number: info.modified_ms
            for info in self.store.list(LOG_PREFIX)
            if (number := parse_record_name(info.name)) is not None
        }
        newest = max(listed, default=0)
        try:
            tip = read_one(self.store, newest, self.job)
        except FormatError as error:
            problems = [error.what, *history.problems]
            return StoredFacts(
                durable_epoch=history.newest_epoch,
                written_ms=listed.get(newest),
                writer="a record that does not read",
                generation=history.generation,
                problems=list(dict.fromkeys(problems)),
            )
        return StoredFacts(
            durable_epoch=history.newest_epoch,
            # Its own stamp is from the epoch's begin: the store may have been out since.
            written_ms=listed.get(newest) or (tip.stamp_ms if tip.stamp_ms >= 0 else None),
            writer=tip.writer,
            generation=tip.generation,
            problems=history.problems,
        )

    def history(self, before_epoch: int | None, limit: int) -> History:
        """See `JobView`."""
        with self._lock:
            return self._reader.read(limit=limit, before_epoch=before_epoch)

    def checkpoint(self, epoch: int) -> CheckpointFigures | None:
        """See `JobView`."""
        with self._lock:
            return self._reader.checkpoint(epoch)

    def takeovers(self) -> list[Takeover]:
        """See `JobView`."""
        with self._lock:
            claims = self._reader.claims(_TAKEOVERS)
        return [
            Takeover(
                generation=one.generation,
                writer=one.writer,
                at_ms=one.stamp_ms if one.stamp_ms >= 0 else None,
            )
            for one in claims
        ]

    def savepoints(self) -> list[SavepointInfo]:
        """See `JobView`."""
        folder = savepoints_folder(self.place)
        store = self._at(folder)
        found = list_savepoints(store, lambda name: self._at(below(folder, name)), job=self.job)
        return found[::-1]

    def operators(self) -> list[OperatorState]:
        """See `JobView`."""
        return self._in_log()[0]

    def states(self) -> list[StateLine]:
        """See `JobView`."""
        return self._in_log()[1]

    def lookup(self, operator: str, state: str, key: Any) -> LookedUpValue:
        """A value as the newest durable checkpoint has it."""
        read = read_state(self.place, self.job, operator, state, keys=[key], options=self.options)
        rows: list[dict[str, Any]] = []
        for batch in read:
            rows += batch.to_pylist()
            if len(rows) >= _ROWS:
                break
        where = "As the newest durable checkpoint has it."
        if not rows:
            return LookedUpValue(found=False, text="The key has no such state.", where=where)
        where = f"{where} Key group {rows[0]['key_group']}."
        shown = [
            {name: value for name, value in row.items() if name not in ("key_group", "key")}
            for row in rows[:_ROWS]
        ]
        return LookedUpValue(found=True, text=as_text(shown), where=where)

    def settings(self) -> list[SettingLine] | None:
        """Nobody knows them here."""
        return None


class StoredJobs:
    """All jobs under a URI."""

    def __init__(self, where: str, options: StoreOptions) -> None:
        self.where: Final = where
        self._options = options
        self._views: dict[str, StoredJobView] = {}  # what they have read is not read again

    def lines(self) -> list[JobLine]:
        """All of them; one listing, and a few records of each."""
        store = open_store(self.where, new_id=SYSTEM.new_id, options=self._options)
        lines = []
        for name, inside in split_jobs(self.where, store.list("")).items():
            one = summarise(self._view(name).store, name, inside)
            lines.append(
                JobLine(
                    job=name,
                    epoch=one.epoch,
                    size_bytes=one.size_bytes,
                    written_ms=one.modified_ms,
                    running=False,
                    problem=one.problem,
                )
            )
        return lines

    def view(self, job: str) -> StoredJobView | None:
        """One of them; None: there is none."""
        view = self._view(job)
        if not view.store.list(LOG_PREFIX):
            return None
        self._views = {**dict(list(self._views.items())[-_VIEWS:]), job: view}
        return view

    def _view(self, job: str) -> StoredJobView:
        return self._views.get(job) or StoredJobView(self.where, job, self._options)


def as_text(value: Any) -> str:
    """A value for people, as JSON where it can be; cut where it is long."""
    rows = value if isinstance(value, list) else [value]
    text = "\n".join(json.dumps(row, default=_plain, ensure_ascii=False) for row in rows)
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}\n... (cut)"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _operators_and_states(
    manifests: list[Manifest],
) -> tuple[list[OperatorState], list[StateLine]]:
    """Every operator, and the states of those that the last run had, after its newest epoch."""
    lineages = resolve(manifests)
    operators = operators_in(manifests, lineages)
    live = {one.uid: lineages[one.uid] for one in operators if not one.dropped}
    durable = min(last_epochs(manifests, live).values(), default=-1)
    newest = {m.operator: m for m in manifests if m.kind == "checkpoint" and m.epoch <= durable}
    states = [
        StateLine(
            operator=row["operator"],
            state=row["state"],
            kind=row["kind"],
            key_schema=row["key_schema"] or "",
            map_key_schema=row["map_key_schema"] or "",
            value_schema=row["value_schema"] or "",
            ttl_ms=row["ttl_ms"],
            looked_up=row["key_schema"] is not None,
        )
        for uid in live
        if uid in newest
        for row in state_rows(newest[uid])
    ]
    return [_operator(one, lineages[one.uid]) for one in operators], states


def _operator(one: OperatorInfo, lineage: OperatorLineage) -> OperatorState:
    sizes = [restored_bytes(subtask, lineage.last_epoch) for subtask in lineage.subtasks]
    return OperatorState(
        uid=one.uid,
        parallelism=one.parallelism,
        max_parallelism=one.max_parallelism,
        first_epoch=one.first_epoch,
        state_bytes=sum(sizes),
        dropped=one.dropped,
        key_groups=one.key_groups,
        subtask_bytes=sizes,
    )
