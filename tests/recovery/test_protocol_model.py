"""Drivers that crash, stores that lose answers, workers that die: what is restored is what was.

A job of one or two operators lives through starts, attempts, partial reads, fenced zombies, writes
that land late, deletions by retention and damaged local copies. Spark is played by a few lines: it
commits a batch when the newest attempt of every subtask has been answered, or when the output was
read in part. The model is one dict per subtask and epoch. Whenever an attempt begins, the state
that its plan brings back is that of the epoch before, and so is what the log alone brings back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recovery.plan import plan_restore
from recovery.rewind import LocationProgress, Verdict, decide_start
from snapshot.lineage import resolve
from snapshot.log import CommitLog
from snapshot.messages import AckRequest, BeginReply, LocalCopy, SlicePart
from snapshot.record import parse_record, record_name
from snapshot.storage.base import Buffer, CreateOutcome
from snapshot.storage.memory import MemoryStore
from statebackend.errors import (
    CommitUnknownError,
    FencedError,
    IncompleteEpochError,
    ObjectNotFoundError,
    StaleRequestError,
    StoreUnreachableError,
)
from statebackend.spark.job import Job
from tests.recovery.driver import (
    JOB,
    Started,
    State,
    ack_of,
    base_of,
    begin_of,
    changed,
    manifests_of,
    new_id,
    part_of,
    replayed,
)

Where = tuple[str, int]
QUERY = "query"
FATES = ["acks", "dies", "holds", "dies restoring"]


class UnsureStore(MemoryStore):
    """Does to the next create what it is told; a `late` write lands when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.next_create = ""
        self.late: tuple[str, list[bytes]] | None = None

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        how, self.next_create = self.next_create, ""
        if how == "lost":
            raise StoreUnreachableError("The request was lost.")
        if how == "late":
            self.late = name, [bytes(part) for part in parts]
            raise StoreUnreachableError("No answer came.")
        outcome = super().create(name, parts)
        if how == "answer lost":
            raise StoreUnreachableError("The answer was lost.")
        return outcome

    def land(self) -> None:
        """The write that nobody waits for any more arrives."""
        assert self.late is not None
        (name, parts), self.late = self.late, None
        super().create(name, parts)


@dataclass
class Copy:
    """A local copy as `recovery.local` keeps one, the state a dict."""

    job_id: str = ""
    epoch: int | None = None
    chain: str = ""
    applying: str = ""
    state: State = field(default_factory=dict)
    deltas: dict[tuple[int, str], bytes] = field(default_factory=dict)

    def described(self) -> LocalCopy:
        if self.epoch is None:
            return LocalCopy(deltas=sorted(self.deltas))
        return LocalCopy(
            job_id=self.job_id,
            epoch=self.epoch,
            chain=self.chain,
            applying=self.applying,
            deltas=sorted(self.deltas),
        )

    def stand_at(self, job_id: str, epoch: int, chain: str) -> None:
        self.job_id, self.epoch, self.chain, self.applying = job_id, epoch, chain, ""
        self.deltas = {key: data for key, data in self.deltas.items() if key[0] > epoch}


@dataclass(frozen=True)
class Prepared:
    """An attempt that has its snapshot ready and has not acked yet."""

    started: Started
    ack: AckRequest
    where: Where
    after: State


class JobMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = UnsureStore()
        self.parallelism = {"a": 2}
        self.current: Started | None = None
        self.older: list[Started] = []
        # What Spark knows: the batch that runs, the last committed one, and batches' stamps.
        self.batch, self.last_commit, self.claimed = 0, -1, False
        self.stamps: dict[int, int] = {}
        self.read_in_part = False
        # What is true: by epoch and subtask; and what the running epoch's newest attempts acked.
        self.truth: dict[int, dict[Where, State]] = {-1: {}}
        self.acked: dict[Where, tuple[int, State]] = {}
        self.durable: set[str] = set()
        self.attempts = 0
        self.copies: dict[tuple[str, Where], Copy] = {}
        self.prepared: list[Prepared] = []

    @property
    def wheres(self) -> list[Where]:
        return [(uid, n) for uid, p in self.parallelism.items() for n in range(p)]

    # --- drivers

    @precondition(lambda self: "b" not in self.parallelism and self.last_commit >= 0)
    @rule()
    def an_operator_is_added_at_the_next_start(self) -> None:
        if self.current is not None:
            self.crash()
        self.parallelism = {"a": 2, "b": 1}

    @precondition(lambda self: self.current is None)
    @rule(every=st.integers(1, 4), budget=st.sampled_from([0, 1 << 20]))
    def start(self, every: int, budget: int) -> None:
        manifests = manifests_of(self.store)
        log = Job("file:///jobs", JOB).progress(manifests)
        spark = LocationProgress(
            path="/location",
            query_id=QUERY if self.claimed else None,
            last_offset=self.batch,
            last_commit=self.last_commit,
        )
        decision = decide_start(spark, log)
        if self.read_in_part and all(e >= self.last_commit for e in log.last_epochs.values()):
            # An earlier attempt at the batch had finished it: that is the state after it.
            self.truth[self.last_commit] = self._from_the_log(self.last_commit)
            self.read_in_part = False
        # One batch back where it was read in part, and in no other case.
        assert (decision.verdict is Verdict.REWIND) is self.read_in_part
        self.last_commit -= self.read_in_part
        self.read_in_part = False
        self.batch = self.last_commit + 1
        assert decision.batch == self.batch
        fault, self.store.next_create = self.store.next_create, ""  # only appends are unsure here
        self.current = Started(
            self.store,
            self.parallelism,
            first_epoch=decision.batch,
            base_every_epochs=every,
            inline_budget_bytes=budget,
        )
        self.store.next_create = fault
        self.claimed = True
        self.acked, self.durable = {}, set()

    @precondition(lambda self: self.current is not None)
    @rule()
    def crash(self) -> None:
        assert self.current is not None
        self.older.append(self.current)
        self.current = None

    # --- attempts

    def _stamp(self) -> int:
        # Written with the batch's offsets: the same when the batch is repeated.
        return self.stamps.setdefault(self.batch, 1_000 + len(self.stamps))

    @rule(random=st.randoms(use_true_random=False), batches=st.integers(1, 4))
    def live_on(self, random: Random, batches: int) -> None:
        """Batch after batch, most of it going well; what a job does all day."""
        if self.current is None:
            self.start(random.randint(1, 4), random.choice([0, 1 << 20]))
        for _ in range(batches):
            for where in random.sample(self.wheres, len(self.wheres)):
                for fate in [*random.choices(FATES, k=random.choice([0, 0, 0, 1])), "acks"]:
                    if self.current is not None:
                        self._attempt(random, where, fate)
            if self.current is None or self.durable != {*self.parallelism}:
                return
            self.commit_the_batch()

    @precondition(lambda self: self.current is not None)
    @rule(random=st.randoms(use_true_random=False), fate=st.sampled_from(FATES))
    def attempt(self, random: Random, fate: str) -> None:
        self._attempt(random, random.choice(self.wheres), fate)

    def _attempt(self, random: Random, where: Where, fate: str) -> None:
        assert self.current is not None
        host = random.choice(["h1", "h1", "h2"])
        self.attempts += 1
        attempt, started = self.attempts, self.current
        reply, copy = self._begin(started, where, host, attempt, half=fate == "dies restoring")
        if copy is None:
            return
        before = self.truth[self.batch - 1].get(where, {})
        assert copy.state == before
        assert (copy.epoch, copy.chain) == (reply.base_epoch, reply.chain)
        keys = random.sample([b"k0", b"k1", b"k2", b"k3"], random.choice([0, 1, 2, 2]))
        changes = {key: random.choice([None, b"x", b"y", b"z" * 40]) for key in keys}
        after = changed(before, changes)
        delta = part_of(changes)
        copy.deltas[self.batch, delta.digest] = delta.data
        if fate == "dies":
            return
        ack = ack_of(
            reply.chain,
            self._sent(delta, reply),
            self.batch,
            where[1],
            where[0],
            stamp_ms=self._stamp(),
            attempt=attempt,
            base=self._sent(base_of(after), reply) if reply.base_due else None,
        )
        self.prepared.append(Prepared(started, ack, where, after))
        if fate == "acks":
            self._send(len(self.prepared) - 1)

    def _sent(self, part: SlicePart, reply: BeginReply) -> SlicePart:
        """What is over the inline budget becomes an object before the ack."""
        if part.size_bytes <= reply.inline_budget_bytes:
            return part
        name = f"data/{new_id()}"
        self.store.put(name, [part.data])
        return SlicePart(digest=part.digest, size_bytes=part.size_bytes, rows=part.rows, name=name)

    def _begin(
        self, started: Started, where: Where, host: str, attempt: int, *, half: bool
    ) -> tuple[BeginReply, Copy | None]:
        """Begin, and carry the plan out; None if the worker was told to die on the way."""
        copy = self.copies.setdefault((host, where), Copy())
        while True:
            request = begin_of(
                self.batch,
                where[1],
                where[0],
                stamp_ms=self._stamp(),
                attempt=attempt,
                copy=copy.described(),
                host=host,
            )
            reply, bodies = started.session.begin(request)
            assert reply.base_epoch == self.batch - 1
            if reply.fresh and copy.epoch is not None:
                assert reply.reason
            if reply.fresh:
                copy = self.copies[host, where] = Copy()
            if self._carry_out(copy, reply, bodies, half=half):
                return reply, copy
            if half:
                return reply, None

    def _carry_out(self, copy: Copy, reply: BeginReply, bodies: list[bytes], *, half: bool) -> bool:
        """False where a local delta turned out damaged, or the worker died half way."""
        inline = iter(bodies)
        if reply.fresh and not reply.steps:
            copy.stand_at(reply.job_id, reply.base_epoch, reply.chain)
        for step in reply.steps:
            if step.source == "local":
                assert not reply.fresh
                data = copy.deltas[step.epoch, step.digest]
                if data == b"damaged":
                    del copy.deltas[step.epoch, step.digest]
                    return False
            elif step.source == "object":
                data = self.store.get(step.name)
            else:
                data = next(inline) if step.size_bytes else b""
            after = replayed(copy.state, data, step.digest)
            if half and after != copy.state:
                if copy.epoch is not None:
                    copy.applying = step.chain
                differing = [k for k in {*after, *copy.state} if after.get(k) != copy.state.get(k)]
                first = min(differing)
                copy.state = changed(copy.state, {first: after.get(first)})
                return False
            copy.state = after
            copy.stand_at(reply.job_id, step.epoch, step.chain)
        assert next(inline, None) is None
        return True

    # --- acks, in time and late

    def _send(self, number: int) -> None:
        one = self.prepared.pop(number)
        live = one.started is self.current
        running = live and one.ack.epoch == self.batch
        newest = self.acked.get(one.where, (0, {}))[0]
        try:
            reply = one.started.session.ack(one.ack)
        except StaleRequestError:
            assert not running or one.ack.attempt < newest
            return
        except CommitUnknownError:
            if live:
                self.crash()
            return
        except FencedError:
            assert not live
            return
        if not live:  # a zombie may take acks in, and never makes a record of them
            return
        assert running
        assert one.ack.attempt >= newest
        self.acked[one.where] = one.ack.attempt, one.after
        everyone = {w for w in self.wheres if w[0] == one.where[0]}
        assert reply.durable is (everyone <= self.acked.keys())
        if reply.durable:
            self.durable.add(one.where[0])

    @precondition(lambda self: self.prepared)
    @rule(random=st.randoms(use_true_random=False))
    def late_acks_arrive(self, random: Random) -> None:
        for _ in range(random.randint(1, len(self.prepared))):
            self._send(random.randrange(len(self.prepared)))

    @precondition(lambda self: self.older)
    @rule(random=st.randoms(use_true_random=False))
    def a_zombie_driver_lets_an_attempt_in(self, random: Random) -> None:
        started = random.choice(self.older[-2:])
        where = random.choice(sorted(started.parallelism)), 0
        epoch = started.session.epoch
        if epoch is None or started.session.failure is not None:
            return
        if epoch == self.last_commit and self.current is None and started is self.older[-1]:
            return  # not a zombie yet: nobody has claimed, and Spark starts no task of such a batch
        self.attempts += 1
        request = begin_of(epoch, 0, where[0], stamp_ms=self.stamps[epoch], attempt=self.attempts)
        try:
            reply, _ = started.session.begin(request)
        except ObjectNotFoundError:  # deleted by those who came after
            return
        delta = part_of({b"zombie": b"%d" % self.attempts})
        ack = ack_of(
            reply.chain,
            delta,
            epoch,
            0,
            where[0],
            stamp_ms=self.stamps[epoch],
            attempt=self.attempts,
        )
        self.prepared.append(Prepared(started, ack, where, {}))

    # --- Spark

    def _go_on(self) -> None:
        self.last_commit, self.batch = self.batch, self.batch + 1
        # A newer attempt that still runs would have been waited for, or killed.
        self.prepared = [
            one
            for one in self.prepared
            if one.started is not self.current
            or one.ack.attempt < self.acked.get(one.where, (0, {}))[0]
        ]

    @precondition(lambda self: self.current is not None and self.durable == {*self.parallelism})
    @rule()
    def commit_the_batch(self) -> None:
        assert self.current is not None
        self.current.session.check_finished(self.batch)
        self.truth[self.batch] = {where: state for where, (_, state) in self.acked.items()}
        self.acked, self.durable = {}, set()
        self._go_on()

    @precondition(
        lambda self: (
            self.current is not None
            and self.durable != {*self.parallelism}
            and self.current.session.epoch in (None, self.batch)
        )
    )
    @rule()
    def commit_the_batch_although_it_was_read_in_part(self) -> None:
        assert self.current is not None
        self.acked, self.durable = {}, set()
        self._go_on()
        self.read_in_part = True
        uid, subtask = self.wheres[0]
        request = begin_of(self.batch, subtask, uid, stamp_ms=self._stamp(), attempt=10**9)
        try:
            self.current.session.begin(request)
        except IncompleteEpochError:
            self.crash()
        else:
            raise AssertionError("an incomplete epoch was confirmed")

    # --- what goes wrong

    @rule(how=st.sampled_from(["lost", "late", "answer lost"]))
    def the_next_commit_is_unsure(self, how: str) -> None:
        self.store.next_create = how

    @precondition(lambda self: self.store.late is not None)
    @rule()
    def a_late_write_lands(self) -> None:
        self.store.land()

    @precondition(lambda self: self.copies)
    @rule(
        random=st.randoms(use_true_random=False),
        how=st.sampled_from(["gone", "foreign", "damaged delta", "torn"]),
    )
    def a_local_copy_is_lost(self, random: Random, how: str) -> None:
        copy = random.choice(list(self.copies.values()))
        if how == "gone":
            copy.__init__()  # type: ignore[misc]
        elif how == "foreign" and copy.epoch is not None:
            copy.job_id, copy.state = "another job", {b"foreign": b"!"}
        elif how == "torn" and copy.epoch is not None:
            copy.applying, copy.state = "ab" * 32, {b"torn": b"!"}
        elif how == "damaged delta":
            copy.deltas = dict.fromkeys(copy.deltas, b"damaged")

    @rule()
    def retention_deletes_what_the_newest_record_lets_go(self) -> None:
        manifests = manifests_of(self.store)
        if not manifests:
            return
        log = CommitLog(self.store, job=JOB, writer="retention", new_id=new_id)
        tip = manifests[-1]
        self.store.delete(
            record_name(sequence)
            for sequence in log.sequences()
            if sequence < tip.oldest_needed and log.read(sequence).kind != "claim"
        )

    # --- what always holds

    def _from_the_log(self, epoch: int) -> dict[Where, State]:
        """Every subtask's state after an epoch, from records and objects alone."""
        found: dict[Where, State] = {}
        for uid, operator in resolve(manifests_of(self.store)).items():
            operator.require(epoch)
            for subtask, lineage in enumerate(operator.subtasks):
                plan = plan_restore(LocalCopy(), lineage, job_id=operator.job_id, epoch=epoch)
                state: State = {}
                for step in plan.steps:
                    entry = step.ref.entry
                    if entry.object:
                        data = self.store.get(entry.object)
                    else:
                        name = record_name(step.ref.sequence)
                        data = parse_record(self.store.get(name), name).slice(entry)
                    state = replayed(state, data, entry.digest)
                found[uid, subtask] = state
        return found

    @invariant()
    def the_log_alone_brings_the_last_committed_batch_back(self) -> None:
        epoch = self.last_commit - self.read_in_part
        found = self._from_the_log(epoch)
        for where, state in self.truth[epoch].items():
            assert found[where] == state


TestAJobThroughCrashes = JobMachine.TestCase
TestAJobThroughCrashes.settings = settings(
    max_examples=settings.default.max_examples, stateful_step_count=40
)
