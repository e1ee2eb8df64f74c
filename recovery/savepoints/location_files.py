"""Reads the files of Spark's checkpoint location: a query's own, a copy of it, or a savepoint's.

A location holds, for a query without stateful operators of Spark's own:

    metadata                   the query's id
    offsets/<batch>            what the batch reads: a line for each source, after two of its own
    commits/<batch>            there once the batch is done
    sources/<n>/...            what source n keeps: of a file source the files of each of its own
                               batches (`<n>`, every so often all of them up to there in
                               `<n>.compact`); of others where they began
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from recovery.savepoints.savepoint import SPARK_FOLDER
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CheckpointLocationError, ObjectNotFoundError, UnsupportedFormatError

__all__ = [
    "IDENTITY_FILE",
    "Batches",
    "LocationFiles",
    "SavepointLocation",
    "StoreLocation",
    "batches_of",
    "query_id_of",
    "text_of",
]

IDENTITY_FILE: Final = "statebackend.json"  # says whose job's location it is
TEXT_LIMIT_BYTES: Final = 64 << 20


class LocationFiles(Protocol):
    """Reads a checkpoint location. Names are relative to it; hidden files are left out."""

    @property
    def path(self) -> str:
        """Where it is, for people."""

    def list(self, folder: str) -> list[str]:
        """Every file below a folder, however deep; nothing where there is no such folder."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file in pieces.

        Raises:
            ObjectNotFoundError: it is not there.
        """


@dataclass(frozen=True)
class StoreLocation:
    """A checkpoint location read without Spark, as an object store."""

    store: ObjectStore

    @property
    def path(self) -> str:
        """The store's URI."""
        return self.store.uri

    def list(self, folder: str) -> list[str]:
        """As the store lists it."""
        return [info.name for info in self.store.list(f"{folder}/")]

    def chunks(self, name: str) -> Iterator[bytes]:
        """As the store reads it."""
        return self.store.get_chunks(name)


@dataclass(frozen=True)
class SavepointLocation:
    """What a savepoint holds of a checkpoint location, as one."""

    store: ObjectStore

    @property
    def path(self) -> str:
        """The savepoint's URI."""
        return self.store.uri

    def list(self, folder: str) -> list[str]:
        """See `LocationFiles`."""
        found = self.store.list(f"{SPARK_FOLDER}{folder}/")
        return [info.name.removeprefix(SPARK_FOLDER) for info in found]

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `LocationFiles`."""
        return self.store.get_chunks(f"{SPARK_FOLDER}{name}")


@dataclass(frozen=True)
class Batches:
    """What Spark has planned and committed, ascending."""

    offsets: Sequence[int]
    commits: Sequence[int]

    @property
    def last_commit(self) -> int:
        """-1 for none."""
        return max(self.commits, default=-1)


def batches_of(location: LocationFiles) -> Batches:
    """The batches that a location knows."""
    return Batches(_numbers(location.list("offsets")), _numbers(location.list("commits")))


def _numbers(names: Iterable[str]) -> list[int]:
    last = (name.rpartition("/")[2] for name in names)
    return sorted(int(name) for name in last if name.isdigit())


def query_id_of(location: LocationFiles) -> str:
    """The id of the query whose location it is.

    Raises:
        CheckpointLocationError: it is no query's.
    """
    try:
        return str(json.loads(text_of(location, "metadata"))["id"])
    except (ObjectNotFoundError, ValueError, KeyError, TypeError) as error:
        raise CheckpointLocationError(
            f"{location.path} is not the checkpoint location of a query: its file `metadata` "
            f"does not read ({error}).",
            todo="Give the checkpointLocation that the query was started with.",
        ) from error


def text_of(location: LocationFiles, name: str) -> str:
    """A file of text.

    Raises:
        ObjectNotFoundError: it is not there. UnsupportedFormatError: it is no text, or too long.
    """
    pieces, size_bytes = [], 0
    for piece in location.chunks(name):
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes > TEXT_LIMIT_BYTES:
            raise UnsupportedFormatError(
                f"The file {name} in {location.path} is over {TEXT_LIMIT_BYTES} bytes.",
                todo="Check that this is the checkpoint location of a query.",
            )
    try:
        return b"".join(pieces).decode()
    except UnicodeDecodeError as error:
        raise UnsupportedFormatError(
            f"The file {name} in {location.path} is no text ({error}).",
            todo="Check that this is the checkpoint location of a query.",
        ) from error
