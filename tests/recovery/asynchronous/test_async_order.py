"""Asynchronous commits: an epoch runs while the record of the one before is on its way, not two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from snapshot.protocol.lineage import resolve
from snapshot.protocol.operators import CommitWork
from statebackend.errors import (
    IncompleteEpochError,
    StaleRequestError,
    StateBackendError,
    UnsupportedQueryError,
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
from tests.recovery.driver import Started, ack_of, begin_of, manifests_of, part_of

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
