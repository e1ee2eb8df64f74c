"""What starting a query means for its state: a pure decision over two logs.

Spark's checkpoint location says which batches Spark has committed; the commit log says which epochs
every operator has made durable. With synchronous commits the log is never behind, except where
Spark committed a batch that an operator did not finish (its output was read in part): then the
query goes back by exactly that batch, which Spark repeats from its offsets. Two batches back is
never exact: later batches may be cut differently.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from statebackend.errors import CheckpointLocationError, RewindError

__all__ = ["LocationProgress", "LogProgress", "StartDecision", "Verdict", "decide_start"]


@dataclass(frozen=True)
class LocationProgress:
    """A checkpoint location. ``query_id`` is None for a new one; batches are -1 for none."""

    path: str
    query_id: str | None
    last_offset: int
    last_commit: int


@dataclass(frozen=True)
class LogProgress:
    """A job's log.

    ``query_id`` is of the query that ran it last, None if it never ran; ``last_epochs`` is the
    newest complete epoch by operator. ``has_epochs``: whether there is any state at all;
    None: if there is an epoch by operator.
    """

    job: str
    uri: str
    query_id: str | None
    last_epochs: Mapping[str, int]
    has_epochs: bool | None = None


class Verdict(enum.Enum):
    """What to do before the query starts."""

    START = "start"
    REWIND = "rewind"
    TRIM = "trim"


@dataclass(frozen=True)
class StartDecision:
    """``batch``: the batch that Spark will run next.

    To rewind is to take back the commit of ``batch``, and every later plan; to trim is to take back
    the later plans alone, which somebody left behind who was overtaken while he went back: with
    them Spark would skip ``batch``.
    """

    verdict: Verdict
    batch: int


def decide_start(location: LocationProgress, log: LogProgress) -> StartDecision:
    """Whether a query may start on a job, and whether it must go back a batch first.

    Raises:
        CheckpointLocationError: location and job do not belong together.
        RewindError: more than one batch would have to be repeated.
    """
    # Operators are named by a claim already, before they have any state.
    has_epochs = bool(log.last_epochs) if log.has_epochs is None else log.has_epochs
    same = location.query_id is not None and location.query_id == log.query_id
    if log.query_id is not None and not same and (has_epochs or location.last_commit >= 0):
        there = "is new" if location.query_id is None else f"is of query {location.query_id}"
        raise CheckpointLocationError(
            f"Job {log.job!r} in {log.uri} belongs to query {log.query_id}, but the checkpoint "
            f"location {location.path} {there}.",
            todo="Give the query the checkpoint location it had, or a new job= name.",
        )
    if log.query_id is None and location.last_commit >= 0:
        raise CheckpointLocationError(
            f"The checkpoint location {location.path} has committed batches (up to "
            f"{location.last_commit}), but job {log.job!r} in {log.uri} has no state at all.",
            todo="Give the job the uri and name it had, or the query a new checkpoint location.",
        )
    batch = location.last_commit + 1
    # An operator that is not in the log is new; it starts from the batch that is next.
    behind = {uid: e for uid, e in log.last_epochs.items() if e < location.last_commit}
    if not behind:
        if location.last_offset > batch + 1:
            raise RewindError(
                f"Spark has planned batches up to {location.last_offset} of {location.path}, and "
                f"committed them up to {location.last_commit}: no query leaves that behind.",
                todo="If the location was restored from a copy, restore all of it, of one moment.",
            )
        surplus = location.last_offset == batch + 1
        return StartDecision(Verdict.TRIM if surplus else Verdict.START, batch)
    oldest = min(behind.values())
    if oldest < location.last_commit - 1:
        raise RewindError(
            f"Spark has committed batch {location.last_commit} of {location.path}, but job "
            f"{log.job!r} in {log.uri} ends with epoch {oldest} in operator(s) "
            f"{', '.join(repr(u) for u, e in behind.items() if e == oldest)}: "
            f"{location.last_commit - oldest} batches would have to be repeated, and only one can "
            f"be, exactly.",
            todo="If the log was restored from an older copy, restore the checkpoint location of "
            "the same moment too.",
        )
    return StartDecision(Verdict.REWIND, location.last_commit)
