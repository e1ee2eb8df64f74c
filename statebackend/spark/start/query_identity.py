"""Which job a query is: its checkpoint location says so, as it says everything else of a query.

The first start writes the job's name and the folder of jobs into a file of the location. Every
later start reads them there, whatever the query is called by then. A query without a location is a
job that goes with it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from snapshot.storage.open import S3_SCHEMES
from statebackend.errors import (
    CheckpointLocationError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
)
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.services import Services
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.stream_writer import location_path, options_of
from statebackend.system import System, temporary_folder

__all__ = ["IDENTITY_FILE", "FoundJob", "QueryIdentity", "find_job", "identity_at", "new_identity"]

_log = logging.getLogger("statebackend.spark")
IDENTITY_FILE: Final = "statebackend.json"
_FOLDER: Final = "_statebackend"  # of the jobs, in a location that names no uri
_DIGITS: Final = 8


class QueryIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A query's job, and the folder of jobs that it is in."""

    uri: str
    job: str

    def write(self, location: CheckpointLocation) -> None:
        """Keep it in the location, unless that has one.

        Raises:
            CheckpointLocationError: it cannot be written.
        """
        location.write(IDENTITY_FILE, iter([msgspec.json.encode(self)]))


@dataclass(frozen=True)
class FoundJob:
    """The job of a query that is about to start.

    Attributes:
        location: where it is still to be written; None: it is there, or the query has none.
        temporary: it goes when the query ends.
    """

    identity: QueryIdentity
    location: CheckpointLocation | None = None
    temporary: bool = False

    def keep(self) -> None:
        """Have later starts find it.

        Raises:
            CheckpointLocationError: the location cannot be written.
        """
        if self.location is not None:
            self.identity.write(self.location)
            _log.info(
                "the state of this query is job %r in %s; %s in its checkpoint location says so",
                self.identity.job,
                self.identity.uri,
                IDENTITY_FILE,
            )

    def remove_after(self, query: StreamingQuery, job: Job) -> None:
        """Have a temporary job's folder removed when its query has ended."""
        if self.temporary:
            job.system.threads.start(lambda: _remove(query, job), f"statebackend-{job.name}")


def find_job(spark: SparkSession, writer: DataStreamWriter, uri: str, system: System) -> FoundJob:
    """The job that a query is: what its location says, or a new one.

    Args:
        uri: the folder of jobs, as it was given, or "".

    Raises:
        CheckpointLocationError: the location cannot be read.
        SettingError: there is no folder for its state.
    """
    options = options_of(writer)
    path = location_path(spark, options)
    if path is None:
        return FoundJob(_temporary(spark, uri, system), temporary=True)
    with jvm.calls():
        location = CheckpointLocation(spark, path)
        known = identity_at(location)
        if known is None:
            return FoundJob(new_identity(location, options.get("queryname", ""), uri), location)
    if uri and uri.rstrip("/") != known.uri.rstrip("/"):
        _log.warning(
            "the state of this query is in %s, as its checkpoint location %s says; uri %s is for "
            "queries that begin",
            known.uri,
            path,
            uri,
        )
    return FoundJob(known)


def _temporary(spark: SparkSession, uri: str, system: System) -> QueryIdentity:
    name = f"temporary-{system.new_id()}"
    if not uri and not spark.sparkContext._jsc.sc().isLocal():
        raise SettingError(
            "The query has no checkpoint location, and no uri was given: there is no place for its "
            "state that all executors share.",
            todo="Give the query the option checkpointLocation, or set spark.statebackend.uri.",
        )
    return QueryIdentity(uri=uri or f"file://{temporary_folder(spark)}", job=name)


def _remove(query: StreamingQuery, job: Job) -> None:
    with contextlib.suppress(Exception):  # the query's own error is told to who waits for it
        query.awaitTermination()
    run = Services.running.pop(job.store.uri, None)
    if run is not None:
        run.server.remove(run.name)
    try:
        job.store.delete([found.name for found in job.store.list("")])
    except StateBackendError as error:
        _log.warning("the temporary job %r in %s is left behind: %s", job.name, job.uri, error)


def identity_at(location: CheckpointLocation) -> QueryIdentity | None:
    """What a location says; None: no query of ours began there.

    Raises:
        CheckpointLocationError: its file cannot be read.
    """
    try:
        text = b"".join(location.chunks(IDENTITY_FILE))
        return msgspec.json.decode(text, type=QueryIdentity)
    except ObjectNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise CheckpointLocationError(
            f"The file {IDENTITY_FILE} of the checkpoint location {location.path} names no job "
            f"({type(error).__name__}).",
            todo="Put it back from a copy, or start with StateBackend(spark, uri=..., job=...), "
            "which need no such file.",
        ) from None


def new_identity(location: CheckpointLocation, name: str, uri: str) -> QueryIdentity:
    """That of a query which begins at a location.

    Args:
        name: the query's, or "". uri: as it was given, or "".

    Raises:
        SettingError: no folder was given, and the location is where none can be.
    """
    path = location.qualified().rstrip("/")
    called = name or path.rpartition("/")[2]
    job = f"{called}-{blake3(path.encode()).hexdigest()[:_DIGITS]}"
    return QueryIdentity(uri=uri or _within(path), job=job)


def _within(path: str) -> str:
    """The folder of jobs inside a location, as its store calls it."""
    parts = urlsplit(path)
    if parts.scheme == "file":
        return f"file://{parts.path}/{_FOLDER}"
    if parts.scheme in S3_SCHEMES:
        return f"s3://{parts.netloc}{parts.path}/{_FOLDER}"
    raise SettingError(
        f"No uri was given, and state cannot be kept beside the checkpoint location {path}: "
        f"{parts.scheme or 'that'} is not a store that a commit log can be kept in.",
        todo="Give uri= (or set spark.statebackend.uri) a file:/// or s3:// URI.",
    )
