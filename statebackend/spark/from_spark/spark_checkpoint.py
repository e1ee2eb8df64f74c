"""The checkpoint location of a query whose state Spark's own operators keep.

Spark plans a batch (`offsets/<n>`), runs it, and commits it (`commits/<n>`). The state of the
newest committed batch N is what comes over. A plan N + 1 without a commit is of a batch that was
cut: Spark would run it again from that plan, and so does the query that goes on here. So what a
sink had got of it, it gets again, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import SparkSession

from recovery.decide.start_batch import COMMITS, OFFSETS, LocationProgress
from recovery.savepoints.location_at_epoch import STATE_FOLDER, files_after
from recovery.savepoints.location_files import query_id_of, text_of
from statebackend.errors import (
    CheckpointLocationError,
    NotRestorableError,
    ObjectNotFoundError,
    UnsupportedFormatError,
    UnsupportedQueryError,
)
from statebackend.spark.from_spark.reached_location import ReachedLocation, running
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.query_identity import identity_at
from statebackend.tables.saved_query import SavedQuery

__all__ = ["SparkCheckpoint", "open_checkpoint"]

_PLAN_VERSION: Final = "v1"
_COMMIT_VERSIONS: Final = ("v1", "v2")
_IDS: Final = "stateUniqueIds"  # of stores, in a commit; from format 2 on
_OF_STATE: Final = "spark.sql.streaming.stateStore."


@dataclass(frozen=True)
class _Files:
    """A location as `recovery.savepoints` reads one; see `LocationFiles`."""

    location: CheckpointLocation

    @property
    def path(self) -> str:
        """As Spark has it."""
        return self.location.path

    def list(self, folder: str) -> list[str]:
        """Every file below a folder."""
        return self.location.files(folder)

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file in pieces."""
        return self.location.chunks(name)


@dataclass(frozen=True)
class SparkCheckpoint:
    """A location, and where its query stands.

    Attributes:
        format: of Spark's state checkpoints, which the source that reads them must be told.
        epoch: the newest committed batch. planned: the next one was planned, and cut.
        stamp_ms: the batch's own time. watermark_ms: in force in it; next_watermark_ms: in the next
            one. 0: there is none.
    """

    spark: SparkSession
    place: ReachedLocation
    location: CheckpointLocation
    progress: LocationProgress
    query_id: str
    format: int
    epoch: int
    planned: bool
    stamp_ms: int
    watermark_ms: int
    next_watermark_ms: int

    @property
    def path(self) -> str:
        """The location's, for people."""
        return self.place.shown

    def files(self) -> dict[str, bytes]:
        """What a query needs that goes on without Spark's state, by name.

        Raises:
            NotRestorableError, UnsupportedFormatError: a source's log or a plan does not tell.
        """
        files = _Files(self.location)
        names = files_after(files, self.epoch, planned=self.planned)
        for name in names:
            if name.startswith(f"{OFFSETS}/"):
                _head(files, name, (_PLAN_VERSION,))
        return {name: self._adapted(name, b"".join(files.chunks(name))) for name in names}

    def saved_query(self) -> SavedQuery:
        """What a savepoint says of the query. Raises as `files`."""
        return SavedQuery(
            epoch=self.epoch,
            stamp_ms=self.stamp_ms,
            watermark_ms=self.watermark_ms or None,
            next_watermark_ms=self.next_watermark_ms,
            query_id=self.query_id,
            location=self.path,
            files=self.files(),
            check=self.check_unchanged,
        )

    def _adapted(self, name: str, body: bytes) -> bytes:
        """Without what Spark says of its own state: its stores, and their ids in a commit."""
        folder = name.partition("/")[0]
        if folder == COMMITS:
            return f'v1\n{{"nextBatchWatermarkMs":{self.next_watermark_ms}}}'.encode()
        if folder != OFFSETS:
            return body
        version, head, *sources = body.decode().split("\n")
        said = json.loads(head)
        conf = said.get("conf", {})
        said["conf"] = {key: conf[key] for key in conf if not key.startswith(_OF_STATE)}
        return "\n".join([version, json.dumps(said, separators=(",", ":")), *sources]).encode()

    def check_unchanged(self) -> None:
        """Refuse what a query has gone on with since it was opened.

        Raises:
            JobRunningError: naming the location.
        """
        found = self.location.progress()
        if found != self.progress:
            raise running(
                self.path,
                f"batch {max(found.last_offset, found.last_commit)} was planned or committed there "
                f"meanwhile",
            )
        self.place.check()
        _refuse_active(self.spark, self.path, self.query_id)


