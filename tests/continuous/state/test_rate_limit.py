from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from statebackend.continuous.worker.rate_limit import RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable


class Rests(threading.Event):
    """Time in which only work and rests pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.rests_s = 100.0, list[float]()
        self.waited: Callable[[], None] = lambda: None
        self.system: Any = SimpleNamespace(monotonic_s=lambda: self.now_s)

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set() or timeout is None:
            return True
        self.now_s += timeout
        self.rests_s.append(timeout)
        self.waited()
        return self.is_set()


@pytest.fixture
def rests() -> Rests:
    return Rests()


def work(rests: Rests, count: int, piece_s: float) -> list[int]:
    done = []
    for piece in RateLimit(rests.system, rests).of(range(count)):
        rests.now_s += piece_s
        done.append(piece)
    return done


def test_pieces_come_through_in_their_order_and_rest_in_proportion(rests: Rests) -> None:
    assert work(rests, 5, 0.01) == list(range(5))
    assert rests.rests_s == pytest.approx([0.04] * 5)


def test_all_rests_together_are_bounded(rests: Rests) -> None:
    assert len(work(rests, 50, 0.1)) == 50
    assert sum(rests.rests_s) == pytest.approx(1.0)


def test_whoever_waits_ends_the_rests(rests: Rests) -> None:
    rests.waited = lambda: rests.set() if len(rests.rests_s) == 2 else None
    assert work(rests, 50, 0.001) == list(range(50))
    assert len(rests.rests_s) == 2


def test_a_rest_is_broken_off_by_another_thread() -> None:
    pace, began = RateLimit(), threading.Event()

    def pieces() -> None:
        for _ in pace.of(range(2)):
            began.set()
            threading.Event().wait(0.3)

    thread = threading.Thread(target=pieces)
    thread.start()
    assert began.wait(10.0)
    pace.hurry()
    thread.join(10.0)
    assert not thread.is_alive()
