"""When the coordinator lets an epoch begin, where a run starts, and what ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.formats.lineage_digest import chain_start
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckRequest
from statebackend.errors import (
    CommitUnknownError,
    FencedError,
    IncompleteEpochError,
    NotRestorableError,
    ProtocolError,
    StaleRequestError,
    StateBackendError,
    WrongBatchError,
)
from tests.recovery.driver import JOB_ID, Run, ack_of, begin_of, part_of

# --- begin ---------------------------------------------------------------------------------------


def test_the_first_epoch_of_a_job_starts_from_nothing() -> None:
    run = Run(2)
    admitted = run.begin(0, 1)
    assert admitted.base_epoch == -1
    assert admitted.chain == chain_start(JOB_ID, "op", (4, 7)).hex()
    assert admitted.first_of_run
    assert not admitted.base_due


def test_an_epoch_starts_from_the_state_after_the_one_before() -> None:
    run = Run(2)
    run.finish(0)
    admitted = run.begin(1, 1)
    assert admitted.base_epoch == 0
    (after,) = [e.chain for e in run.records[-1].slices if e.subtask == 1]
    assert admitted.chain == after


def test_a_subtask_is_first_of_the_run_in_its_first_epoch_only() -> None:
    run = Run(2)
    assert run.begin(0, 0).first_of_run
    assert run.begin(0, 1).first_of_run
    run.ack(0, 0)
    run.ack(0, 1)
    run.commit()
    assert not run.begin(1, 1).first_of_run
    assert run.again().begin(1, 1).first_of_run


def test_a_record_is_not_written_over_a_gap() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    run.ack(1)
    work = run.coordinator.records.take_due("op", 1)
    assert work is not None
    run.coordinator.records.check_follows(work)
    with pytest.raises(ProtocolError, match="would leave a gap: epoch 4 is not in the log"):
        run.coordinator.records.check_follows(dataclasses.replace(work, epoch=5))


def test_an_epoch_begins_only_when_the_one_before_is_durable_in_every_operator() -> None:
    run = Run({"a": 1, "b": 2})
    run.finish(0, ["a"])
    run.begin(0, 0, "b")
    run.ack(0, 0, "b")
    with pytest.raises(
        IncompleteEpochError, match=r"batch 0 was not finished.* 'b' \(1\)"
    ) as caught:
        run.begin(1, 0, "a")
    assert "'a'" not in str(caught.value)
    # The refusal changed nothing: what was missing may still come.
    run.begin(0, 1, "b")
    run.ack(0, 1, "b")
    run.commit("b")
    assert run.begin(1, 0, "a").base_epoch == 0


def test_an_operator_that_nobody_evaluated_is_missed_too() -> None:
    run = Run({"a": 1, "b": 1})
    run.finish(0, ["a"])
    with pytest.raises(IncompleteEpochError, match="'b'"):
        run.begin(1, 0, "a")


def test_acks_without_their_record_do_not_let_the_next_epoch_begin() -> None:
    run = Run(1)
    run.begin(0)
    assert run.ack(0) is Acked.COMPLETE
    with pytest.raises(IncompleteEpochError):
        run.begin(1)
    run.commit()
    run.begin(1)


def test_a_refusal_names_the_subtasks_but_not_hundreds() -> None:
    run = Run(20, max_parallelism=32)
    run.begin(0)
    with pytest.raises(IncompleteEpochError, match=r"'op' \(0, 1, 2, 3, 4, 5, 6, 7 and 12 more\)"):
        run.begin(1)
    for subtask in set(range(20)) - {0, 3, 5, 17}:
        run.begin(0, subtask)
        run.ack(0, subtask)
    with pytest.raises(IncompleteEpochError, match=r"'op' \(0, 3, 5, 17\)"):
        run.begin(1)


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_an_epoch_that_is_over_does_not_begin_again(epoch: int) -> None:
    run = Run(1)
    for n in range(4):
        run.finish(n)
    run.begin(4)
    with pytest.raises(StaleRequestError, match=f"Epoch {epoch}"):
        run.begin(epoch)


def test_batches_follow_one_another_without_a_gap() -> None:
    run = Run(1)
    run.finish(0)
    with pytest.raises(IncompleteEpochError, match="Batch 2 followed although batch 1 was not"):
        run.begin(2)
    run.begin(1)


def test_another_query_on_the_frame_is_refused() -> None:
    run = Run(1)
    other = msgspec.structs.replace(begin_of(0), query_id="another")
    with pytest.raises(WrongBatchError, match="query another"):
        run.coordinator.begin(other)
    run.begin(0)


def test_an_operator_that_is_not_of_this_job_is_named() -> None:
    run = Run({"a": 1, "b": 1})
    with pytest.raises(ProtocolError, match="'c' is not one of job 'clicks'") as caught:
        run.begin(0, 0, "c")
    assert "a, b" in str(caught.value)


@pytest.mark.parametrize("subtask", [-1, 2, 99])
def test_a_subtask_that_is_not_there_cannot_begin(subtask: int) -> None:
    with pytest.raises(ProtocolError, match="no subtask"):
        Run(2).begin(0, subtask)


# --- restarts ------------------------------------------------------------------------------------


def test_a_run_may_start_at_the_last_epoch_again_or_at_the_one_after_it() -> None:
    run = Run(2)
    for epoch in range(3):
        run.finish(epoch)
    assert run.again().begin(2).base_epoch == 1
    assert run.again().begin(3).base_epoch == 2


@pytest.mark.parametrize("epoch", [4, 9])
def test_a_run_cannot_start_from_an_epoch_that_is_not_in_the_log(epoch: int) -> None:
    run = Run(1)
    for n in range(3):
        run.finish(n)
    later = run.again()
    with pytest.raises(NotRestorableError, match="complete epochs: 0 to 2"):
        later.begin(epoch)
    # Nothing was bound to it.
    assert later.begin(3).base_epoch == 2


def test_the_epoch_that_is_repeated_replaces_the_one_in_the_log() -> None:
    run = Run(1)
    run.finish(0)
    run.finish(1, changes={b"k": b"first"})
    later = run.again()
    later.finish(1, changes={b"k": b"second"})
    assert [r.epoch for r in run.records] == [0, 1, 1]
    lineage = resolve(run.records)["op"].subtasks[0]
    assert lineage.deltas[1].entry.digest == part_of({b"k": b"second"}).digest
    assert later.begin(2).chain == run.records[-1].slices[0].chain


def test_a_run_starts_at_the_batch_that_sparks_location_says() -> None:
    run = Run(1)
    for n in range(3):
        run.finish(n)
    later = run.again(first_epoch=3)
    # A batch in which no operator took part went by: nothing of it was kept.
    with pytest.raises(IncompleteEpochError, match=r"Batch 4 followed .*batch 3 .*'op'"):
        later.begin(4)
    with pytest.raises(WrongBatchError, match="batch 2"):
        later.begin(2)
    assert later.begin(3).base_epoch == 2


def test_a_batch_that_the_run_before_finished_may_be_skipped_when_it_is_repeated() -> None:
    # A file sink skips a batch that it has written: Spark commits it without evaluating it again.
    run = Run(1)
    for n in range(4):
        run.finish(n)
    later = run.again(first_epoch=3)
    assert later.begin(4).base_epoch == 3


def test_a_new_operator_starts_from_nothing_at_the_epoch_that_is_next() -> None:
    run = Run({"a": 1})
    for epoch in range(3):
        run.finish(epoch)
    later = run.again({"a": 1, "b": 2})
    admitted = later.begin(3, 1, "b")
    assert admitted.base_epoch == 2
    assert admitted.chain == chain_start(JOB_ID, "b", (4, 7)).hex()
    later.finish(3, ["a", "b"])
    assert later.records[-1].first_epoch == 3
    # Every record of the run tells of it, also those of others.
    assert later.records[-2].operator == "a"
    assert later.records[-2].settings == {"operators": {"a": 0, "b": 3}}
    later.begin(4, 0, "b")
    # And in the next run it is no new one any more, at either epoch.
    for epoch in (3, 4):
        after = run.again({"a": 1, "b": 2})
        after.finish(epoch)
        assert after.records[-1].first_epoch == 3


def test_what_a_new_operator_did_not_finish_holds_the_others_back_too() -> None:
    run = Run({"a": 1})
    run.finish(0)
    later = run.again({"a": 1, "b": 1})
    later.finish(1, ["a"])
    with pytest.raises(IncompleteEpochError, match="'b'"):
        later.begin(2, 0, "a")


# --- the end of a run ----------------------------------------------------------------------------


ENDS: list[Callable[[Run], Any]] = [
    lambda run: run.begin(1),
    lambda run: run.begin(0, 1),
    lambda run: run.coordinator.ack(ack_of("00" * 32, part_of({}), 0)),
    lambda run: run.coordinator.records.take_due("op", 0),
    lambda run: run.coordinator.check_finished(0),
]


@pytest.mark.parametrize("number", range(len(ENDS)))
@pytest.mark.parametrize("kind", [FencedError, CommitUnknownError])
def test_after_the_first_failed_commit_nothing_is_accepted_any_more(
    number: int, kind: type[StateBackendError]
) -> None:
    run = Run(2)
    run.finish(0)
    first = kind("The first.")
    run.coordinator.run.fail(first)
    run.coordinator.run.fail(FencedError("A later one."))
    assert run.coordinator.run.failure is first
    with pytest.raises(kind, match="The first"):
        ENDS[number](run)


def test_the_run_after_a_failed_one_goes_on_from_the_log() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    run.ack(1)
    work = run.coordinator.records.take_due("op", 1)
    assert work is not None
    run.append(work)  # written, but the answer never came
    run.coordinator.run.fail(CommitUnknownError("Who knows."))
    assert run.again().begin(1).base_epoch == 0
    assert run.again().begin(2).base_epoch == 1


def test_an_epoch_is_finished_when_every_operator_s_record_is_durable() -> None:
    run = Run({"a": 1, "b": 1})
    with pytest.raises(IncompleteEpochError, match="did not use its frame"):
        run.coordinator.check_finished(0)
    run.finish(0, ["a"])
    with pytest.raises(IncompleteEpochError, match="'b'"):
        run.coordinator.check_finished(0)
    run.begin(0, 0, "b")
    run.ack(0, 0, "b")
    with pytest.raises(IncompleteEpochError, match="'b'"):
        run.coordinator.check_finished(0)
    run.commit("b")
    run.coordinator.check_finished(0)
    with pytest.raises(IncompleteEpochError, match="batch 1"):
        run.coordinator.check_finished(1)
    run.begin(1, 0, "a")
    with pytest.raises(IncompleteEpochError, match="has returned although batch 1 was not"):
        run.coordinator.check_finished(1)


@given(st.data())
def test_in_any_order_of_acks_the_record_is_what_the_newest_attempts_sent(
    data: st.DataObject,
) -> None:
    parallelism = data.draw(st.integers(1, 3))
    run = Run(parallelism)
    befores = [run.begin(0, n).chain for n in range(parallelism)]
    attempts = st.tuples(st.integers(0, parallelism - 1), st.integers(0, 5), st.sampled_from("xy"))
    newest: dict[int, AckRequest] = {}
    for subtask, attempt, content in data.draw(st.lists(attempts, max_size=15)):
        # One attempt has one outcome: an ack that is sent twice is the same twice.
        part = part_of({b"k": content.encode() + (b"" if attempt % 2 else b"%d" % attempt)})
        ack = ack_of(befores[subtask], part, 0, subtask, attempt=attempt)
        known = newest.get(subtask)
        if known is not None and attempt < known.attempt:
            with pytest.raises(StaleRequestError):
                run.coordinator.ack(ack)
            continue
        expected = Acked.COMPLETE if len({*newest, subtask}) == parallelism else Acked.PARTIAL
        assert run.coordinator.ack(ack) is expected
        newest[subtask] = ack
        durable = [e.chain for e in run.records[-1].slices] if run.records else []
        wanted = [newest[n].chain for n in sorted(newest)]
        manifest = run.commit()
        assert (manifest is None) is (len(newest) < parallelism or wanted == durable)
    if len(newest) < parallelism:
        assert run.records == []
        with pytest.raises(IncompleteEpochError):
            run.begin(1)
        return
    for subtask, entry in enumerate(run.records[-1].slices):
        assert entry.chain == newest[subtask].chain == run.begin(1, subtask).chain
