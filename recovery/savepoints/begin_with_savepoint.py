"""A new job that begins with a savepoint: its state goes into the job's folder, under its own log.

The log then reads, from a sequence *k* on (0, but for earlier tries that were cut):

    k                a claim: `settings.savepoint` names the savepoint, and how many records follow
    k + 1 ... k + n  the savepoint's records
    k + n + 1        a claim that says that they are all there

Each of the two claims is made right after what was read of the log, or not at all. So a try never
begins anew where the one before is done after all: where its last write comes late.

Claims are never deleted, so the first one tells for ever what the job began with. A try that was
cut is repeated from a new claim on: records of an epoch take the place of earlier ones, and what
the cut try had copied belongs to a generation that commits nothing any more, so it is cleaned.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from recovery.savepoints.savepoint import Savepoint
from recovery.savepoints.state_at_epoch import StateAt
from recovery.savepoints.state_copy import copy_state, scratch_folder
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog, Tenure
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CheckpointLocationError, FencedError, ObjectNotFoundError
from statebackend.threads import THREADS, Threads

__all__ = [
    "Beginning",
    "Standing",
    "begin_job",
    "has_begun_with",
    "left_in_the_middle",
    "standing",
    "went_on",
]

SETTING: Final = "savepoint"


class Standing(enum.Enum):
    """How far a job has begun with a savepoint."""

    NEW = "new"  # there is no log
    CUT = "cut"  # a try was cut, and nobody has gone on from it
    BEGUN = "begun"


@dataclass(frozen=True)
class Beginning:
    """``query_id``: of the query that was given the job when it had begun; else empty.

    ``end``: the claim that says that it has begun. ``last``: the newest record; -1: none.
    """

    standing: Standing
    query_id: str = ""
    end: int = -1
    last: int = -1


def standing(log: CommitLog, job: str, savepoint: Savepoint) -> Beginning:
    """How far a job has begun with this savepoint; a few reads.

    Raises:
        CheckpointLocationError: it has begun with something else.
    """
    present = log.sequences()
    ours: set[int] = set()  # generations of tries
    there = frozenset(present)
    for sequence in present:
        try:
            manifest = log.read(sequence)
        except ObjectNotFoundError:
            continue
        said = _said(manifest)
        if said is not None and said.get("id") == savepoint.id:
            ours.add(manifest.generation)
            end = sequence + int(said.get("records", -1)) + 1
            if "records" in said and end in there and _ends(log.read(end), sequence, savepoint):
                return Beginning(Standing.BEGUN, log.read(end).query_id, end)
        elif manifest.generation not in ours:
            raise CheckpointLocationError(
                f"Job {job!r} has a log already, which does not begin with the "
                f"{savepoint.described}.",
                todo="Give the new query a job= name that was never used, or leave savepoint= out.",
            )
    if not present:
        return Beginning(Standing.NEW)
    return Beginning(Standing.CUT, last=present[-1])


def has_begun_with(log: CommitLog, uri: str) -> bool:
    """Whether a job has begun with a savepoint in this place, which it does not need any more."""
    for sequence in log.sequences():
        manifest = log.read(sequence)
        said = _said(manifest)
        if said is not None and "begun" in said:
            return bool(said.get("uri") == uri)
        if said is None and manifest.kind == "claim":
            return False  # it began with nothing
    return False


def went_on(log: CommitLog, begun: Beginning) -> bool:
    """Whether a job has finished an epoch since it began."""
    later = (log.read(sequence) for sequence in log.sequences() if sequence > begun.end)
    return any(manifest.kind == "checkpoint" for manifest in later)


def _said(manifest: Manifest) -> Mapping[str, Any] | None:
    said = manifest.settings.get(SETTING) if manifest.kind == "claim" else None
    return said if isinstance(said, dict) else None


def _ends(manifest: Manifest, begun: int, savepoint: Savepoint) -> bool:
    """Whether a claim says that all records are there, and none came in between."""
    said = _said(manifest)
    return said is not None and said.get("id") == savepoint.id and said.get("begun") == begun


def left_in_the_middle(manifests: list[Manifest]) -> str:
    """The URI of the savepoint that a job was to begin with, where that was cut; else empty."""
    claims = [m for m in manifests if m.kind == "claim"]
    said = _said(claims[-1]) if claims else None
    return str(said.get("uri", "?")) if said is not None and "records" in said else ""


def begin_job(
    state: StateAt,
    savepoint: Savepoint,
    source: ObjectStore,
    target: ObjectStore,
    log: CommitLog,
    *,
    after: int,
    query_id: str,
    new_id: Callable[[], str],
    tick: Callable[[int], None] = lambda size_bytes: None,
    threads: Threads = THREADS,
) -> None:
    """Write a savepoint's state into a job's folder. Durable on return; safe to repeat when cut.

    Args:
        state: from :func:`saved_state`. source: the savepoint's folder.
        target: the job's folder. log: the job's.
        after: the newest record that `standing` saw.
        query_id: of the query that the job is for.

    Raises:
        FencedError: another driver has begun meanwhile, or the try before has come to its end.
        CorruptionError: the savepoint is damaged.
        StoreUnreachableError, CommitUnknownError: from the store; begin again.
    """
    run = f"savepoint {savepoint.id}"
    named = {"id": savepoint.id, "uri": savepoint.uri}
    tenure = log.claim(
        job_id=savepoint.job_id,
        query_id=query_id,
        run=run,
        settings={**state.settings, SETTING: {**named, "records": len(state.records)}},
        after=after,
    )
    if tenure.job_id != savepoint.job_id:
        raise _overtaken(savepoint, tenure)
    with scratch_folder() as scratch:
        copy_state(
            state,
            source,
            target,
            log=log,
            tenure=tenure,
            query_id=query_id,
            run=run,
            new_id=new_id,
            scratch=scratch,
            tick=tick,
            threads=threads,
        )
    log.claim(
        query_id=query_id,
        run=run,
        settings={**state.settings, SETTING: {**named, "begun": tenure.sequence}},
        after=tenure.next_sequence - 1,
    )


def _overtaken(savepoint: Savepoint, tenure: Tenure) -> FencedError:
    return FencedError(
        f"Another driver claimed the job while it was given the savepoint {savepoint.id} "
        f"(generation {tenure.generation}).",
        todo="Let one driver start the job, then start this one again.",
    )
