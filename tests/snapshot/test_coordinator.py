"""The coordinator's invariants, by name: begins, acks, stamps, records, and what ends a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.formats.delta import chain_start
from snapshot.formats.names import data_name
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckRequest, SlicePart
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
from tests.recovery.driver import (
    JOB_ID,
    Run,
    ack_of,
    begin_of,
    part_of,
    stamp_of,
)

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


# --- stamps --------------------------------------------------------------------------------------


def test_a_kept_frame_is_refused_after_the_batchs_own() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    with pytest.raises(WrongBatchError, match="batch 1"):
        run.begin(1, stamp_ms=stamp_of(0))


def test_a_kept_frame_is_refused_before_the_batchs_own_and_does_not_take_its_place() -> None:
    run = Run(1)
    run.finish(0)
    with pytest.raises(WrongBatchError, match="batch 1"):
        run.begin(1, stamp_ms=stamp_of(0))
    assert run.begin(1).base_epoch == 0
    run.ack(1)
    run.commit()
    run.begin(2)


def test_a_frame_kept_since_the_batch_before_last_is_refused() -> None:
    run = Run(1)
    run.finish(0)
    run.finish(1)
    with pytest.raises(WrongBatchError):
        run.begin(2, stamp_ms=stamp_of(0))
    run.begin(2)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_frame_kept_for_longer_is_refused_too(kept: int) -> None:
    run = Run(1)
    for epoch in range(4):
        run.finish(epoch)
    with pytest.raises(WrongBatchError):
        run.begin(4, stamp_ms=stamp_of(kept))
    run.begin(4)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_frame_kept_over_a_restart_in_one_process_is_refused(kept: int) -> None:
    run = Run(1)
    for epoch in range(3):
        run.finish(epoch)
    later = run.again(same_process=True)
    with pytest.raises(WrongBatchError):
        later.begin(3, stamp_ms=stamp_of(kept))
    later.begin(3)


@pytest.mark.parametrize("earlier", range(3))
def test_an_epoch_may_have_the_time_of_any_earlier_one(earlier: int) -> None:
    run = Run(2)
    for epoch in range(3):
        run.finish(epoch)
    for same_process in (True, False):
        later = run.again(same_process=same_process)
        for subtask in range(2):
            later.begin(3, subtask, stamp_ms=stamp_of(earlier), nonce=7)
            later.ack(3, subtask, stamp_ms=stamp_of(earlier))
        later.commit()
        assert later.records[-1].stamp_ms == stamp_of(earlier)
        later.begin(4, stamp_ms=stamp_of(earlier), nonce=8)
        run = Run(2, records=run.records[:3])


def test_a_kept_frame_is_refused_where_the_time_is_the_same() -> None:
    run = Run(2)
    for epoch in range(3):
        for subtask in range(2):
            run.begin(epoch, subtask, stamp_ms=5, nonce=10 * epoch + subtask)
            run.ack(epoch, subtask, stamp_ms=5)
        run.commit()
    for kept in range(3):
        with pytest.raises(WrongBatchError):  # before the batch's own, and after it
            run.begin(3, 1, stamp_ms=5, nonce=10 * kept + 1)
    run.begin(3, 0, stamp_ms=5, nonce=30)
    for kept in range(3):
        for subtask in range(2):
            with pytest.raises(WrongBatchError):
                run.begin(3, subtask, stamp_ms=5, nonce=10 * kept + subtask)
    run.begin(3, 1, stamp_ms=5, nonce=0)  # what another subtask's number was says nothing


def test_an_epoch_that_is_repeated_in_one_process_has_a_frame_of_its_own() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1, nonce=1)
    later = run.again(same_process=True)
    with pytest.raises(WrongBatchError):
        later.begin(1, nonce=1)
    later.begin(1, nonce=2)


def test_a_repeated_epoch_keeps_its_stamp_after_a_restart() -> None:
    run = Run(1)
    for epoch in range(3):
        run.finish(epoch)
    later = run.again()
    later.finish(2)
    assert later.records[-1].stamp_ms == stamp_of(2)
    later.finish(3)


def test_an_epoch_that_was_given_up_may_get_another_stamp() -> None:
    # Its offsets were never written: Spark plans the batch anew.
    run = Run(1)
    run.finish(0)
    run.begin(1)
    later = run.again()
    later.finish(1, stamp_ms=stamp_of(1) + 77)
    assert later.records[-1].stamp_ms == stamp_of(1) + 77


def test_an_ack_with_another_stamp_is_refused() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    with pytest.raises(WrongBatchError):
        run.ack(1, stamp_ms=stamp_of(0))
    assert run.commit() is None


# --- acks ----------------------------------------------------------------------------------------


def test_the_ack_that_completes_the_operator_is_told_apart() -> None:
    run = Run(3)
    for subtask in range(3):
        run.begin(0, subtask)
    assert run.ack(0, 2) is Acked.PARTIAL
    assert run.ack(0, 0) is Acked.PARTIAL
    assert run.commit() is None
    assert run.ack(0, 1) is Acked.COMPLETE
    manifest = run.commit()
    assert manifest is not None
    assert [(e.kind, e.subtask) for e in manifest.slices] == [("delta", n) for n in range(3)]


def test_the_newest_attempt_wins_whichever_acks_last() -> None:
    run = Run(1)
    for attempt in (3, 7):
        run.begin(0, attempt=attempt)
    run.ack(0, attempt=7, changes={b"k": b"seven"})
    with pytest.raises(StaleRequestError, match="newer attempt"):
        run.ack(0, attempt=3, changes={b"k": b"three"})
    manifest = run.commit()
    assert manifest is not None
    (entry,) = manifest.slices
    assert (entry.attempt, entry.digest) == (7, part_of({b"k": b"seven"}).digest)


def test_a_stale_attempt_stays_refused_once_the_record_is_durable() -> None:
    run = Run(1)
    run.begin(0)
    run.ack(0, attempt=7)
    run.commit()
    with pytest.raises(StaleRequestError):
        run.ack(0, attempt=3, changes={b"k": b"three"})
    assert run.commit() is None


def test_a_later_differing_ack_makes_a_superseding_record_with_all_subtasks() -> None:
    run = Run(3)
    run.finish(0)
    run.begin(0, 1, attempt=9)
    assert run.ack(0, 1, attempt=9, changes={b"k": b"again"}) is Acked.COMPLETE
    manifest = run.commit()
    assert manifest is not None
    assert [e.subtask for e in manifest.slices] == [0, 1, 2]
    assert [e.attempt for e in manifest.slices] == [0, 9, 0]
    before = run.records[0]
    assert [e.digest == b.digest for e, b in zip(manifest.slices, before.slices, strict=True)] == [
        True,
        False,
        True,
    ]
    # What follows stands on it.
    for subtask in range(3):
        assert run.begin(1, subtask).chain == manifest.slices[subtask].chain


@pytest.mark.parametrize("attempt", [0, 9])
def test_an_identical_ack_writes_nothing(attempt: int) -> None:
    run = Run(2)
    run.finish(0)
    assert run.ack(0, 1, attempt=attempt) is Acked.COMPLETE
    assert run.commit() is None
    assert len(run.records) == 1


def test_an_ack_after_the_next_epoch_began_is_refused() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    late = ack_of(chain_start(JOB_ID, "op", (0, 7)).hex(), part_of({b"k": b"late"}), 0, attempt=99)
    with pytest.raises(StaleRequestError, match="epoch 1 is running"):
        run.coordinator.ack(late)
    assert run.commit() is None


@pytest.mark.parametrize("epoch", [0, 2])
def test_an_ack_of_an_epoch_that_is_not_running_is_refused(epoch: int) -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    with pytest.raises(StaleRequestError):
        run.coordinator.ack(ack_of("00" * 32, part_of({}), epoch))


def test_an_ack_before_anything_began_is_refused() -> None:
    with pytest.raises(StaleRequestError):
        Run(1).coordinator.ack(ack_of("00" * 32, part_of({}), 0))


def test_an_ack_of_another_job_s_operator_is_refused() -> None:
    run = Run(1)
    run.begin(0)
    with pytest.raises(StaleRequestError, match="'other'"):
        run.coordinator.ack(ack_of("00" * 32, part_of({}), 0, operator="other"))


def test_a_snapshot_of_another_state_than_was_given_is_refused() -> None:
    run = Run(2)
    run.finish(0)
    run.begin(1)
    foreign = run.begin(1, 1).chain
    with pytest.raises(ProtocolError, match="does not follow"):
        run.coordinator.ack(ack_of(foreign, part_of({b"k": b"x"}), 1, 0))
    assert run.commit() is None


def test_a_chain_that_is_not_that_of_the_delta_is_refused() -> None:
    run = Run(1)
    before = run.begin(0).chain
    good = ack_of(before, part_of({b"k": b"x"}), 0)
    with pytest.raises(ProtocolError, match="does not follow"):
        run.coordinator.ack(msgspec.structs.replace(good, delta=part_of({b"k": b"y"})))


@pytest.mark.parametrize("subtask", [-1, 2])
def test_an_ack_of_a_subtask_that_is_not_there_is_refused(subtask: int) -> None:
    run = Run(2)
    chains = [run.begin(0, n).chain for n in range(2)]
    run.ack(0, 0)
    with pytest.raises(ProtocolError):
        run.coordinator.ack(ack_of(chains[1], part_of({b"k": b"x"}), 0, subtask))
    assert run.commit() is None


@pytest.mark.parametrize("digest", ["", "zz" * 32, "00"])
def test_an_ack_whose_digest_is_none_is_refused(digest: str) -> None:
    run = Run(1)
    before = run.begin(0).chain
    good = ack_of(before, part_of({b"k": b"x"}), 0)
    bad = msgspec.structs.replace(good, delta=SlicePart(digest=digest, size_bytes=0, rows=0))
    with pytest.raises(ProtocolError):
        run.coordinator.ack(bad)


# --- records -------------------------------------------------------------------------------------


def test_a_record_says_what_it_is_of() -> None:
    run = Run({"a": 1, "b": 2})
    run.finish(0)
    record = run.records[1]
    assert (record.kind, record.job, record.job_id) == ("checkpoint", "clicks", JOB_ID)
    assert (record.operator, record.epoch, record.stamp_ms) == ("b", 0, stamp_of(0))
    assert (record.parallelism, record.max_parallelism, record.first_epoch) == (2, 8, 0)
    assert (record.query_id, record.run) == ("query", run.coordinator.run.name)
    assert record.settings == {"operators": {"a": 0, "b": 0}}
    assert record.states == {"count": 1}
    assert record.schemas == {"count": "{}"}
    assert [(e.key_group_start, e.key_group_end) for e in record.slices] == [(0, 3), (4, 7)]
    assert {e.operator for e in record.slices} == {"b"}


def test_slices_and_bodies_go_together_with_the_bases_beside_their_deltas() -> None:
    run = Run(3)
    befores = [run.begin(0, n).chain for n in range(3)]
    inline, base, far = part_of({b"k": b"x"}), part_of({b"all": b"y"}), part_of({b"k": b"z"})
    name = data_name(1, 0, "7")
    apart = SlicePart(digest=far.digest, size_bytes=far.size_bytes, rows=far.rows, name=name)
    run.coordinator.ack(ack_of(befores[2], inline, 0, 2, base=base))
    run.coordinator.ack(ack_of(befores[0], apart, 0, 0))
    run.coordinator.ack(ack_of(befores[1], part_of({}), 0, 1, base=apart))
    work = run.coordinator.records.take_due("op", 0)
    assert work is not None
    named = [(e.subtask, e.kind, e.object) for e in work.manifest.slices]
    assert named == [
        (0, "delta", name),
        (1, "delta", None),
        (1, "base", name),
        (2, "delta", None),
        (2, "base", None),
    ]
    assert work.bodies == [None, b"", None, inline.data, base.data]


def test_a_record_in_the_making_does_not_change_with_a_later_ack() -> None:
    run = Run(1)
    run.begin(0)
    run.ack(0, changes={b"k": b"first"})
    work = run.coordinator.records.take_due("op", 0)
    assert work is not None
    run.ack(0, attempt=1, changes={b"k": b"second"})
    run.coordinator.records.committed(work, run.append(work))
    manifest = run.commit()
    assert manifest is not None
    assert manifest.slices[0].digest == part_of({b"k": b"second"}).digest
    assert run.begin(1).chain == manifest.slices[0].chain


def test_no_record_is_due_for_an_epoch_that_is_over() -> None:
    run = Run(1)
    run.finish(0, changes={b"k": b"first"})
    run.ack(0, attempt=1, changes={b"k": b"second"})  # a twin that Spark killed while it acked
    run.begin(1)
    assert run.coordinator.records.take_due("op", 0) is None
    run.ack(1)
    assert run.coordinator.records.take_due("op", 0) is None
    assert run.coordinator.records.take_due("op", 1) is not None


def test_a_record_of_the_epoch_before_does_not_complete_the_one_that_runs() -> None:
    run = Run(1)
    run.finish(0, changes={b"k": b"first"})
    run.ack(0, attempt=1, changes={b"k": b"second"})
    work = run.coordinator.records.take_due("op", 0)
    assert work is not None
    run.begin(1)  # the caller's lock was forgotten
    with pytest.raises(AssertionError, match="epoch 1 began while 0 was written"):
        run.coordinator.records.committed(work, run.append(work))
    with pytest.raises(IncompleteEpochError):
        run.coordinator.check_finished(1)
    with pytest.raises(IncompleteEpochError):
        run.begin(2)


# --- bases ---------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 5))
def test_every_subtask_sends_a_base_once_in_so_many_epochs_and_never_all_in_one(
    parallelism: int, every: int, first: int
) -> None:
    due: dict[int, set[int]] = {}
    run = Run({"warm": 1}, base_every_epochs=every)
    for epoch in range(first):
        run.finish(epoch)
    run = run.again({"op": parallelism})
    for epoch in range(first, first + 3 * every + 1):
        due[epoch] = {
            subtask for subtask in range(parallelism) if run.begin(epoch, subtask).base_due
        }
        for subtask in range(parallelism):
            run.ack(epoch, subtask)
        run.commit()
    assert due[first] == set()  # everything there is is in its delta
    for start in range(first + 1, first + 2 * every + 1):
        window = [due[e] for e in range(start, start + every)]
        for subtask in range(parallelism):
            assert sum(subtask in one for one in window) == 1
    if parallelism > 1 and every > 1:
        assert all(len(one) < parallelism for one in due.values())


def test_every_attempt_at_an_epoch_is_asked_for_the_same_base_over_restarts_too() -> None:
    run = Run(2, base_every_epochs=3)
    seen = set()
    for epoch in range(8):
        for subtask in range(2):
            asked = {run.begin(epoch, subtask, attempt=n).base_due for n in range(3)}
            run.ack(epoch, subtask)
            if epoch:
                asked.add(run.again().begin(epoch, subtask).base_due)
            assert len(asked) == 1
            seen |= asked
        run.commit()
    assert seen == {True, False}


def test_a_base_goes_into_the_record_and_the_next_runs_start_from_it() -> None:
    run = Run(1, base_every_epochs=2)
    for epoch in range(6):
        due = run.begin(epoch).base_due
        run.ack(epoch, base={b"k": b"%d" % epoch} if due else None)
        run.commit()
    lineage = resolve(run.records)["op"]
    assert sorted(lineage.subtasks[0].bases) == [2, 4]
    assert run.records[-1].oldest_needed == 4


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