def open_checkpoint(spark: SparkSession, place: ReachedLocation) -> SparkCheckpoint:
    """Look at a checkpoint location of Spark's.

    Raises:
        CheckpointLocationError: it is no query's, is a job's of ours, or cannot be read.
        JobRunningError: a query of this driver uses it.
        NotRestorableError: no batch was committed, or a file that is needed is gone.
        UnsupportedFormatError: a plan or commit is of a form that this release does not know.
        UnsupportedQueryError: it holds no state.
    """
    location, path = place.open(spark), place.shown
    progress = location.progress()
    if identity_at(location) is not None:
        raise CheckpointLocationError(
            f"The checkpoint location {path} is of a query whose state is kept here, not by "
            f"Spark's own operators.",
            todo="Take a savepoint of it: backend.savepoint(), or `statebackend savepoint create`.",
        )
    files = _Files(location)
    query_id = query_id_of(files)
    _refuse_active(spark, path, query_id)
    epoch = progress.last_commit
    if epoch < 0:
        raise NotRestorableError(
            f"The query in {path} has committed no batch: there is no state to bring over.",
            todo="Start the program with install() and a new checkpoint location.",
        )
    if progress.last_offset > epoch + 1:
        raise UnsupportedQueryError(
            f"In {path} batches {epoch + 1} to {progress.last_offset} are planned and none of them "
            f"is committed: the query tracks its progress asynchronously.",
            todo="Start it in Spark once more without asyncProgressTrackingEnabled, and stop it "
            "when a batch is done.",
        )
    if not location.files(STATE_FOLDER):
        raise UnsupportedQueryError(
            f"The checkpoint location {path} holds no state of Spark's operators.",
            todo="Check that this is the checkpointLocation of the query.",
        )
    plan = _head(files, f"{OFFSETS}/{epoch}", (_PLAN_VERSION,))
    commit = _head(files, f"{COMMITS}/{epoch}", _COMMIT_VERSIONS)
    return SparkCheckpoint(
        spark=spark,
        place=place,
        location=location,
        progress=progress,
        query_id=query_id,
        format=2 if _IDS in commit else 1,
        epoch=epoch,
        planned=progress.last_offset > epoch,
        stamp_ms=int(plan["batchTimestampMs"]),
        watermark_ms=int(plan["batchWatermarkMs"]),
        next_watermark_ms=int(commit.get("nextBatchWatermarkMs", 0)),
    )


def _head(files: _Files, name: str, versions: tuple[str, ...]) -> dict[str, Any]:
    """What Spark says in the second line of a log file."""
    try:
        version, text, *_ = [*text_of(files, name).split("\n"), "", ""]
    except ObjectNotFoundError as error:
        raise NotRestorableError(
            f"The checkpoint location {files.path} has no {name}, so where its sources stood is "
            f"not known.",
            todo="Restore the location from a whole copy.",
        ) from error
    if version.strip() not in versions:
        raise UnsupportedFormatError(
            f"The file {name} in {files.path} is of the form {version[:20]!r}; this release reads "
            f"{' and '.join(versions)}.",
            todo="Leave spark.sql.streaming.queryEvolution.enableSourceEvolution at false, or use "
            "a newer release of this library.",
        )
    try:
        said = json.loads(text)
        if name.startswith(OFFSETS):
            int(said["batchTimestampMs"]), int(said["batchWatermarkMs"])
        return dict(said)
    except (ValueError, KeyError, TypeError) as error:
        raise NotRestorableError(
            f"The file {name} in {files.path} was not written to its end, or is damaged ({error}).",
            todo="Restore it from a copy, or start the query in Spark once more: it writes the "
            "next batch.",
        ) from error


def _refuse_active(spark: SparkSession, path: str, query_id: str) -> None:
    session: Any = spark
    found = session._jsparkSession.sharedState().activeStreamingQueries()  # of every session
    if any(str(one) == query_id for one in found.keySet().toArray()):
        raise running(path, "a query of this driver uses it")
