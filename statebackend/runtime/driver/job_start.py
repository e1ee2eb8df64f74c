"""One start of a job in either mode: its operators checked, its log claimed, its session opened.

What cannot go on is refused first. The claim comes next, which fences another driver; then the log
is read again, as what another driver had committed before the claim is part of the truth. Which
epoch a job goes on with is for its mode to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from recovery.decide.live_lineages import named_operators
from recovery.savepoints.begin_with_savepoint import left_in_the_middle
from recovery.savepoints.between_modes import CONTINUOUS
from snapshot.formats.record import Manifest
from snapshot.log.progress_book import ProgressBook
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.operators import OperatorSpec, operators_setting
from snapshot.protocol.running_job import RunningJob
from snapshot.protocol.stamps import Stamps
from snapshot.protocol.tenure import Tenure
from statebackend.errors import NotRestorableError, StateMismatchError
from statebackend.runtime.driver.job import Job, base_policy, held_before
from statebackend.runtime.driver.operator_specs import Operator, log_changes, operator_specs
from statebackend.runtime.driver.session import RunSession
from statebackend.settings import Settings

__all__ = ["JobStart", "specs_of"]


def specs_of(
    job: str,
    operators: Mapping[str, Operator],
    manifests: list[Manifest],
    *,
    allow_dropped_state: bool,
    heartbeat: bool = False,
) -> dict[str, OperatorSpec]:
    """What the coordinator is told of the operators, as they go on from what a log holds.

    Args:
        heartbeat: see `operator_specs`.

    Raises:
        NotRestorableError: the job was to begin with a savepoint, and that was cut.
        MissingUidError, StateMismatchError, SettingError: as `operator_specs`.
    """
    _refuse_half_begun(job, manifests)
    return operator_specs(
        job,
        operators,
        _newest(manifests),
        allow_dropped_state=allow_dropped_state,
        heartbeat=heartbeat,
    )


def _newest(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The newest record of each operator that the last run still had."""
    named = named_operators(manifests)
    newest = {m.operator: m for m in manifests if m.kind == "checkpoint"}
    return {
        uid: one
        for uid, one in newest.items()
        if named is None or named.get(uid) == one.first_epoch
    }


def _refuse_half_begun(job: str, manifests: list[Manifest]) -> None:
    """Refuse to start without ``savepoint=`` what was to begin with one, and was cut."""
    uri = left_in_the_middle(manifests)
    if uri:
        raise NotRestorableError(
            f"Job {job!r} was to begin with the savepoint {uri}, and that was cut.",
            todo=f"Start it with savepoint={uri!r} again, or give the query another job= name.",
        )


