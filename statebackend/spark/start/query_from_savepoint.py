"""Starts a query from a savepoint: its state, its sink's log, and its checkpoint location."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3
from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from recovery.decide.start_batch import LocationProgress
from recovery.savepoints.begin_with_savepoint import (
    Standing,
    has_begun_with,
    standing,
    went_on,
)
from recovery.savepoints.between_modes import (
    lists_in,
    state_for_query,
    state_with_keys,
    state_with_watermark,
)
from recovery.savepoints.savepoint import (
    SPARK_FOLDER,
    Savepoint,
)
from recovery.savepoints.state_at_epoch import StateAt
from snapshot.formats.record import Manifest
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CheckpointLocationError,
    CorruptionError,
    SettingError,
)
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import OpenSavepoint, open_savepoint, uri_of
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.schema.keys.key_schemas import key_renamed
from statebackend.spark.frames.repeatable_sources import (
    REPEATABLE_SOURCES,
    Source,
    sources_in,
    sources_of,
)
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.location_from_savepoint import LocationFile, location_files
from statebackend.spark.start.sink_log import SinkLog, sink_log, sink_of

__all__ = [
    "EXACT_SOURCES",
    "NewQuery",
    "begin_with",
    "has_begun",
    "warn_of_sources",
]

_log = logging.getLogger("statebackend.spark")

# From these a clone reads on exactly where the original stood: what they give follows from the
# offsets in Spark's plan and the log that Spark keeps of them, both of which are carried along.
EXACT_SOURCES: Final = REPEATABLE_SOURCES

_KNOW_BY_QUERY: Final = ("delta", "iceberg")  # sinks that tell batches by the query's id


@dataclass(frozen=True)
class NewQuery:
    """What is known of the query that begins.

    Attributes:
        operators: by uid. sources: in Spark's order; None: not known.
        sink: its sink's log, if it keeps one. sink_format: the sink's; "" if it is not known.
    """

    operators: Mapping[str, Operator] = field(default_factory=dict)
    sources: Sequence[Source] | None = None
    sink: SinkLog | None = None
    sink_format: str = ""

    @classmethod
    def of(
        cls,
        writer: DataStreamWriter | None,
        location: CheckpointLocation | None,
        path: str | None,
        operators: Mapping[str, Operator],
    ) -> NewQuery:
        """By its writer.

        Args:
            path: the option of that name.
        """
        if writer is None:
            return cls(operators)
        sink = sink_of(writer, path)
        log = None if location is None else sink_log(writer, location, sink)
        return cls(operators, sources_in(writer), log, sink.format)


def has_begun(source: str | Savepoint, job: Job, location: CheckpointLocation | None) -> bool:
    """Whether the query goes on with what it took from a savepoint once; that may be gone since."""
    if location is None or location.progress().query_id is None:
        return False
    return has_begun_with(job.log(), job.open_at(uri_of(source)).uri)


def begin_with(
    source: str | Savepoint,
    job: Job,
    location: CheckpointLocation | None,
    check: Callable[[list[Manifest]], Any],
    query: NewQuery | None = None,
) -> None:
    """Give a new job a savepoint's state, and a new checkpoint location where its sources stood.

    First the state, the sink's log, then the location, `metadata` last; may be cut, and repeated.
    It does nothing for a job that has begun with this savepoint, and its location.

    Args:
        source: the savepoint, or its URI.
        check: refuses what the query cannot take over, before anything is written.
        query: what is known of it.

    Raises:
        CheckpointLocationError: job, location or sink have begun with something else, or the sink
            would write a batch twice.
        NotRestorableError, CorruptionError, UnsupportedFormatError: of the savepoint.
        SettingError: it is a continuous job's, and how many sources there are is not known.
    """
    query = query or NewQuery()
    saved, log = open_savepoint(source, job), job.log()
    savepoint = saved.savepoint
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
    files = location_files(savepoint, query.sources, saved.store)
    _refuse_used(location, progress, files, saved.store)
    _refuse_repeated(savepoint, files, query.sink_format)
    if query.sink is not None:
        query.sink.check(savepoint.epoch)
    query_id = begun.query_id
    if begun.standing is not Standing.BEGUN:
        state = _taken_over(saved, query.operators)
        query_id = job.system.new_uuid()
        saved.begin(state, log, begun, query_id=query_id, check=check)
    _fill(location, saved, query_id, query.sink, files)
    saved.log_begun(query_id)


def _taken_over(saved: OpenSavepoint, operators: Mapping[str, Operator]) -> StateAt:
    state = saved.state()
    if (next_ms := saved.savepoint.next_watermark_ms) is not None:
        delays = {uid: one.time.delay_ms for uid, one in operators.items()}
        keys = {uid: one.key_schema.json() for uid, one in operators.items()}
        renamed = state_with_keys(state, lambda uid, key: key_renamed(key, keys.get(uid, key)))
        return state_with_watermark(renamed, next_ms, delays)
    if not saved.savepoint.continuous:
        return state
    _log.warning(
        "the savepoint %s is of a continuous job: the query's sources begin anew, and of %s "
        "nothing is taken over",
        saved.savepoint.id,
        ", ".join(sorted(lists_in(state))),
    )
    return state_for_query(state)


def _refuse_repeated(savepoint: Savepoint, files: Collection[str], sink_format: str) -> None:
    """Refuse a batch that is run again, where the sink would not know it.

    Spark's own query may have written it, and was cut before it was committed.
    """
    batch = savepoint.epoch + 1
    knows_by_query = any(one in sink_format.lower() for one in _KNOW_BY_QUERY)
    if knows_by_query and f"offsets/{batch}" in files:
        raise CheckpointLocationError(
            f"Spark has planned batch {batch} and not committed it, so it is run again here. The "
            f"sink {sink_format} knows a batch that it has by the query's id, and this query has a "
            f"new one: rows of that batch could be written twice.",
            todo="Start the old query in Spark once more, stop it when a batch is done, and bring "
            "its state over anew.",
        )


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
    saved: OpenSavepoint,
    query_id: str,
    sink: SinkLog | None,
    files: Mapping[str, LocationFile],
) -> None:
    if sink is not None:
        sink.begin(saved.savepoint.epoch)
    for name, file in files.items():
        there = file.copied or name
        copied = file.body is None
        location.write(
            name, _checked(saved.store, there, file.digest) if copied else iter([file.body or b""])
        )
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


def warn_of_sources(df: DataFrame) -> None:
    """Say of which sources it is not known whether a clone reads on exactly."""
    for source in sources_of(df):
        if source.name not in EXACT_SOURCES or source.cleans:
            _log.warning(
                "of the source %s it is not known whether a query that begins with a savepoint "
                "reads on exactly where the savepoint stands",
                source.name,
            )
