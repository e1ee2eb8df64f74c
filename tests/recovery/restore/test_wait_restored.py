"""A start is waited for until each subtask has its state, and who waits sees how far that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snapshot.storage.memory_store import MemoryStore
from statebackend.runtime.driver.restore_wait import restored_in, wait_restored
from tests.recovery.driver import Started, ack_of, begin_of, part_of

if TYPE_CHECKING:
    from collections.abc import Callable


class _System:
    """A clock that moves where somebody sleeps on it; then something happens."""

    def __init__(self, *happens: Callable[[], Any]) -> None:
        self.now_s, self._happens = 0.0, list(happens)

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep_s(self, seconds: float) -> None:
        self.now_s += seconds
        if self._happens:
            self._happens.pop(0)()


def finish(run: Started, uid: str, subtask: int, epoch: int = 0) -> None:
    reply, _ = run.session.begin(begin_of(epoch, subtask, uid))
    run.session.ack(ack_of(reply.chain, part_of({b"k": b"v"}), epoch, subtask, uid))


def waits(
    run: Started, system: Any, *, active: Callable[[], bool] = lambda: True, timeout_s: float = 9.0
) -> tuple[bool, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    found = wait_restored(
        lambda: restored_in(run.session),
        active,
        timeout_s,
        lambda done, total: told.append((done, total)),
        system,
    )
    return found, told


def test_it_is_over_once_every_subtask_of_every_operator_has_its_state() -> None:
    run = Started(MemoryStore(), {"a": 2, "b": 1})
    steps = (lambda: finish(run, "a", 1), lambda: finish(run, "b", 0), lambda: finish(run, "a", 0))
    assert waits(run, _System(*steps)) == (True, [(0, 3), (1, 3), (2, 3), (3, 3)])
    assert waits(run, _System()) == (True, [(3, 3)])  # long after


def test_it_ends_when_time_is_up_or_the_query_has_ended() -> None:
    run = Started(MemoryStore(), {"a": 2})
    finish(run, "a", 0)
    found, told = waits(run, _System(), timeout_s=1.0)
    assert not found
    assert set(told) == {(1, 2)}
    ended: list[bool] = []
    found, _ = waits(run, _System(lambda: ended.append(True)), active=lambda: not ended)
    assert not found


def test_a_query_that_ends_with_its_first_batch_has_its_state() -> None:
    run = Started(MemoryStore(), {"a": 1})
    finish(run, "a", 0)
    assert waits(run, _System(), active=lambda: False) == (True, [(1, 1)])
