"""Drivers that crash, stores that lose answers, workers that die: what is restored is what was.

A job of one or two operators lives through starts, attempts, partial reads, fenced zombies, writes
that land late, records that are still on their way, bases that are made apart and come whenever,
cleanings by the driver, by its predecessors and by strangers, and damage to copies of all kinds.
Spark is played by a few lines: it
commits a batch when the newest attempt of every subtask has been answered, or when the output was
read in part. The model is one dict per subtask and epoch. Whenever an attempt begins, the state
that its plan brings back is that of the epoch before, and so is what the log alone brings back.
Its watermark is the one that follows from what was seen up to then, and the one it had before if
the epoch is repeated; and its initial state is there in its operator's first epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recovery.decide.restore_plan import plan_restore
from recovery.decide.rewind import LocationProgress, Verdict, decide_start
from recovery.restore.upload import Uploaded
from snapshot.formats.base import FileEntry, FileIndex, decode_index, encode_index
from snapshot.formats.names import base_file_name, data_name
from snapshot.formats.record import parse_record, record_name, slice_key
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.bases import BasePolicy
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckRequest, BaseGrant, BeginReply, LocalCopy, SlicePart
from snapshot.protocol.operators import takes_initial
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import Buffer, CreateOutcome
from statebackend.errors import (
    CommitUnknownError,
    CorruptionError,
    FencedError,
    IncompleteEpochError,
    ObjectNotFoundError,
    StaleRequestError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.job import Job
from tests.recovery.driver import (
    JOB,
    Started,
    State,
    ack_of,
    base_of,
    begin_of,
    changed,
    done_of,
    manifests_of,
    new_id,
    part_of,
    replayed,
)

Where = tuple[str, int]
QUERY = "query"
BUDGETS = [0, 150, 1 << 20]
DELAYS_MS = {"a": 10, "b": 25}
INITIAL = {b"k0": b"initial"}
FATES = ["acks", "dies", "holds", "dies restoring"]


class Damaged(Exception):
    """What a worker finds damaged: the digest of the slice."""

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest


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


class OnItsWay(Future[None]):
    """A record that is written when somebody waits for it, or the model says so."""

    def __init__(self, behind: Behind) -> None:
        super().__init__()
        self.behind = behind

    def result(self, timeout: float | None = None) -> None:
        while not self.done():
            self.behind.write_one()
        return super().result(timeout)


class Behind:
    """In the place of the session's writing thread: writes in order, when it is told to."""

    def __init__(self) -> None:
        self.queue: list[tuple[OnItsWay, Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, call: Callable[..., None], *args: Any) -> OnItsWay:
        future = OnItsWay(self)
        self.queue.append((future, call, args))
        return future

    def write_one(self) -> None:
        future, call, args = self.queue.pop(0)
        try:
            future.set_result(call(*args))
        except StateBackendError as error:
            future.set_exception(error)

    def write_all(self) -> None:
        while self.queue:
            self.write_one()


@dataclass(frozen=True)
class Upload:
    """A base under a grant, not reported yet."""

    started: Started
    grant: BaseGrant
    where: Where
    state: State
    generation: int


@dataclass
class Copy:
    """A local copy as `recovery.local.local_copies` keeps one, the state a dict."""

    job_id: str = ""
    epoch: int | None = None
    chain: str = ""
    applying: str = ""
    state: State = field(default_factory=dict)
    deltas: dict[tuple[int, str], bytes] = field(default_factory=dict)

    def described(self, damaged: Collection[str]) -> LocalCopy:
        if self.epoch is None:
            return LocalCopy(deltas=sorted(self.deltas), damaged=sorted(damaged))
        return LocalCopy(
            damaged=sorted(damaged),
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
        self.were_behind = False  # the last start's commits were asynchronous
        self.stamps: dict[int, int] = {}
        self.read_in_part = False
        # What is true: by epoch and subtask; and what the running epoch's newest attempts acked.
        self.truth: dict[int, dict[Where, State]] = {-1: {}}
        self.acked: dict[Where, tuple[int, State]] = {}
        # The same for time: the largest event times by epoch and operator; and, by epoch, the
        # watermark. `logged`: the running epoch was finished by some operator before.
        self.seen: dict[int, dict[str, int | None]] = {-1: {}}
        self.events: dict[Where, int | None] = {}
        self.watermarks: dict[int, int] = {-1: 0}
        self.logged = False
        self.first_epochs: dict[str, int] = {}
        self.durable: set[str] = set()
        self.attempts = 0
        self.copies: dict[tuple[str, Where], Copy] = {}
        self.prepared: list[Prepared] = []
        self.uploads: list[Upload] = []
        self.behind: dict[int, Behind] = {}  # by the id of the start
        self.hurt: dict[str, bytes] = {}  # objects that are damaged or gone, as they were
        self.now_s = 0.0

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
    @rule(
        every=st.integers(1, 4),
        budget=st.sampled_from(BUDGETS),
        asynchronous=st.booleans(),
        whole=st.booleans(),
    )
    def start(self, every: int, budget: int, *, asynchronous: bool, whole: bool) -> None:
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
            self.seen[self.last_commit] = {
                uid: lineage.epochs[self.last_commit].event_max_ms
                for uid, lineage in resolve(manifests).items()
            }
            self.read_in_part = False
        # One batch back where it was read in part or its record was still on its way, and in no
        # other case.
        lost = any(last == self.last_commit - 1 for last in log.last_epochs.values())
        assert not lost or self.read_in_part or self.were_behind
        assert (decision.verdict is Verdict.REWIND) is (self.read_in_part or lost)
        self.last_commit -= self.read_in_part or lost
        self.read_in_part = False
        self.batch = self.last_commit + 1
        assert decision.batch == self.batch
        known = resolve(manifests)
        for uid in self.parallelism:
            self.first_epochs.setdefault(uid, self.batch)
        fault, self.store.next_create = self.store.next_create, ""  # only appends are unsure here
        self.current = Started(
            self.store,
            self.parallelism,
            first_epoch=decision.batch,
            inline_budget_bytes=budget,
            policy=BasePolicy(
                every_epochs=every, apart_every_epochs=2 * every, apart_min_bytes=200, lease_s=10
            ),
            now_s=lambda: self.now_s,
            asynchronous=asynchronous,
            whole_limit_bytes=int(whole),  # as a flag: how large a store is on disk is not known
            specs={
                uid: {"time_mode": "event", "watermark_delay_ms": DELAYS_MS[uid]}
                for uid in self.parallelism
            },
            initial={
                uid: dict.fromkeys(range(p), INITIAL)
                for uid, p in self.parallelism.items()
                if takes_initial(known.get(uid), self.batch)
            },
        )
        again = resolve(manifests_of(self.store)).values()
        self.logged = any(self.batch in lineage.epochs for lineage in again)
        self.were_behind = asynchronous
        behind = self.behind[id(self.current)] = Behind()
        self.current.session._writer = behind  # type: ignore[assignment]
        self.store.next_create = fault
        self.claimed = True
        self.acked, self.durable = {}, set()
        due = self.current.coordinator.run.next_due()
        assert due is not None
        assert due.epoch in (self.last_commit, self.batch)

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
            self.start(
                random.randint(1, 4),
                random.choice(BUDGETS),
                asynchronous=random.random() < 0.6,
                whole=random.random() < 0.5,
            )
        for _ in range(batches):
            for where in random.sample(self.wheres, len(self.wheres)):
                for fate in [*random.choices(FATES, k=random.choice([0, 0, 0, 1])), "acks"]:
                    if self.current is not None:
                        self._attempt(random, where, fate)
                    if self.uploads and random.random() < 0.3:
                        self._finish_upload(random.randrange(len(self.uploads)))
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
        if copy is None or reply is None:
            return
        before = self.truth[self.batch - 1].get(where, {})
        if reply.layers:
            (layer,) = reply.layers
            assert (layer.epoch, layer.chain) == (reply.base_epoch, reply.chain)
            assert reply.durable_epoch == reply.base_epoch - 1
            if reply.durable_epoch in self.truth:
                assert copy.state == self.truth[reply.durable_epoch].get(where, {})
        else:
            assert copy.state == before
            assert copy.chain == reply.chain
            assert reply.durable_epoch == reply.base_epoch
        assert (copy.epoch, copy.chain) == (reply.durable_epoch, reply.durable_chain)
        if reply.grant is not None:
            assert reply.grant.chain == copy.chain
            self.uploads.append(Upload(started, reply.grant, where, copy.state, reply.generation))
        keys = random.sample([b"k0", b"k1", b"k2", b"k3"], random.choice([0, 1, 2, 2]))
        changes = {key: random.choice([None, b"x", b"y", b"z" * 40]) for key in keys}
        changes = {**self._initial(reply, where), **changes}
        after = changed(before, changes)
        delta = part_of(changes)
        copy.deltas[self.batch, delta.digest] = delta.data
        if fate == "dies":
            return
        base, large_bytes = None, 0
        if reply.base_due and base_of(after).size_bytes > reply.inline_budget_bytes:
            large_bytes = base_of(after).size_bytes
        elif reply.base_due:
            base = base_of(after)
        ack = ack_of(
            reply.chain,
            self._sent(delta, reply),
            self.batch,
            where[1],
            where[0],
            stamp_ms=self._stamp(),
            attempt=attempt,
            base=base,
            large_bytes=large_bytes,
            max_event_ms=random.choice([None, self.batch * 10 + random.randint(0, 30)]),
        )
        self.prepared.append(Prepared(started, ack, where, after))
        if fate == "acks":
            self._send(len(self.prepared) - 1)

    def _initial(self, reply: BeginReply, where: Where) -> State:
        """What the operator begins with: its object is there as long as somebody may ask for it."""
        first = self.first_epochs[where[0]]
        assert len(reply.initial) == (self.batch == first)
        return (
            replayed({}, self._whole(reply.initial[0].name), reply.initial[0].digest)
            if reply.initial
            else {}
        )

    def _next_watermark(self, epoch: int) -> int:
        """The watermark after ``epoch``: the smallest of all operators', and never back."""
        seen = [(uid, self.seen[epoch].get(uid)) for uid in self.parallelism]
        candidates = [0 if ms is None else ms - DELAYS_MS[uid] for uid, ms in seen]
        return max(self.watermarks[epoch], min(candidates))

    def _check_times(self, reply: BeginReply) -> None:
        last = self.batch - 1
        if not self.logged or self.batch not in self.watermarks:
            self.watermarks[self.batch] = self._next_watermark(last)
        assert reply.watermark_ms == self.watermarks[self.batch]
        assert reply.late_watermark_ms == self.watermarks[last]

    def _sent(self, part: SlicePart, reply: BeginReply) -> SlicePart:
        """What is over the inline budget becomes an object before the ack."""
        if part.size_bytes <= reply.inline_budget_bytes:
            return part
        name = data_name(reply.generation, self.batch, new_id())
        self.store.put(name, [part.data])
        return SlicePart(digest=part.digest, size_bytes=part.size_bytes, rows=part.rows, name=name)

    def _begin(
        self, started: Started, where: Where, host: str, attempt: int, *, half: bool
    ) -> tuple[BeginReply | None, Copy | None]:
        """Begin, and carry the plan out; None if the worker was told to die on the way."""
        copy = self.copies.setdefault((host, where), Copy())
        damaged: set[str] = set()
        while True:
            request = begin_of(
                self.batch,
                where[1],
                where[0],
                stamp_ms=self._stamp(),
                attempt=attempt,
                copy=copy.described(damaged),
                host=host,
            )
            try:
                reply, bodies = started.session.begin(request)
            except (FencedError, CommitUnknownError):  # of a record that was on its way
                self.crash()
                return None, None
            except (CorruptionError, ObjectNotFoundError):
                assert self.hurt  # never without damage
                self._heal()
                self.crash()  # it remembers what it found damaged
                return None, None
            assert reply.base_epoch == self.batch - 1
            self._check_times(reply)
            if reply.fresh and copy.epoch is not None:
                assert reply.reason
            if reply.fresh:
                copy = self.copies[host, where] = Copy()
            try:
                whole = self._carry_out(copy, reply, bodies, half=half)
            except Damaged as found:
                digest = found.digest
                if digest in damaged:
                    raise AssertionError("what is damaged was not gone around") from found
                damaged.add(digest)
                copy = self.copies[host, where] = Copy()
                continue
            if whole:
                return reply, copy
            if half:
                return reply, None

    def _object(self, name: str, digest: str) -> bytes:
        """An object as a worker reads it: checked."""
        try:
            data = self.store.get(name)
        except ObjectNotFoundError:
            data = b""
            assert name in self.hurt  # nothing else deletes what is needed
        if blake3(data).hexdigest() != digest:
            assert name in self.hurt
            raise Damaged(digest)
        return data

    def _files_state(self, data: bytes, digest: str) -> State:
        state: State = {}
        for file in decode_index(data).files:
            try:
                state = replayed(state, self._object(file.object, file.digest), file.digest)
            except Damaged as found:
                raise Damaged(digest) from found
        return state

    def _carry_out(self, copy: Copy, reply: BeginReply, bodies: list[bytes], *, half: bool) -> bool:
        """As :meth:`_carried_out`; what is damaged is named as the coordinator wants it named."""
        try:
            return self._carried_out(copy, reply, bodies, half=half)
        except Damaged as found:
            kinds = {step.digest: step.kind for step in (*reply.layers, *reply.steps)}
            raise Damaged(slice_key(kinds[found.digest], found.digest)) from found

    def _carried_out(
        self, copy: Copy, reply: BeginReply, bodies: list[bytes], *, half: bool
    ) -> bool:
        """False where a local delta turned out damaged, or the worker died half way."""
        inline = iter(bodies)
        if reply.fresh and not reply.steps:
            copy.stand_at(reply.job_id, reply.durable_epoch, reply.durable_chain)
        for step in reply.steps:
            if step.source == "local":
                assert not reply.fresh
                data = copy.deltas[step.epoch, step.digest]
                if data == b"damaged":
                    del copy.deltas[step.epoch, step.digest]
                    return False
            elif step.source == "object":
                data = self._object(step.name, step.digest)
            else:
                data = next(inline) if step.size_bytes else b""
            if step.kind == "files":
                assert blake3(data).hexdigest() == step.digest
                after = self._files_state(data, step.digest)
            else:
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
        state = copy.state
        for layer in reply.layers:
            if layer.source == "local":
                data = copy.deltas[layer.epoch, layer.digest]
                if data == b"damaged":
                    del copy.deltas[layer.epoch, layer.digest]
                    return False
            elif layer.source == "object":
                data = self._object(layer.name, layer.digest)
            else:
                data = next(inline) if layer.size_bytes else b""
            state = replayed(state, data, layer.digest)
            assert state == self.truth[layer.epoch].get(self._where_of(copy), {})
        assert next(inline, None) is None
        return True

    def _where_of(self, copy: Copy) -> Where:
        return next(where for (_, where), one in self.copies.items() if one is copy)

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
        self.events[one.where] = one.ack.max_event_ms
        everyone = {w for w in self.wheres if w[0] == one.where[0]}
        complete = everyone <= self.acked.keys()
        assert reply.durable is (complete and not one.started.coordinator.run.asynchronous)
        if complete:
            self.durable.add(one.where[0])

    # --- records on their way, and bases

    @rule(random=st.randoms(use_true_random=False))
    def records_land(self, random: Random) -> None:
        """Of the driver that runs, or of one that was killed a moment ago, or of a zombie."""
        for started in [*self.older[-2:], *([self.current] if self.current else [])]:
            behind = self.behind[id(started)]
            for _ in range(random.randint(0, len(behind.queue))):
                behind.write_one()

    def _finish_upload(self, number: int, files: bool | None = None) -> None:
        one = self.uploads.pop(number)
        full = base_of(one.state)
        name = base_file_name(one.generation, one.grant.id, "1.sst")
        if one.grant.whole_limit_bytes:
            self.store.put(name, [full.data])
            kind, sent_bytes = "base", full.size_bytes
            part = SlicePart(
                digest=full.digest, size_bytes=full.size_bytes, rows=full.rows, name=name
            )
        else:
            granted = decode_index(one.grant.index).files if one.grant.index else []
            same = [file for file in granted if file.digest == full.digest]
            if not same:
                self.store.put(name, [full.data])
                same = [
                    FileEntry(
                        name="1.sst", object=name, size_bytes=full.size_bytes, digest=full.digest
                    )
                ]
            data = encode_index(FileIndex(incarnation=new_id(), files=same))
            kind, sent_bytes, digest = "files", len(data), blake3(data).hexdigest()
            part = SlicePart(digest=digest, size_bytes=len(data), rows=0, data=data)
            if len(one.state) % 2:
                own = base_file_name(one.generation, one.grant.id, "index")
                self.store.put(own, [data])
                part = SlicePart(digest=digest, size_bytes=len(data), rows=0, name=own)
        uploaded = Uploaded(kind, part, full.size_bytes, sent_bytes, 0.0)
        with contextlib.suppress(StaleRequestError, FencedError, CommitUnknownError):
            one.started.session.base_done(done_of(one.grant, uploaded, one.where[1], one.where[0]))

    @precondition(lambda self: self.uploads)
    @rule(random=st.randoms(use_true_random=False))
    def bases_arrive(self, random: Random) -> None:
        for _ in range(random.randint(1, len(self.uploads))):
            self._finish_upload(random.randrange(len(self.uploads)))

    @precondition(lambda self: self.uploads)
    @rule(random=st.randoms(use_true_random=False))
    def time_passes(self, random: Random) -> None:
        """Grants lapse; what was uploaded under them is reported all the same, or never."""
        self.now_s += 11
        if random.random() < 0.5:
            self.uploads.pop(random.randrange(len(self.uploads)))

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
        if epoch >= self.last_commit and self.current is None and started is self.older[-1]:
            return  # not a zombie yet: nobody has claimed, and Spark starts no task of such a batch
        self.attempts += 1
        request = begin_of(epoch, 0, where[0], stamp_ms=self.stamps[epoch], attempt=self.attempts)
        try:
            reply, _ = started.session.begin(request)
        except (ObjectNotFoundError, CorruptionError):  # deleted by those who came after
            return
        except (FencedError, CommitUnknownError):  # of a record that was on its way
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
        self._commit_times()
        self.acked, self.durable = {}, set()
        self._go_on()

    def _commit_times(self) -> None:
        assert self.current is not None
        seen: dict[str, int | None] = {}
        for uid in self.parallelism:
            ms = [self.events[where] for where in self.acked if where[0] == uid]
            known = [one for one in [self.seen[self.batch - 1].get(uid), *ms] if one is not None]
            seen[uid] = max(known, default=None)
        self.seen[self.batch] = seen
        due = self.current.coordinator.run.next_due()
        if due is not None:  # the run may have ended with a record that is on its way
            moves = self._next_watermark(self.batch) > self.watermarks[self.batch]
            assert (due.epoch, due.watermark_moves) == (self.batch, moves)
        self.logged = False

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
        if self.current.session.epoch is None and self._log_holds(self.batch):
            return  # an earlier run had finished it: a sink that skips what it has is believed
        # Else it would be two batches: nobody waits for the record of the one before this.
        self.behind[id(self.current)].write_all()
        if self.current.session.failure is not None:
            self.crash()
            return
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

    def _log_holds(self, batch: int) -> bool:
        known = resolve(manifests_of(self.store))
        return all(uid in known and batch in known[uid].epochs for uid in self.parallelism)

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

    @rule(random=st.randoms(use_true_random=False), how=st.sampled_from(["flipped", "gone"]))
    def an_object_is_damaged(self, random: Random, how: str) -> None:
        there = [i.name for i in self.store.list("") if not i.name.startswith("log/")]
        if not there or len(self.hurt) > 2:
            return
        name = random.choice(there)
        data = self.store.get(name)
        self.hurt.setdefault(name, data)
        if how == "gone":
            self.store.delete([name])
        else:
            self.store.put(name, [data[:-1] + bytes([data[-1] ^ 1])])

    @rule()
    def _heal(self) -> None:
        for name, data in self.hurt.items():
            self.store.put(name, [data])
        self.hurt.clear()

    @rule()
    def a_stranger_cleans(self) -> None:
        if manifests_of(self.store):
            log = CommitLog(self.store, job=JOB, writer="stranger", new_id=new_id)
            clean(self.store, lambda: outside_view(self.store, log), prefixes=ALL_PREFIXES)

    @rule(random=st.randoms(use_true_random=False))
    def a_driver_cleans(self, random: Random) -> None:
        """The one that runs, or a zombie by what it knew."""
        drivers = [one for one in [*self.older[-2:], self.current] if one is not None]
        if drivers:
            one = random.choice(drivers)
            if one.session.epoch is not None:
                one.session.cleaner._run(one.coordinator, one.tenure)

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
                        data = self._whole(entry.object)
                    else:
                        name = record_name(step.ref.sequence)
                        data = parse_record(self.store.get(name), name).slice(entry)
                    if entry.kind == "files":
                        for file in decode_index(data).files:
                            state = replayed(state, self._whole(file.object), file.digest)
                    else:
                        state = replayed(state, data, entry.digest)
                found[uid, subtask] = state
        return found

    def _whole(self, name: str) -> bytes:
        return self.hurt[name] if name in self.hurt else self.store.get(name)

    @invariant()
    def the_log_alone_brings_the_last_committed_batch_back(self) -> None:
        epoch = self.last_commit - self.read_in_part
        operators = resolve(manifests_of(self.store))
        known = {uid for uid, _ in self.truth[epoch]}
        if any(uid not in operators or operators[uid].last_epoch < epoch for uid in known):
            # Its record is still on its way, or was lost: then Spark goes back by one batch.
            assert self.were_behind or epoch == -1
            epoch -= 1
        found = self._from_the_log(epoch)
        for where, state in self.truth[epoch].items():
            assert found[where] == state


TestAJobThroughCrashes = JobMachine.TestCase
TestAJobThroughCrashes.settings = settings(
    max_examples=settings.default.max_examples, stateful_step_count=40
)
