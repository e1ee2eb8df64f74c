"""Bases that are uploaded beside the epochs and come late: which record names them."""

from __future__ import annotations

import pytest

from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.lineage import SubtaskLineage, resolve
from snapshot.protocol.messages import AckRequest, BaseDone, BaseGrant, BeginReply, SlicePart
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import ProtocolError, StaleRequestError
from tests.recovery.driver import (
    PROTOCOL,
    Started,
    ack_of,
    base_of,
    begin_of,
    manifests_of,
    part_of,
    renewal_of,
)
from tests.snapshot.hand_clock import Now

# --- in a run ------------------------------------------------------------------------------------


SOON = BasePolicy(every_epochs=2, apart_every_epochs=3, apart_min_bytes=1 << 40, lease_s=10)
BUDGET = 1000


class Uploads:
    """A run of one operator whose first subtask's state is large; no store on a disk."""

    def __init__(self, *, asynchronous: bool = False, parallelism: int = 1) -> None:
        self.store, self.now = MemoryStore(), Now()
        self.parallelism = parallelism
        self.asynchronous = asynchronous
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.started = Started(
            self.store,
            {"op": self.parallelism},
            first_epoch=self.epoch,
            inline_budget_bytes=BUDGET,
            policy=SOON,
            now_s=self.now,
            asynchronous=self.asynchronous,
        )

    def begin(self, subtask: int = 0) -> BeginReply:
        return self.started.session.begin(begin_of(self.epoch, subtask))[0]

    def ack(
        self,
        reply: BeginReply,
        subtask: int = 0,
        *,
        base: SlicePart | None = None,
        large: bool = True,
    ) -> None:
        ack: AckRequest = ack_of(
            reply.chain,
            part_of({b"k": b"%d" % self.epoch}),
            self.epoch,
            subtask,
            base=base,
            large_bytes=10**6 if large and reply.base_due else 0,
        )
        self.started.session.ack(ack)

    def run(self, epochs: int = 1, *, large: bool = True) -> None:
        for _ in range(epochs):
            for subtask in range(self.parallelism):
                self.ack(self.begin(subtask), subtask, large=large)
            self.started.session.drain(30)
            self.epoch += 1

    def run_to_grant(self) -> BaseGrant:
        """The epoch whose begin gave it is not acked yet."""
        for _ in range(30):
            reply = self.begin()
            if reply.grant is not None:
                self.reply = reply
                return reply.grant
            self.ack(reply)
            self.started.session.drain(30)
            self.epoch += 1
        raise AssertionError("no base came due")

    def upload(self, grant: BaseGrant, state_bytes: int = 10**6) -> SlicePart:
        made = base_of({b"k": b"%d" % grant.epoch})
        name = f"base/{self.started.tenure.generation:010d}/{grant.id}/whole"
        self.store.put(name, [made.data])
        part = SlicePart(digest=made.digest, size_bytes=made.size_bytes, rows=1, name=name)
        self.started.session.base_done(
            BaseDone(
                protocol=PROTOCOL,
                job="clicks",
                session="session",
                operator="op",
                subtask=0,
                grant=grant.id,
                epoch=grant.epoch,
                chain=grant.chain,
                kind="base",
                part=part,
                state_bytes=state_bytes,
                uploaded_bytes=made.size_bytes,
                seconds=0.1,
            )
        )
        return part

    def lineage(self) -> SubtaskLineage:
        return resolve(manifests_of(self.store))["op"].subtasks[0]

    def check(self) -> None:
        """The log and the coordinator know the same, and a new run starts from it."""
        known = self.started.coordinator.run.operators["op"].lineage
        resolve(manifests_of(self.store))["op"].require(self.epoch - 1)
        assert self.lineage().base_before(self.epoch) == known.subtasks[0].base_before(self.epoch)
        assert self.started.session.failure is None


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def uploads(request: pytest.FixtureRequest) -> Uploads:
    return Uploads(asynchronous=request.param)


def test_a_base_is_named_by_the_operator_s_next_record(uploads: Uploads) -> None:
    grant = uploads.run_to_grant()
    assert grant.epoch == uploads.epoch - 1
    part = uploads.upload(grant)
    assert uploads.lineage().base_before(uploads.epoch) is None
    assert uploads.started.coordinator.run.pending_names() == {part.name}
    uploads.run()
    ref = uploads.lineage().base_before(uploads.epoch)
    assert ref is not None
    assert (ref.entry.epoch, ref.entry.object) == (grant.epoch, part.name)
    assert uploads.started.coordinator.uploads.open_grants() == set()
    uploads.run(2)
    uploads.check()


@pytest.mark.parametrize("late", [1, 2, 7])
def test_a_base_may_come_many_epochs_late(uploads: Uploads, late: int) -> None:
    grant = uploads.run_to_grant()
    uploads.run(late)
    uploads.started.session.base_renewed(renewal_of(grant))
    uploads.upload(grant)
    uploads.run()
    ref = uploads.lineage().base_before(uploads.epoch)
    assert ref is not None
    assert ref.entry.epoch == grant.epoch
    uploads.run(3)
    uploads.check()
    uploads.start()
    reply = uploads.begin()
    assert next(step.kind for step in reply.steps) == "base"
    assert len(reply.steps) == uploads.epoch - grant.epoch


