"""Drivers and workers without Spark, for the tests of the protocol and of recovery.

`Run` is a coordinator whose records go into a list: the pure protocol. `Started` is a run with a
real log in an object store behind it. State is a plain dict, deltas are real.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from recovery.decide.restore_plan import RestorePlan
from snapshot.barriers.job_watermark import NextDue
from snapshot.formats.delta import decode_delta, encode_delta
from snapshot.formats.lineage_digest import chain
from snapshot.formats.object_names import data_name
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.base_leases import Grant
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.epoch_acks import Acked
from snapshot.protocol.lineage import OperatorLineage, resolve
from snapshot.protocol.messages import (
    PROTOCOL,
    AckRequest,
    BaseDone,
    BaseGrant,
    BaseRenewal,
    BeginRequest,
    LocalCopy,
    SlicePart,
    Use,
)
from snapshot.protocol.operators import Admitted, CommitWork, OperatorSpec, operators_setting
from snapshot.protocol.running_job import RunningJob
from snapshot.protocol.stamps import Stamps
from snapshot.protocol.tenure import Patience
from snapshot.storage.object_store import ObjectStore
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.worker.background_upload import Uploaded
from statebackend.system import SYSTEM, System

JOB, JOB_ID = "clicks", "job-0"
MAX_PARALLELISM = 8
Changes = Mapping[bytes, bytes | None]
State = dict[bytes, bytes]
Specs = Mapping[str, Mapping[str, Any]]  # by operator: fields of its spec

_ids = itertools.count()


def new_id() -> str:
    return f"id{next(_ids):06}"


def stamp_of(epoch: int) -> int:
    """The stamp that Spark gives a batch, and keeps when it repeats it."""
    return 1_700_000_000_000 + 1000 * epoch


def spec_of(
    uid: str,
    parallelism: int,
    max_parallelism: int = MAX_PARALLELISM,
    more: Mapping[str, Any] | None = None,
) -> OperatorSpec:
    """A spec; ``more``: other fields than those of every operator."""
    spec = OperatorSpec(
        uid=uid,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        states={"count": 1},
        schemas={"count": "{}"},
    )
    return msgspec.structs.replace(spec, **(more or {}))


def part_of(changes: Changes) -> SlicePart:
    """A slice as a task makes it: no bytes at all where nothing changed."""
    keys = sorted(changes)
    data = encode_delta(keys, [changes[key] for key in keys]).data if keys else b""
    return SlicePart(
        digest=blake3(data).hexdigest(), size_bytes=len(data), rows=len(keys), data=data
    )


def base_of(state: State) -> SlicePart:
    keys = sorted(state)
    full = encode_delta(keys, [state[key] for key in keys])
    return SlicePart(
        digest=full.digest.hex(), size_bytes=len(full.data), rows=full.rows, data=full.data
    )


def changed(state: State, changes: Changes) -> State:
    """A new state; None deletes."""
    merged = {**state, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def replayed(state: State, data: bytes, digest: str) -> State:
    """A new state with a delta's bytes on top, digest checked."""
    if not data:
        assert digest == blake3(b"").hexdigest()
        return dict(state)
    rows = decode_delta(data, digest=bytes.fromhex(digest), name="slice")
    return changed(state, dict(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True)))


def follow(before: str, digest: str) -> str:
    return chain(bytes.fromhex(before), bytes.fromhex(digest)).hex()


def begin_of(
    epoch: int,
    subtask: int = 0,
    operator: str = "op",
    *,
    stamp_ms: int | None = None,
    attempt: int = 0,
    copy: LocalCopy | None = None,
    host: str = "host",
    nonce: int = 0,
) -> BeginRequest:
    return BeginRequest(
        protocol=PROTOCOL,
        job=JOB,
        session="session",
        operator=operator,
        subtask=subtask,
        epoch=epoch,
        stamp_ms=stamp_of(epoch) if stamp_ms is None else stamp_ms,
        query_id="query",
        attempt=attempt,
        host=host,
        executor="executor",
        copy=copy or LocalCopy(),
        nonce=nonce,
    )


def ack_of(
    before: str,
    part: SlicePart,
    epoch: int,
    subtask: int = 0,
    operator: str = "op",
    *,
    stamp_ms: int | None = None,
    attempt: int = 0,
    base: SlicePart | None = None,
    large_bytes: int = 0,
    max_event_ms: int | None = None,
    next_timer_ms: int | None = None,
    use: Use | None = None,
) -> AckRequest:
    return AckRequest(
        protocol=PROTOCOL,
        job=JOB,
        session="session",
        operator=operator,
        subtask=subtask,
        epoch=epoch,
        stamp_ms=stamp_of(epoch) if stamp_ms is None else stamp_ms,
        attempt=attempt,
        chain=follow(before, part.digest),
        delta=part,
        base=base,
        large_bytes=large_bytes,
        max_event_ms=max_event_ms,
        next_timer_ms=next_timer_ms,
        use=use or Use(),
    )


