"""Asynchronous commits: an epoch runs while the record of the one before is on its way, not two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckReply, BeginReply
from snapshot.protocol.operators import CommitWork
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import Buffer, CreateOutcome
from statebackend.errors import (
    CommitUnknownError,
    FencedError,
    IncompleteEpochError,
    StaleRequestError,
    StateBackendError,
    StoreUnreachableError,
    UnsupportedQueryError,
)
from tests.recovery.driver import (
    Changes,
    Started,
    ack_of,
    begin_of,
    manifests_of,
    part_of,
)
from tests.recovery.restore.one_subtask_job import Job, K, L

LONG_S = 30.0


class HeldUp(MemoryStore):
    """Creates wait at a gate, and fail as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        assert self.gate.wait(LONG_S)
        if self.failure is not None:
            raise self.failure
        return super().create(name, parts)


@pytest.fixture
def store() -> Iterator[HeldUp]:
    made = HeldUp()
    yield made
    made.gate.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def begun(started: Started, epoch: int, subtask: int = 0, attempt: int = 0) -> BeginReply:
    return started.session.begin(begin_of(epoch, subtask, attempt=attempt))[0]


def acked(
    started: Started, reply: BeginReply, changes: Changes, subtask: int = 0, attempt: int = 0
) -> AckReply:
    ack = ack_of(reply.chain, part_of(changes), reply.base_epoch + 1, subtask, attempt=attempt)
    return started.session.ack(ack)


def epoch_of(started: Started, epoch: int, parallelism: int = 1) -> None:
    replies = [begun(started, epoch, n) for n in range(parallelism)]
    for n, reply in enumerate(replies):
        assert not acked(started, reply, {b"k": b"%d" % epoch}, n).durable


def drained(started: Started) -> None:
    started.session.drain(LONG_S)


def still_waits(future: Any) -> bool:
    try:
        future.result(0.2)
    except NotYet:
        return True
    return False


# --- one epoch ahead -----------------------------------------------------------------------------


def test_an_epoch_begins_while_the_record_of_the_one_before_is_on_its_way(store: HeldUp) -> None:
    started = Started(store, {"op": 2}, asynchronous=True)
    epoch_of(started, 0, 2)
    drained(started)
    store.gate.clear()
    epoch_of(started, 1, 2)
    reply = begun(started, 2)
    assert (reply.base_epoch, reply.durable_epoch) == (1, 0)
    (layer,) = reply.layers
    assert (layer.epoch, layer.chain) == (1, reply.chain)
    lineage = started.coordinator.run.operators["op"].lineage.subtasks[0]
    assert reply.durable_chain == lineage.chain_at(0)
    assert [m.epoch for m in manifests_of(store) if m.kind == "checkpoint"] == [0]
    store.gate.set()
    drained(started)
    reply = begun(started, 2, attempt=1)
    assert (reply.base_epoch, reply.durable_epoch, reply.layers) == (1, 1, [])


def test_the_last_ack_of_an_epoch_waits_for_the_record_of_the_one_before(
    store: HeldUp, threads: ThreadPoolExecutor
) -> None:
    started = Started(store, {"op": 2}, asynchronous=True)
    store.gate.clear()
    epoch_of(started, 0, 2)
    replies = [begun(started, 1, n) for n in (0, 1)]
    assert not acked(started, replies[0], {b"k": b"1"}, 0).durable
    last = threads.submit(acked, started, replies[1], {b"k": b"1"}, 1)
    assert still_waits(last)
    # A twin of either may not answer earlier: Spark would go on with it.
    twins = [threads.submit(acked, started, replies[n], {b"k": b"1"}, n, 1) for n in (0, 1)]
    assert all(still_waits(twin) for twin in twins)
    store.gate.set()
    assert not last.result(LONG_S).durable
    assert [twin.result(LONG_S).durable for twin in twins] == [False, False]
    drained(started)
    assert [m.epoch for m in manifests_of(store) if m.kind == "checkpoint"] == [0, 1]


def test_an_epoch_that_was_not_acked_in_full_is_not_gone_over(store: HeldUp) -> None:
    started = Started(store, {"op": 2}, asynchronous=True)
    store.gate.clear()
    epoch_of(started, 0, 2)
    acked(started, begun(started, 1, 0), {}, 0)
    with pytest.raises(IncompleteEpochError, match="batch 1 was not finished"):
        begun(started, 2)
    with pytest.raises(IncompleteEpochError):
        started.session.check_finished(1)


