"""What starting a query means for its state: the table of verdicts."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from recovery.rewind import (
    LocationProgress,
    LogProgress,
    StartDecision,
    Verdict,
    decide_start,
)
from snapshot.record import Manifest
from snapshot.storage.memory import MemoryStore
from statebackend.errors import CheckpointLocationError, IncompleteEpochError, RewindError
from statebackend.spark.job import Job
from tests.recovery.driver import JOB, Run, Started, ack_of, begin_of, manifests_of, part_of


def location(
    last_commit: int, *, query: str | None = "q", last_offset: int | None = None
) -> LocationProgress:
    offset = last_commit if last_offset is None else last_offset
    return LocationProgress("/checkpoint", query, offset, last_commit)


def log(query: str | None = "q", **last_epochs: int) -> LogProgress:
    return LogProgress("clicks", "file:///state", query, last_epochs)


def start(batch: int) -> StartDecision:
    return StartDecision(Verdict.START, batch)


def rewind(batch: int) -> StartDecision:
    return StartDecision(Verdict.REWIND, batch)


def with_fields(progress: LogProgress, **fields: object) -> LogProgress:
    return dataclasses.replace(progress, **fields)


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
    "batch 0 was not finished": (location(0), log("q", a=-1), rewind(0)),
    "one of them did not finish batch 0": (location(0), log("q", a=-1, b=0), rewind(0)),
    "one operator did not finish": (location(7), log("q", a=7, b=6), rewind(7)),
    "none finished": (location(7), log("q", a=6, b=6), rewind(7)),
    "an operator is new": (location(7), log("q", a=7), start(8)),
    "a rewind was overtaken by a plan": (
        location(6, last_offset=8),
        log("q", a=6),
        StartDecision(Verdict.TRIM, 7),
    ),
    "named by a claim, and no epoch ever finished": (
        NEW,
        with_fields(log("q", a=-1), has_epochs=False),
        start(0),
    ),
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
    "two batches behind": (location(7), log("q", a=5), "'a': 2 batches"),
    "one of the operators is": (location(7), log("q", a=7, b=5), "'b': 2 batches"),
    "no epoch at all, after batch 1": (location(1), log("q", a=-1), "2 batches"),
    "a log from long ago": (location(99), log("q", a=3), "96 batches"),
}


@pytest.mark.parametrize("name", TOO_FAR)
def test_more_than_one_batch_is_never_repeated(name: str) -> None:
    there, known, says = TOO_FAR[name]
    with pytest.raises(RewindError, match=says):
        decide_start(there, known)


# --- what the log says of operators --------------------------------------------------------------


def test_a_location_that_no_query_leaves_behind_is_not_touched() -> None:
    with pytest.raises(RewindError, match="planned batches up to 9"):
        decide_start(location(3, last_offset=9), log("q", a=9))


def progress(records: list[Manifest]) -> LogProgress:
    return Job("file:///state", JOB).progress(records)


def test_an_operator_that_did_not_finish_its_very_first_epoch_is_not_taken_for_new() -> None:
    run = Run({"a": 1, "b": 1})
    run.finish(0, ["a"])
    known = progress(run.records)
    assert known.last_epochs == {"a": 0, "b": -1}
    assert decide_start(location(0, query="query"), known) == rewind(0)


def test_an_operator_that_was_added_and_did_not_finish_is_not_taken_for_new() -> None:
    run = Run({"a": 1})
    for epoch in range(7):
        run.finish(epoch)
    later = run.again({"a": 1, "b": 1})
    later.finish(7, ["a"])
    known = progress(run.records)
    assert known.last_epochs == {"a": 7, "b": 6}
    assert decide_start(location(7, query="query"), known) == rewind(7)
    # Its run crashed in that batch, without Spark having committed it: there is nothing to repeat.
    assert decide_start(location(6, query="query"), known) == start(7)


def test_an_operator_that_another_run_had_is_no_business_of_this_one() -> None:
    run = Run({"a": 1, "b": 1})
    run.finish(0, ["a"])
    later = run.again({"a": 1})
    later.finish(0)
    later.finish(1)
    assert progress(run.records).last_epochs == {"a": 1}


def test_a_claim_tells_of_its_operators_before_their_first_record() -> None:
    store = MemoryStore()
    Started(store, {"a": 1, "b": 1}, first_epoch=0)
    known = progress(manifests_of(store))
    assert known.last_epochs == {"a": -1, "b": -1}
    assert decide_start(location(0, query="query"), known) == rewind(0)
    assert decide_start(location(-1, query="query"), known) == start(0)


def test_records_of_before_operators_were_named_are_read() -> None:
    run = Run({"a": 1, "b": 1})
    run.finish(0)
    old = [msgspec.structs.replace(record, settings={}) for record in run.records]
    assert progress(old).last_epochs == {"a": 0, "b": 0}


def test_an_epoch_that_the_last_run_repeated_in_part_is_not_finished() -> None:
    store = MemoryStore()
    first = Started(store, {"a": 1, "b": 1}, first_epoch=0)
    for uid in ("a", "b"):
        begun, _ = first.session.begin(begin_of(0, 0, uid))
        first.session.ack(ack_of(begun.chain, part_of({b"k": b"first run"}), 0, 0, uid))
    # Spark had not committed the batch and repeats it; only a is evaluated, then it is committed.
    second = Started(store, {"a": 1, "b": 1}, first_epoch=0)
    begun, _ = second.session.begin(begin_of(0, 0, "a"))
    second.session.ack(ack_of(begun.chain, part_of({b"k": b"second run"}), 0, 0, "a"))
    with pytest.raises(IncompleteEpochError, match="goes back by this one batch"):
        second.session.begin(begin_of(1, 0, "a"))
    known = progress(manifests_of(store))
    assert decide_start(location(0, query="query"), known) == rewind(0)
