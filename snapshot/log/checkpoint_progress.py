"""The newest progress events of a job, as one thing."""

from __future__ import annotations

import msgspec

from snapshot.log.progress_events import (
    BaseProgress,
    EpochProgress,
    RebalanceProgress,
    SubtaskProgress,
)
from snapshot.log.state_operators import StateOperator, state_operators

__all__ = ["CheckpointProgress"]


class CheckpointProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What ``StateBackend.progress()`` returns: the newest events, the oldest first.

    Attributes:
        job: the job's name.
        epoch: the one that runs; None before the first.
        durable_epoch: the newest that is durable.
        epochs: of each operator, when its record is durable.
        subtasks: of each subtask, when its snapshot was taken in.
        bases: full states that were uploaded in the background.
        rebalances: how often subtasks were spread anew since the query was started.
        last_rebalance: the newest of these.
    """

    job: str
    epoch: int | None
    durable_epoch: int | None
    epochs: list[EpochProgress]
    subtasks: list[SubtaskProgress]
    bases: list[BaseProgress]
    rebalances: int = 0
    last_rebalance: RebalanceProgress | None = None

    def state_operators(self, epoch: int | None = None) -> list[StateOperator]:
        """The operators with state, in the shape of Spark's ``stateOperators``.

        Args:
            epoch: one of those that are kept; default: the newest durable one.
        """
        wanted = self.durable_epoch if epoch is None else epoch
        if wanted is None:
            return []
        return state_operators(self.epochs, self.subtasks, wanted)
