"""Taking over a continuous job: what its operators are, the claim, the coordinator of a run.

Each start and each restart claims the job anew, so that whatever is left of the run before is
fenced, and its slots are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql.types import StructType

from recovery.savepoints.between_modes import CONTINUOUS, is_continuous
from recovery.savepoints.state_at_epoch import last_epochs
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.log.progress import ProgressBook
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.operators import OperatorSpec, operators_setting
from snapshot.protocol.tenure import Tenure
from statebackend.continuous.driver.driver_lists import sink_states, source_states
from statebackend.continuous.driver.restored_times import restored_watermarks
from statebackend.continuous.job.flow import Flow, time_of
from statebackend.errors import SettingError, StateMismatchError
from statebackend.keygroups import check_parallelism, default_max_parallelism
from statebackend.operators.declared_states import StateDeclaration
from statebackend.runtime.driver.inputs import key_schema_of
from statebackend.runtime.driver.job import Job, base_policy, held_before, live_lineages
from statebackend.runtime.driver.operator_specs import Operator, log_changes, operator_specs
from statebackend.runtime.driver.session import RunSession
from statebackend.settings import Settings
from statebackend.spark.start.query_from_savepoint import refuse_half_begun

__all__ = ["QUERY_ID", "Taken", "groups_of", "operators_of", "specs_of", "take_over"]

QUERY_ID: Final = CONTINUOUS
"""In the place of a streaming query's id."""


def groups_of(job: Job, settings: Settings, parallelism: int) -> int:
    """The job's key groups, or those of the savepoint that it is to begin with.

    Raises:
        ParallelismError, MaxParallelismChangedError: it cannot be run so.
        StorageError: the log cannot be read.
    """
    known = next(iter((job.lineages() or job.begins()).values()), None)
    groups = settings.max_parallelism or (
        known.max_parallelism if known else default_max_parallelism(parallelism)
    )
    check_parallelism(parallelism, groups)
    if known is not None:
        job.check_parallelism(known, groups)
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


def specs_of(
    job: str,
    operators: Mapping[str, Operator],
    manifests: list[Manifest],
    *,
    allow_dropped_state: bool,
) -> dict[str, OperatorSpec]:
    """What the coordinator is told of them.

    Raises:
        MissingUidError, StateMismatchError: the checkpoint has something else.
    """
    refuse_half_begun(job, manifests)
    live = live_lineages(manifests)
    newest = {m.operator: m for m in manifests if m.operator in live}
    specs = operator_specs(
        job, operators, newest, allow_dropped_state=allow_dropped_state, heartbeat=False
    )
    log_changes(specs, newest)
    return specs


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
    log = job.log()
    before = log.manifests()
    _refuse_a_query(job.name, before)
    checked = specs_of(job.name, operators, before, allow_dropped_state=allow_dropped_state)
    epoch = _last_complete(before, operators)
    known = live_lineages(before)
    firsts = {uid: known[uid].first_epoch if uid in known else epoch + 1 for uid in operators}
    tenure = log.claim(query_id=QUERY_ID, run=run, settings=operators_setting(firsts))
    # Read again: what another driver had committed before the claim is part of the truth.
    manifests = held_before(log, tenure)
    specs = specs_of(job.name, operators, manifests, allow_dropped_state=allow_dropped_state)
    for uid, spec in specs.items():
        if (spec.states, spec.schemas) != (checked[uid].states, checked[uid].schemas):
            raise StateMismatchError(
                f"Another driver of job {job.name!r} changed the states of operator {uid!r} while "
                "this one was started.",
                todo="Stop the other driver, and start this job again.",
            )
    epoch = _last_complete(manifests, operators)
    lineages = {uid: one for uid, one in live_lineages(manifests).items() if uid in operators}
    session = RunSession(
        store=job.store,
        log=log,
        gate_timeout_s=settings.start_timeout_s,
        whole_limit_bytes=settings.base_whole_limit_bytes,
        progress=progress,
        clean_every_epochs=settings.clean_every_epochs,
        clean_min_age_s=settings.clean_min_age_s,
        system=job.system,
    )
    coordinator = _coordinator(job, settings, run, tenure, specs, lineages, first_epoch=epoch + 1)
    session.open(coordinator, tenure)
    watermarks_ms = restored_watermarks(specs, lineages, epoch)
    stamp_ms = _stamp_after(lineages, job.system.wall_ms())
    return Taken(run, tenure, session, epoch, stamp_ms, watermarks_ms, log=log)


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


def _coordinator(
    job: Job,
    settings: Settings,
    run: str,
    tenure: Tenure,
    specs: Mapping[str, OperatorSpec],
    lineages: Mapping[str, OperatorLineage],
    *,
    first_epoch: int,
) -> Coordinator:
    """With synchronous commits: what is complete is durable."""
    return Coordinator(
        job=job.name,
        job_id=tenure.job_id,
        generation=tenure.generation,
        run=run,
        query_id=QUERY_ID,
        operators=specs,
        lineages=lineages,
        inline_budget_bytes=settings.inline_budget_bytes(
            max(one.parallelism for one in specs.values())
        ),
        bases=base_policy(settings),
        now_s=job.system.monotonic_s,
        new_id=job.system.new_id,
        first_epoch=first_epoch,
        retain_epochs=settings.retain_epochs,
    )


def _last_complete(manifests: list[Manifest], operators: Mapping[str, Operator]) -> int:
    """An epoch counts once every vertex of the run that wrote it has its record."""
    found = {uid: one for uid, one in last_epochs(manifests).items() if uid in operators}
    return min(found.values(), default=-1)


def _stamp_after(lineages: Mapping[str, OperatorLineage], now_ms: int) -> int:
    stamps = [entry.stamp_ms for one in lineages.values() for entry in one.epochs.values()]
    return max(now_ms, max(stamps, default=0) + 1)
