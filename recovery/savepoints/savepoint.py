"""Savepoints: a job's whole state at one epoch, in a folder of its own that nobody cleans.

    savepoint.begun     written first: whose it is going to be; at the end: that it is deleted
    log/ data/ base/    a job's folder with everything that the epoch needs, and no more
    spark/              of Spark's checkpoint location what the epoch needs; not of a continuous job
    savepoint.json      written last: without it there is no savepoint

`savepoint.json`, format version 1: JSON with `savepoint` (`Savepoint`), and `digest`, blake3 over
the bytes of that as they stand. A savepoint owns its bytes: it stays whole whatever becomes of its
job, and only `delete` takes it away.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final
from urllib.parse import quote

import msgspec
from blake3 import blake3

from recovery.inspect.job_list import BEGUN_NAME, SAVEPOINT_NAME
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.uris import SAVEPOINTS_FOLDER, job_folder
from statebackend.errors import (
    CorruptionError,
    NotRestorableError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)

__all__ = [
    "SPARK_FOLDER",
    "Begun",
    "Savepoint",
    "SavepointFile",
    "SavepointOperator",
    "below",
    "decode_begun",
    "decode_savepoint",
    "default_folder",
    "encode_savepoint",
    "read_savepoint",
    "savepoints_folder",
]

FORMAT_VERSION: Final = 1
SPARK_FOLDER: Final = "spark/"


class SavepointOperator(msgspec.Struct, frozen=True, kw_only=True):
    """One operator. ``epoch``: the one that its state is of; ``size_bytes``: of its slices."""

    uid: str
    parallelism: int
    max_parallelism: int
    first_epoch: int
    epoch: int
    size_bytes: int


class SavepointFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of Spark's checkpoint location, by its name there."""

    name: str
    size_bytes: int
    digest: str


class Savepoint(msgspec.Struct, frozen=True, kw_only=True):
    """A savepoint: what `StateBackend.savepoint` returns, and ``savepoint=`` takes.

    Attributes:
        format: of `savepoint.json`.
        id: names it.
        uri: where it lies.
        job: the name of the job that it was taken from; of no job: the savepoint's own id.
        job_id: that job's id.
        job_uri: that job's folder; empty where it was written anew.
        query_id: of the streaming query.
        location: the query's checkpoint location.
        continuous: it was a job without micro-batches. Where its sources stood, and what its sinks
            had prepared, is among the operators, and there is no ``location``.
        epoch: the batch (or checkpoint) after which this is the state, and where the sources stood.
        uncommitted: of a continuous job: its sinks may hold output of the epoch that nobody has
            committed. That is the job's own: no other commits it.
        stamp_ms: that batch's own time.
        watermark_ms: in force in it; None: it had none.
        next_watermark_ms: of a query that had Spark's own operators: in force in the next batch.
            None: of any other, whose operators say it.
        created_ms: when it was made, by the clock of the host that made it.
        operators: those that had begun by then.
        records: how many records were copied.
        objects: how many objects besides.
        size_bytes: of the state.
        spark: files of Spark's checkpoint location.
    """

    format: int = FORMAT_VERSION
    id: str
    uri: str
    job: str
    job_id: str
    job_uri: str
    query_id: str
    location: str
    epoch: int
    stamp_ms: int
    watermark_ms: int | None
    created_ms: int
    operators: list[SavepointOperator]
    records: int
    objects: int
    size_bytes: int
    spark: list[SavepointFile]
    continuous: bool = False
    uncommitted: bool = False
    next_watermark_ms: int | None = None

    @property
    def of_job(self) -> str:
        """The name of the job that it was taken from; empty if it is of none."""
        return "" if self.job == self.id else self.job

    @property
    def origin(self) -> str:
        """What its state was taken from, for people; empty: tables, or several savepoints."""
        if self.of_job:
            return f"job {self.of_job!r}"
        return f"the query at {self.location}" if self.query_id else ""

    @property
    def described(self) -> str:
        """The savepoint with its origin, in a sentence."""
        return f"savepoint {self.id} of {self.origin}" if self.origin else f"savepoint {self.id}"


