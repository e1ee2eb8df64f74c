"""Which acks the coordinator takes, and what stands in the records that they complete."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.formats.lineage_digest import chain_start
from snapshot.formats.object_names import data_name
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import SlicePart
from statebackend.errors import IncompleteEpochError, ProtocolError, StaleRequestError
from tests.recovery.driver import JOB_ID, Run, ack_of, part_of, stamp_of

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