def test_operators_do_not_wait_for_each_other_s_records(store: HeldUp) -> None:
    started = Started(store, {"a": 1, "b": 1}, asynchronous=True)
    session = started.session
    for epoch in (0, 1):
        for uid in ("a", "b"):
            reply = session.begin(begin_of(epoch, 0, uid))[0]
            session.ack(ack_of(reply.chain, part_of({b"k": b"x"}), epoch, 0, uid))
    drained(started)
    found = resolve(manifests_of(store))
    assert [found[uid].last_epoch for uid in ("a", "b")] == [1, 1]


# --- twins ---------------------------------------------------------------------------------------


def test_the_record_of_a_late_twin_decides_what_the_next_epoch_starts_from(
    store: HeldUp, threads: ThreadPoolExecutor
) -> None:
    started = Started(store, {"op": 1}, asynchronous=True)
    store.gate.clear()
    first = begun(started, 0)
    acked(started, first, {b"k": b"first"})
    twin = threads.submit(acked, started, first, {b"k": b"second"}, 0, 1)
    assert still_waits(twin)
    reply = begun(started, 1)
    assert reply.layers[0].digest == part_of({b"k": b"second"}).digest
    with pytest.raises(StaleRequestError):
        acked(started, first, {b"k": b"third"}, 0, 2)
    store.gate.set()
    twin.result(LONG_S)
    acked(started, reply, {b"k": b"1"})
    drained(started)
    deltas = resolve(manifests_of(store))["op"].subtasks[0].deltas
    assert deltas[0].entry.attempt == 1
    assert deltas[1].entry.chain


def test_a_twin_that_made_another_state_is_answered_when_the_log_holds_that_one(
    store: HeldUp, threads: ThreadPoolExecutor
) -> None:
    """Else Spark could use its output, and the log still hold the state of the first."""
    started = Started(store, {"op": 1}, asynchronous=True)
    reply = begun(started, 0)
    acked(started, reply, {b"k": b"first"})
    drained(started)
    store.gate.clear()
    same = threads.submit(acked, started, reply, {b"k": b"first"}, 0, 1)
    assert not same.result(LONG_S).durable
    other = threads.submit(acked, started, reply, {b"k": b"second"}, 0, 2)
    assert still_waits(other)
    store.gate.set()
    other.result(LONG_S)
    assert resolve(manifests_of(store))["op"].subtasks[0].deltas[0].entry.attempt == 2


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_repeated_epoch_is_answered_when_its_new_record_has_replaced_the_old_one(
    store: HeldUp, threads: ThreadPoolExecutor, parallelism: int
) -> None:
    """Else Spark could commit the new output, and a crash leave the log with the old state.

    Also where the driver before ran at another parallelism.
    """
    before = Started(store, {"op": parallelism}, asynchronous=True)
    epoch_of(before, 0, parallelism)
    drained(before)
    started = Started(store, {"op": 1}, asynchronous=True, first_epoch=0)  # Spark repeats it
    store.gate.clear()
    last = threads.submit(acked, started, begun(started, 0), {b"k": b"other"})
    assert still_waits(last)
    store.gate.set()
    last.result(LONG_S)
    digest = resolve(manifests_of(store))["op"].subtasks[0].deltas[0].entry.digest
    assert digest == part_of({b"k": b"other"}).digest
    store.gate.clear()
    epoch_of(started, 1)  # from here on nobody waits for his own


@pytest.mark.parametrize("first_is_durable", [True, False])
def test_a_third_attempt_that_makes_what_the_first_made_is_waited_for_too(
    store: HeldUp, threads: ThreadPoolExecutor, *, first_is_durable: bool
) -> None:
    started = Started(store, {"op": 1}, asynchronous=True)
    reply = begun(started, 0)
    if not first_is_durable:
        store.gate.clear()
    acked(started, reply, {b"k": b"one"})
    if first_is_durable:
        drained(started)
    store.gate.clear()
    waiting = [threads.submit(acked, started, reply, {b"k": b"two"}, 0, 1)]
    while started.coordinator.run.operators["op"].epoch.acks[0].attempt != 1:
        pass
    waiting.append(threads.submit(acked, started, reply, {b"k": b"one"}, 0, 2))
    while started.coordinator.run.operators["op"].epoch.acks[0].attempt != 2:
        pass
    following = begun(started, 1)
    assert (following.durable_epoch, len(following.layers)) == (-1, 1)
    store.gate.set()
    for one in waiting:
        one.result(LONG_S)
    acked(started, following, {b"k": b"1"})
    epoch_of(started, 2)
    drained(started)
    assert started.session.failure is None
    found = resolve(manifests_of(store))["op"]
    assert found.subtasks[0].deltas[0].entry.attempt == 2
    assert found.last_epoch == 2


