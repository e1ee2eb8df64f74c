"""Taking over a continuous job: what its operators are, the claim, the coordinator of a run.

Each start and each restart claims the job anew, so that whatever is left of the run before is
fenced, and its slots are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql.types import StructType

from recovery.savepoints.between_modes import CONTINUOUS, has_no_key, is_continuous
from recovery.savepoints.state_at_epoch import last_epochs
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.log.progress_book import ProgressBook
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.tenure import Tenure
from statebackend.continuous.driver.driver_lists import sink_states, source_states
from statebackend.continuous.driver.restored_times import restored_watermarks
from statebackend.continuous.job.flow import Flow, JobSetup, time_of
from statebackend.errors import SettingError
from statebackend.keygroups import check_parallelism, default_max_parallelism
from statebackend.operators.declared_states import StateDeclaration
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_start import JobStart
from statebackend.runtime.driver.operator_specs import Operator, check_groups, key_schema_of
from statebackend.runtime.driver.session import RunSession
from statebackend.settings import Settings

__all__ = [
    "QUERY_ID",
    "Taken",
    "default_parallelism",
    "groups_of",
    "operators_of",
    "take_over",
]

QUERY_ID: Final = CONTINUOUS
"""In the place of a streaming query's id."""


def default_parallelism(setup: JobSetup) -> int:
    """Subtasks of each vertex if a start does not say it: the backend's, the job's, Spark's cores.

    Not ``spark.sql.shuffle.partitions``: all subtasks run at once, each in a task of its own.

    Raises:
        StorageError: the log cannot be read.
    """
    if setup.settings.parallelism:
        return setup.settings.parallelism
    lineages = setup.job.resolved.of(setup.job.manifests())
    known = [one.parallelism for one in lineages.values()]
    if known:  # sources and sinks have one
        return max(known)
    return max(setup.spark.sparkContext.defaultParallelism, 1) if setup.spark else 1


def groups_of(job: Job, settings: Settings, parallelism: int) -> int:
    """The job's key groups, or those of the savepoint that it is to begin with.

    Raises:
        ParallelismError, MaxParallelismChangedError: it cannot be run so.
        StorageError: the log cannot be read.
    """
    manifests = job.manifests()
    lineages = job.resolved.of(manifests) or job.begins()
    # A savepoint with other key groups has them in operators with a key alone.
    keyless = {m.operator for m in manifests if m.kind == "checkpoint" and has_no_key(m)}
    known = next((lineages[uid] for uid in sorted(lineages, key=keyless.__contains__)), None)
    groups = settings.max_parallelism or (
        known.max_parallelism if known else default_max_parallelism(parallelism)
    )
    check_parallelism(parallelism, groups)
    if known is not None:
        check_groups(job.name, known.max_parallelism, groups)
    return groups


def operators_of(flow: Flow, parallelism: int, max_parallelism: int) -> dict[str, Operator]:
    """Everything of the job that has a part in the log."""

    def plain(uid: str, states: dict[str, StateDeclaration]) -> Operator:
        return Operator(uid, 1, max_parallelism, StructType([]), states)

    operators = {uid: plain(uid, source_states()) for uid in flow.sources}
    operators |= {uid: plain(uid, sink_states()) for uid in flow.sinks}
    for uid, one in flow.operations.items():
        names = [one.plan.input_schema.names[i] for i in one.plan.key_positions]
        operators[uid] = Operator(
            uid,
            parallelism,
            max_parallelism,
            key_schema_of(one.plan.input_schema, names),
            one.declared.declared,
            deleted=tuple(one.declared.dropped),
            time=time_of(one),
        )
    return operators


@dataclass(frozen=True)
class Taken:
    """A job that was taken over.

    Attributes:
        epoch: of its last complete checkpoint; -1 before the first.
        stamp_ms: for the epoch after it: later than any before.
        watermarks_ms: at its end, by operator (see `restored_watermarks`).
        log: that the session writes.
    """

    run: str
    tenure: Tenure
    session: RunSession
    epoch: int
    stamp_ms: int
    watermarks_ms: Mapping[str, int] = field(default_factory=dict)
    log: CommitLog = field(kw_only=True)


def take_over(
    job: Job,
    operators: Mapping[str, Operator],
    settings: Settings,
    *,
    run: str,
    progress: ProgressBook,
    allow_dropped_state: bool,
) -> Taken:
    """Claim the job and make the session of a run; its gate is open on return.

    Raises:
        FencedError, CommitUnknownError, StoreUnreachableError: the claim did not succeed.
        StateMismatchError: another driver changed the job meanwhile.
        SettingError: the job is a streaming query's.
    """
    start = JobStart(
        job,
        operators,
        settings,
        run=run,
        progress=progress,
        allow_dropped_state=allow_dropped_state,
    )
    before = start.log.manifests()
    _refuse_a_query(job.name, before)
    start.check(before)
    held = start.claim(QUERY_ID, before, _last_complete(job, before, operators) + 1)
    epoch, lineages = _last_complete(job, held, operators), start.lineages_in(held)
    start.open(lineages, query_id=QUERY_ID, first_epoch=epoch + 1)
    return Taken(
        run=run,
        tenure=start.tenure,
        session=start.session,
        epoch=epoch,
        stamp_ms=_stamp_after(lineages, job.system.wall_ms()),
        watermarks_ms=restored_watermarks(start.specs, lineages, epoch),
        log=start.log,
    )


def _refuse_a_query(job: str, manifests: list[Manifest]) -> None:
    """Its operators would go on, and the sources begin anew: all would count twice."""
    written = [m.query_id for m in manifests if m.kind == "checkpoint"]
    if written and not is_continuous(manifests):
        raise SettingError(
            f"Job {job!r} holds the state of the streaming query {written[-1]}: a continuous job "
            f"cannot go on from it.",
            todo="Give the continuous job a job= name of its own; with savepoint= it begins with "
            "the query's state, and its sources anew.",
        )


def _last_complete(job: Job, manifests: list[Manifest], operators: Mapping[str, Operator]) -> int:
    """An epoch counts once every vertex of the run that wrote it has its record."""
    epochs = last_epochs(manifests, job.resolved.of(manifests))
    return min((one for uid, one in epochs.items() if uid in operators), default=-1)


def _stamp_after(lineages: Mapping[str, OperatorLineage], now_ms: int) -> int:
    stamps = [entry.stamp_ms for one in lineages.values() for entry in one.epochs.values()]
    return max(now_ms, max(stamps, default=0) + 1)