class Begun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `savepoint.begun` says. ``deleted``: somebody began to delete what has this id."""

    id: str
    job: str
    job_uri: str
    created_ms: int
    deleted: bool = False

    def completes(self, savepoint: Savepoint) -> bool:
        """Whether `savepoint.json` is of the savepoint that this began, and not deleted.

        A write that was taken for lost may land much later: a `savepoint.json` after its deletion
        began or was done, a mark of deletion in what was made in the same place since.
        """
        return self.deleted != (self.id == savepoint.id)


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    savepoint: msgspec.Raw
    digest: str


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    format: int


# --- places --------------------------------------------------------------------------------------


def savepoints_folder(uri: str) -> str:
    """Where the savepoints of all jobs under a URI are, if nobody said another place."""
    return f"{uri.rstrip('/')}/{SAVEPOINTS_FOLDER}"


def default_folder(uri: str, job: str, savepoint_id: str) -> str:
    """Where a savepoint goes if nobody says where to."""
    return f"{job_folder(savepoints_folder(uri), job)}/{savepoint_id}"


def below(folder: str, name: str) -> str:
    """The URI of what a listing of a folder shows as ``name``."""
    shown = quote(name) if folder.startswith("file:") else name  # decoded when it is opened
    return f"{folder.rstrip('/')}/{shown}"


# --- reading and writing -------------------------------------------------------------------------


def read_savepoint(store: ObjectStore) -> Savepoint:
    """What `savepoint.json` says, with the URI under which it was found.

    Raises:
        NotRestorableError: there is no savepoint, or one that was never finished.
        CorruptionError: it does not read. UnsupportedFormatError: it is of a later format.
    """
    try:
        data = store.get(SAVEPOINT_NAME)
        begun = store.get(BEGUN_NAME)
    except ObjectNotFoundError as error:
        begun_there = any(info.name == BEGUN_NAME for info in store.list(BEGUN_NAME))
        what = "a savepoint that was never finished" if begun_there else "no savepoint"
        raise _none(what, store) from error
    savepoint = decode_savepoint(data, store.uri)
    its = decode_begun(begun)
    if its is not None and not its.completes(savepoint):
        raise _none("what is left of a deleted savepoint", store)
    return savepoint


def _none(what: str, store: ObjectStore) -> NotRestorableError:
    return NotRestorableError(
        f"There is {what} in {store.uri}.",
        todo="Check the URI; `statebackend savepoint list` shows what there is.",
    )


def decode_begun(data: bytes) -> Begun | None:
    """`savepoint.begun`; None if it does not read: that alone makes no savepoint useless."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(data, type=Begun)
    return None


def encode_savepoint(savepoint: Savepoint) -> bytes:
    """`savepoint.json`."""
    text = msgspec.json.encode(savepoint)
    return msgspec.json.encode(
        _Envelope(savepoint=msgspec.Raw(text), digest=blake3(text).hexdigest())
    )


def decode_savepoint(data: bytes, uri: str) -> Savepoint:
    """`savepoint.json`, with the URI under which it was found. Raises as `read_savepoint`."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        text = bytes(envelope.savepoint)
        if blake3(text).hexdigest() != envelope.digest:
            raise ValueError("its digest is another")
        version = msgspec.json.decode(text, type=_Version).format
        if version > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"The savepoint in {uri} has the format version {version}; this release reads up "
                f"to {FORMAT_VERSION}.",
                todo="Use a release that is at least as new as the one that wrote it.",
            )
        savepoint = msgspec.json.decode(text, type=Savepoint)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptionError(
            f"The object {SAVEPOINT_NAME!r} in {uri} is damaged ({error}).",
            todo="Restore it from another copy of the store, or take another savepoint.",
        ) from error
    return msgspec.structs.replace(savepoint, uri=uri)
