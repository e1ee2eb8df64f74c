"""Decides which batch a query goes on with, and prepares its checkpoint location for that."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from recovery.decide.start_batch import (
    OFFSETS,
    LocationProgress,
    LogProgress,
    StartDecision,
    Verdict,
    check_belongs,
    decide_start,
)
from recovery.decide.taken_back_files import TakenBack
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.log.stale_listings import has_grown
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.refusal_texts import planned_anew
from statebackend.errors import (
    CheckpointLocationError,
    JobRunningError,
    RewindError,
    SettingError,
    StateBackendError,
)
from statebackend.runtime.driver.job import Job, held_before
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.go_back_to import WENT_BACK, GoBackTo
from statebackend.spark.start.location_rewind import LocationRewind

__all__ = ["StartPoint", "refuse_hidden"]

_log = logging.getLogger("statebackend.spark")
_LOOKS: Final = 10  # at a log that grows, before what it lacks is said


class StartPoint:
    """The batch that a start goes on with.

    Args:
        log: of this start alone. run: its name.
        go_back_to: the epoch after which the query may go on where it could not go on at all.
        check: told of the records and the batch that was decided on, before anything is taken back;
            whatever it raises refuses the start.

    Attributes:
        first_epoch: that batch, once `find` has found it.
        first_stamp_ms: of its plan, where it was planned before; None where it was not.
    """

    def __init__(
        self,
        job: Job,
        log: CommitLog,
        operators: Mapping[str, Operator],
        *,
        run: str,
        go_back_to: int | None = None,
        check: Callable[[list[Manifest], int], None] = lambda manifests, batch: None,
    ) -> None:
        self._job, self._log, self._operators = job, log, operators
        self._run, self._check = run, check
        self._asked = GoBackTo(go_back_to, job, operators, lambda manifests: self._known(manifests))
        self._given_up: int | None = None  # the newest epoch that the user gives up
        self.first_epoch: int | None = None
        self.first_stamp_ms: int | None = None

    def check_without_location(self) -> None:
        """Refuse to go back where it is not known in which checkpoint location.

        Raises:
            SettingError: the user named an epoch.
        """
        if self._asked.epoch is not None:
            raise SettingError(
                f"go_back_to={self._asked.epoch} is given, but no checkpoint location is known "
                f"before the query starts.",
                todo="Name it: backend.starting(checkpoint_location=..., go_back_to=...), or "
                "backend.start(writer, go_back_to=...) with the option checkpointLocation.",
            )

    def find(
        self,
        location: CheckpointLocation,
        progress: LocationProgress,
        hidden: list[TakenBack],
        manifests: list[Manifest],
        *,
        looks: int = _LOOKS,
    ) -> list[Manifest]:
        """Decide, and prepare the location; returns what the log held then.

        Args:
            progress, hidden, manifests: read one after the other, in this order. Spark commits only
                what is in the log, so what is read of the log last is never behind.
            looks: how often they are read anew where the log grows meanwhile.

        Raises:
            CheckpointLocationError, RewindError, JobRunningError: it cannot go on. If it had taken
            anything back by then, the next start puts that back.
            StoreCapabilityError: what was read of the log is not its newest.
            StateBackendError: what ``check`` raised.
            FencedError: another driver started the job meanwhile; nothing is missing.
        """
        decision = None
        if hidden:
            check_belongs(progress, self._known(manifests))
        else:
            try:
                decision = self._decide(progress, manifests)
            except (CheckpointLocationError, RewindError, JobRunningError) as error:
                # Before the claim: what is refused fences nobody, and leaves nothing in the log.
                lacks = not isinstance(error, JobRunningError)  # as it says of the log
                if lacks and self._has_grown(manifests) and looks:
                    progress, hidden = location.progress(), location.taken_back()
                    manifests = self._log.manifests()
                    return self.find(location, progress, hidden, manifests, looks=looks - 1)
                if isinstance(error, CheckpointLocationError):
                    raise
                told = self._as_asked(error, progress, manifests)
                self._check(manifests, told.batch)
            else:
                self._check(manifests, decision.batch)
        if decision is None or decision.verdict is not Verdict.START:
            as_asked = decision is None and not hidden
            decision, manifests = self._go_back(location, as_asked=as_asked)
        if self._asked.epoch is not None and self._given_up is None:
            _log.warning(
                "go_back_to=%d is ignored: %s goes on with batch %d",
                self._asked.epoch,
                progress.path,
                decision.batch,
            )
        self.first_epoch = decision.batch
        self.first_stamp_ms = location.stamp_ms(f"{OFFSETS}/{decision.batch}")
        refuse_hidden(location)
        return manifests

    def _go_back(
        self, location: CheckpointLocation, *, as_asked: bool
    ) -> tuple[StartDecision, list[Manifest]]:
        """Put back what others took, then take back what must be repeated.

        Args:
            as_asked: it is known already that this goes back to the epoch that the user named.
        """
        # Whoever runs the job now is fenced before anything is taken from under it.
        told = {WENT_BACK: str(self._asked.epoch)} if as_asked else {}
        tenure = self._log.claim(run=self._run, settings=told)

        def look() -> list[Manifest]:
            return held_before(self._log, tenure, anew=True)

        new_id = self._job.system.new_id
        going = LocationRewind(location, generation=tenure.generation, look=look, new_id=new_id)
        stamps = _recorded_stamps(look())
        going.repair(stamps)
        # The location first here, too; and who was fenced himself takes nothing back.
        progress, manifests = location.progress(), look()
        decision = self._decide_or_give_up(progress, manifests)
        if self._given_up is not None and not as_asked:
            # What was put back shows it only now. The log says so before anything is taken.
            return self._go_back(location, as_asked=True)
        self._check(manifests, decision.batch)
        if decision.verdict is not Verdict.START:
            self._require(manifests, decision.batch - 1)
            going.back_to(decision.batch, progress.last_commit, stamps)
        return decision, manifests

    def _decide_or_give_up(
        self, progress: LocationProgress, manifests: list[Manifest]
    ) -> StartDecision:
        self._given_up = None
        try:
            return self._decide(progress, manifests)
        except (RewindError, JobRunningError) as error:
            decision = self._as_asked(error, progress, manifests)
            self._given_up = self._last_epoch(manifests)
            _log.warning(
                "job %s goes back to epoch %d, as it was asked to: what came after it is given up "
                "(epochs up to %d, batches up to %d); %s",
                self._job.name,
                self._asked.epoch,
                self._given_up,
                progress.last_commit,
                error.what,
            )
            return decision

    def started_at(
        self,
        query_id: str,
        location: LocationProgress,
        manifests: list[Manifest],
        *,
        looks: int = _LOOKS,
    ) -> tuple[int, list[Manifest]]:
        """The batch that a query began with, once it is known to be the job's.

        Args:
            looks: how often the log is read anew where it grows meanwhile.

        Returns:
            with it, what the log held when that was decided.

        Raises:
            RewindError: it should have gone back first.
        """
        if self.first_epoch is not None:
            # Decided before the start; batches that no operator took part in may have been
            # committed since, and are found out by the first begin.
            location = LocationProgress(
                location.path,
                query_id,
                last_offset=max(self.first_epoch - 1, min(location.last_offset, self.first_epoch)),
                last_commit=self.first_epoch - 1,
            )
        location = dataclasses.replace(location, query_id=query_id)
        try:
            decision = decide_start(location, self._known(manifests))
            if decision.verdict is Verdict.REWIND:
                raise RewindError(
                    f"Batch {decision.batch} of {location.path} must be repeated before the query "
                    f"can go on.",
                    todo="Start it with backend.start(writer), or name the location: "
                    "backend.starting(checkpoint_location=...).",
                )
        except (CheckpointLocationError, RewindError):
            if self._has_grown(manifests) and looks:
                manifests = self._log.manifests()
                return self.started_at(query_id, location, manifests, looks=looks - 1)
            raise
        return decision.batch, manifests

    def check_not_overtaken(self, manifests: list[Manifest], first_epoch: int) -> None:
        """Refuse to repeat a batch that another driver has gone on from since it was planned.

        Its record would take the place of all epochs after it; Spark may have committed those.
        """
        last = self._last_epoch(manifests)
        if last > max(first_epoch, -1 if self._given_up is None else self._given_up):
            raise JobRunningError(
                f"Epoch {last} of job {self._job.name!r} is durable, and this query was started "
                f"with batch {first_epoch}: another driver went on meanwhile, or the checkpoint "
                f"location is an older copy than the job's log.",
                todo="If another driver runs the job, leave it and stop this one. If there is "
                "none, give this query the checkpoint location that belongs to the job, in its "
                "newest state.",
            )

    def check_plan_stands(self, location: CheckpointLocation, first_epoch: int) -> None:
        """Refuse to fence anybody where the first batch's plan is another than at the start.

        Whether it is the one that Spark goes by is asked after the claim: see
        `CheckpointLocation.check_planned`.

        Raises:
            CheckpointLocationError: another driver has gone back meanwhile.
        """
        found_ms = location.stamp_ms(f"{OFFSETS}/{first_epoch}")
        if self.first_stamp_ms not in (None, found_ms) and first_epoch == self.first_epoch:
            raise planned_anew(first_epoch)

    def _has_grown(self, manifests: list[Manifest]) -> bool:
        """Whether the log holds more than was read of it, which is then said to lack something."""
        newest = manifests[-1].sequence if manifests else -1
        return has_grown(newest, self._log.read, self._log.sequences)

    def _last_epoch(self, manifests: list[Manifest]) -> int:
        return max(self._job.progress(manifests).last_epochs.values(), default=-1)

    @property
    def gives_up(self) -> bool:
        """Whether the user gives epochs up."""
        return self._given_up is not None

    def forget_given_up(self, lineages: Iterable[OperatorLineage]) -> None:
        """Take out of lineages what the user gave up: in this run it does not count."""
        if self._given_up is None or self.first_epoch is None:
            return
        for lineage in lineages:
            one: OperatorLineage | None = lineage
            while one is not None:
                for subtask in one.subtasks:
                    subtask.drop_from(self.first_epoch)
                one.epochs = {e: kept for e, kept in one.epochs.items() if e < self.first_epoch}
                one = one.before

    def _known(self, manifests: list[Manifest]) -> LogProgress:
        progress = self._job.progress(manifests)
        kept = {u: e for u, e in progress.last_epochs.items() if u in self._operators}
        return dataclasses.replace(progress, last_epochs=kept)

    def _decide(self, location: LocationProgress, manifests: list[Manifest]) -> StartDecision:
        decision = decide_start(location, self._known(manifests))
        self.check_not_overtaken(manifests, decision.batch)  # before anything is taken back
        return decision

    def _require(self, manifests: list[Manifest], epoch: int) -> None:
        """Nothing is taken from Spark's location unless the log can go on from there."""
        for uid, lineage in self._job.resolved.of(manifests).items():
            if uid in self._operators and epoch >= lineage.first_epoch - 1:
                lineage.require(epoch)

    def _as_asked(
        self, error: StateBackendError, location: LocationProgress, manifests: list[Manifest]
    ) -> StartDecision:
        """See `GoBackTo.decide`; the log can go on from there."""
        decision = self._asked.decide(error, location, manifests)
        self._require(manifests, decision.batch - 1)
        return decision


def refuse_hidden(location: CheckpointLocation) -> None:
    """Refuse a location of which a start is taking something back, or has just done so.

    Raises:
        CheckpointLocationError: naming it.
    """
    hidden = location.taken_back()
    if hidden:
        raise CheckpointLocationError(
            f"{hidden[0].place} of {location.path} was taken back by another start (generation "
            f"{hidden[0].generation}).",
            todo="Let one driver start the job. backend.start(writer) puts it back, and so does "
            "backend.starting(checkpoint_location=...).",
        )


def _recorded_stamps(manifests: list[Manifest]) -> dict[int, int]:
    """By epoch in the log, the time at which Spark planned its batch."""
    return {m.epoch: m.stamp_ms for m in manifests if m.kind == "checkpoint"}
