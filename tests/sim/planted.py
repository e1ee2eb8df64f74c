"""What a planted bug changes: names in modules and classes, and what is put there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

import recovery.decide.restore_plan
import recovery.decide.start_batch
import recovery.local.local_copies
import recovery.restore.restorer
import snapshot.log.commit_log
import snapshot.retention.deletable
import statebackend.runtime.worker.background_upload
from recovery.decide.restore_plan import Step, StepSource
from recovery.decide.start_batch import COMMITS, OFFSETS, LocationProgress
from recovery.local.store_directory import StoreDirectory
from recovery.restore.restorer import Restorer
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.base_leases import BaseBook, Grant
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.epoch_acks import Acked, EpochState
from snapshot.protocol.lineage import SubtaskLineage
from snapshot.protocol.record_commits import RecordCommits
from snapshot.protocol.running_job import RunningJob
from snapshot.protocol.running_operator import RunningOperator
from snapshot.protocol.stamps import Stamps
from snapshot.protocol.tenure import Verdict
from snapshot.retention.deletable import Fate
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.store import Marker, RocksStore
from statebackend.runtime.driver import session
from statebackend.runtime.driver.session import RunSession
from statebackend.spark import session_settings as atstart
from statebackend.spark.start import go_back_to as goback
from statebackend.spark.start import location_rewind as goingback
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.location_rewind import LocationRewind
from statebackend.spark.start.start_point import StartPoint
from tests.planted.bug import Patches
from tests.sim.kernel import current
from tests.sim.seams import decoded
from tests.sim.task import SimEpoch


def first_attempt_wins() -> Patches:
    def take(self: EpochState, ack: Any) -> Acked:
        self.acks.setdefault(ack.subtask, ack)
        return Acked.COMPLETE if len(self.acks) == self.parallelism else Acked.PARTIAL

    yield EpochState, "take", take


def last_ack_wins() -> Patches:
    def take(self: EpochState, ack: Any) -> Acked:
        self.acks[ack.subtask] = ack
        return Acked.COMPLETE if len(self.acks) == self.parallelism else Acked.PARTIAL

    yield EpochState, "take", take


def a_look_counts() -> Patches:
    yield EpochState, "acks", property(lambda self: self._latest)


def no_superseding_record() -> Patches:
    really = EpochState.take_due

    def take_due(self: EpochState) -> Any:
        return None if self._taken else really(self)

    yield EpochState, "take_due", take_due


def ack_without_barrier() -> Patches:
    yield SimEpoch, "wants_barrier", False


def claims_deleted() -> Patches:
    really = snapshot.retention.deletable._record_fate

    def record(name: str, view: Any) -> Fate:
        fate = really(name, view)
        sequence = snapshot.retention.deletable.parse_record_name(name)
        old = sequence is not None and sequence < view.oldest_needed
        return Fate.DEAD if old and fate is Fate.LIVE else fate

    yield snapshot.retention.deletable, "_record_fate", record


def applied_too_early() -> Patches:
    really = SimEpoch._snapshot

    def made(self: SimEpoch, opened: Any, table: Any) -> Any:
        request = really(self, opened, table)
        reply = opened.reply
        if not reply.layers and request.delta.data:
            rows = decoded(request.delta.data, arrow=self._config.arrow)
            marker = Marker(
                job_id=reply.job_id,
                operator="op",
                key_group_start=reply.key_group_start,
                key_group_end=reply.key_group_end,
                epoch=self._context.epoch,
                chain=request.chain,
            )
            opened.store.apply([key for key, _ in rows], [value for _, value in rows], marker)
        return request

    # With a plan that believes the epoch's number alone, as whoever applies early would have it.
    yield SimEpoch, "_snapshot", made
    yield from chain_ignored()


def chain_ignored() -> Patches:
    def holds(self: SubtaskLineage, epoch: int, digest: str) -> bool:
        return self.chain_at(epoch) is not None or epoch + 1 in self.deltas

    yield SubtaskLineage, "holds", holds


def retention_by_record() -> Patches:
    really = RecordCommits._oldest_needed

    def oldest_needed(self: RecordCommits) -> int:
        running = self._run.operators.values()
        newest = [e.sequence for o in running for e in o.lineage.epochs.values()]
        return max([really(self), *newest])

    yield RecordCommits, "_oldest_needed", oldest_needed


def pruned_too_early() -> Patches:
    really = RunningOperator.oldest_needed

    def oldest_needed(self: RunningOperator, epoch: int) -> int | None:
        return really(self, epoch + 1) if epoch in self.lineage.epochs else really(self, epoch)

    yield RunningOperator, "oldest_needed", oldest_needed


def taken_slot_is_success() -> Patches:
    really = snapshot.log.commit_log.judge

    def judge(outcome: Any, found: Any, own: str) -> Verdict:
        verdict = really(outcome, found, own)
        return Verdict.COMMITTED if verdict is Verdict.FENCED else verdict

    yield snapshot.log.commit_log, "judge", judge


def unknown_is_success() -> Patches:
    really = snapshot.log.commit_log.judge

    def judge(outcome: Any, found: Any, own: str) -> Verdict:
        verdict = really(outcome, found, own)
        return Verdict.COMMITTED if verdict is Verdict.UNKNOWN else verdict

    yield snapshot.log.commit_log, "judge", judge


def generation_not_raised() -> Patches:
    really = CommitLog._claimed

    def claimed(self: CommitLog, manifest: Any) -> Any:
        lower = max(1, manifest.generation - 1)
        return really(self, msgspec.structs.replace(manifest, generation=lower))

    yield CommitLog, "_claimed", claimed


def no_wait_for_the_record_before() -> Patches:
    really = RunSession._commit_behind

    def behind(self: RunSession, coordinator: Any, tenure: Any, ack: Any) -> None:
        really(self, coordinator, tenure, ack)

    yield RunSession, "_commit_behind", behind


def ack_before_the_record() -> Patches:
    really = RunSession._commit

    def commit(self: RunSession, coordinator: Any, tenure: Any, work: Any) -> None:
        if coordinator.run.asynchronous:
            really(self, coordinator, tenure, work)
        else:  # the record is written by the way, and taken for durable at once
            actor = current()
            actor.sched.spawn(actor.process, lambda: really(self, coordinator, tenure, work))

    yield RunSession, "_commit", commit


def grants_ignored() -> Patches:
    yield BaseBook, "open_grants", lambda self: set()


def lapsed_grants_count() -> Patches:
    really = BaseBook._held

    def held(self: BaseBook, subtask: int, grant_id: str) -> Grant:
        known = self.every_grant.get(grant_id)
        if known is None:
            return really(self, subtask, grant_id)
        return self.grants.setdefault(subtask, known)

    grant = BaseBook.grant

    def given(self: BaseBook, *asked: Any) -> Grant | None:
        one = grant(self, *asked)
        if one is not None:
            self.every_grant[one.id] = one
        return one

    yield BaseBook, "every_grant", {}
    yield BaseBook, "grant", given
    yield BaseBook, "_held", held


def pending_ignored() -> Patches:
    yield RunningJob, "pending_names", lambda self: set()
    really = snapshot.retention.deletable._data_fate

    def data(name: str, view: Any) -> Fate:
        fate = really(name, view)
        return Fate.DEAD if fate is Fate.DRIVERS and view.is_driver else fate

    yield snapshot.retention.deletable, "_data_fate", data


def garbage_is_kept() -> Patches:
    really = snapshot.retention.deletable._data_fate

    def data(name: str, view: Any) -> Fate:
        fate = really(name, view)
        return Fate.DRIVERS if fate is Fate.DEAD else fate

    yield snapshot.retention.deletable, "_data_fate", data


def bases_are_kept() -> Patches:
    really = snapshot.retention.deletable._base_fate

    def base(name: str, view: Any) -> Fate:
        fate = really(name, view)
        return Fate.DRIVERS if fate is Fate.DEAD else fate

    yield snapshot.retention.deletable, "_base_fate", base


def only_the_commit_taken_back() -> Patches:
    def next_to_take(location: LocationProgress, batch: int) -> tuple[str, int] | None:
        return (COMMITS, location.last_commit) if location.last_commit >= batch else None

    yield goingback, "next_to_take", next_to_take


def no_rewind() -> Patches:
    def next_to_take(location: LocationProgress, batch: int) -> tuple[str, int] | None:
        return (OFFSETS, location.last_offset) if location.last_offset > batch else None

    yield goingback, "next_to_take", next_to_take


def taken_for_good() -> Patches:
    """As it was: whoever goes back deletes, and does not look whether he was overtaken."""
    yield LocationRewind, "_look_again", lambda self, own: None
    yield LocationRewind, "repair", lambda self, recorded: None
    yield CheckpointLocation, "taken_back", lambda self: []


def no_lease() -> Patches:
    class Fcntl:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(file: int, how: int) -> None:
            """Everybody gets it."""

    yield recovery.local.local_copies, "fcntl", Fcntl


def files_by_name() -> Patches:
    def reusable(granted: Any, shared: Any) -> Any:
        files = granted.files if granted is not None else []
        return {f.name: f for f in files if not f.name.startswith(("CURRENT", "MANIFEST-"))}

    yield statebackend.runtime.worker.background_upload, "reusable", reusable
    really = statebackend.runtime.worker.background_upload.BaseUpload._file

    def file(self: Any, path: Any, size_bytes: int, known: Any) -> Any:
        return known if known is not None else really(self, path, size_bytes, None)

    yield statebackend.runtime.worker.background_upload.BaseUpload, "_file", file


def overtaken_goes_on() -> Patches:
    yield StartPoint, "check_not_overtaken", lambda self, manifests, first_epoch: None


# --- another parallelism --------------------------------------------------------------------


def parents_not_needed() -> Patches:
    really = SubtaskLineage.oldest_needed

    def oldest_needed(self: SubtaskLineage, epoch: int) -> int | None:
        return really(replace(self, parents=()), epoch)

    yield SubtaskLineage, "oldest_needed", oldest_needed


def parents_forgotten() -> Patches:
    really = SubtaskLineage.prune

    def prune(self: SubtaskLineage, epoch: int) -> None:
        really(self, epoch)
        if epoch > self.start_epoch:
            self.parents, self.rescaled = (), False

    yield SubtaskLineage, "prune", prune


def rows_not_clipped() -> Patches:
    yield recovery.restore.restorer, "clip_pieces", lambda rows, first, last: rows


def any_origin_known() -> Patches:
    really = session.plan_restore

    def plan_restore(copy: Any, lineage: SubtaskLineage, *, avoid: Any, **more: Any) -> Any:
        # Every first base after a change of parallelism is damaged: else it shows too rarely.
        return really(copy, lineage, avoid={*avoid, *_first_bases(lineage)}, **more)

    yield session, "plan_restore", plan_restore
    yield SubtaskLineage, "origin_known", True


def _first_bases(lineage: SubtaskLineage) -> list[str]:
    first = lineage.start_epoch + 1
    own = [ref.key for epoch, ref in lineage.bases.items() if lineage.rescaled and epoch <= first]
    return own + [key for parent in lineage.parents for key in _first_bases(parent)]


def folder_by_index() -> Patches:
    def folder(key_groups: KeyGroupRange) -> str:
        return str(round(key_groups.start / len(key_groups)))

    yield recovery.local.local_copies, "_folder", folder


def ancestor_as_it_is() -> Patches:
    def part(lineage: SubtaskLineage, epoch: int, keep: KeyGroupRange, known: Any) -> Any:
        copy, at = known.copies.get(lineage.key_groups), lineage.key_groups
        if copy is None or copy.epoch is None:
            return recovery.decide.restore_plan._without_copy(lineage, epoch, keep, known)
        return [Step(None, StepSource.LOCAL, keep, at, copy.epoch, copy.chain)]

    yield recovery.decide.restore_plan, "_part", part


def child_marked_first() -> Patches:
    really = Restorer._inherit

    def inherit(self: Restorer, held: Any, reply: Any, steps: Any, bodies: Any) -> None:
        held.child = self._marker(reply, reply.durable_epoch, reply.durable_chain)
        really(self, held, reply, steps, bodies)

    def adopt_store(self: Any, store: Any) -> Any:
        store.apply((), (), self.child)
        store.flush()
        self.store = store
        return store

    before = RocksStore.write_before

    def write_before(self: RocksStore, marker: Marker | None) -> None:
        if marker is not None:
            before(self, marker)

    yield Restorer, "_inherit", inherit
    yield StoreDirectory, "adopt_store", adopt_store
    yield RocksStore, "write_before", write_before


def marker_first() -> Patches:
    really = RocksStore._write_checked

    def apply(self: RocksStore, keys: Any, values: Any, marker: Any) -> None:
        really(self, (), (), marker)
        really(self, keys, values, None)

    def apply_batches(self: RocksStore, batches: Any, marker: Any) -> None:
        really(self, (), (), marker)
        for keys, values in batches:
            really(self, keys, values, None)

    yield RocksStore, "apply", apply
    yield RocksStore, "apply_batches", apply_batches


# --- breaks of issue 18, as they were --------------------------------------------------------


def time_is_the_stamp() -> Patches:
    """Also those of the log's epochs, and whatever this process saw is not asked."""
    really = Coordinator._first_epoch

    def first_epoch(self: Coordinator, request: Any) -> None:
        epochs = [one.epochs.items() for one in self.run.lineages.values()]
        times = {one.stamp_ms for known in epochs for n, one in known if n < request.epoch}
        stamps = self.run.stamps
        stamps.current, stamps.__dict__["times"] = None, times
        really(self, request)

    def bind(self: Stamps, stamp_ms: int, *of: str | int) -> bool:
        times = self.__dict__["times"]
        if stamp_ms in times or stamp_ms == self.current:
            return False
        if self.current is not None:
            times.add(self.current)
        self.current = stamp_ms
        return True

    yield Coordinator, "_first_epoch", first_epoch
    yield Stamps, "bind", bind
    yield Stamps, "admit", lambda self, stamp_ms, *of: stamp_ms == self.current


def location_not_looked_at() -> Patches:
    yield recovery.decide.start_batch, "_require_files", lambda location, decision: None


def retried_in_part() -> Patches:
    always = {k: v for k, v in atstart._ALWAYS.items() if k not in atstart._RETRIED_WHOLE}
    yield atstart, "_ALWAYS", always


def newest_of_any_task() -> Patches:
    really = EpochState.take

    def take(self: EpochState, ack: Any) -> Acked:
        known = self._latest.get(ack.subtask)
        if known is not None and ack.attempt < known.attempt:
            return Acked.STALE
        return really(self, ack)

    yield EpochState, "take", take


def no_way_out() -> Patches:
    yield goback, "_ways_out", lambda possible: ""


# --- commits behind the batches --------------------------------------------------------------


def unfinished_batches_pass() -> Patches:
    """What `StateBackend.checked` asks is answered with yes, whatever is missing."""
    yield RunSession, "check_finished", lambda self, epoch: self.checks.passed(epoch)