class JobStart:
    """One start of a job: `check`, then `claim`, then `open`.

    Args:
        run: its name.
        allow_dropped_state, heartbeat: see `operator_specs`.
        of_session: more arguments of `RunSession`.

    Attributes:
        log: of this start alone.
        session: answers the run's requests; its gate is shut until `open`.
        specs, lineages: of the operators, by uid, as `check` found them.
        tenure: from the claim.
    """

    tenure: Tenure

    def __init__(
        self,
        job: Job,
        operators: Mapping[str, Operator],
        settings: Settings,
        *,
        run: str,
        progress: ProgressBook,
        allow_dropped_state: bool,
        heartbeat: bool = False,
        **of_session: Any,
    ) -> None:
        self._job, self._operators, self._settings = job, operators, settings
        self._run = run
        self._allow_dropped_state, self._heartbeat = allow_dropped_state, heartbeat
        self.log = job.log()
        self.session = RunSession(
            store=job.store,
            log=self.log,
            gate_timeout_s=settings.start_timeout_s,
            whole_limit_bytes=settings.base_whole_limit_bytes,
            progress=progress,
            clean_every_epochs=settings.clean_every_epochs,
            clean_min_age_s=settings.clean_min_age_s,
            system=job.system,
            **of_session,
        )
        self.specs: dict[str, OperatorSpec] = {}
        self.lineages: Mapping[str, OperatorLineage] = {}

    def specs_in(self, manifests: list[Manifest]) -> dict[str, OperatorSpec]:
        """As `specs_of`, of this start's operators."""
        return specs_of(
            self._job.name,
            self._operators,
            manifests,
            allow_dropped_state=self._allow_dropped_state,
            heartbeat=self._heartbeat,
        )

    def check(self, manifests: list[Manifest]) -> None:
        """Refuse operators that cannot go on from what the log holds. Raises as `specs_of`."""
        self.specs = self.specs_in(manifests)
        self.lineages = self._job.resolved.of(manifests)
        log_changes(self.specs, _newest(manifests), self._operators)

    def claim(
        self,
        query_id: str,
        manifests: list[Manifest],
        first_epoch: int,
        initial: Collection[str] = (),
    ) -> list[Manifest]:
        """Claim the job; returns what its log held then.

        Args:
            manifests: what was read of the log last. first_epoch: the epoch to go on with.
            initial: operators with an initial state.

        Raises:
            FencedError, CommitUnknownError, StoreUnreachableError: the claim did not succeed.
            StateMismatchError: another driver changed the job meanwhile. Else as `specs_of`.
        """
        self._check_unchanged(manifests)  # before whoever goes on is fenced
        known = self._job.resolved.of(manifests)
        firsts = {
            uid: known[uid].first_epoch if uid in known else first_epoch for uid in self._operators
        }
        self.tenure = self.log.claim(
            query_id=query_id, run=self._run, settings=operators_setting(firsts, initial)
        )
        held = held_before(self.log, self.tenure)
        self._check_unchanged(held)
        return held

    def _check_unchanged(self, held: list[Manifest]) -> None:
        """Refuse a start whose state ids or schema versions another driver has given meanwhile."""
        for uid, now in self.specs_in(held).items():
            checked = self.specs[uid]
            if (now.states, now.schemas) != (checked.states, checked.schemas):
                raise StateMismatchError(
                    f"Another driver of job {self._job.name!r} changed the states of operator "
                    f"{uid!r} while this one was started.",
                    todo="Stop the other driver, and start this one again.",
                )
            # What it has dropped since is not dropped again.
            self.specs[uid] = msgspec.structs.replace(now, initial=checked.initial)

    def lineages_in(self, held: list[Manifest]) -> dict[str, OperatorLineage]:
        """The lineages of this start's operators, for the run to change."""
        taken = self._job.resolved.take(held)
        return {uid: one for uid, one in taken.items() if uid in self._operators}

    def open(
        self,
        lineages: Mapping[str, OperatorLineage],
        *,
        query_id: str,
        first_epoch: int,
        check_plan: Callable[[int, int], None] | None = None,
        asynchronous: bool = False,
        stamps: Stamps | None = None,
    ) -> None:
        """Let the run's requests in.

        Args:
            lineages: that the run goes on from.
            check_plan: see `RunSession.open`.
            asynchronous, stamps: see `RunningJob`.
        """
        parallelism = max(one.parallelism for one in self._operators.values())
        run = RunningJob(
            job=self._job.name,
            job_id=self.tenure.job_id,
            generation=self.tenure.generation,
            name=self._run,
            query_id=query_id,
            specs=self.specs,
            lineages=lineages,
            inline_budget_bytes=self._settings.inline_budget_bytes(parallelism),
            asynchronous=asynchronous,
            first_epoch=first_epoch,
            stamps=Stamps(stamps),
        )
        coordinator = Coordinator(
            run,
            bases=base_policy(self._settings),
            now_s=self._job.system.monotonic_s,
            new_id=self._job.system.new_id,
            retain_epochs=self._settings.retain_epochs,
        )
        system = self._job.system
        self._job.figures.run_begins(
            system.monotonic_s(), system.wall_ms(), continuous=query_id == CONTINUOUS
        )
        self.session.open(coordinator, self.tenure, check_plan)