def done_of(
    grant: BaseGrant | Grant, uploaded: Uploaded, subtask: int = 0, operator: str = "op"
) -> BaseDone:
    return BaseDone(
        protocol=PROTOCOL,
        job=JOB,
        session="session",
        operator=operator,
        subtask=subtask,
        grant=grant.id,
        epoch=grant.epoch,
        chain=grant.chain,
        kind=uploaded.kind,
        part=uploaded.part,
        state_bytes=uploaded.state_bytes,
        uploaded_bytes=uploaded.uploaded_bytes,
        seconds=uploaded.seconds,
    )


def renewal_of(
    grant: BaseGrant,
    subtask: int = 0,
    operator: str = "op",
    *,
    given_up: bool = False,
    why: str = "",
    harmless: bool = False,
) -> BaseRenewal:
    return BaseRenewal(
        protocol=PROTOCOL,
        job=JOB,
        session="session",
        operator=operator,
        subtask=subtask,
        grant=grant.id,
        given_up=given_up,
        why=why,
        harmless=harmless,
    )


class Run:
    """One run of a coordinator; `records` is its log, which may be handed to the next run.

    ``forget`` takes what is given up out of what the log said.
    """

    def __init__(
        self,
        parallelism: Mapping[str, int] | int = 2,
        *,
        records: list[Manifest] | None = None,
        slices: dict[str, bytes] | None = None,
        base_every_epochs: int = 64,
        max_parallelism: int = MAX_PARALLELISM,
        first_epoch: int | None = None,
        asynchronous: bool = False,
        specs: Specs | None = None,
        stamps: Stamps | None = None,
        forget: Callable[[Iterable[OperatorLineage]], None] = list,
    ) -> None:
        self.parallelism = {"op": parallelism} if isinstance(parallelism, int) else parallelism
        self.specs = dict(specs or {})
        self.asynchronous = asynchronous
        self.chains: dict[tuple[str, int, int], str] = {}  # as begins named them
        self.records = [] if records is None else records
        self.slices = {} if slices is None else slices
        self.base_every_epochs = base_every_epochs
        resolved = resolve(self.records)
        forget(resolved.values())
        self.coordinator = Coordinator(
            RunningJob(
                job=JOB,
                job_id=JOB_ID,
                generation=1,
                name=new_id(),
                query_id="query",
                specs={
                    uid: spec_of(uid, p, max_parallelism, self.specs.get(uid))
                    for uid, p in self.parallelism.items()
                },
                lineages={uid: one for uid, one in resolved.items() if uid in self.parallelism},
                inline_budget_bytes=1 << 20,
                first_epoch=first_epoch,
                asynchronous=asynchronous,
                stamps=Stamps(stamps),
            ),
            bases=BasePolicy(every_epochs=base_every_epochs),
            now_s=lambda: 0.0,
            new_id=new_id,
        )

    def again(
        self,
        parallelism: Mapping[str, int] | None = None,
        *,
        first_epoch: int | None = None,
        specs: Specs | None = None,
        same_process: bool = False,
    ) -> Run:
        """The next run of the job, after a crash."""
        return Run(
            parallelism or self.parallelism,
            records=self.records,
            slices=self.slices,
            base_every_epochs=self.base_every_epochs,
            first_epoch=first_epoch,
            asynchronous=self.asynchronous,
            specs=self.specs if specs is None else specs,
            stamps=self.coordinator.run.stamps if same_process else None,
        )

    def lineage(self, operator: str = "op") -> OperatorLineage:
        return self.coordinator.run.operators[operator].lineage

    def begin(
        self,
        epoch: int,
        subtask: int = 0,
        operator: str = "op",
        *,
        stamp_ms: int | None = None,
        attempt: int = 0,
        nonce: int = 0,
    ) -> Admitted:
        request = begin_of(
            epoch, subtask, operator, stamp_ms=stamp_ms, attempt=attempt, nonce=nonce
        )
        admitted = self.coordinator.begin(request)
        self.chains[operator, subtask, epoch - 1] = admitted.chain
        return admitted

    def ack(
        self,
        epoch: int,
        subtask: int = 0,
        operator: str = "op",
        *,
        changes: Changes | None = None,
        attempt: int = 0,
        stamp_ms: int | None = None,
        base: State | None = None,
        max_event_ms: int | None = None,
        next_timer_ms: int | None = None,
        use: Use | None = None,
    ) -> Acked:
        part = part_of({b"k": b"%d" % epoch} if changes is None else changes)
        full = None if base is None else base_of(base)
        for one in (part, full):
            if one is not None:
                self.slices[one.digest] = one.data
        before = self.lineage(operator).subtasks[subtask].chain_at(epoch - 1)
        before = before or self.chains[operator, subtask, epoch - 1]
        return self.coordinator.ack(
            ack_of(
                before,
                part,
                epoch,
                subtask,
                operator,
                stamp_ms=stamp_ms,
                attempt=attempt,
                base=full,
                max_event_ms=max_event_ms,
                next_timer_ms=next_timer_ms,
                use=use,
            )
        )

    def append(self, work: CommitWork) -> Manifest:
        """The record becomes durable; the coordinator has not heard of it yet."""
        sequence = self.records[-1].sequence + 1 if self.records else 0
        # As the session does: what is retained never grows backwards.
        oldest = max([work.manifest.oldest_needed, *(r.oldest_needed for r in self.records[-1:])])
        manifest = msgspec.structs.replace(work.manifest, sequence=sequence, oldest_needed=oldest)
        self.records.append(manifest)
        return manifest

    def commit(self, operator: str = "op") -> Manifest | None:
        """Write the record that is due, if one is."""
        assert self.coordinator.run.epoch is not None
        work = self.coordinator.records.take_due(operator, self.coordinator.run.epoch)
        if work is None:
            return None
        manifest = self.append(work)
        self.coordinator.records.committed(work, manifest)
        return manifest

    def finish(
        self,
        epoch: int,
        operators: Iterable[str] | None = None,
        *,
        changes: Changes | None = None,
        attempt: int = 0,
        stamp_ms: int | None = None,
        max_event_ms: int | None = None,
        next_timer_ms: int | None = None,
    ) -> None:
        """A whole epoch of these operators (all of them), begun, acked and durable."""
        for uid in operators or self.parallelism:
            for subtask in range(self.parallelism[uid]):
                self.begin(epoch, subtask, uid, attempt=attempt, stamp_ms=stamp_ms)
                self.ack(
                    epoch,
                    subtask,
                    uid,
                    changes=changes,
                    attempt=attempt,
                    stamp_ms=stamp_ms,
                    max_event_ms=max_event_ms,
                    next_timer_ms=next_timer_ms,
                )
            assert self.commit(uid) is not None


