"""Attempts that do not come to their ack in time are killed, each once, and have more time then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError

from snapshot.storage.memory_store import MemoryStore
from statebackend.runtime.driver.attempt_timeouts import Attempts, look
from statebackend.threads import THREADS
from tests.recovery.driver import Started, ack_of, begin_of, part_of


def killed(attempts: Attempts, now_s: float, failed: tuple[int, ...] = ()) -> list[int]:
    found: list[int] = []

    def kill(attempt: int, why: str) -> bool:
        if attempt not in failed:
            found.append(attempt)
        return attempt not in failed

    look(attempts, kill, now_s)
    return found


def test_an_attempt_is_killed_once_it_has_had_its_time() -> None:
    attempts = Attempts(60.0)
    attempts.begun("op", 0, 3, 17, 100.0)
    attempts.begun("op", 1, 3, 18, 130.0)
    assert killed(attempts, 159.9) == []
    assert killed(attempts, 160.0) == [17]
    assert killed(attempts, 189.0) == [], "not again"
    assert killed(attempts, 190.0) == [18]


def test_an_attempt_that_asks_again_has_no_more_time() -> None:
    attempts = Attempts(60.0)
    for asked_s in (0.0, 30.0, 59.0):
        attempts.begun("op", 0, 3, 17, asked_s)
    assert killed(attempts, 60.0) == [17]


def test_what_has_acked_waits_for_the_driver_and_not_the_other_way_round() -> None:
    attempts = Attempts(60.0)
    attempts.begun("op", 0, 3, 17, 0.0)
    attempts.over("op", 0, 16)  # an earlier one, late
    attempts.begun("op", 1, 3, 18, 0.0)
    attempts.over("op", 1, 18)
    assert killed(attempts, 1000.0) == [17]


def test_one_that_failed_takes_no_time_from_the_next() -> None:
    attempts = Attempts(60.0)
    attempts.begun("op", 0, 3, 17, 0.0)
    attempts.begun("op", 0, 3, 21, 50.0)
    assert killed(attempts, 109.0, failed=(17,)) == []
    assert killed(attempts, 110.0) == [21]


def test_one_that_is_frozen_is_killed_although_another_of_its_subtask_has_acked() -> None:
    attempts = Attempts(60.0)
    attempts.begun("op", 0, 3, 17, 0.0)
    attempts.begun("op", 0, 3, 18, 1.0)  # another evaluation of the same frame
    attempts.over("op", 0, 18)
    assert killed(attempts, 60.0) == [17]


def test_what_an_epoch_left_behind_is_not_killed_in_the_next() -> None:
    attempts = Attempts(60.0)
    attempts.begun("op", 0, 3, 17, 0.0)
    attempts.begun("op", 0, 4, 18, 50.0)
    assert killed(attempts, 100.0) == []


def test_a_task_that_is_only_slow_gets_to_its_end() -> None:
    attempts = Attempts(60.0)
    took_s, now_s, tries = 400.0, 0.0, 0
    while True:
        attempts.begun("op", 0, 3, tries, now_s)
        given_s = next(s for s in range(1, 10_000) if s >= took_s or killed(attempts, now_s + s))
        if given_s >= took_s:
            break
        now_s, tries = now_s + given_s, tries + 1
    assert tries == 3
    attempts.begun("op", 0, 4, 9, 5000.0)
    assert killed(attempts, 5060.0) == [9], "the next epoch's as at first"


@pytest.mark.parametrize("error", [Py4JError("not now"), ConnectionError("not now")])
def test_what_could_not_be_killed_is_tried_again_and_keeps_no_other(error: Exception) -> None:
    def gone(attempt: int, why: str) -> bool:
        asked.append(attempt)
        if attempt == 17:
            raise error
        return True

    asked: list[int] = []
    attempts = Attempts(60.0)
    for subtask in range(3):
        attempts.begun("op", subtask, 3, 17 + subtask, 0.0)
    look(attempts, gone, 60.0)
    assert asked == [17, 18, 19]
    look(attempts, gone, 65.0)
    assert asked == [17, 18, 19, 17]
    assert killed(attempts, 70.0) == [17]
    assert killed(attempts, 600.0) == []


def test_what_acks_while_it_could_not_be_killed_is_let_be() -> None:
    def gone(attempt: int, why: str) -> bool:
        raise Py4JError("not now")

    attempts = Attempts(60.0)
    attempts.begun("op", 0, 3, 17, 0.0)
    look(attempts, gone, 60.0)
    attempts.over("op", 0, 17)
    assert killed(attempts, 600.0) == []


def test_a_session_tells_of_begins_and_acks() -> None:
    system: Any = SimpleNamespace(monotonic_s=lambda: 100.0, threads=THREADS)
    started = Started(MemoryStore(), {"op": 2}, system=system)
    attempts = started.session.attempts = Attempts(60.0)
    replies = [started.session.begin(begin_of(0, n, attempt=7 + n))[0] for n in range(2)]
    started.session.ack(ack_of(replies[0].chain, part_of({b"k": b"v"}), 0, 0, attempt=7))
    assert killed(attempts, 161.0) == [8]
