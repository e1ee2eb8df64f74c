"""What starting a query means for its state: the table of verdicts."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from recovery.decide.start_batch import (
    COMMITS,
    OFFSETS,
    LocationProgress,
    LogProgress,
    StartDecision,
    Verdict,
    decide_going_back,
    decide_start,
    lacks_for,
)
from recovery.decide.taken_back_files import Repair, TakenBack, decide_repair, next_to_take
from recovery.savepoints.state_at_epoch import last_epochs as epochs_known
from snapshot.formats.record import Manifest
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import CheckpointLocationError, IncompleteEpochError, RewindError
from statebackend.runtime.driver.job import Job
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


# --- what a start needs of the location ----------------------------------------------------------


def files(offsets: list[int], commits: list[int]) -> LocationProgress:
    return LocationProgress(
        "/checkpoint",
        "q",
        max(offsets, default=-1),
        max(commits, default=-1),
        frozenset(offsets),
        frozenset(commits),
    )


LACKS = {
    "nothing is needed for the first batch": (files([], []), 0, []),
    "the first batch, repeated": (files([0], [0]), 0, []),
    "the next, after the first": (files([0], [0]), 1, []),
    "a planned batch": (files([3, 4], [3]), 4, []),
    "a committed batch": (files([3, 4], [3, 4]), 4, []),
    "a batch that is to be planned": (files([3, 4], [3, 4]), 5, []),
    "its own plan is gone": (files([3], [3, 4]), 4, ["offsets/4"]),
    "one batch is kept": (files([4, 5], [4]), 4, ["offsets/3", "commits/3"]),
    "the plan before is gone": (files([4], [3]), 4, ["offsets/3"]),
    "the commit before is gone": (files([3, 4], [4]), 4, ["commits/3"]),
    "what is only listed in part is taken as it is": (location(7), 7, []),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_spark_needs_to_run_a_batch_and_has_not(name: str) -> None:
    there, batch, lacks = LACKS[name]
    assert lacks_for(there, batch) == lacks


def test_a_rewind_that_needs_what_spark_has_purged_is_refused_with_the_setting_named() -> None:
    with pytest.raises(RewindError, match="no offsets/3 and no commits/3") as caught:
        decide_start(files([4, 5], [4]), log("q", a=3))
    assert "spark.sql.streaming.minBatchesToRetain says: set it to 2 or more" in str(caught.value)
    assert decide_start(files([3, 4, 5], [3, 4]), log("q", a=3)) == rewind(4)


def test_a_start_without_the_plan_that_spark_goes_on_from_is_refused() -> None:
    with pytest.raises(RewindError, match=r"go on with batch 5.* no offsets/4"):
        decide_start(files([5], [4]), log("q", a=4))


def test_plans_that_end_before_the_commits_are_refused() -> None:
    with pytest.raises(RewindError, match="plans end with 3"):
        decide_start(files([2, 3], [2, 3, 4]), log("q", a=4))


# --- taking back, and putting back ---------------------------------------------------------------


def test_the_newest_plan_is_taken_back_first_and_the_commit_last() -> None:
    offsets, commits, taken = [0, 1, 2, 3, 4], [0, 1, 2, 3], []
    while step := next_to_take(files(offsets, commits), 2):
        taken.append(step)
        (offsets if step[0] == OFFSETS else commits).remove(step[1])
    assert taken == [(OFFSETS, 4), (OFFSETS, 3), (COMMITS, 3), (COMMITS, 2)]
    assert offsets == [0, 1, 2], "the plan of the batch itself stays: it is repeated from it"


@pytest.mark.parametrize("id", ["7f", "0-a-B"])
def test_a_hidden_name_is_read_as_what_it_was_made_of(id: str) -> None:
    one = TakenBack(OFFSETS, 12, 3, id)
    folder, _, name = one.name.partition("/")
    assert TakenBack.parse(folder, name) == one
    assert name.startswith("."), "Spark's logs do not look at it"


@pytest.mark.parametrize(
    "name", ["12", ".12.crc", ".12.3.taken-back", ".12.3.x.tmp", "12.3.x.taken-back"]
)
def test_any_other_name_is_not_a_hidden_one(name: str) -> None:
    assert TakenBack.parse(OFFSETS, name) is None


PLAN = TakenBack(OFFSETS, 3, 2, "x")
LATER = TakenBack(OFFSETS, 3, 4, "y")
COMMIT = TakenBack(COMMITS, 2, 2, "z")
REPLACED = PLAN.replaced("a")

REPAIRS = {
    "a commit is put back": ([COMMIT], files([2], [1]), {}, {}, ([COMMIT], [])),
    "a commit that is there again counts": ([COMMIT], files([2], [2]), {}, {}, ([], [COMMIT])),
    "a plan is put back": ([PLAN], files([2], [2]), {}, {PLAN.name: 5}, ([PLAN], [])),
    "a hidden plan counts where nothing was run": (
        [PLAN],
        files([2, 3], [2]),
        {},
        {PLAN.name: 5, PLAN.place: 6},
        ([PLAN], []),
    ),
    "the plan that was run stays": (
        [PLAN],
        files([2, 3], [2, 3]),
        {3: 6},
        {PLAN.name: 5, PLAN.place: 6},
        ([], [PLAN]),
    ),
    "the hidden plan that was run is put back": (
        [PLAN],
        files([2, 3], [2]),
        {3: 5},
        {PLAN.name: 5, PLAN.place: 6},
        ([PLAN], []),
    ),
    "of two, the one that was run": (
        [PLAN, LATER],
        files([2], [2]),
        {3: 8},
        {PLAN.name: 5, LATER.name: 8},
        ([LATER], [PLAN]),
    ),
    "of two that were not run, the one that was taken first": (
        [LATER, PLAN],
        files([2], [2]),
        {},
        {PLAN.name: 5, LATER.name: 8},
        ([PLAN], [LATER]),
    ),
    "a plan that does not say its time is put back all the same": (
        [PLAN],
        files([2], [2]),
        {3: 5},
        {},
        ([PLAN], []),
    ),
    "what was replaced is deleted": (
        [REPLACED],
        files([2, 3], [2]),
        {},
        {REPLACED.name: 5, REPLACED.place: 6},
        ([], [REPLACED]),
    ),
    "what was to be replaced makes room for what replaces it": (
        [REPLACED, PLAN],
        files([2], [2]),
        {},
        {REPLACED.name: 5, PLAN.name: 6},
        ([PLAN], [REPLACED]),
    ),
    "what was replaced by a start that was overtaken is put back": (
        [REPLACED],
        files([2], [2]),
        {},
        {REPLACED.name: 5},
        ([REPLACED], []),
    ),
    "what was replaced, and was run, is put back": (
        [REPLACED, PLAN],
        files([2, 3], [2]),
        {3: 5},
        {REPLACED.name: 5, PLAN.name: 6, PLAN.place: 7},
        ([REPLACED], [PLAN]),
    ),
    "nothing is hidden": ([], files([2], [2]), {}, {}, ([], [])),
}


@pytest.mark.parametrize("name", REPAIRS)
def test_what_becomes_of_what_others_took_back(name: str) -> None:
    hidden, there, recorded, stamps, (put_back, drop) = REPAIRS[name]
    found = decide_repair(hidden, there, recorded=recorded, stamps=stamps)
    assert found == Repair(tuple(put_back), tuple(drop))


# --- going back further, where the user says so --------------------------------------------------


def test_the_user_may_name_an_epoch_to_go_back_to() -> None:
    assert decide_going_back(location(3), log("q", a=5), 3, [3, 2]) == rewind(4)
    assert decide_going_back(location(3), log("q", a=5), 2, [3, 2]) == rewind(3)


def test_an_epoch_that_cannot_be_gone_back_to_is_refused_with_those_that_can() -> None:
    with pytest.raises(RewindError, match=r"epoch 4 .* it can go back to 3, 2[.]"):
        decide_going_back(location(3), log("q", a=5), 4, [3, 2])
    with pytest.raises(RewindError, match="9, 8, 7, 6, 5 and older ones"):
        decide_going_back(location(9), log("q", a=12), 11, [9, 8, 7, 6, 5, 4])
    with pytest.raises(RewindError, match="there is no epoch"):
        decide_going_back(location(3), log("q", a=5), 3, [])


def test_going_back_does_not_join_what_does_not_belong_together() -> None:
    with pytest.raises(CheckpointLocationError, match="is of query other"):
        decide_going_back(location(3, query="other"), log("q", a=5), 3, [3, 2])


def test_where_going_back_was_cut_no_operator_counts_further_than_the_newest_record() -> None:
    run = Run({"a": 1, "b": 1})
    for epoch in range(10):
        run.finish(epoch)
    again = run.again(first_epoch=3)
    again.finish(3, ["a"])
    assert epochs_known(again.records) == {"a": 3, "b": 2}
