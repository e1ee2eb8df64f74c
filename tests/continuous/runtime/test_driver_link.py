"""A slot asks its driver again soon when an answer is lost, with more time each try."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from statebackend.continuous.worker.driver_link import DriverLink
from statebackend.errors import CoordinatorUnreachableError
from statebackend.threads import THREADS

SILENCE_S = 15.0


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.threads = SimpleNamespace(lock=THREADS.lock, event=self._event)

    def monotonic_s(self) -> float:
        return self.now_s

    def _event(self) -> Any:
        def wait(seconds: float) -> bool:
            self.now_s += seconds
            return False

        return SimpleNamespace(wait=wait, is_set=lambda: False, set=lambda: None)


class Driver:
    """A client whose driver needs so long for an answer, and loses the first ones."""

    def __init__(self, clock: Clock, *, lost: int, takes_s: float = 0.0) -> None:
        self._clock, self._lost, self._takes_s = clock, lost, takes_s
        self.tries_s: list[float] = []

    def begin(self, endpoint: Any, request: Any, *, timeout_s: float) -> Any:
        self.tries_s.append(timeout_s)
        if len(self.tries_s) <= self._lost or self._takes_s > timeout_s:
            self._clock.now_s += timeout_s
            raise CoordinatorUnreachableError("No answer came.")
        self._clock.now_s += self._takes_s
        return "begun", []


def _asked(driver: Callable[[Clock], Driver], timeout_s: float) -> tuple[Clock, Driver, Any]:
    clock = Clock()
    client: Any = driver(clock)
    system: Any = clock
    endpoint: Any = None
    link = DriverLink(client, endpoint, job="job", slot=0, silence_s=SILENCE_S, system=system)
    request: Any = None
    session = link.session(timeout_s=timeout_s, ack_timeout_s=timeout_s)
    return clock, client, lambda: session.begin(request)


def test_a_lost_begin_costs_a_try_and_not_all_the_time_that_there_is() -> None:
    clock, _, ask = _asked(lambda clock: Driver(clock, lost=1), 90.0)
    assert ask() == ("begun", [])
    assert clock.now_s < SILENCE_S / 2


def test_an_answer_that_takes_longer_than_a_try_comes_with_a_later_one() -> None:
    _, driver, ask = _asked(lambda clock: Driver(clock, lost=0, takes_s=70.0), 90.0)
    assert ask() == ("begun", [])
    assert driver.tries_s[:2] == [5.0, 10.0]
    assert len(driver.tries_s) == 3, "the third has all the time that is left"


def test_all_tries_together_take_no_longer_than_was_said() -> None:
    clock, driver, ask = _asked(lambda clock: Driver(clock, lost=99), 90.0)
    with pytest.raises(CoordinatorUnreachableError):
        ask()
    assert driver.tries_s[2] > 70.0
    assert clock.now_s == pytest.approx(90.0, abs=0.5)
