"""One run as its subtasks see it: what an answer promises, and what happens between two locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

from snapshot.formats.record import slice_key
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckReply, AckRequest, BeginReply, LocalCopy, SlicePart
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import Buffer, CreateOutcome
from statebackend.errors import (
    CommitUnknownError,
    CoordinatorUnreachableError,
    CorruptionError,
    FencedError,
    IncompleteEpochError,
    ProtocolError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.worker.participant import JobSubtask, Membership, Participant
from tests.recovery.driver import (
    JOB,
    Changes,
    Started,
    ack_of,
    base_of,
    begin_of,
    manifests_of,
    new_id,
    part_of,
)


def begin(started: Started, epoch: int, subtask: int = 0, attempt: int = 0) -> BeginReply:
    return started.session.begin(begin_of(epoch, subtask, attempt=attempt))[0]


def ack(
    started: Started,
    reply: BeginReply,
    changes: Changes,
    subtask: int = 0,
    attempt: int = 0,
) -> AckReply:
    request = ack_of(reply.chain, part_of(changes), reply.base_epoch + 1, subtask, attempt=attempt)
    return started.session.ack(request)


def finish(started: Started, epoch: int, parallelism: int = 1) -> None:
    replies = [begin(started, epoch, n) for n in range(parallelism)]
    for n, reply in enumerate(replies):
        ack(started, reply, {b"k": b"%d" % epoch}, n)


# --- answers -------------------------------------------------------------------------------------


def test_acks_return_at_once_but_the_last_which_returns_with_one_write() -> None:
    store = CountingStore(MemoryStore())
    started = Started(store, {"op": 3})
    replies = [begin(started, 0, n) for n in range(3)]
    claims = store.counts["create"].requests
    for n in (2, 0):
        assert not ack(started, replies[n], {b"k": b"x"}, n).durable
        assert store.counts["create"].requests == claims
    assert ack(started, replies[1], {b"k": b"x"}, 1).durable
    assert store.counts["create"].requests == claims + 1
    assert "put" not in store.counts
    # The same again, from another attempt: nothing to write.
    assert ack(started, replies[1], {b"k": b"x"}, 1, attempt=1).durable
    assert store.counts["create"].requests == claims + 1
    started.session.check_finished(0)


def test_what_was_answered_durable_is_in_the_log() -> None:
    store = MemoryStore()
    started = Started(store, {"op": 2})
    finish(started, 0, 2)
    (record,) = [m for m in manifests_of(store) if m.kind == "checkpoint"]
    assert (record.epoch, len(record.slices)) == (0, 2)


DAMAGE: dict[str, Callable[[SlicePart], SlicePart]] = {
    "cut": lambda part: msgspec.structs.replace(part, data=part.data[:-1]),
    "flipped": lambda part: msgspec.structs.replace(part, data=part.data[:-1] + b"!"),
    "of another length": lambda part: msgspec.structs.replace(part, size_bytes=99),
    "lost": lambda part: msgspec.structs.replace(part, data=b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["delta", "base"])
def test_a_slice_that_was_damaged_on_its_way_is_refused_before_it_counts(
    kind: str, damage: str
) -> None:
    started = Started(MemoryStore(), {"op": 1})
    reply = begin(started, 0)
    good = ack_of(reply.chain, part_of({b"k": b"x"}), 0, base=part_of({b"all": b"y"}))
    bad: AckRequest = msgspec.structs.replace(good, **{kind: DAMAGE[damage](getattr(good, kind))})
    with pytest.raises(ProtocolError, match="not the bytes that it names"):
        started.session.ack(bad)
    with pytest.raises(IncompleteEpochError):
        started.session.check_finished(0)
    assert started.session.ack(good).durable


def test_requests_wait_for_the_drivers_checks_and_then_say_so() -> None:
    store = MemoryStore()
    log = CommitLog(store, job=JOB, writer="w", new_id=new_id)
    session = RunSession(store=store, log=log, gate_timeout_s=0)
    with pytest.raises(CoordinatorUnreachableError, match="had not finished its checks"):
        session.begin(begin_of(0))
    session.refuse(ProtocolError("The start was refused."))
    for call in (
        lambda: session.begin(begin_of(0)),
        lambda: session.ack(ack_of("00" * 32, part_of({}), 0)),
        lambda: session.check_finished(0),
    ):
        with pytest.raises(ProtocolError, match="start was refused"):
            call()
    assert isinstance(session.failure, ProtocolError)


def test_a_driver_that_was_fenced_accepts_nothing_any_more() -> None:
    store = MemoryStore()
    old = Started(store, {"op": 1})
    finish(old, 0)
    reply = begin(old, 1)
    new = Started(store, {"op": 1}, first_epoch=1)
    with pytest.raises(FencedError):
        ack(old, reply, {b"k": b"zombie"})
    for call in (lambda: begin(old, 1), lambda: begin(old, 2), lambda: ack(old, reply, {})):
        with pytest.raises(FencedError):
            call()
    assert isinstance(old.session.failure, FencedError)
    finish(new, 1)
    assert [m.epoch for m in manifests_of(store) if m.kind == "checkpoint"] == [0, 1]


# --- a store that can be held up -----------------------------------------------------------------


class HeldUp(MemoryStore):
    """Does something in the middle of the next create."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super().create(name, parts)


