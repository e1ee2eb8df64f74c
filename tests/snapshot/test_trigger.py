"""When a checkpoint begins, and when its failures become the job's: by a manual clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.barriers.checkpoint_trigger import Kind, Request, Trigger, TriggerPolicy
from snapshot.barriers.pending_checkpoints import Reason
from snapshot.barriers.tolerable_failures import Failures
from statebackend.errors import SettingError


def trigger(**policy: Any) -> Trigger:
    return Trigger(TriggerPolicy(**policy), 0.0)


def begun(machine: Trigger, now_s: float) -> list[tuple[str, bool]]:
    return [(request.kind, request.periodic) for request in machine.poll(now_s)]


PERIODIC = ("checkpoint", True)


def test_a_periodic_checkpoint_begins_at_every_interval() -> None:
    machine = trigger(interval_s=10, max_concurrent=9)
    assert machine.next_s == 10
    assert begun(machine, 9.9) == []
    assert begun(machine, 10) == [PERIODIC]
    assert begun(machine, 10) == []
    assert begun(machine, 20) == [PERIODIC]


def test_intervals_that_were_missed_are_not_made_up_for() -> None:
    machine = trigger(interval_s=10, max_concurrent=9)
    assert begun(machine, 47) == [PERIODIC]
    assert machine.next_s == 50


def test_no_more_are_given_than_are_wanted_and_the_others_wait() -> None:
    machine = trigger(interval_s=10, max_concurrent=3)
    for kind in ("checkpoint", "savepoint"):
        machine.request(kind, 1)  # type: ignore[arg-type]
    assert [one.kind for one in machine.poll(10, most=1)] == ["savepoint"]
    assert [one.periodic for one in machine.poll(10, most=1)] == [False]
    assert [one.periodic for one in machine.poll(10, most=1)] == [True]
    assert machine.poll(20, most=1) == []


def test_a_periodic_checkpoint_inside_the_pause_is_dropped_and_comes_after_it() -> None:
    machine = trigger(interval_s=10, min_pause_s=8)
    (first,) = machine.poll(10)
    machine.ended(first, 15)
    assert begun(machine, 20) == []
    assert machine.queued == []
    assert machine.next_s == 23
    assert begun(machine, 23) == [PERIODIC]


@pytest.mark.parametrize("kind", ["checkpoint", "savepoint"])
def test_what_a_user_asks_for_runs_at_once_inside_the_pause(kind: Any) -> None:
    machine = trigger(interval_s=10, min_pause_s=100)
    (first,) = machine.poll(10)
    machine.ended(first, 15)
    assert machine.request(kind, 16) is not None
    assert begun(machine, 16) == [(kind, False)]


def test_at_the_limit_requests_wait_savepoints_first_and_periodic_ones_last() -> None:
    machine = trigger(interval_s=10)
    running: Request | None = machine.poll(10)[0]
    assert machine.poll(20) == []
    kinds: list[Kind] = ["checkpoint", "savepoint", "checkpoint", "savepoint"]
    for kind in kinds:
        machine.request(kind, 21)
    order = []
    while running is not None:
        machine.ended(running, 22)
        running = next(iter(machine.poll(22)), None)
        order += [running] if running is not None else []
    assert [(r.kind, r.periodic, r.id) for r in order] == [
        ("savepoint", False, 4),
        ("savepoint", False, 6),
        ("checkpoint", False, 3),
        ("checkpoint", False, 5),
        ("checkpoint", True, 2),
    ]


def test_so_many_run_at_the_same_time() -> None:
    machine = trigger(interval_s=10, max_concurrent=2)
    assert [begun(machine, s) for s in (10, 20, 30)] == [[PERIODIC], [PERIODIC], []]
    assert machine.running == 2


def test_only_one_periodic_request_waits() -> None:
    machine = trigger(interval_s=10)
    for now_s in (10, 20, 30, 40):
        machine.poll(now_s)
    assert [request.periodic for request in machine.queued] == [True]


def test_the_eleventh_request_in_a_queue_of_ten_is_refused() -> None:
    machine = trigger()
    assert machine.request("checkpoint", 0) is not None
    machine.poll(0)
    asked = [machine.request("checkpoint", 1) for _ in range(10)]
    assert None not in asked
    assert machine.request("savepoint", 2) is None
    assert len(machine.queued) == 10


def test_a_periodic_request_makes_room_for_a_user_s() -> None:
    machine = trigger(interval_s=10, queue_limit=2)
    machine.poll(10)
    machine.poll(20)
    assert machine.request("checkpoint", 21) is not None
    assert machine.request("checkpoint", 21) is not None
    assert [request.periodic for request in machine.queued] == [False, False]
    assert machine.request("checkpoint", 21) is None


def test_checkpoints_take_no_more_than_their_share_of_the_time() -> None:
    machine = trigger(interval_s=1, max_share=0.25)
    (first,) = machine.poll(1)
    machine.ended(first, 3)  # 2 s: the next 6 s are free of it
    assert begun(machine, 8.9) == []
    assert begun(machine, 9) == [PERIODIC]


@given(
    st.floats(0.05, 1.0),
    st.lists(st.floats(0.01, 30.0), min_size=2, max_size=20),
    st.booleans(),
)
def test_the_share_holds_whatever_checkpoints_take(
    share: float, took: list[float], by_interval: bool
) -> None:
    policy: dict[str, float] = {"interval_s": 0.5} if by_interval else {"min_pause_s": 0.5}
    machine = trigger(max_share=share, **policy)
    now_s, spent_s, first_s = 0.0, 0.0, -1.0
    for took_s in took:
        due: list[Request] = []
        while not due:
            assert machine.next_s is not None
            now_s = max(now_s, machine.next_s)
            due = machine.poll(now_s)
        if first_s < 0:
            first_s = now_s
        assert spent_s <= share * (now_s - first_s) + 1e-6
        now_s += took_s
        spent_s += took_s
        machine.ended(due[0], now_s)


def test_what_is_over_counts_once() -> None:
    machine = trigger(interval_s=1, max_share=0.25)
    (first,) = machine.poll(1)
    machine.ended(first, 3)
    machine.ended(first, 100)
    assert begun(machine, 9) == [PERIODIC]


def test_without_an_interval_nothing_begins_unasked() -> None:
    machine = trigger()
    assert machine.next_s is None
    assert machine.poll(1e9) == []


def test_after_a_restart_nothing_is_under_way_and_users_go_on_waiting() -> None:
    machine = trigger(interval_s=10)
    machine.poll(10)
    machine.poll(20)
    machine.request("savepoint", 21)
    machine.reset(30)
    assert machine.running == 0
    assert begun(machine, 30) == [("savepoint", False)]
    assert machine.next_s == 40


@pytest.mark.parametrize(
    "policy",
    [
        {"interval_s": 0},
        {"min_pause_s": -1},
        {"max_concurrent": 0},
        {"queue_limit": 0},
        {"max_share": 0, "interval_s": 1},
        {"max_share": 1.5, "interval_s": 1},
        {"max_share": 0.5},
    ],
)
def test_a_policy_that_means_nothing_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        TriggerPolicy(**policy)


# --- failures ------------------------------------------------------------------------------------


def test_one_failure_more_than_is_tolerable_fails_the_job_once() -> None:
    failures = Failures(2)
    told = [
        failures.failed(1, Reason.DECLINED),
        failures.failed(2, Reason.EXPIRED),
        failures.failed(3, Reason.FAILOVER),  # not the checkpoint's own
        failures.failed(4, Reason.STORE),
        failures.failed(4, Reason.STORE),
    ]
    assert told == [False, False, False, True, False]


def test_a_success_between_begins_the_count_anew() -> None:
    failures = Failures(2)
    told = [failures.failed(1, Reason.EXPIRED), failures.failed(2, Reason.EXPIRED)]
    failures.succeeded(3)
    assert [*told, failures.failed(4, Reason.EXPIRED)] == [False, False, False]
    assert failures.count == 1


def test_the_same_checkpoint_reported_twice_counts_once() -> None:
    failures = Failures(1)
    assert [failures.failed(1, Reason.DECLINED) for _ in range(3)] == [False] * 3
    assert failures.failed(2, Reason.DECLINED)


def test_a_failure_older_than_a_success_is_not_counted() -> None:
    failures = Failures(0)
    failures.succeeded(5)
    assert not failures.failed(4, Reason.EXPIRED)
    assert failures.failed(6, Reason.EXPIRED)


@pytest.mark.parametrize("reason", list(Reason))
def test_only_the_checkpoint_s_own_failures_count(reason: Reason) -> None:
    own = {Reason.DECLINED, Reason.EXPIRED, Reason.STORE}
    assert Failures(0).failed(1, reason) is (reason in own)
