"""Starts a query from a savepoint: its state, its sink's log, and its checkpoint location."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from blake3 import blake3
from pyspark.sql import DataFrame

from recovery.decide.rewind import LocationProgress
from recovery.savepoints.between_modes import lists_in, state_for_query
from recovery.savepoints.claim import (
    Beginning,
    Standing,
    begin_job,
    has_begun_with,
    left_in_the_middle,
    saved_state,
    standing,
    went_on,
)
from recovery.savepoints.savepoint import (
    SPARK_FOLDER,
    Savepoint,
    read_savepoint,
)
from recovery.savepoints.state_at_epoch import StateAt
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import OperatorLineage
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CheckpointLocationError,
    CorruptionError,
    NotRestorableError,
    SettingError,
)
from statebackend.runtime.driver.job import Job
from statebackend.spark.frames.replayable import REPEATABLE_SOURCES, sources_of
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.new_location import LocationFile, location_files
from statebackend.spark.start.sink_log import SinkLog
from statebackend.system import System

__all__ = [
    "EXACT_SOURCES",
    "begin_with",
    "has_begun",
    "open_saved",
    "refuse_half_begun",
    "saved_lineages",
    "warn_of_sources",
]

_log = logging.getLogger("statebackend.spark")

# From these a clone reads on exactly where the original stood: what they give follows from the
# offsets in Spark's plan and the log that Spark keeps of them, both of which are carried along.
EXACT_SOURCES: Final = REPEATABLE_SOURCES


def saved_lineages(source: str | Savepoint, job: Job) -> dict[str, OperatorLineage]:
    """The operators with a key of a savepoint, by uid.

    Raises as `read_savepoint`, and for a damaged log.
    """
    _, _, state = open_saved(source, job)
    lists = lists_in(state)
    return {uid: one for uid, one in state.lineages.items() if uid not in lists}


def open_saved(source: str | Savepoint, job: Job) -> tuple[ObjectStore, Savepoint, StateAt]:
    """A savepoint's folder, what it says, and its state. Raises as `saved_lineages`."""
    store = job.open_at(_uri(source))
    savepoint = read_savepoint(store)
    return store, savepoint, saved_state(store, savepoint, _log_of(store, savepoint, job.system))


def _log_of(store: ObjectStore, savepoint: Savepoint, system: System) -> CommitLog:
    return CommitLog(
        store,
        job=savepoint.job,
        writer=system.process_name(),
        new_id=system.new_id,
        threads=system.threads,
    )


def has_begun(source: str | Savepoint, job: Job, location: CheckpointLocation | None) -> bool:
    """Whether the query goes on with what it took from a savepoint once; that may be gone since."""
    if location is None or location.progress().query_id is None:
        return False
    return has_begun_with(job.log(), job.open_at(_uri(source)).uri)


def _uri(source: str | Savepoint) -> str:
    return source if isinstance(source, str) else source.uri


def begin_with(
    source: str | Savepoint,
    job: Job,
    location: CheckpointLocation | None,
    check: Callable[[list[Manifest]], Any],
    sink: SinkLog | None = None,
    sources: int | None = None,
) -> None:
    """Give a new job a savepoint's state, and a new checkpoint location where its sources stood.

    First the state, the sink's log, then the location, `metadata` last; may be cut, and repeated.
    It does nothing for a job that has begun with this savepoint, and its location.

    Args:
        source: the savepoint, or its URI.
        check: refuses what the query cannot take over, before anything is written. sink: its log.
        sources: how many the query has, where that is known.

    Raises:
        CheckpointLocationError: job, location or sink have begun with something else.
        NotRestorableError, CorruptionError, UnsupportedFormatError: of the savepoint.
        SettingError: it is a continuous job's, and how many sources there are is not known.
    """
    store, log = job.open_at(_uri(source)), job.log()
    savepoint = read_savepoint(store)
    begun = standing(log, job.name, savepoint)
    if location is None:
        if begun.standing is Standing.BEGUN:
            return  # the location is checked once the query has one
        raise _no_location()
    progress = location.progress()
    if begun.standing is Standing.BEGUN:
        if progress.query_id is not None:
            return  # whether it is that query's is decided as for every start
        if went_on(log, begun):
            raise _gone_on(job, savepoint, location)
    files = location_files(savepoint, sources)
    _refuse_used(location, progress, files, store)
    if sink is not None:
        sink.check(savepoint.epoch)
    query_id = begun.query_id
    if begun.standing is not Standing.BEGUN:
        query_id = _begin_state(savepoint, store, job, log, begun, check)
    _fill(location, savepoint, store, query_id, sink, files)
    _log.warning(
        "job %s begins with the savepoint %s of job %s, after epoch %d; query %s",
        job.name,
        savepoint.id,
        savepoint.job,
        savepoint.epoch,
        query_id,
    )