def state_by(plan: RestorePlan, slices: Mapping[str, bytes]) -> State:
    """What a plan without a local copy brings back."""
    assert plan.fresh
    state: State = {}
    for step in plan.steps:
        state = replayed(state, slices[step.ref.entry.digest], step.ref.entry.digest)
    return state


class Started:
    """One start of a job on an object store: claimed, resolved and open for requests."""

    def __init__(
        self,
        store: ObjectStore,
        parallelism: Mapping[str, int],
        *,
        first_epoch: int = 0,
        base_every_epochs: int = 64,
        inline_budget_bytes: int = 1 << 20,
        policy: BasePolicy | None = None,
        now_s: Callable[[], float] = lambda: 0.0,
        asynchronous: bool = False,
        whole_limit_bytes: int = 8 << 20,
        clean_every_epochs: int = 0,
        patience: Patience | None = None,
        specs: Specs | None = None,
        initial: Mapping[str, Mapping[int, State]] | None = None,
        on_epoch_acked: Callable[[NextDue], None] | None = None,
        system: System = SYSTEM,
    ) -> None:
        self.store = store
        self.parallelism = dict(parallelism)
        log = CommitLog(store, job=JOB, writer=new_id(), new_id=new_id, patience=patience)
        known = resolve(log.manifests())
        firsts = {
            uid: known[uid].first_epoch if uid in known else first_epoch for uid in parallelism
        }
        self.tenure = log.claim(query_id="query", settings=operators_setting(firsts))
        fields = {uid: dict((specs or {}).get(uid, {})) for uid in parallelism}
        for uid, states in (initial or {}).items():
            fields[uid]["initial"] = {
                n: self._object_of(state, first_epoch) for n, state in states.items()
            }
        self.coordinator = Coordinator(
            RunningJob(
                job=JOB,
                job_id=self.tenure.job_id,
                generation=self.tenure.generation,
                name=new_id(),
                query_id="query",
                specs={
                    uid: spec_of(uid, p, more=fields[uid]) for uid, p in self.parallelism.items()
                },
                lineages={
                    uid: one for uid, one in resolve(log.manifests()).items() if uid in parallelism
                },
                inline_budget_bytes=inline_budget_bytes,
                first_epoch=first_epoch,
                asynchronous=asynchronous,
            ),
            bases=policy or BasePolicy(every_epochs=base_every_epochs),
            now_s=now_s,
            new_id=new_id,
        )
        self.session = RunSession(
            store=store,
            log=log,
            gate_timeout_s=0,
            whole_limit_bytes=whole_limit_bytes,
            clean_every_epochs=clean_every_epochs,
            on_epoch_acked=on_epoch_acked,
            system=system,
        )
        self.session.open(self.coordinator, self.tenure)

    def _object_of(self, state: State, epoch: int) -> SlicePart:
        """Initial state in an object of its own, as a driver makes it."""
        part = base_of(state)
        name = data_name(self.tenure.generation, epoch, new_id())
        self.store.put(name, [part.data])
        return msgspec.structs.replace(part, data=b"", name=name)


def manifests_of(store: ObjectStore, job: str = JOB) -> list[Manifest]:
    """What a reader of the log finds now."""
    return CommitLog(store, job=job, writer="reader", new_id=new_id).manifests()


def without(records: Sequence[Manifest], oldest: int) -> list[Manifest]:
    """The records that a retention which believes `oldest_needed` would have left."""
    return [record for record in records if record.sequence >= oldest]