def test_a_driver_that_was_overtaken_is_told_so_where_something_is_missing() -> None:
    """What it needs may be deleted by then: that is no damage."""
    store = MemoryStore()
    old = Started(store, {"op": 1})
    for epoch in range(3):
        finish(old, epoch)
    damaged = [
        slice_key(entry.kind, entry.digest)
        for manifest in manifests_of(store)
        for entry in manifest.slices
    ]
    request = begin_of(3, 0, copy=LocalCopy(damaged=damaged))
    with pytest.raises(CorruptionError):
        old.session.begin(request)
    new = Started(store, {"op": 1}, first_epoch=3)
    with pytest.raises(FencedError, match="was taken over"):
        old.session.begin(request)
    with pytest.raises(CorruptionError):
        new.session.begin(begin_of(3, 0, copy=LocalCopy(damaged=damaged)))


def test_a_commit_in_doubt_ends_the_run_and_the_next_goes_on_from_the_log() -> None:
    store = HeldUp()
    started = Started(store, {"op": 1})
    reply = begin(started, 0)

    def down() -> None:
        raise StoreUnreachableError("No answer came.")

    store.meanwhile = down
    with pytest.raises(CommitUnknownError):
        ack(started, reply, {b"k": b"x"})
    with pytest.raises(CommitUnknownError):
        begin(started, 0)
    again = Started(store, {"op": 1}, first_epoch=0)
    finish(again, 0)
    again.session.check_finished(0)


def test_an_epoch_begins_from_what_a_record_on_its_way_makes_of_the_one_before() -> None:
    """A twin of a finished task acks with other bytes while Spark goes on to the next batch."""
    store = HeldUp()
    started = Started(store, {"op": 1})
    first = begin(started, 0)
    ack(started, first, {b"k": b"first"})
    twin = begin(started, 0, attempt=1)
    given: list[BeginReply] = []
    spark = threading.Thread(target=lambda: given.append(begin(started, 1)))

    def meanwhile() -> None:
        spark.start()
        spark.join(0.2)

    store.meanwhile = meanwhile
    assert ack(started, twin, {b"k": b"second"}, attempt=1).durable
    spark.join()
    (reply,) = given
    lineage = resolve(manifests_of(store))["op"].subtasks[0]
    assert reply.chain == lineage.chain_at(0)
    assert lineage.deltas[0].entry.attempt == 1
    # And the job lives on, also over a restart.
    assert ack(started, reply, {b"k": b"1"}).durable
    started.session.check_finished(1)
    finish(Started(store, {"op": 1}, first_epoch=2), 2)


def test_acks_of_other_operators_do_not_wait_for_a_record_on_its_way() -> None:
    store = HeldUp()
    started = Started(store, {"a": 1, "b": 2})
    session = started.session
    a, b = (session.begin(begin_of(0, 0, uid))[0] for uid in ("a", "b"))
    seen: list[AckReply] = []

    def meanwhile() -> None:
        other = threading.Thread(
            target=lambda: seen.append(
                session.ack(ack_of(b.chain, part_of({b"k": b"b"}), 0, 0, "b"))
            )
        )
        other.start()
        other.join(10)

    store.meanwhile = meanwhile
    assert session.ack(ack_of(a.chain, part_of({b"k": b"a"}), 0, 0, "a")).durable
    assert [reply.durable for reply in seen] == [False]


