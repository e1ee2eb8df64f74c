"""What slots say goes to the run's loop once, however often it is sent."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from statebackend.continuous.driver.driver_endpoint import DriverEndpoint
from statebackend.continuous.job.slot_messages import (
    Failed,
    Poll,
    Report,
    Running,
    Stop,
    decode_commands,
)
from statebackend.errors import ProtocolError, StaleRequestError
from statebackend.rpc.envelope import ErrorReply, encode


@pytest.fixture
def said() -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


@pytest.fixture
def door(said: queue.SimpleQueue[Any]) -> DriverEndpoint:
    session: Any = None  # reports do not come to it
    return DriverEndpoint(session, 2, said)


def report(door: DriverEndpoint, slot: int, number: int) -> None:
    running = Running(vertex="count", subtask=slot)
    door.call("report", encode(Report(slot=slot, number=number, events=[running])))


def taken(said: queue.SimpleQueue[Any]) -> list[tuple[int, int]]:
    found = []
    while not said.empty():
        one = said.get()
        found.append((one.slot, one.number))
    return found


def test_a_report_that_is_sent_again_is_taken_once(
    door: DriverEndpoint, said: queue.SimpleQueue[Any]
) -> None:
    for number in (0, 0, 1, 0, 1, 2):
        report(door, 1, number)
    report(door, 0, 0)  # each slot counts for itself
    assert taken(said) == [(1, 0), (1, 1), (1, 2), (0, 0)]


def test_a_report_that_was_overtaken_is_taken_when_it_comes(
    door: DriverEndpoint, said: queue.SimpleQueue[Any]
) -> None:
    """Threads of a slot report at the same time; an answer that was lost holds up nobody else."""
    for number in (2, 0, 2, 1, 3, 1, 0):
        report(door, 0, number)
    assert taken(said) == [(0, 2), (0, 0), (0, 1), (0, 3)]


def test_a_report_of_no_slot_and_one_after_the_end_are_refused(
    door: DriverEndpoint, said: queue.SimpleQueue[Any]
) -> None:
    with pytest.raises(ProtocolError):
        report(door, 2, 0)
    door.close()
    with pytest.raises(StaleRequestError):
        report(door, 0, 0)
    assert taken(said) == []


def test_a_failure_ends_the_run_before_it_is_answered(
    door: DriverEndpoint, said: queue.SimpleQueue[Any]
) -> None:
    """Its slot goes then, and what the others make of that is no failure of theirs."""
    failed = Failed(vertex="count", subtask=0, reply=ErrorReply("SB1014", "", ""))
    told = encode(Report(slot=0, number=0, events=[failed]))
    door.call("report", told)
    with pytest.raises(StaleRequestError):
        report(door, 1, 0)
    poll = decode_commands(door.call("poll", encode(Poll(slot=1, first=0, wait_s=5.0))))
    assert poll.commands == [Stop()]
    door.call("report", told)  # the answer was lost: it is not told that the run was over anyway
    assert [type(one) for one in (said.get(), said.get())] == [Report, Poll]
    assert said.empty()
