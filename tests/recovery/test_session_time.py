"""A run's times as its subtasks and its listener are told them; initial and dropped state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from snapshot.barriers.job_watermark import NextDue
from snapshot.protocol.messages import BeginReply
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import CreateOutcome
from statebackend.errors import CommitUnknownError, ProtocolError, StoreUnreachableError
from statebackend.runtime.driver.session import RunSession
from tests.recovery.driver import Started, ack_of, begin_of, manifests_of, part_of

EVENT: dict[str, Any] = {"time_mode": "event", "watermark_delay_ms": 10}
PROCESSING: dict[str, Any] = {"time_mode": "processing"}
LONG_S = 30.0


class Held(MemoryStore):
    """Creates wait at a gate, and fail as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def create(self, name: str, parts: Any) -> CreateOutcome:
        assert self.gate.wait(LONG_S)
        if self.fails:
            raise StoreUnreachableError("No answer.")
        return super().create(name, parts)


@pytest.fixture
def store() -> Iterator[Held]:
    made = Held()
    yield made
    made.gate.set()


class Listener:
    """Keeps what it is told, and that no lock was held."""

    def __init__(self) -> None:
        self.told: list[NextDue] = []
        self.session: RunSession | None = None

    def __call__(self, due: NextDue) -> None:
        if self.session is not None:
            assert not self.session._state_lock.locked()
            assert not self.session._commit_lock.locked()
        self.told.append(due)


def started_with(store: MemoryStore, listener: Any, **more: Any) -> Started:
    specs = more.pop("specs", {"op": EVENT})
    parallelism = more.pop("parallelism", {"op": 1})
    return Started(store, parallelism, specs=specs, on_epoch_acked=listener, **more)


def begun(
    started: Started, epoch: int, subtask: int = 0, operator: str = "op", attempt: int = 0
) -> BeginReply:
    return started.session.begin(begin_of(epoch, subtask, operator, attempt=attempt))[0]


def acked(
    started: Started,
    epoch: int,
    subtask: int = 0,
    operator: str = "op",
    attempt: int = 0,
    **times: Any,
) -> None:
    reply = begun(started, epoch, subtask, operator, attempt)
    part = part_of({b"k": b"%d" % epoch})
    started.session.ack(
        ack_of(reply.chain, part, epoch, subtask, operator, attempt=attempt, **times)
    )


def test_the_answer_to_a_begin_carries_the_epochs_watermarks(store: Held) -> None:
    started = started_with(store, None)
    for epoch, ms in enumerate([100, 300]):
        acked(started, epoch, max_event_ms=ms)
    reply = begun(started, 2)
    assert (reply.watermark_ms, reply.late_watermark_ms) == (290, 90)
    again = Started(store, {"op": 1}, first_epoch=2, specs={"op": EVENT})
    reply = begun(again, 2)
    assert (reply.watermark_ms, reply.late_watermark_ms) == (290, 90)
    again = Started(store, {"op": 1}, first_epoch=1, specs={"op": EVENT})
    reply = begun(again, 1)
    assert (reply.watermark_ms, reply.late_watermark_ms) == (90, 0)


def test_progress_has_late_rows_timers_and_the_watermark_by_epoch(store: Held) -> None:
    started = started_with(store, None, parallelism={"op": 2})
    for epoch in range(2):
        for subtask in range(2):
            reply = begun(started, epoch, subtask)
            ack = ack_of(reply.chain, part_of({}), epoch, subtask, max_event_ms=100)
            figures = {"late_rows": 2 + epoch, "timers_fired": subtask}
            started.session.ack(msgspec.structs.replace(ack, figures=figures))
    events = started.session.progress.summary(None).epochs
    said = [(e.late_rows, e.timers_fired, e.watermark_ms) for e in events]
    assert said == [(4, 1, 0), (6, 1, 90)]


# --- the listener --------------------------------------------------------------------------------


def test_the_listener_is_told_at_the_start_and_once_when_the_last_operator_has_acked(
    store: Held,
) -> None:
    listener = Listener()
    specs = {"a": EVENT, "b": PROCESSING}
    started = started_with(store, listener, parallelism={"a": 2, "b": 1}, specs=specs)
    listener.session = started.session
    assert listener.told == [NextDue(-1, None, False)]
    listener.told.clear()
    acked(started, 0, 0, "b", next_timer_ms=55)
    acked(started, 0, 1, "a", max_event_ms=100)
    assert listener.told == []
    acked(started, 0, 0, "a", next_timer_ms=20)
    assert listener.told == [NextDue(0, 55, True)]
    acked(started, 0, 0, "a", attempt=1, next_timer_ms=20)
    assert len(listener.told) == 1