def _begin_state(
    savepoint: Savepoint,
    store: ObjectStore,
    job: Job,
    log: CommitLog,
    begun: Beginning,
    check: Callable[[list[Manifest]], Any],
) -> str:
    """The state goes into the job's folder; the id of the query that it is for."""
    state = saved_state(store, savepoint, _log_of(store, savepoint, job.system))
    if savepoint.continuous:
        _log.warning(
            "the savepoint %s is of a continuous job: the query's sources begin anew, and of %s "
            "nothing is taken over",
            savepoint.id,
            ", ".join(sorted(lists_in(state))),
        )
        state = state_for_query(state)
    check([kept.manifest for kept in state.records])
    query_id = job.system.new_uuid()
    begin_job(
        state,
        savepoint,
        store,
        job.store,
        log,
        after=begun.last,
        query_id=query_id,
        new_id=job.system.new_id,
        threads=job.system.threads,
    )
    return query_id


def _no_location() -> SettingError:
    return SettingError(
        "A query that begins with a savepoint needs its checkpoint location prepared.",
        todo="Give the writer .option('checkpointLocation', ...), or say "
        "backend.starting(checkpoint_location=...).",
    )


def _gone_on(
    job: Job, savepoint: Savepoint, location: CheckpointLocation
) -> CheckpointLocationError:
    return CheckpointLocationError(
        f"Job {job.name!r} has gone on since it began with the savepoint {savepoint.id}, but "
        f"the checkpoint location {location.path} is new.",
        todo="Give the query the checkpoint location it had, or a new job= name.",
    )


def _fill(
    location: CheckpointLocation,
    savepoint: Savepoint,
    store: ObjectStore,
    query_id: str,
    sink: SinkLog | None,
    files: Mapping[str, LocationFile],
) -> None:
    if sink is not None:
        sink.begin(savepoint.epoch)
    for name, file in files.items():
        pieces = iter([file.body]) if file.body is not None else _checked(store, name, file.digest)
        location.write(name, pieces)
    location.write("metadata", iter([json.dumps({"id": query_id}).encode()]))


def _refuse_used(
    location: CheckpointLocation,
    progress: LocationProgress,
    files: Mapping[str, LocationFile],
    store: ObjectStore,
) -> None:
    """Only an empty location may be prepared, or one whose preparation was cut."""
    ours = {name: file.digest for name, file in files.items()}
    used = f"is of query {progress.query_id}" if progress.query_id is not None else ""
    if not used:
        for folder in ("offsets", "commits", "sources", "state"):
            for name in location.files(folder):
                if ours.get(name) != _digest(location.chunks(name)):
                    used = used or f"holds {name}, which is not the savepoint's"
    if used:
        raise CheckpointLocationError(
            f"A query cannot begin with the savepoint {store.uri} at the checkpoint location "
            f"{location.path}: it {used}.",
            todo="Give the query a checkpoint location that was never used; one that has batches "
            "already goes on without savepoint=.",
        )


def _digest(pieces: Iterator[bytes]) -> str:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _checked(store: ObjectStore, name: str, digest: str) -> Iterator[bytes]:
    """A file of the savepoint; what it raises at its end keeps it from getting its name."""
    hasher = blake3()
    for piece in store.get_chunks(f"{SPARK_FOLDER}{name}"):
        hasher.update(piece)
        yield piece
    if hasher.hexdigest() != digest:
        raise CorruptionError(
            f"The file {SPARK_FOLDER}{name} in {store.uri} is not what savepoint.json names.",
            todo="Restore it from another copy of the store, or use another savepoint.",
        )


def refuse_half_begun(job: str, manifests: list[Manifest]) -> None:
    """Refuse to start without ``savepoint=`` what was to begin with one, and was cut.

    Raises:
        NotRestorableError: naming the savepoint.
    """
    uri = left_in_the_middle(manifests)
    if uri:
        raise NotRestorableError(
            f"Job {job!r} was to begin with the savepoint {uri}, and that was cut.",
            todo=f"Start it with savepoint={uri!r} again, or give the query another job= name.",
        )


def warn_of_sources(df: DataFrame) -> None:
    """Say of which sources it is not known whether a clone reads on exactly."""
    for source in sources_of(df):
        if source.name not in EXACT_SOURCES or source.cleans:
            _log.warning(
                "of the source %s it is not known whether a query that begins with a savepoint "
                "reads on exactly where the savepoint stands",
                source.name,
            )
