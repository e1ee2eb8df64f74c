"""A store that is down while a commit is on its way: the same write again, and an end to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from snapshot.formats.record import parse_record
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import Buffer, CreateOutcome
from statebackend.errors import (
    CommitUnknownError,
    FencedError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.store_patience import StorePatience
from tests.recovery.driver import Started, ack_of, begin_of, manifests_of, part_of
from tests.support.failing_store import FailingStore, Failure


@dataclass
class Waits:
    """Patience by count; `meanwhile` happens during the wait of that number."""

    limit: int
    meanwhile: dict[int, Callable[[], object]] = field(default_factory=dict)
    errors: list[StateBackendError] = field(default_factory=list)

    def wait(self, attempt: int, error: StateBackendError) -> bool:
        if attempt == 1:
            self.errors.clear()  # another commit
        self.errors.append(error)
        assert attempt == len(self.errors)
        self.meanwhile.get(attempt, lambda: None)()
        return attempt <= self.limit


class Flaky(MemoryStore):
    """Loses the next creates, all but the claim's; keeps what they were."""

    def __init__(self, lost: int = 0) -> None:
        super().__init__()
        self.lost = lost
        self.tried: list[tuple[str, bytes]] = []
        self.unreadable = False

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        body = b"".join(bytes(part) for part in parts)
        self.tried.append((name, body))
        if len(self.tried) > 1 and self.lost:
            self.lost -= 1
            raise StoreUnreachableError("No answer came.")
        return super().create(name, parts)

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        if self.unreadable:
            raise StoreUnreachableError("Down.")
        return super().get_tail(name, length)

    def land(self, number: int) -> None:
        """A try that nobody waits for any more arrives."""
        name, body = self.tried[number]
        super().create(name, [body])


def acked(started: Started, epoch: int) -> bool:
    reply, _ = started.session.begin(begin_of(epoch))
    return started.session.ack(ack_of(reply.chain, part_of({b"k": b"%d" % epoch}), epoch)).durable


def write_ids(store: Flaky) -> list[str]:
    return [parse_record(body, name).manifest.write_id for name, body in store.tried[1:]]


def test_while_the_store_is_down_the_same_write_is_tried_again() -> None:
    store, patience = Flaky(lost=4), Waits(10)
    started = Started(store, {"op": 1}, patience=patience)
    assert acked(started, 0)
    assert len(patience.errors) == 4
    assert len(set(store.tried[1:])) == 1
    assert len(write_ids(store)) == 5
    assert [m.kind for m in manifests_of(store)] == ["claim", "checkpoint"]
    assert acked(started, 1)
    assert len(set(write_ids(store))) == 2


@pytest.mark.parametrize("lands", [1, 2, 3])
def test_a_try_that_lands_late_and_the_one_after_it_are_one_record(lands: int) -> None:
    store = Flaky(lost=3)
    patience = Waits(10, {lands: lambda: store.land(lands)})
    started = Started(store, {"op": 1}, patience=patience)
    assert acked(started, 0)
    store.lost = 0
    assert [m.kind for m in manifests_of(store)] == ["claim", "checkpoint"]
    for number in range(1, len(store.tried)):
        store.land(number)  # and the others later still
    assert acked(started, 1)
    assert [m.epoch for m in manifests_of(store) if m.kind == "checkpoint"] == [0, 1]


def test_a_try_that_landed_and_cannot_be_read_back_is_tried_until_it_can() -> None:
    store = Flaky(lost=1)

    def comes_back() -> None:
        store.unreadable = False

    def lands_and_is_unreadable() -> None:
        store.land(1)
        store.unreadable = True

    patience = Waits(10, {1: lands_and_is_unreadable, 4: comes_back})
    started = Started(store, {"op": 1}, patience=patience)
    assert acked(started, 0)
    assert len(patience.errors) == 4
    assert [m.kind for m in manifests_of(store)] == ["claim", "checkpoint"]


def test_after_its_patience_a_commit_is_unknown_and_nothing_more_is_written() -> None:
    store, patience = Flaky(lost=100), Waits(3)
    started = Started(store, {"op": 1}, patience=patience)
    with pytest.raises(CommitUnknownError):
        acked(started, 0)
    assert len(patience.errors) == 4
    tried = len(store.tried)
    with pytest.raises(CommitUnknownError):
        acked(started, 0)
    assert len(store.tried) == tried
    store.lost = 0
    store.land(1)  # it counts, once a claim has seen it
    again = Started(store, {"op": 1}, first_epoch=0)
    assert again.coordinator.run.lineages["op"].last_epoch == 0
    assert acked(again, 0)


def test_who_waits_while_another_takes_over_is_fenced() -> None:
    store = Flaky(lost=2)
    patience = Waits(10, {2: lambda: Started(store, {"op": 1})})
    started = Started(store, {"op": 1}, patience=patience)
    with pytest.raises(FencedError):
        acked(started, 0)
    assert [m.kind for m in manifests_of(store)] == ["claim", "claim"]


@pytest.mark.parametrize("failure", ["before", "after"])
def test_answers_that_get_lost_on_the_way_make_no_second_record(failure: Failure) -> None:
    inner = MemoryStore()

    def plan(verb: str, name: str, number: int) -> Failure:
        return failure if verb == "create" and number % 3 == 2 else None

    started = Started(FailingStore(inner, plan), {"op": 1}, patience=Waits(10))
    for epoch in range(9):
        assert acked(started, epoch)
    assert [m.epoch for m in manifests_of(inner) if m.kind == "checkpoint"] == list(range(9))


@pytest.mark.parametrize("timeout_s", [0.1, 1.0, 60.0, 600.0])
def test_patience_waits_longer_each_time_and_never_beyond_its_end(timeout_s: float) -> None:
    time_s, pauses = [1000.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time_s[0] += seconds

    patience = StorePatience(timeout_s, now_s=lambda: time_s[0], sleep_s=sleep)
    error = StoreUnreachableError("Down.")
    for _ in range(2):  # the second commit has all of it again
        pauses.clear()
        started_s, attempt = time_s[0], 1
        while patience.wait(attempt, error):
            attempt += 1
            assert attempt < 200
        assert time_s[0] - started_s <= timeout_s
        assert pauses == sorted(pauses)
        assert max(pauses, default=0) <= 10
        if timeout_s >= 60:
            assert time_s[0] - started_s > timeout_s - 11