def test_an_attempt_that_changes_what_is_due_is_told(store: Held) -> None:
    listener = Listener()
    started = started_with(store, listener, specs={"op": PROCESSING})
    listener.told.clear()
    acked(started, 0, next_timer_ms=55)
    acked(started, 0, attempt=1, next_timer_ms=44)
    assert [due.processing_due_ms for due in listener.told] == [55, 44]


def test_at_the_start_of_a_later_run_the_records_say_what_is_due(store: Held) -> None:
    acked(started_with(store, None), 0, max_event_ms=100, next_timer_ms=20)
    listener = Listener()
    started = started_with(store, listener, first_epoch=1)
    assert listener.told == [NextDue(0, None, True)]
    acked(started, 1)
    assert listener.told[1:] == [NextDue(1, None, False)]


def test_an_epoch_that_is_repeated_is_told_although_nothing_changed(store: Held) -> None:
    # What was due at the start may have been waited for in the epoch that is repeated.
    acked(started_with(store, None, specs={"op": PROCESSING}), 0, next_timer_ms=20)
    listener = Listener()
    started = started_with(store, listener, first_epoch=0, specs={"op": PROCESSING})
    acked(started, 0, next_timer_ms=20)
    assert listener.told == [NextDue(0, 20, False)] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_listener_raises_fails_nobody(
    store: Held, caplog: pytest.LogCaptureFixture, *, asynchronous: bool
) -> None:
    def fails(due: NextDue) -> None:
        raise RuntimeError(f"told {due.epoch}")

    started = started_with(store, fails, asynchronous=asynchronous)
    acked(started, 0)
    acked(started, 1)
    assert started.session.failure is None
    assert [str(r.exc_info[1]) for r in caplog.records if r.exc_info] == [
        "told -1",
        "told 0",
        "told 1",
    ]


def test_the_listener_is_not_told_of_an_epoch_that_is_not_durable(store: Held) -> None:
    listener = Listener()
    started = started_with(store, listener)
    listener.told.clear()
    store.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        ack = pool.submit(acked, started, 0)
        while not started.session._commit_lock.locked():
            assert not ack.done()
        assert listener.told == []
        store.gate.set()
        ack.result(LONG_S)
    assert [due.epoch for due in listener.told] == [0]


def test_the_listener_is_told_nothing_once_a_commit_has_failed(store: Held) -> None:
    listener = Listener()
    started = started_with(store, listener)
    listener.told.clear()
    store.fails = True
    with pytest.raises(CommitUnknownError):
        acked(started, 0)
    assert listener.told == []


def test_with_asynchronous_commits_it_is_told_while_the_record_is_on_its_way(store: Held) -> None:
    listener = Listener()
    started = started_with(store, listener, asynchronous=True)
    listener.told.clear()
    store.gate.clear()
    acked(started, 0, max_event_ms=100, next_timer_ms=20)
    assert listener.told == [NextDue(0, None, True)]
    assert begun(started, 1).watermark_ms == 90
    store.gate.set()
    assert started.session.drain(LONG_S)


# --- initial and dropped state -------------------------------------------------------------------


def test_initial_state_is_named_in_the_first_epoch_only_and_garbage_after_it(store: Held) -> None:
    started = Started(
        store, {"op": 2}, first_epoch=3, initial={"op": {1: {b"i": b"0"}}}, clean_every_epochs=1
    )
    (name,) = [info.name for info in store.list("data/")]
    assert begun(started, 3).initial == []
    (part,) = begun(started, 3, 1).initial
    assert (part.name, part.data) == (name, b"")
    for epoch in range(3, 6):
        for subtask in range(2):
            acked(started, epoch, subtask)
        started.session.cleaner.drain(LONG_S)
        assert begun(started, epoch + 1, 1).initial == []
        left = [info.name for info in store.list("data/")]
        assert left == ([name] if epoch < 5 else [])


def test_initial_state_of_another_generation_is_refused_at_the_binding(store: Held) -> None:
    specs = {"op": {"initial": {0: msgspec.structs.replace(part_of({}), name="data/x")}}}
    with pytest.raises(ProtocolError, match="initial state"):
        Started(store, {"op": 1}, specs=specs)


def test_dropped_states_are_named_until_a_record_says_they_are_gone(store: Held) -> None:
    acked(Started(store, {"op": 1}), 0)
    specs = {"op": {"dropped": {"s\x001": 1}}}
    started = Started(store, {"op": 1}, first_epoch=1, specs=specs)
    assert begun(started, 1).dropped == [1]
    started = Started(store, {"op": 1}, first_epoch=1, specs=specs)
    assert begun(started, 1).dropped == [1]
    acked(started, 1)
    assert begun(started, 2).dropped == []
    assert [m.dropped_ids for m in manifests_of(store) if m.kind == "checkpoint"] == [[], [1]]
