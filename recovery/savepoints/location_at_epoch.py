"""Which files of Spark's checkpoint location a query needs to go on after an epoch.

Of the epoch's batch and the one before the plan is taken (Spark asks for both), of the epoch's the
commit, and of each source what it knew in the epoch (`recovery.savepoints.source_files`).
"""

from __future__ import annotations

from typing import Final

from recovery.savepoints.location_files import LocationFiles, batches_of
from recovery.savepoints.source_files import files_of_sources
from statebackend.errors import NotRestorableError, UnsupportedQueryError

__all__ = ["STATE_FOLDER", "files_after", "files_of"]

STATE_FOLDER: Final = "state"


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
    return wanted + files_of_sources(location, epoch + planned)
