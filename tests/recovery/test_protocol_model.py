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
from random import Random

from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from recovery.decide.restore_plan import plan_restore
from recovery.decide.start_batch import LocationProgress, Verdict, decide_start
from snapshot.formats.file_index import FileEntry, FileIndex, decode_index, encode_index
from snapshot.formats.object_names import base_file_name
from snapshot.formats.record import parse_record, record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.initial_state_checks import takes_initial
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import LocalCopy, SlicePart
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view
from statebackend.errors import (
    CommitUnknownError,
    CorruptionError,
    FencedError,
    IncompleteEpochError,
    ObjectNotFoundError,
    StaleRequestError,
)
from statebackend.runtime.driver.job import Job
from statebackend.runtime.worker.background_upload import Uploaded
from tests.recovery.driver import (
    JOB,
    Started,
    State,
    ack_of,
    base_of,
    begin_of,
    done_of,
    manifests_of,
    new_id,
    part_of,
    replayed,
)
from tests.recovery.modelled_attempts import ModelledAttempts
from tests.recovery.modelled_job import (
    BUDGETS,
    DELAYS_MS,
    FATES,
    INITIAL,
    QUERY,
    Behind,
    Prepared,
    Where,
)


class JobMachine(ModelledAttempts):
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

    # --- batches

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
