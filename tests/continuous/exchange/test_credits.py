from __future__ import annotations

import threading

import pytest

from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput, Idle, Watermark
from statebackend.continuous.exchange.credits import Credits
from statebackend.continuous.exchange.elements import (
    CAPACITY_MIN_BYTES,
    ELEMENT_BYTES,
    check_capacity,
    compact,
    cost_of,
)
from statebackend.errors import PeerLostError, ProtocolError, SettingError
from tests.continuous.exchange.peers import rows


def test_credits_are_never_negative_and_never_above_the_capacity() -> None:
    capacity = 10_000
    credits = Credits(capacity)
    costs = [(7919 * i) % 4999 + 1 for i in range(3000)]
    seen: list[int] = []
    taken: list[int] = []
    changed = threading.Condition()

    def take() -> None:
        for cost in costs:
            credits.take(cost)
            seen.append(credits.available_bytes)
            with changed:
                taken.append(cost)
                changed.notify()

    taker = threading.Thread(target=take)
    taker.start()
    for i in range(len(costs)):
        with changed:
            assert changed.wait_for(lambda i=i: len(taken) > i, 20)  # type: ignore[misc]
        credits.grant(costs[i])
        seen.append(credits.available_bytes)
    taker.join(20)
    assert min(seen) >= 0
    assert max(seen) <= capacity
    assert credits.available_bytes == capacity


def test_no_more_can_be_granted_than_was_taken() -> None:
    credits = Credits(1000)
    assert credits.try_take(600)
    assert not credits.try_take(600)
    with pytest.raises(ProtocolError):
        credits.grant(601)
    with pytest.raises(ProtocolError):
        credits.grant(-1)
    credits.grant(600)
    assert credits.available_bytes == 1000


def test_a_failure_wakes_who_waits_for_credit() -> None:
    credits = Credits(1000)
    credits.take(1000)
    raised: list[BaseException] = []

    def take() -> None:
        try:
            credits.take(1)
        except PeerLostError as error:
            raised.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    assert credits.fail(PeerLostError("It is gone."))
    taker.join(20)
    assert [str(error) for error in raised] == ["[SB5009] It is gone."]
    assert not credits.fail(PeerLostError("Again."))
    with pytest.raises(PeerLostError, match="It is gone"):
        credits.wait(1, 0)


def test_waiting_for_credit_takes_none() -> None:
    credits = Credits(1000)
    assert credits.wait(1000, 0)
    credits.take(1)
    assert not credits.wait(1000, 0.01)
    assert credits.available_bytes == 999


def test_checkpoints_get_through_without_credit_and_all_else_costs() -> None:
    free = [Barrier(checkpoint=1, stamp_ms=0), Cancel(checkpoint=1), EndOfInput()]
    assert [cost_of(event, CAPACITY_MIN_BYTES) for event in free] == [0, 0, 0]
    assert cost_of(Watermark(at_ms=1), CAPACITY_MIN_BYTES) == ELEMENT_BYTES
    assert cost_of(Idle(idle=True), CAPACITY_MIN_BYTES) == ELEMENT_BYTES
    assert cost_of(rows(0, 10), 1 << 20) == 240 + ELEMENT_BYTES
    assert cost_of(rows(0, 10_000), CAPACITY_MIN_BYTES) == CAPACITY_MIN_BYTES // 2


def test_a_channel_that_nothing_fits_into_is_refused() -> None:
    with pytest.raises(SettingError):
        check_capacity(CAPACITY_MIN_BYTES - 1)


def test_a_slice_is_copied_out_of_what_it_was_cut_from() -> None:
    whole = rows(0, 10_000)
    part = whole.slice(100, 50)
    assert part.get_total_buffer_size() == whole.nbytes
    assert compact(part).equals(part)
    assert compact(part).get_total_buffer_size() < 2 * part.nbytes
    assert compact(whole) is whole
