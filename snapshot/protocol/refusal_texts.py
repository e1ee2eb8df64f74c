"""The coordinator's refusals, in words: what happened, to what, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from statebackend.errors import (
    CheckpointLocationError,
    CommitUnknownError,
    IncompleteEpochError,
    StaleRequestError,
    WrongBatchError,
)

__all__ = ["interrupted", "planned_anew", "stale_attempt", "unfinished", "wrong_batch"]


def unfinished(
    epoch: int,
    missing: Mapping[str, Sequence[int]],
    following: int | None,
    disagreeing: Sequence[str] = (),
) -> IncompleteEpochError:
    """These subtasks, by operator, had not acked ``epoch`` when it was over.

    Args:
        following: the batch that Spark went on to; None: the function of ``epoch`` has returned.
        disagreeing: operators of which some subtasks ran again and came to another broadcast state
            than those that did not.
    """
    within = following is None
    over = "The foreachBatch function has returned" if within else f"Batch {following} followed"
    if disagreeing:
        return IncompleteEpochError(
            f"{over} although batch {epoch} was not finished by operator "
            f"{disagreeing[0]!r}: some of its subtasks ran again and came to another broadcast "
            f"state than those that did not.",
            todo="Start the query again. process_broadcast() must go by its "
            "rows and the broadcast state alone, and Spark must read the same rows again.",
        )
    who = ", ".join(
        f"{uid!r} ({_few(subtasks)})" if subtasks else repr(uid)
        for uid, subtasks in missing.items()
    )
    return IncompleteEpochError(
        f"{over} although batch {epoch} was not finished by operator(s) "
        f"{who} (in brackets: subtasks without a snapshot). The output was read in part or not "
        f"at all: isEmpty(), take(), first(), limit() or a foreachBatch that does not use its "
        f"frame.",
        todo="Use every row of the frame: to look at some rows, persist() and count() it first. "
        "Then start the query again: it repeats this batch exactly."
        if within
        else "Use every row of the frame (wrap the function in backend.checked() to be told "
        "within the batch), then start the query again: it goes back by this one batch and "
        "repeats it exactly. An operator whose output the query does not use at all must not be "
        "made: build the query with a new StateBackend without it.",
    )


def wrong_batch(epoch: int) -> WrongBatchError:
    """A frame of another batch was evaluated in ``epoch``."""
    return WrongBatchError(
        f"A frame that belongs to another batch was evaluated in batch {epoch}.",
        todo="Do not keep the frame of a foreachBatch beyond its call; collect or write what "
        "you need of it, or persist() it, within the call.",
    )


def planned_anew(epoch: int) -> CheckpointLocationError:
    """Spark did not find the plan that was there when the query was started."""
    return CheckpointLocationError(
        f"The plan of batch {epoch} in the checkpoint location is not the one that this query goes "
        f"by: another driver's start took it back.",
        todo="Let one driver start the job, then start this query again.",
    )


def stale_attempt(what: str) -> StaleRequestError:
    """An attempt came too late."""
    return StaleRequestError(
        what, todo="Nothing to do: the attempt was superseded (a frozen or lost worker)."
    )


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown or "none"


def interrupted(operator: str, epoch: int, error: BaseException) -> CommitUnknownError:
    """A commit ended in what no store raises: nothing may be taken for durable after it."""
    return CommitUnknownError(
        f"The record of operator {operator!r} for epoch {epoch} was not written "
        f"({type(error).__name__}).",
        todo="Start again: the next claim settles what the log holds.",
    )
