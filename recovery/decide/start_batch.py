"""Decides which batch a query starts with, from Spark's checkpoint location and the log. Pure.

The checkpoint location says which batches Spark has committed. The commit log says which epochs
every operator has made durable. With synchronous commits the log is never behind, with one
exception: Spark committed a batch that an operator did not finish, since its output was read in
part. Then the query goes back by exactly that batch, which Spark repeats from its offsets. Going
back by two batches is not exact for every sink, because Spark may cut the later one differently.
That is done only if the user asks for it (`decide_going_back`).

How files are taken back for that: `recovery.decide.taken_back_files`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from statebackend.errors import CheckpointLocationError, RewindError

__all__ = [
    "COMMITS",
    "OFFSETS",
    "LocationProgress",
    "LogProgress",
    "StartDecision",
    "Verdict",
    "check_belongs",
    "decide_going_back",
    "decide_start",
    "lacks_for",
]

OFFSETS: Final = "offsets"
COMMITS: Final = "commits"
_RETAINED: Final = "spark.sql.streaming.minBatchesToRetain"


@dataclass(frozen=True)
class LocationProgress:
    """A checkpoint location. ``query_id`` is None for a new one; batches are -1 for none.

    ``offsets``, ``commits``: every batch that is there; None where only the last ones are known.
    """

    path: str
    query_id: str | None
    last_offset: int
    last_commit: int
    offsets: Collection[int] | None = None
    commits: Collection[int] | None = None


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
        RewindError: more than one batch would have to be repeated, or what is needed is gone.
    """
    check_belongs(location, log)
    if location.last_offset < location.last_commit:
        raise RewindError(
            f"Spark has committed batches up to {location.last_commit} of {location.path}, and "
            f"its plans end with {location.last_offset}: Spark would repeat that batch.",
            todo="Put the missing files of `offsets` back from a copy of the location. If there is "
            "none, an earlier epoch or a savepoint is the way out: see go_back_to= in "
            "docs/howto/repair.md.",
        )
    batch = location.last_commit + 1
    # An operator that is not in the log is new; it starts from the batch that is next.
    behind = {uid: e for uid, e in log.last_epochs.items() if e < location.last_commit}
    if not behind:
        if location.last_offset > batch + 1:
            raise RewindError(
                f"Spark has planned batches up to {location.last_offset} of {location.path}, and "
                f"committed them up to {location.last_commit}: no query leaves that behind.",
                todo="If the location was restored from a copy, restore all of it, of one moment. "
                "Else see go_back_to= in docs/howto/repair.md.",
            )
        surplus = location.last_offset == batch + 1
        decision = StartDecision(Verdict.TRIM if surplus else Verdict.START, batch)
        _require_files(location, decision)
        return decision
    oldest = min(behind.values())
    if oldest < location.last_commit - 1:
        raise RewindError(
            f"Spark has committed batch {location.last_commit} of {location.path}, but job "
            f"{log.job!r} in {log.uri} ends with epoch {oldest} in operator(s) "
            f"{', '.join(repr(u) for u, e in behind.items() if e == oldest)}: "
            f"{location.last_commit - oldest} batches would have to be repeated, and only one can "
            f"be, exactly.",
            todo="If the log was restored from an older copy, restore the checkpoint location of "
            "the same moment too. Else see go_back_to= in docs/howto/repair.md.",
        )
    decision = StartDecision(Verdict.REWIND, location.last_commit)
    _require_files(location, decision)
    return decision


def check_belongs(location: LocationProgress, log: LogProgress) -> None:
    """Refuse a location that is not the job's.

    Raises:
        CheckpointLocationError: location and job do not belong together.
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
            todo="Give the job the uri and name it had, or the query a new checkpoint location. If "
            "Spark's own operator ran there, its state is in that location: begin at a new one "
            "with initial_state= read from it (docs/howto/move-a-spark-job.md).",
        )


def decide_going_back(
    location: LocationProgress, log: LogProgress, epoch: int, possible: Sequence[int]
) -> StartDecision:
    """Starts after an epoch that the user named, and gives up what came later.

    Args:
        possible: the epochs after which both state and location can go on, the newest first.

    Raises:
        CheckpointLocationError: location and job do not belong together.
        RewindError: the epoch is not one of them.
    """
    check_belongs(location, log)
    if epoch not in possible:
        raise RewindError(
            f"Job {log.job!r} in {log.uri} cannot go back to epoch {epoch} at {location.path}: "
            f"{_possible(possible)}.",
            todo="Name one of these, or begin a new job with the newest savepoint.",
        )
    return StartDecision(Verdict.REWIND, epoch + 1)


def _possible(epochs: Sequence[int]) -> str:
    if not epochs:
        return "there is no epoch that both its log and the location can go back to"
    shown = ", ".join(str(one) for one in epochs[:5])
    return f"it can go back to {shown}" + (" and older ones" if len(epochs) > 5 else "")


# --- what a start needs of the location ----------------------------------------------------------


def lacks_for(location: LocationProgress, batch: int) -> list[str]:
    """The files that Spark needs to repeat a batch, or to plan it, and that the location lacks.

    Spark reads the plan of the last batch and of the one before it. This library also needs the
    commit of the one before: without it the next start would misjudge how far Spark is.
    """
    if location.offsets is None or location.commits is None:
        return []
    planned = batch in location.offsets or batch in location.commits
    plans = (batch, batch - 1) if planned else (batch - 1, batch - 2)
    lacks = [f"{OFFSETS}/{n}" for n in plans if n >= 0 and n not in location.offsets]
    if batch > 0 and batch - 1 not in location.commits:
        lacks.append(f"{COMMITS}/{batch - 1}")
    return lacks


def _require_files(location: LocationProgress, decision: StartDecision) -> None:
    lacks = lacks_for(location, decision.batch)
    if not lacks:
        return
    if decision.verdict is Verdict.START:
        doing = f"go on with batch {decision.batch}"
    else:
        doing = f"go back and repeat batch {decision.batch}"
    raise RewindError(
        f"The query must {doing}, and {location.path} has no {' and no '.join(lacks)} (any more), "
        f"which that needs. Nothing was taken back.",
        todo=f"Spark keeps as many batches as {_RETAINED} says: set it to 2 or more (its default "
        f"is 100). Put these files back from a copy of the location.",
    )
