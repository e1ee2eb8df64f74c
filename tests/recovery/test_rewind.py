"""What starting a query means for its state: the table of verdicts."""

from __future__ import annotations

import pytest

from recovery.rewind import (
    LocationProgress,
    LogProgress,
    StartDecision,
    Verdict,
    decide_start,
)
from statebackend.errors import CheckpointLocationError, RewindError


def location(last_commit: int, *, query: str | None = "q", last_offset: int | None = None):  # type: ignore[no-untyped-def]
    offset = last_commit if last_offset is None else last_offset
    return LocationProgress("/checkpoint", query, offset, last_commit)


def log(query: str | None = "q", **last_epochs: int) -> LogProgress:
    return LogProgress("clicks", "file:///state", query, last_epochs)


def start(batch: int) -> StartDecision:
    return StartDecision(Verdict.START, batch)


def rewind(batch: int) -> StartDecision:
    return StartDecision(Verdict.REWIND, batch)


NEW = location(-1, query=None)

CASES = {
    "all is new": (NEW, log(None), start(0)),
    "claimed, and never ran": (NEW, log("q"), start(0)),
    "a location made and nothing run": (location(-1), log(None), start(0)),
    "claimed by this query, nothing run": (location(-1), log("q"), start(0)),
    "claimed by another query that never ran a batch": (location(-1), log("other"), start(0)),
    "the batch had begun": (location(-1, last_offset=0), log("q"), start(0)),
    "the epoch is durable, Spark had not committed": (
        location(-1, last_offset=0),
        log("q", a=0),
        start(0),
    ),
    "both agree": (location(7), log("q", a=7), start(8)),
    "the log is one ahead": (location(6, last_offset=7), log("q", a=7), start(7)),
    "one operator is ahead": (location(6), log("q", a=7, b=6), start(7)),
    "batch 0 was not finished": (location(0), log("q"), rewind(0)),
    "one operator did not finish": (location(7), log("q", a=7, b=6), rewind(7)),
    "none finished": (location(7), log("q", a=6, b=6), rewind(7)),
    "an operator is new": (location(7), log("q", a=7), start(8)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_batch_that_is_next(name: str) -> None:
    there, known, expected = CASES[name]
    assert decide_start(there, known) == expected


FOREIGN = {
    "another query's location": (location(3, query="other"), log("q", a=3), "is of query other"),
    "a new location for a job with state": (NEW, log("q", a=3), "is new"),
    "another query's location, before its first batch": (
        location(-1, query="other"),
        log("q", a=0),
        "is of query other",
    ),
    "a location with batches for another query's job": (
        location(3, query="other"),
        log("q"),
        "is of query other",
    ),
    "a location with batches for a new job": (location(3), log(None), "no state at all"),
    "batch 0 was run without the backend": (location(0), log(None), "no state at all"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_location_and_a_job_that_do_not_belong_together_are_refused(name: str) -> None:
    there, known, says = FOREIGN[name]
    with pytest.raises(CheckpointLocationError, match=says) as caught:
        decide_start(there, known)
    assert "/checkpoint" in str(caught.value)
    assert "'clicks' in file:///state" in str(caught.value)


TOO_FAR = {
    "two batches behind": (location(7), log("q", a=5), "2 batches"),
    "one of the operators is": (location(7), log("q", a=7, b=5), "2 batches"),
    "no epoch at all, after batch 1": (location(1), log("q"), "2 batches"),
    "a log from long ago": (location(99), log("q", a=3), "96 batches"),
}


@pytest.mark.parametrize("name", TOO_FAR)
def test_more_than_one_batch_is_never_repeated(name: str) -> None:
    there, known, says = TOO_FAR[name]
    with pytest.raises(RewindError, match=says):
        decide_start(there, known)


@pytest.mark.xfail(
    strict=True,
    reason="decide_start cannot tell an operator that is new from one whose first epoch was not "
    "finished: beside an operator that finished, batch 0 (or the batch it was added in) is "
    "lost to it, although IncompleteEpochError promised to repeat it",
)
@pytest.mark.parametrize("batch", [0, 7])
def test_an_operator_that_did_not_finish_its_very_first_epoch_is_not_taken_for_new(
    batch: int,
) -> None:
    # Operators a and b ran in this batch, b's output was read in part, Spark committed it.
    assert decide_start(location(batch), log("q", a=batch)) == rewind(batch)
