"""Which job a query is: its checkpoint location says so, as it says everything else of a query.

The first start writes the job's name and the folder of jobs into a file of the location. Every
later start reads them there, whatever the query is called by then. A query without a location is a
job that goes with it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from recovery.savepoints.location_files import IDENTITY_FILE
from snapshot.storage.stores_by_uri import S3_SCHEMES
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
from statebackend.spark.start.writer_inspection import default_folder, location_path, options_of
from statebackend.system import System, temporary_folder

__all__ = [
    "IDENTITY_FILE",
    "FoundJob",
    "QueryIdentity",
    "find_job",
    "identity_at",
    "job_at",
    "new_identity",
    "refuse_other_place",
]

_log = logging.getLogger("statebackend.spark")
_STORES: Final = {**dict.fromkeys(S3_SCHEMES, "s3"), "abfss": "abfs"}
_FOLDER: Final = "_statebackend"  # of the jobs, in a location that names no uri
_DIGITS: Final = 8
_OF_SPARK: Final = re.compile(r"temporary-[0-9a-f-]{36}")  # a location that Spark deletes
_PARTS: Final = re.compile(r"[^:/]*:(//(?P<host>[^/:]*)(:\d*)?)?(?P<path>/.*?)/*")


class QueryIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A query's job, and the folder of jobs that it is in.

    Attributes:
        uri: that folder; "": it is inside the checkpoint location, and goes where that goes.
        location: whose job it is, where the folder is elsewhere; "": an earlier release wrote it.
    """

    uri: str
    job: str
    location: str = ""

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
        job: the same, opened.
        location: where it is still to be written; None: it is there, or the query has none.
        temporary: it goes when the query ends.
    """

    identity: QueryIdentity
    job: Job
    location: CheckpointLocation | None = None
    temporary: bool = False

    def keep(self) -> None:
        """Have later starts find it.

        Raises:
            CheckpointLocationError: the location cannot be written, or another driver began there
                with another job.
        """
        if self.location is not None:
            self.identity.write(self.location)
            self._check_kept(self.location)
            _log.info(
                "the state of this query is job %r in %s; %s in its checkpoint location says so",
                self.identity.job,
                self.job.uri,
                IDENTITY_FILE,
            )

    def _check_kept(self, location: CheckpointLocation) -> None:
        """Refuse to run another job than the one that later starts will find."""
        found = identity_at(location)
        if found == self.identity:
            return
        there = f"job {found.job!r} in {_folder_of(found, location)}" if found else "none"
        raise CheckpointLocationError(
            f"Another driver began a query at the checkpoint location {location.path} while this "
            f"one began: the job that its file {IDENTITY_FILE} names is {there}, and this start "
            f"was for job {self.identity.job!r} in {self.job.uri}.",
            todo="If the other query is to run, stop this one. Else start again: that goes on with "
            "the job that is there.",
        )

    def after_start(
        self, query: StreamingQuery, place: CheckpointLocation, timeout_s: float
    ) -> None:
        """Look once more whose the location is; have a temporary job removed after its query.

        Two drivers may have renamed their files one after the other: Hadoop's local file system
        replaces the first. Spark keeps the location of a query without a name under its default
        folder. There the job stays too, and the location says so.

        Args:
            place: where Spark runs the query. timeout_s: for its last record, before the removal.

        Raises:
            CheckpointLocationError: that cannot be written, or names another job; the query is
                stopped then.
        """
        try:
            self._settle(query, place, timeout_s)
        except BaseException:
            query.stop()
            raise

    def _settle(self, query: StreamingQuery, place: CheckpointLocation, timeout_s: float) -> None:
        job = self.job
        if self.location is not None:
            self._check_kept(self.location)
        if not self.temporary:
            return
        if _OF_SPARK.fullmatch(place.path.rstrip("/").rpartition("/")[2]):
            remove = functools.partial(_remove, query, job, timeout_s)
            job.system.threads.start(remove, f"statebackend-{job.name}")
            return
        path = place.qualified().rstrip("/")
        QueryIdentity(uri=self.job.uri, job=job.name, location=path).write(place)


def find_job(
    spark: SparkSession,
    writer: DataStreamWriter,
    uri: str,
    system: System,
    open_job: Callable[[str, str], Job],
) -> FoundJob:
    """The job that a query is: what its location says, or a new one.

    Args:
        uri: the folder of jobs, as it was given, or "".
        open_job: a job by its folder of jobs and its name.

    Raises:
        CheckpointLocationError: the location cannot be read, or is a copy of another.
        SettingError: there is no folder for its state.
        StorageError: of a query that begins, whether its job is new cannot be read.
    """
    options = options_of(writer)
    path = location_path(writer, options)
    if path is None:
        folder = default_folder(writer)
        if folder and not uri:  # Spark makes a location there, and keeps it
            uri = _within(CheckpointLocation(spark, folder).qualified().rstrip("/"))
        made = _temporary(spark, uri, system)
        return FoundJob(made, open_job(made.uri, made.job), temporary=True)
    return job_at(spark, path, uri, open_job, query_name=options.get("queryname", ""))


def job_at(
    spark: SparkSession,
    path: str,
    uri: str,
    open_job: Callable[[str, str], Job],
    *,
    query_name: str = "",
) -> FoundJob:
    """As :func:`find_job`, by a checkpoint location."""
    with jvm.calls():
        location = CheckpointLocation(spark, path)
        known = identity_at(location)
        if known is None:
            made = new_identity(location, query_name, uri)
            return _beginning(made, location, open_job)
        _refuse_copy(known, location)
        folder = _folder_of(known, location)
    if uri and uri.rstrip("/") != folder.rstrip("/"):
        _log.warning(
            "the state of this query is in %s, as its checkpoint location %s says; uri %s is for "
            "queries that begin",
            folder,
            path,
            uri,
        )
    return FoundJob(known, open_job(folder, known.job))


def _beginning(
    made: QueryIdentity, location: CheckpointLocation, open_job: Callable[[str, str], Job]
) -> FoundJob:
    """The job of a query that begins, which is not that of a location that was here before.

    Where the location has batches and has only lost its file, the name finds its job again.
    """
    folder = _folder_of(made, location)
    job = open_job(folder, made.job)
    if made.uri and job.manifests() and not _has_batches(location):
        made = msgspec.structs.replace(made, job=f"{made.job}-{job.system.new_id()[:_DIGITS]}")
        _log.warning(
            "the checkpoint location %s is new, but job %r in %s began at that path before; it is "
            "left as it is, and this query is job %r",
            location.path,
            job.name,
            folder,
            made.job,
        )
        job = open_job(folder, made.job)
    return FoundJob(made, job, location)


def _has_batches(location: CheckpointLocation) -> bool:
    progress = location.progress()
    return progress.query_id is not None or progress.last_offset >= 0 or progress.last_commit >= 0


def _temporary(spark: SparkSession, uri: str, system: System) -> QueryIdentity:
    name = f"temporary-{system.new_id()}"
    if not uri and not spark.sparkContext._jsc.sc().isLocal():
        raise SettingError(
            "The query has no checkpoint location, and no uri was given: there is no place for its "
            "state that all executors share.",
            todo="Give the query the option checkpointLocation, or set spark.statebackend.uri.",
        )
    return QueryIdentity(uri=uri or f"file://{temporary_folder(spark)}", job=name)


def _remove(query: StreamingQuery, job: Job, timeout_s: float) -> None:
    """Delete a temporary job once its query is known to have ended, and its records are written."""
    with contextlib.suppress(Exception):  # the query's own error is told to who waits for it
        query.awaitTermination()
    if not _has_ended(query):
        _log.warning(
            "the temporary job %r in %s is left behind: it is not known whether its query has "
            "ended",
            job.name,
            job.uri,
        )
        return
    run = Services.running.pop(job.store.uri, None)
    if run is not None:
        run.server.remove(run.name)
    try:
        if run is not None and not run.session.drain(timeout_s):
            _log.warning(
                "the temporary job %r in %s is left behind: its last record is not written after "
                "%g s",
                job.name,
                job.uri,
                timeout_s,
            )
            return
        job.store.delete([found.name for found in job.store.list("")])
    except StateBackendError as error:
        _log.warning("the temporary job %r in %s is left behind: %s", job.name, job.uri, error)


def _has_ended(query: StreamingQuery) -> bool:
    """False also where the JVM does not answer: the query may run on."""
    try:
        return not query.isActive
    except Exception as error:
        _log.debug("whether the query has ended cannot be asked (%s)", error)
        return False


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
    if not uri:
        _within(path)
    called = name or path.rpartition("/")[2]
    job = f"{called}-{blake3(path.encode()).hexdigest()[:_DIGITS]}"
    return QueryIdentity(uri=uri, job=job, location=path if uri else "")


def _refuse_copy(known: QueryIdentity, location: CheckpointLocation) -> None:
    """Refuse to take over the job of the location that this one is a copy of."""
    path = location.qualified().rstrip("/")
    if not known.location or _is_one_place(known.location, path):
        return
    raise CheckpointLocationError(
        f"The checkpoint location {path} is a copy of {known.location}, or that was moved here: by "
        f"its file {IDENTITY_FILE} the state is job {known.job!r} in {known.uri}, which a query at "
        f"{known.location} may run.",
        todo=f"If it was moved, and no query runs at the old path, write {path} as the "
        f'"location" into the file {IDENTITY_FILE} here, and delete .{IDENTITY_FILE}.crc if that '
        f"is beside it. For another query that begins with the same state, take a savepoint of "
        f"job {known.job!r} and give savepoint= at a new checkpoint location.",
    )


def refuse_other_place(prepared: CheckpointLocation, place: CheckpointLocation) -> None:
    """Refuse a query that Spark runs at another location than the one that was prepared.

    Raises:
        CheckpointLocationError: naming both.
    """
    wanted, found = prepared.qualified(), place.qualified()
    if _is_one_place(wanted, found):
        return
    raise CheckpointLocationError(
        f"Spark started the query at the checkpoint location {found}, but {wanted} was prepared "
        f"for it.",
        todo="Give the writer the option checkpointLocation, and starting() the same path.",
    )


def _folder_of(identity: QueryIdentity, location: CheckpointLocation) -> str:
    """The folder of jobs that an identity means in the location where it was found."""
    path = location.qualified().rstrip("/")
    if not identity.uri:
        return _within(path)
    inside = _inside(path)
    # Earlier releases wrote the whole uri of the folder inside, and a copy has one of its own.
    if (
        inside not in (None, identity.uri)
        and not identity.location
        and identity.uri.endswith(f"/{_FOLDER}")
        and location.files(f"{_FOLDER}/{identity.job}")
    ):
        return _within(path)
    return identity.uri


def _within(path: str) -> str:
    """The folder of jobs inside a location, as its store calls it.

    Raises:
        SettingError: it is where none can be.
    """
    if (inside := _inside(path)) is not None:
        return inside
    scheme = urlsplit(path).scheme
    raise SettingError(
        f"No uri was given, and state cannot be kept beside the checkpoint location {path}: "
        f"{scheme or 'that'} is not a store that a commit log can be kept in.",
        todo="Give uri= (or set spark.statebackend.uri) a file:/// or s3:// URI.",
    )


def _inside(path: str) -> str | None:
    parts = urlsplit(path)
    if parts.scheme == "file":
        return f"file://{parts.path}/{_FOLDER}"
    if parts.scheme in S3_SCHEMES:
        return f"s3://{parts.netloc}{parts.path}/{_FOLDER}"
    return None


def _is_one_place(one: str, other: str) -> bool:
    """Whether two qualified paths mean one folder, by whichever of Hadoop's names for a store.

    One of them may leave the port of its host out, or be a link on this host.
    """
    schemes = [_STORES.get(path.partition(":")[0], path.partition(":")[0]) for path in (one, other)]
    parts = _PARTS.fullmatch(one), _PARTS.fullmatch(other)
    if parts[0] is None or parts[1] is None or schemes[0] != schemes[1]:
        return one == other
    hosts = {part["host"] for part in parts if part and part["host"]}
    if parts[0]["path"] == parts[1]["path"] and len(hosts) < 2:
        return True
    paths = [urlsplit(path).path for path in (one, other)]
    return schemes[0] == "file" and os.path.realpath(paths[0]) == os.path.realpath(paths[1])
