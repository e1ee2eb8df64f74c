"""A job's state at one epoch, as its store or a savepoint holds it; found without claiming it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql.types import StructType

from recovery.decide.live_lineages import live_lineages
from recovery.decide.restore_plan import RestorePlan
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.state_at_epoch import StateAt, last_epochs, needed_key, state_at
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import OperatorLineage, SliceRef, SubtaskLineage
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.errors import NotRestorableError, SettingError
from statebackend.operators.declared_states import StateDeclaration
from statebackend.runtime.driver.restore_records import Records
from statebackend.schema.types import schema_from_json
from statebackend.system import SYSTEM, System

__all__ = [
    "StoredJob",
    "StoredOperator",
    "StoredState",
    "find_job",
    "job_in",
    "restored_bytes",
    "stored_states",
]

_KEY: str = ""  # the name under which a record has the schema of the operator's keys


@dataclass(frozen=True)
class StoredState:
    """A state of an operator: what was declared, and its number in the keys."""

    declared: StateDeclaration
    id: int


@dataclass(frozen=True)
class StoredOperator:
    """One operator after the epoch.

    Attributes:
        last: its record of the epoch.
        moved: where the bytes of a slice really are, by record and slice: a base may be in a later
            record than the one that it is counted to.
    """

    uid: str
    lineage: OperatorLineage
    last: Manifest
    moved: Mapping[tuple[int, str], int]

    @property
    def key_schema(self) -> StructType:
        """Of its keys; without fields, if it has none."""
        text = self.last.schemas.get(_KEY)
        return schema_from_json(text) if text else StructType()

    @property
    def states(self) -> dict[str, StoredState]:
        """What it has, by name."""
        return stored_states(self.last)

    def state(self, name: str) -> StoredState:
        """One state.

        Raises:
            SettingError: it has none of that name.
        """
        states = self.states
        if name not in states:
            raise SettingError(
                f"The operator {self.uid!r} has no state {name!r} after epoch {self.last.epoch}.",
                todo=_there("states", states),
            )
        return states[name]

    def placed(self, plan: RestorePlan) -> RestorePlan:
        """A plan whose slices are read from where they are."""
        steps = tuple(
            step if step.ref is None else replace(step, ref=self.placed_slice(step.ref))
            for step in plan.steps
        )
        return replace(plan, steps=steps)

    def placed_slice(self, ref: SliceRef) -> SliceRef:
        """A slice, by the record that holds it."""
        sequence = self.moved.get((ref.sequence, needed_key(ref.entry)), ref.sequence)
        return SliceRef(sequence, ref.entry)


def stored_states(record: Manifest) -> dict[str, StoredState]:
    """The states that an operator has after the epoch of a record, by name."""
    return {
        name: StoredState(StateDeclaration.from_json(text), record.states.get(name, -1))
        for name, text in record.schemas.items()
        if name != _KEY
    }


def restored_bytes(subtask: SubtaskLineage, epoch: int) -> int:
    """What a restore reads of a subtask: its newest full copy, and the changes since."""
    found = 0
    for one, at in subtask.origins(epoch):
        base = one.base_before(at)
        found += max(base.entry.size_bytes, base.entry.state_bytes) if base else 0
        found += one.since_base(at)[1]
    return found


@dataclass(frozen=True)
class StoredJob:
    """A job after one epoch.

    Attributes:
        store: the folder of the job, or of the savepoint.
        kept: nothing that it needs is ever cleaned: it is a savepoint.
        lineages: of all epochs in the log, by operator.
    """

    store: ObjectStore
    job: str
    job_id: str
    epoch: int
    operators: dict[str, StoredOperator]
    kept: bool
    records: Records = field(repr=False)
    lineages: Mapping[str, OperatorLineage] = field(repr=False)
    manifests: Sequence[Manifest] = field(repr=False)

    def epochs(self) -> list[int]:
        """Those that the log has records of, ascending."""
        return sorted({number for one in self.lineages.values() for number in one.epochs})

    def holds(self, epoch: int) -> bool:
        """Whether the log leads to the state of every operator after an epoch."""
        if epoch > min(last_epochs(self.manifests, self.lineages).values(), default=-1):
            return False
        try:
            state_at(self.manifests, epoch, self.lineages)
        except NotRestorableError:
            return False
        return True

    def operator(self, uid: str) -> StoredOperator:
        """One operator.

        Raises:
            SettingError: there is none of that uid.
        """
        if uid not in self.operators:
            raise SettingError(
                f"The job {self.job!r} has no operator {uid!r} after epoch {self.epoch}.",
                todo=_there("operators", self.operators),
            )
        return self.operators[uid]


def find_job(
    uri: str,
    job: str | None,
    *,
    epoch: int | None = None,
    savepoint: str | None = None,
    options: StoreOptions | None = None,
    system: System = SYSTEM,
) -> StoredJob:
    """A job after an epoch: the newest durable one, one that is retained, or a savepoint's.

    Args:
        uri: the folder of all jobs. job: its name there. Neither counts with ``savepoint``.
        savepoint: the URI of a savepoint.

    Raises:
        SettingError: no job is named, or an epoch of a savepoint.
        NotRestorableError: there is no such job or savepoint, or its log does not hold the epoch.
        FormatError: what is there does not read.
        StoreUnreachableError: from the store.
    """
    if savepoint is not None:
        if epoch is not None:
            raise SettingError(
                f"Both a savepoint and the epoch {epoch} were given.",
                todo="Leave epoch= out: a savepoint holds one epoch.",
            )
        store = open_store(savepoint, new_id=system.new_id, options=options)
        found = read_savepoint(store)
        return _job_at(store, found.job, found.epoch, kept=True, system=system)
    if job is None:
        raise SettingError(
            f"No job under {uri} was named.",
            todo="Give job=; `statebackend list` shows which there are.",
        )
    store = open_store(job_folder(uri, job), new_id=system.new_id, options=options)
    return _job_at(store, job, epoch, kept=False, system=system)


def _job_at(
    store: ObjectStore, job: str, epoch: int | None, *, kept: bool, system: System
) -> StoredJob:
    log = CommitLog(store, job=job, writer="reader", new_id=system.new_id)
    manifests = log.manifests()
    if not manifests:
        raise NotRestorableError(
            f"There is no job in {store.uri}: it has no commit log.",
            todo="Check the URI and the job's name (statebackend list shows what is there).",
        )
    try:
        return job_in(store, job, manifests, epoch, system, kept=kept)
    except NotRestorableError as error:
        if kept or epoch is None or epoch < 0:  # nobody has chosen it
            raise
        raise NotRestorableError(
            error.what,
            todo="Give an epoch that the job retains (statebackend.epochs shows which), or none.",
        ) from error


def job_in(
    store: ObjectStore,
    job: str,
    manifests: list[Manifest],
    epoch: int | None,
    system: System = SYSTEM,
    *,
    kept: bool = False,
) -> StoredJob:
    """A job after an epoch, as its log was; None: the newest durable one.

    Raises:
        NotRestorableError: the log did not hold the epoch.
    """
    lineages = live_lineages(manifests)
    if epoch is None:
        epoch = min(last_epochs(manifests, lineages).values(), default=-1)
    at = state_at(manifests, epoch, lineages)
    operators = dict(_operators(at))
    job_id = manifests[-1].job_id
    records = Records(store, system.threads)
    return StoredJob(store, job, job_id, epoch, operators, kept, records, lineages, manifests)


def _operators(at: StateAt) -> Iterable[tuple[str, StoredOperator]]:
    moved = {
        (kept.manifest.sequence, needed_key(one.entry)): one.sequence
        for kept in at.records
        for one in kept.slices
    }
    for uid, lineage in sorted(at.lineages.items()):
        last = at.last(uid)
        if last is not None:
            yield uid, StoredOperator(uid, lineage, last, moved)


def _there(what: str, names: Iterable[str]) -> str:
    shown = ", ".join(map(repr, sorted(names)))
    return f"Its {what} are: {shown}." if shown else f"It has no {what}."