def test_a_base_that_is_reported_twice_is_refused_the_second_time(uploads: Uploads) -> None:
    grant = uploads.run_to_grant()
    uploads.upload(grant)
    with pytest.raises(StaleRequestError):
        uploads.upload(grant)
    uploads.run()
    with pytest.raises(StaleRequestError):
        uploads.upload(grant)
    with pytest.raises(StaleRequestError):
        uploads.started.session.base_renewed(renewal_of(grant))
    uploads.run(2)
    uploads.check()


def test_a_base_of_the_run_before_is_refused(uploads: Uploads) -> None:
    grant = uploads.run_to_grant()
    uploads.start()
    with pytest.raises(ProtocolError, match="No operator"):
        uploads.upload(grant)
    uploads.run()
    with pytest.raises(StaleRequestError):
        uploads.upload(grant)
    uploads.run()
    uploads.check()


def test_a_base_stays_good_when_the_batch_whose_record_names_it_is_repeated(
    uploads: Uploads,
) -> None:
    grant = uploads.run_to_grant()
    uploads.upload(grant)
    uploads.run()
    uploads.epoch -= 1  # Spark repeats it
    uploads.start()
    assert [step.epoch for step in uploads.begin().steps] == [grant.epoch]
    uploads.run(3)
    uploads.check()
    ref = uploads.lineage().base_before(uploads.epoch)
    assert ref is not None
    assert ref.entry.epoch == grant.epoch


def test_a_base_that_an_inline_one_overtook_is_not_named(uploads: Uploads) -> None:
    grant = uploads.run_to_grant()
    part = uploads.upload(grant)
    inline = base_of({b"k": b"inline"})
    uploads.ack(uploads.reply, base=inline)
    uploads.started.session.drain(30)
    uploads.epoch += 1
    ref = uploads.lineage().base_before(uploads.epoch)
    assert ref is not None
    assert (ref.entry.epoch, ref.entry.digest) == (uploads.epoch - 1, inline.digest)
    uploads.run(3)
    assert part.name not in uploads.started.coordinator.run.pending_names()
    assert uploads.started.coordinator.uploads.open_grants() == set()
    uploads.check()


def test_a_base_that_comes_after_an_inline_one_is_older_and_stays_so(uploads: Uploads) -> None:
    grant = uploads.run_to_grant()
    inline = base_of({b"k": b"inline"})
    uploads.ack(uploads.reply, base=inline)
    uploads.started.session.drain(30)
    uploads.epoch += 1
    uploads.run(2)
    uploads.upload(grant)
    uploads.run(2)
    ref = uploads.lineage().base_before(uploads.epoch)
    assert ref is not None
    assert ref.entry.digest == inline.digest
    uploads.check()


def test_state_that_has_shrunk_goes_into_records_again(uploads: Uploads) -> None:
    grant = uploads.run_to_grant()
    uploads.upload(grant, state_bytes=BUDGET)
    uploads.run(large=False)
    book = uploads.started.coordinator.run.operators["op"].bases
    assert not book.large_bytes
    for _ in range(4):
        reply = uploads.begin()
        assert reply.grant is None
        uploads.ack(reply, base=base_of({b"k": b"all"}) if reply.base_due else None, large=False)
        uploads.started.session.drain(30)
        uploads.epoch += 1
    ref = uploads.lineage().base_before(uploads.epoch)
    assert ref is not None
    assert ref.entry.object is None


def test_large_state_is_known_to_be_large_after_a_restart(uploads: Uploads) -> None:
    uploads.upload(uploads.run_to_grant())
    uploads.run()
    uploads.start()
    for _ in range(6):
        reply = uploads.begin()
        assert not reply.base_due
        if reply.grant is not None:
            return
        uploads.ack(reply)
        uploads.started.session.drain(30)
        uploads.epoch += 1
    raise AssertionError("no base came due")


def test_of_two_records_that_are_on_their_way_the_first_alone_names_a_base() -> None:
    """When it is durable, the base may be overtaken and deleted before the second is written."""
    uploads = Uploads(asynchronous=True)
    grant = uploads.run_to_grant()
    part = uploads.upload(grant)
    coordinator = uploads.started.coordinator
    with uploads.started.session._state_lock:
        coordinator.ack(ack_of(uploads.reply.chain, part_of({}), uploads.epoch))
        first = coordinator.records.take_due("op", uploads.epoch)
        coordinator.ack(ack_of(uploads.reply.chain, part_of({b"k": b"twin"}), uploads.epoch))
        second = coordinator.records.take_due("op", uploads.epoch)
    assert first is not None
    assert second is not None
    named = [[entry.kind for entry in work.manifest.slices] for work in (first, second)]
    assert named == [["delta", "base"], ["delta"]]
    assert grant.id in coordinator.uploads.open_grants()
    assert part.name in coordinator.run.pending_names()
    for work in (first, second):
        uploads.started.session._commit(coordinator, uploads.started.tenure, work)
        assert grant.id not in coordinator.uploads.open_grants()
    uploads.epoch += 1
    uploads.run(3)
    uploads.check()
