"""Goes back to the epoch that the user names: which ones there are, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from recovery.decide.start_batch import (
    LocationProgress,
    LogProgress,
    StartDecision,
    decide_going_back,
    lacks_for,
)
from snapshot.formats.record import Manifest
from snapshot.protocol.lineage import OperatorLineage
from statebackend.errors import RewindError, SettingError, StateBackendError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator

__all__ = ["WENT_BACK", "GoBackTo", "check_go_back_to"]

WENT_BACK: Final = "went_back_to"
"""In the settings of a claim: the epoch that it is about to go back to."""

_SHOWN: Final = 5


class GoBackTo:
    """The epoch after which a query goes on because the user says so.

    Args:
        epoch: None: the user names none.
        known: how far each operator of the query has come, by the log.
    """

    def __init__(
        self,
        epoch: int | None,
        job: Job,
        operators: Mapping[str, Operator],
        known: Callable[[list[Manifest]], LogProgress],
    ) -> None:
        self.epoch = epoch
        self._job, self._operators, self._known = job, operators, known

    def decide(
        self, error: StateBackendError, location: LocationProgress, manifests: list[Manifest]
    ) -> StartDecision:
        """Decide to go back to the epoch that the user named; nothing is changed.

        Args:
            error: why the query cannot go on otherwise.

        Raises:
            CheckpointLocationError, RewindError, JobRunningError: no epoch was named, or it cannot
                be, or the job has gone back to it and on.
        """
        possible = self._possible(location, manifests)
        if self.epoch is None:
            todo = f"{error.todo} {_ways_out(possible)}"
            raise type(error)(error.what, todo=todo) from error
        _refuse_again(manifests, self.epoch, possible)
        return decide_going_back(location, self._known(manifests), self.epoch, possible)

    def _possible(self, location: LocationProgress, manifests: list[Manifest]) -> list[int]:
        """The epochs that may be named, the newest first: state and location can go on after."""
        known = self._known(manifests).last_epochs
        newest = min([location.last_commit, *known.values()])
        return [
            epoch
            for epoch in sorted(location.commits or (), reverse=True)
            if epoch <= newest
            and not lacks_for(location, epoch + 1)
            and self.has_state(manifests, epoch)
            and not _has_gone_back(manifests, epoch)
        ]

    def has_state(self, manifests: list[Manifest], epoch: int) -> bool:
        """Whether the log has the state that the query declares, as it was after an epoch."""
        ids = {m.sequence: m.states for m in manifests}
        try:
            return all(
                lineage.at(self._operators[uid].parallelism, epoch).is_known(epoch)
                and _has_same_states(lineage, epoch, ids, self._operators[uid].states)
                for uid, lineage in self._job.resolved.of(manifests).items()
                if uid in self._operators
            )
        except StateBackendError:  # it cannot be told what it was made of
            return False


def check_go_back_to(value: object) -> None:
    """Refuse what is no epoch; None is none.

    Raises:
        SettingError: naming it.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return
    raise SettingError(
        f"go_back_to= is {value!r}, which is no epoch.",
        todo="Give an int from 0: the error of a start that is refused without it says which.",
    )


def _has_same_states(
    lineage: OperatorLineage,
    epoch: int,
    ids: Mapping[int, Mapping[str, int]],
    declared: Collection[str],
) -> bool:
    """Whether no state was deleted after an epoch, and none that is declared was left out.

    Its name would stand for another state now, which is empty.

    Args:
        ids: of states, by name, as the records say, by sequence. declared: names, in this start.
    """
    entry, last = lineage.epochs.get(epoch), lineage.epochs.get(lineage.last_epoch)
    if entry is None or last is None:
        return True
    then, now = ids[entry.sequence], ids[last.sequence]
    same = all(now.get(name) == number for name, number in then.items() if name in declared)
    return same and entry.dropped_ids == last.dropped_ids


def _ways_out(possible: list[int]) -> str:
    if possible:
        shown = ", ".join(map(str, possible[:_SHOWN]))
        more = f"go_back_to= can give up what came after epoch {shown}"
    else:
        more = (
            "There is no epoch that go_back_to= could go back to; without a copy, begin a new job "
            "with the newest savepoint"
        )
    return f"{more}: see docs/howto/repair.md."


def _refuse_again(manifests: list[Manifest], epoch: int, possible: list[int]) -> None:
    """Refuse an argument that was left in a script: it has done its work, and the job went on.

    Raises:
        RewindError: the job has gone back to that epoch before, and more than a batch further.
    """
    if _has_gone_back(manifests, epoch):
        raise RewindError(
            f"The job was told to go back to epoch {epoch} before, and has gone on since.",
            todo=f"Leave go_back_to= out of scripts: each epoch is gone back to once. "
            f"{_ways_out(possible)}",
        )


def _has_gone_back(manifests: list[Manifest], epoch: int) -> bool:
    """Whether the job was told to go back to an epoch, did, and has gone more than a batch further.

    A claim says what it was about to do, and may have been cut, or refused. What was done then is
    said by the records after it: they begin with the next epoch. Where that epoch itself was made
    anew since, it is another one.
    """
    for claim in manifests:
        if claim.settings.get(WENT_BACK) == str(epoch):
            since = [
                m.epoch for m in manifests if m.kind == "checkpoint" and m.sequence > claim.sequence
            ]
            if since and min(since) == epoch + 1 < max(since):
                return True
    return False
