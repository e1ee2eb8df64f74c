"""The checkpoints under way over all subtasks of a job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.barriers.pending_checkpoints import (
    Aborted,
    Action,
    Checkpoints,
    Commit,
    Complete,
    Inject,
    Reason,
    Subtask,
    check_in_flight,
)
from statebackend.errors import ProtocolError, RescaleError

A0, A1, S0 = Subtask("a", 0), Subtask("a", 1), Subtask("sink", 0)


def job(epoch: int = 0, before: int = 0, may_leave: bool = False) -> Checkpoints[str]:
    return Checkpoints([A0, A1, S0], epoch=epoch, before=before, timeout_s=10, may_leave=may_leave)


def begin(machine: Checkpoints[str], now_s: float = 0.0, **more: Any) -> Inject:
    (inject,) = machine.begin(now_s, stamp_ms=0, **more)
    assert isinstance(inject, Inject)
    return inject


def ack_all(machine: Checkpoints[str], number: int, **more: Any) -> list[Action[str]]:
    return [a for s in (A0, A1, S0) for a in machine.ack(s, number, f"{s}", **more)]


def complete(machine: Checkpoints[str], number: int) -> list[Action[str]]:
    ack_all(machine, number)
    return machine.committed(number)


def test_when_all_have_acked_the_record_is_asked_for_and_then_it_is_complete() -> None:
    machine = job(epoch=4, before=17)
    inject = begin(machine)
    assert (inject.barrier.checkpoint, inject.epoch) == (18, 5)
    assert machine.ack(A0, 18, "x") == []
    assert machine.ack(A1, 18, "y") == []
    assert machine.waiting_for(18) == {S0}
    (commit,) = machine.ack(S0, 18, "z")
    assert isinstance(commit, Commit)
    assert commit.parts == {A0: "x", A1: "y", S0: "z"}
    assert machine.epoch == 4
    assert machine.committed(18) == [Complete(18, 5, False)]
    assert (machine.epoch, machine.pending) == (5, [])


def test_the_same_ack_twice_counts_once_and_the_first_part_stays() -> None:
    machine = job()
    begin(machine)
    machine.ack(A0, 1, "x")
    assert machine.ack(A0, 1, "other") == []
    machine.ack(A1, 1, "y")
    (commit,) = machine.ack(S0, 1, "z")
    assert isinstance(commit, Commit)
    assert commit.parts[A0] == "x"


def test_an_aborted_attempt_s_epoch_is_taken_by_the_next_and_its_number_never_again() -> None:
    machine = job()
    begin(machine)
    assert machine.decline(A1, 1) == [Aborted(1, 1, Reason.DECLINED, A1)]
    inject = begin(machine)
    assert (inject.barrier.checkpoint, inject.epoch) == (2, 1)


def test_acks_of_an_attempt_that_is_over_change_nothing() -> None:
    machine = job()
    begin(machine)
    machine.abort(1, Reason.DECLINED)
    begin(machine)
    assert ack_all(machine, 1) == []
    assert machine.decline(A0, 1) == []
    assert machine.waiting_for(2) == {A0, A1, S0}
    assert ack_all(machine, 99) == []


def test_an_attempt_that_takes_too_long_is_given_up() -> None:
    machine = job()
    begin(machine, 5.0)
    assert machine.next_deadline_s == 15.0
    assert machine.tick(14.9) == []
    assert machine.tick(15.0) == [Aborted(1, 1, Reason.EXPIRED)]
    assert machine.next_deadline_s is None


def test_a_record_that_is_being_written_is_beyond_giving_up() -> None:
    machine = job()
    begin(machine)
    ack_all(machine, 1)
    assert machine.tick(1e9) == []
    assert machine.abort(1, Reason.FAILOVER) == []
    assert machine.decline(A0, 1) == []
    assert machine.abort_all(Reason.FAILOVER) == []
    assert machine.committed(1) == [Complete(1, 1, False)]


def test_a_record_that_is_not_there_gives_the_attempt_up() -> None:
    machine = job()
    begin(machine)
    ack_all(machine, 1)
    assert machine.not_committed(1) == [Aborted(1, 1, Reason.STORE)]
    assert begin(machine).epoch == 1


@pytest.mark.parametrize("told", ["committed", "not_committed"])
def test_an_outcome_that_was_not_asked_for_is_a_fault(told: str) -> None:
    machine = job()
    begin(machine)
    with pytest.raises(ProtocolError, match="checkpoint 1"):
        getattr(machine, told)(1)


def test_attempts_are_committed_in_their_order_one_by_one() -> None:
    machine = job()
    begin(machine)
    assert begin(machine).epoch == 2
    assert ack_all(machine, 2) == []
    (first,) = ack_all(machine, 1)
    assert isinstance(first, Commit)
    done, second = machine.committed(1)
    assert done == Complete(1, 1, False)
    assert isinstance(second, Commit)
    assert (second.checkpoint, second.epoch) == (2, 2)


def test_with_an_attempt_go_the_newer_ones_that_build_on_it() -> None:
    machine = job()
    begin(machine)
    begin(machine)
    begin(machine)
    complete(machine, 1)
    assert machine.decline(A0, 2) == [
        Aborted(2, 2, Reason.DECLINED, A0),
        Aborted(3, 3, Reason.EARLIER),
    ]
    assert begin(machine).epoch == 2


def test_a_restart_gives_all_up_for_the_same_reason() -> None:
    machine = job()
    begin(machine)
    begin(machine)
    gone = machine.abort_all(Reason.FAILOVER)
    assert gone == [Aborted(1, 1, Reason.FAILOVER), Aborted(2, 2, Reason.FAILOVER)]


# --- finite inputs -------------------------------------------------------------------------------


def test_subtasks_at_their_end_stay_and_ack_until_all_are() -> None:
    machine = job()
    for subtask in (A0, A1):
        machine.at_end(subtask)
    begin(machine)
    machine.ack(A0, 1, "x", ended=True)
    machine.ack(A1, 1, "y", ended=True)
    machine.ack(S0, 1, "z")
    assert machine.committed(1) == [Complete(1, 1, False)]
    begin(machine)
    assert machine.waiting_for(2) == {A0, A1, S0}
    machine.at_end(S0)
    (commit,) = ack_all(machine, 2, ended=True)
    assert isinstance(commit, Commit)
    assert commit.parts.keys() == {A0, A1, S0}
    assert machine.committed(2) == [Complete(2, 2, True)]
    assert not machine.last_is_due


def test_nobody_waits_for_a_subtask_whose_part_after_its_end_is_in_a_complete_checkpoint() -> None:
    machine = job(may_leave=True)
    begin(machine)
    machine.at_end(A0)
    machine.ack(A0, 1, "before its end")
    machine.ack(A1, 1, "y")
    machine.ack(S0, 1, "z")
    machine.committed(1)
    begin(machine)
    assert A0 in machine.waiting_for(2)  # the complete one is from before its end
    machine.ack(A0, 2, "x", ended=True)
    machine.ack(A1, 2, "y")
    (commit,) = machine.ack(S0, 2, "z")
    assert isinstance(commit, Commit)
    assert commit.ended == {A0}
    assert not commit.finished
    assert machine.committed(2) == [Complete(2, 2, False)]
    begin(machine)
    assert machine.waiting_for(3) == {A1, S0}
    machine.ack(A1, 3, "y")
    (commit,) = machine.ack(S0, 3, "z")
    assert isinstance(commit, Commit)
    assert commit.finished == {A0}


def test_an_aborted_checkpoint_lets_nobody_go() -> None:
    machine = job(may_leave=True)
    begin(machine)
    machine.ack(A0, 1, "x", ended=True)
    machine.abort(1, Reason.EXPIRED)
    begin(machine)
    assert A0 in machine.waiting_for(2)


def test_attempts_under_way_do_not_wait_for_who_has_finished_either() -> None:
    machine = job(may_leave=True)
    begin(machine)
    begin(machine)
    machine.ack(A1, 2, "y")
    machine.ack(S0, 2, "z")
    machine.ack(A0, 1, "x", ended=True)
    machine.ack(A1, 1, "y")
    machine.ack(S0, 1, "z")
    assert machine.waiting_for(2) == {A0}
    (_, commit) = machine.committed(1)
    assert isinstance(commit, Commit)
    assert commit.finished == {A0}


def test_when_all_are_at_their_end_the_last_checkpoint_is_due_and_the_job_over_with_it() -> None:
    machine = job()
    for subtask in (A0, A1, S0):
        assert not machine.last_is_due
        machine.at_end(subtask)
    assert machine.last_is_due
    inject = begin(machine)
    assert inject.barrier.kind == "last"
    assert not machine.last_is_due
    ack_all(machine, 1, ended=True)
    assert machine.committed(1) == [Complete(1, 1, True)]
    assert not machine.last_is_due


def test_a_last_checkpoint_that_failed_is_due_again() -> None:
    machine = job()
    for subtask in (A0, A1, S0):
        machine.at_end(subtask)
    begin(machine)
    machine.abort(1, Reason.EXPIRED)
    assert machine.last_is_due


def test_with_the_last_checkpoint_what_is_under_way_is_given_up() -> None:
    machine = job()
    begin(machine)
    begin(machine)
    ack_all(machine, 1, ended=True)
    assert machine.committed(1) == [Complete(1, 1, True), Aborted(2, 2, Reason.STOPPED)]


def test_a_job_that_is_asked_to_end_is_over_with_that_checkpoint() -> None:
    machine = job()
    begin(machine)
    assert begin(machine, kind="last").barrier.kind == "last"
    begin(machine)
    ack_all(machine, 1)
    ack_all(machine, 2)
    machine.committed(1)
    assert machine.committed(2) == [Complete(2, 2, True), Aborted(3, 3, Reason.STOPPED)]


def test_the_job_is_ending_while_its_last_checkpoint_is_under_way() -> None:
    machine = job()
    begin(machine)
    assert not machine.is_ending
    begin(machine, kind="last")
    assert machine.is_ending
    machine.decline(A0, 1)
    assert not machine.is_ending
    for subtask in (A0, A1, S0):
        machine.at_end(subtask)
    begin(machine)
    assert machine.is_ending, "what it was asked for as does not matter"


def test_a_savepoint_stays_one_at_the_end() -> None:
    machine = job()
    for subtask in (A0, A1, S0):
        machine.at_end(subtask)
    assert begin(machine, kind="savepoint").barrier.kind == "savepoint"


# --- rows in flight ------------------------------------------------------------------------------


def test_rows_in_flight_go_back_at_the_same_parallelism_only() -> None:
    saved = {"source": 2, "count": 4, "sink": 4}
    check_in_flight(["count"], saved, dict(saved))
    check_in_flight([], saved, {**saved, "count": 8})
    check_in_flight(["count"], saved, {"source": 2, "count": 4})
    with pytest.raises(RescaleError, match=r"in flight to 'count'.*'sink' from 4 to 8") as refused:
        check_in_flight(["count"], saved, {**saved, "sink": 8})
    assert "savepoint" in refused.value.todo


# --- properties ----------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "ack", "decline", "ok", "not", "tick"]), st.integers(0, 8)),
    max_size=60,
)


@given(STEPS)
def test_epochs_have_no_gap_and_numbers_rise_whatever_happens(steps: list[tuple[str, int]]) -> None:
    machine = job(before=3)
    subtasks = [A0, A1, S0]
    acked: dict[int, set[Subtask]] = {}
    committed, numbers, now_s = 0, [3], 0.0
    writing: int | None = None
    for what, pick in steps:
        now_s += 1.0
        number = machine.number - pick // 3
        subtask = subtasks[pick % 3]
        if what == "begin":
            actions = machine.begin(now_s, stamp_ms=0)
        elif what == "ack":
            acked.setdefault(number, set()).add(subtask)
            actions = machine.ack(subtask, number, "")
        elif what == "decline":
            actions = machine.decline(subtask, number)
        elif what == "tick":
            actions = machine.tick(now_s)
        elif writing is not None:
            told = machine.committed if what == "ok" else machine.not_committed
            done, writing = writing, None
            actions = told(done)
        else:
            continue
        for action in actions:
            if isinstance(action, Inject):
                assert action.barrier.checkpoint > numbers[-1]
                numbers.append(action.barrier.checkpoint)
            elif isinstance(action, Commit):
                assert writing is None
                assert acked[action.checkpoint] == set(subtasks)
                assert action.epoch == committed + 1
                writing = action.checkpoint
            elif isinstance(action, Complete):
                committed += 1
                assert action.epoch == committed
