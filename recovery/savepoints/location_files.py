"""What of Spark's checkpoint location belongs to one epoch, and goes into a savepoint.

A location holds, for a query without stateful operators of Spark's own:

    metadata                   the query's id
    offsets/<batch>            what the batch reads: a line for each source, after two of its own
    commits/<batch>            there once the batch is done
    sources/<n>/...            what source n keeps: of a file source the files of each of its own
                               batches (`<n>`, every so often all of them up to there in
                               `<n>.compact`); of others where they began

Of the epoch's batch and the one before the plan is taken (Spark asks for both), of the epoch's the
commit, and of each source what it knew in the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CheckpointLocationError,
    NotRestorableError,
    ObjectNotFoundError,
    UnsupportedFormatError,
    UnsupportedQueryError,
)

__all__ = [
    "NO_OFFSET",
    "STATE_FOLDER",
    "Batches",
    "LocationFiles",
    "StoreLocation",
    "batches_of",
    "file_source_offset",
    "files_after",
    "files_of",
    "query_id_of",
    "text_of",
]

_COMPACT: Final = ".compact"
NO_OFFSET: Final = "-"
_VERSION: Final = "v1"
_FILE_LOG: Final = b'v1\n{"path":'
TEXT_LIMIT_BYTES: Final = 64 << 20
STATE_FOLDER: Final = "state"


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


def files_of(location: LocationFiles, epoch: int) -> list[str]:
    """The files that a query needs to go on after ``epoch``, but for `metadata`.

    Raises:
        UnsupportedQueryError: Spark keeps state of its own there, which is not carried along.
        NotRestorableError: the batch is not committed, or its plan or a source's log is gone.
        UnsupportedFormatError: the plan is of a form that this release does not know.
    """
    if location.list(STATE_FOLDER):
        raise UnsupportedQueryError(
            f"The checkpoint location {location.path} has a folder `state`: operators of Spark's "
            f"own (dropDuplicates, a stream-stream join, an aggregation) keep state there, and a "
            f"savepoint does not carry that along.",
            todo="Use the backend's operators in their place, or copy the whole location and the "
            "job's folder while the query is stopped.",
        )
    return files_after(location, epoch)


def files_after(location: LocationFiles, epoch: int, *, planned: bool = False) -> list[str]:
    """As `files_of`, whatever Spark keeps beside it.

    Args:
        planned: Spark has planned the next batch, too: that plan goes along.
    """
    wanted = [f"offsets/{n}" for n in range(max(0, epoch - 1), epoch + 1 + planned)]
    wanted.append(f"commits/{epoch}")
    batches = batches_of(location)
    there = {f"offsets/{n}" for n in batches.offsets} | {f"commits/{n}" for n in batches.commits}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise NotRestorableError(
            f"The checkpoint location {location.path} has no {' and no '.join(missing)} (any "
            f"more), so where its sources stood after epoch {epoch} is not known.",
            todo="Let the query finish a batch, and try again.",
        )
    offsets = _offsets(location, epoch + planned)
    by_source: dict[str, list[str]] = {}
    for name in location.list("sources"):
        by_source.setdefault(name.split("/")[1], []).append(name)
    for number, names in sorted(by_source.items()):
        its = _offsets_of(int(number), offsets) if number.isdigit() else set()
        wanted += _of_source(location, f"sources/{number}", names, its)
    return wanted


def _offsets(location: LocationFiles, epoch: int) -> list[str]:
    """Each source's offset at the end of an epoch, as Spark wrote it."""
    lines = text_of(location, f"offsets/{epoch}").split("\n")
    if len(lines) < 2 or lines[0].strip() != _VERSION:
        raise UnsupportedFormatError(
            f"The plan of batch {epoch} in {location.path} is of the form "
            f"{(lines or ['nothing'])[0][:20]!r}; this release reads {_VERSION!r}.",
            todo="Leave spark.sql.streaming.queryEvolution.enableSourceEvolution at false.",
        )
    return [line.strip() for line in lines[2:] if line.strip()]


def _offsets_of(number: int, offsets: Sequence[str]) -> set[str]:
    """The offsets that may be those of a source: one, unless a source is read in two places.

    Such a source has one folder and in each place the same offset. So before a source's place stand
    at least as many offsets as there are sources before it, and no more different ones.
    """
    return {
        offset
        for place, offset in enumerate(offsets)
        if len(set(offsets[:place])) <= number <= place
    }


def _of_source(
    location: LocationFiles, folder: str, names: Sequence[str], offsets: Collection[str]
) -> list[str]:
    """What a source knew: of a file source its log up to an offset; of any other all it keeps.

    Args:
        offsets: one of them is the source's. A log goes along up to the largest: what it has beyond
            its own the source reads next, as Spark does at a restart.
    """
    known = len(offsets) == 1 and NO_OFFSET not in offsets
    if not known and not next(location.chunks(names[0]), b"").startswith(_FILE_LOG):
        return sorted(names)
    ends = [end for one in offsets if (end := file_source_offset(one)) is not None]
    if not ends:
        return [] if NO_OFFSET in offsets else sorted(names)
    newest = max(_log_number(folder, name) for name in names)
    last = max((end for end in ends if end <= newest), default=min(ends))
    return _file_log(location, folder, names, last)


def file_source_offset(offset: str) -> int | None:
    """How far the log of a file source had come, by an offset in a plan; None: it is another's."""
    try:
        said: Any = json.loads(offset)
    except ValueError:
        return None
    if not isinstance(said, dict) or set(said) != {"logOffset"}:
        return None
    last = said["logOffset"]
    return last if type(last) is int else None  # a topic of Kafka's may have that name


def _file_log(location: LocationFiles, folder: str, names: Sequence[str], last: int) -> list[str]:
    """A file source's log up to one of its batches, from the newest compact file on."""
    entries: dict[int, str] = {}
    compact = -1
    for name in names:
        number = _log_number(folder, name)
        if not 0 <= number <= last:
            continue
        if name.endswith(_COMPACT) or number not in entries:
            entries[number] = name
        if name.endswith(_COMPACT):
            compact = max(compact, number)
    first = max(compact, 0)
    missing = [n for n in range(first, last + 1) if n not in entries]
    if missing:
        raise NotRestorableError(
            f"The log of a file source in {location.path}/{folder} has no entry {missing[0]}, and "
            f"it is needed up to {last}: which files were read is not known.",
            todo="Let the query finish a batch, and try again.",
        )
    return [entries[n] for n in range(first, last + 1)]


def _log_number(folder: str, name: str) -> int:
    """-1: it is no file of a log."""
    number = name.removeprefix(f"{folder}/").removesuffix(_COMPACT)
    return int(number) if number.isdigit() else -1


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