def test_records_are_written_in_the_order_in_which_they_were_due(
    store: HeldUp, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twin acks between the moment when a record is due and the moment when it is on its way."""
    started = Started(store, {"op": 1}, asynchronous=True)
    reply = begun(started, 0)
    real, twins = started.coordinator.records.take_due, []

    def due(uid: str, epoch: int) -> CommitWork | None:
        work = real(uid, epoch)
        if not twins:
            twins.append(threads.submit(acked, started, reply, {b"k": b"second"}, 0, 1))
            still_waits(twins[0])
        return work

    monkeypatch.setattr(started.coordinator.records, "take_due", due)
    acked(started, reply, {b"k": b"first"})
    twins[0].result(LONG_S)
    following = begun(started, 1)
    acked(started, following, {b"k": b"1"})
    drained(started)
    deltas = resolve(manifests_of(store))["op"].subtasks[0].deltas
    assert deltas[0].entry.attempt == 1
    assert deltas[1].entry.chain == started.coordinator.run.operators["op"].lineage.subtasks[
        0
    ].chain_at(1)


# --- failures ------------------------------------------------------------------------------------


def _fenced(store: HeldUp) -> None:
    Started(store, {"op": 1}, first_epoch=0)


def _down(store: HeldUp) -> None:
    store.failure = StoreUnreachableError("Down.")


def _broken(store: HeldUp) -> None:
    store.failure = RuntimeError("What no store raises.")


FAILURES: dict[str, tuple[Callable[[HeldUp], None], type[StateBackendError]]] = {
    "fenced": (_fenced, FencedError),
    "down": (_down, CommitUnknownError),
    "broken": (_broken, CommitUnknownError),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_commit_that_failed_behind_is_told_to_the_next_who_asks(store: HeldUp, how: str) -> None:
    fail, error = FAILURES[how]
    started = Started(store, {"op": 1}, asynchronous=True)
    epoch_of(started, 0)
    drained(started)
    fail(store)
    store.gate.clear()
    epoch_of(started, 1)
    reply = begun(started, 2)  # the record of 1 is on its way
    store.gate.set()
    drained(started)
    for call in (
        lambda: begun(started, 2, attempt=1),
        lambda: acked(started, reply, {b"k": b"2"}),
        lambda: begun(started, 3),
        lambda: started.session.check_finished(2),
    ):
        with pytest.raises(error):
            call()
    assert isinstance(started.session.failure, error)
    assert isinstance(started.coordinator.run.failure, error)
    store.failure = None
    again = Started(store, {"op": 1}, first_epoch=1)
    found = resolve(manifests_of(store))["op"]
    assert found.last_epoch in {0, 1}
    assert acked(again, begun(again, 1), {}).durable


def test_the_last_ack_that_waits_for_a_record_that_fails_is_told_so(
    store: HeldUp, threads: ThreadPoolExecutor
) -> None:
    started = Started(store, {"op": 1}, asynchronous=True)
    store.gate.clear()
    epoch_of(started, 0)
    last = threads.submit(acked, started, begun(started, 1), {b"k": b"1"})
    assert still_waits(last)
    store.failure = StoreUnreachableError("Down.")
    store.gate.set()
    with pytest.raises(CommitUnknownError):
        last.result(LONG_S)
    drained(started)
    store.failure = None
    assert [m.kind for m in manifests_of(store)] == ["claim"]


@pytest.mark.parametrize("how", ["down", "broken"])
def test_with_synchronous_commits_nothing_is_called_durable_after_a_commit_that_failed(
    store: HeldUp, how: str
) -> None:
    started = Started(store, {"op": 1})
    reply = begun(started, 0)
    FAILURES[how][0](store)
    with pytest.raises((StateBackendError, RuntimeError)):
        acked(started, reply, {b"k": b"0"})
    store.failure = None
    with pytest.raises(CommitUnknownError):  # the task is tried again
        acked(started, reply, {b"k": b"0"}, 0, 1)
    assert [m.kind for m in manifests_of(store)] == ["claim"]


# --- what is needed ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [True, False])
def test_the_log_keeps_what_a_rewind_by_one_batch_needs_wherever_it_is_cut(
    store: HeldUp, threads: ThreadPoolExecutor, *, late: bool
) -> None:
    """`late`: every record is made while the one before is still on its way."""
    started = Started(store, {"op": 1}, asynchronous=True, base_every_epochs=2)

    def needs(*epochs: int) -> None:
        manifests = manifests_of(store)  # from the tip's oldest_needed on
        for epoch in epochs:
            if epoch >= 0:
                resolve(manifests)["op"].require(epoch)

    def ack(epoch: int) -> Future[AckReply]:
        reply = begun(started, epoch)
        base = part_of({b"k": b"base%d" % epoch}) if reply.base_due else None
        part = part_of({b"k": b"%d" % epoch})
        return threads.submit(started.session.ack, ack_of(reply.chain, part, epoch, base=base))

    for epoch in range(0, 12, 2):
        store.gate.clear()
        ack(epoch).result(LONG_S)
        needs(epoch - 1)  # Spark has committed the batch or not: it repeats it
        if not late:
            store.gate.set()
            drained(started)
            needs(epoch - 1, epoch)
        following = ack(epoch + 1)
        assert still_waits(following) is late
        store.gate.set()
        following.result(LONG_S)
        drained(started)
        needs(epoch, epoch + 1)


# --- layers --------------------------------------------------------------------------------------


def test_state_is_that_of_the_epoch_before_while_its_record_is_on_its_way(
    tmp_path: Path, store: HeldUp
) -> None:
    job = Job(tmp_path, store=store, asynchronous=True)
    job.run({K: b"0", L: b"0"}, {K: b"1"})
    drained(job.started)
    store.gate.clear()
    job.run({L: None})
    for host in ("h", "elsewhere", "h"):
        opened = job.open(host)  # compares store and layer
        assert [epoch for epoch, _ in opened.layers] == [2]
        opened.directory.release()


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_an_epoch_without_changes_that_is_on_its_way_is_no_layer(
    tmp_path: Path, store: HeldUp, budget: int
) -> None:
    job = Job(tmp_path, store=store, asynchronous=True, budget=budget)
    job.run({K: b"0"})
    drained(job.started)
    store.gate.clear()
    job.run({})
    for host in ("elsewhere", "h", "elsewhere"):
        opened = job.open(host)
        assert (opened.reply.durable_epoch, opened.layers) == (0, [])
        opened.directory.release()
    store.gate.set()
    drained(job.started)
    job.run({K: b"2"})


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_for_a_damaged_local_layer_the_ack_s_is_taken(
    tmp_path: Path, store: HeldUp, budget: int
) -> None:
    job = Job(tmp_path, store=store, asynchronous=True, budget=budget)
    job.run({K: b"0"})
    drained(job.started)
    store.gate.clear()
    job.run({K: b"1"})
    (path,) = (job.directory("h") / "deltas").glob("1-*")
    path.write_bytes(b"torn")
    opened = job.open("h")
    assert [copy.deltas for copy in job.asked][-1] == []
    assert len(job.asked) == 2
    opened.directory.release()


def test_a_store_that_stands_too_far_is_not_used_while_a_record_is_on_its_way(
    tmp_path: Path, store: HeldUp
) -> None:
    job = Job(tmp_path, store=store, asynchronous=True)
    job.run({K: b"0"}, {K: b"1"})
    drained(job.started)
    job.open("h").directory.release()  # stands at 1
    job.restart(1)  # the log holds 1; Spark repeats it
    store.gate.clear()
    opened = job.open("h")
    assert opened.reply.reason == "the local copy stands at epoch 1, after epoch 0"
    assert opened.reply.fresh
    opened.directory.release()


# --- each batch is checked -----------------------------------------------------------------------


def test_no_epoch_follows_one_that_nobody_checked(store: HeldUp) -> None:
    started = Started(store, {"op": 1}, asynchronous=True)
    started.session.checks.required = True
    epoch_of(started, 0)
    drained(started)
    started.session.check_finished(0)
    epoch_of(started, 1)
    for attempt in range(2):
        with pytest.raises(UnsupportedQueryError, match=r"Batch 1 was not checked.*checked\(\)"):
            begun(started, 2, attempt=attempt)
    begun(started, 1, attempt=1)  # what runs again in its own batch is let in
    started.session.check_finished(1)
    begun(started, 2, attempt=2)


def test_a_foreign_query_is_told_that_it_is_one(store: HeldUp) -> None:
    started = Started(store, {"op": 1}, asynchronous=True)
    started.session.checks.required = True
    epoch_of(started, 0)  # and nobody checked it
    for what in ({"query_id": "another"}, {"operator": "another"}):
        request = msgspec.structs.replace(begin_of(1), **what)
        with pytest.raises(StateBackendError, match="another") as refused:
            started.session.begin(request)
        assert not isinstance(refused.value, UnsupportedQueryError)


def test_a_check_that_finds_a_batch_read_in_part_lets_nothing_follow(store: HeldUp) -> None:
    started = Started(store, {"op": 2}, asynchronous=True)
    started.session.checks.required = True
    epoch_of(started, 0, 2)
    drained(started)
    started.session.check_finished(0)
    acked(started, begun(started, 1), {b"k": b"1"})
    with pytest.raises(IncompleteEpochError):
        started.session.check_finished(1)
    with pytest.raises(UnsupportedQueryError):
        begun(started, 2)


def test_where_no_function_is_to_be_checked_epochs_follow_as_ever(store: HeldUp) -> None:
    started = Started(store, {"op": 1}, asynchronous=True)
    for epoch in range(3):
        epoch_of(started, epoch)