def test_attempts_that_finish_at_once_make_one_record_between_them() -> None:
    store = CountingStore(MemoryStore())
    started = Started(store, {"op": 4})
    replies = [begin(started, 0, n) for n in range(4)]
    claims = store.counts["create"].requests
    answers: list[AckReply] = []
    errors: list[StateBackendError] = []
    gate = threading.Barrier(8)

    def send(number: int) -> None:
        subtask, attempt = number % 4, number // 4
        gate.wait()
        try:
            answers.append(ack(started, replies[subtask], {b"k": b"x"}, subtask, attempt=attempt))
        except StateBackendError as error:
            errors.append(error)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) + len(errors) == 8
    assert all(error.code == "SB5005" for error in errors)
    assert store.counts["create"].requests == claims + 1
    started.session.check_finished(0)


# --- restores ------------------------------------------------------------------------------------


def test_a_record_is_read_once_however_many_subtasks_restore_from_it() -> None:
    store = CountingStore(MemoryStore())
    started = Started(store, {"op": 4})
    for epoch in range(3):
        finish(started, epoch, 4)
    read = CountingStore(store)
    again = Started(read, {"op": 4}, first_epoch=3)
    for n in range(4):
        _, bodies = again.session.begin(begin_of(3, n))
        assert len(bodies) == 3
    # Reading the manifests brought the slices along, and nothing was read twice.
    assert read.counts["get_tail"].requests == 3
    assert "get" not in read.counts


def test_a_subtask_restores_in_its_first_attempt_of_the_run_only() -> None:
    store = MemoryStore()
    started = Started(store, {"op": 2})
    finish(started, 0, 2)
    again = Started(store, {"op": 2}, first_epoch=1)
    assert begin(again, 1, 0).restoring
    assert begin(again, 1, 1).restoring
    for n in range(2):
        ack(again, begin(again, 1, n, attempt=1), {}, n, attempt=1)
    assert not begin(again, 2, 0).restoring


def test_an_attempt_that_died_before_its_ack_leaves_the_report_to_the_next() -> None:
    store = MemoryStore()
    started = Started(store, {"op": 1})
    finish(started, 0)
    again = Started(store, {"op": 1}, first_epoch=1)
    assert begin(again, 1).restoring
    assert begin(again, 1, attempt=1).restoring


def test_what_the_log_needs_does_not_fall_back_when_all_operators_are_new() -> None:
    store = MemoryStore()
    started = Started(store, {"old": 1}, base_every_epochs=1)
    for epoch in range(4):
        begun, _ = started.session.begin(begin_of(epoch, 0, "old"))
        base = base_of({b"k": b"x"}) if begun.base_due else None
        started.session.ack(ack_of(begun.chain, part_of({}), epoch, 0, "old", base=base))
    oldest = manifests_of(store)[-1].oldest_needed
    assert oldest > 0
    replaced = Started(store, {"new": 1}, first_epoch=4)
    begun, _ = replaced.session.begin(begin_of(4, 0, "new"))
    assert replaced.session.ack(ack_of(begun.chain, part_of({}), 4, 0, "new")).durable
    assert manifests_of(store)[-1].oldest_needed >= oldest


def test_what_is_asked_beside_epochs_is_answered_by_the_run() -> None:
    """The job's id for a sink, and lookups: no other kind of call is known."""
    store = MemoryStore()
    session = Started(store, {"op": 1}).session
    assert session.identity()[0] == manifests_of(store)[-1].job_id
    with pytest.raises(ProtocolError, match="other"):
        session.call("other", b"")


def test_an_ack_says_how_often_the_store_was_asked_again_since_the_last() -> None:
    class Retrying(MemoryStore):
        again = 3

        def take_retries(self) -> int:
            taken, self.again = self.again, 0
            return taken

    store = Retrying()
    session = Started(MemoryStore(), {"op": 1}).session
    who = JobSubtask(JOB, JOB, "op", 0, 1)
    participant = Participant(who, Membership(session, "session", "query"), store)
    ack = ack_of("00" * 32, part_of({}), 0)
    assert participant.with_requests(ack, {}).figures["retries"] == 3
    assert "retries" not in participant.with_requests(ack, {}).figures
