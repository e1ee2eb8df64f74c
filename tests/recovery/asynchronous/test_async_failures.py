"""Asynchronous commits that fail or come late: what is said, what the log keeps, and the state."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckReply
from statebackend.errors import (
    CommitUnknownError,
    FencedError,
    StateBackendError,
    StoreUnreachableError,
)
from tests.recovery.asynchronous.held_up import (
    LONG_S,
    HeldUp,
    acked,
    begun,
    drained,
    epoch_of,
    still_waits,
)
from tests.recovery.driver import Started, ack_of, manifests_of, part_of
from tests.recovery.restore.one_subtask_job import Job, K, L

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
