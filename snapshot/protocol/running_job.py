"""One run of a job as it stands: what the coordinator's parts share, and what others ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from snapshot.barriers.job_watermark import JobTime, NextDue, next_due
from snapshot.protocol.lineage import EpochEntry, OperatorLineage
from snapshot.protocol.operators import OperatorSpec
from snapshot.protocol.running_operator import RunningOperator, resumed_time
from snapshot.protocol.stamps import Stamps
from statebackend.errors import ProtocolError, StateBackendError

__all__ = ["RunningJob"]


@dataclass(kw_only=True)
class RunningJob:
    """A run (one start of the query) of one job.

    Attributes:
        job: the job's name. job_id: its identity, from its first claim. generation: the driver's.
        name: of this start of the query. query_id: Spark's id of the query.
        specs: by operator. lineages: by operator, as resolved from the log.
        inline_budget_bytes: what an ack may carry; more becomes an object of its own.
        asynchronous: an epoch may begin while the record of the one before is being written.
        first_epoch: the batch that Spark will run first, as its checkpoint location says; None
            where that is not known.
        stamps: those that it has seen; at first those of the run before it in the same process.
        recorded: every operator's epochs as the log had them: a lineage at another parallelism
            ends where the run begins.
        operators: those that run, once the first epoch has begun.
        begins_with: that epoch. epoch: the one that runs. time: its watermarks.
        failure: why nothing is accepted any more.
    """

    job: str
    job_id: str
    generation: int
    name: str
    query_id: str
    specs: Mapping[str, OperatorSpec]
    lineages: Mapping[str, OperatorLineage]
    inline_budget_bytes: int
    asynchronous: bool = False
    first_epoch: int | None = None
    stamps: Stamps = field(default_factory=Stamps)
    recorded: Mapping[str, Mapping[int, EpochEntry]] = field(init=False)
    operators: dict[str, RunningOperator] = field(default_factory=dict)
    begins_with: int | None = None
    epoch: int | None = None
    time: JobTime = field(default_factory=JobTime)
    failure: StateBackendError | None = None

    def __post_init__(self) -> None:
        self.specs, self.lineages = dict(self.specs), dict(self.lineages)
        self.recorded = {uid: dict(one.epochs) for uid, one in self.lineages.items()}

    def fail(self, error: StateBackendError) -> None:
        """Accept nothing any more: this driver was fenced, or cannot know whether it was."""
        self.failure = self.failure or error

    def check_alive(self) -> None:
        """Raise why nothing is accepted any more, if so."""
        if self.failure is not None:
            raise self.failure

    def operator(self, uid: str) -> RunningOperator:
        """An operator that runs.

        Raises:
            ProtocolError: there is no such operator, or it does not run yet.
        """
        self.check_alive()
        operator = self.operators.get(uid)
        if operator is None:
            raise ProtocolError(f"No operator {uid!r} of job {self.job!r} is running.")
        return operator

    def was_recorded(self, uid: str, epoch: int) -> bool:
        """Whether the log has had this epoch of an operator since before this run."""
        return epoch in self.recorded.get(uid, ())

    def was_finished(self, epoch: int) -> bool:
        """Whether an earlier run finished ``epoch``.

        Then Spark may commit it without evaluating it again: a file sink, or a foreachBatch
        function that keeps account of its batches, skips the batch that it has written already.
        """
        return all(
            uid in self.lineages and epoch in self.lineages[uid].epochs for uid in self.specs
        )

    @property
    def settled(self) -> bool:
        """Whether every subtask has had its state in this run: an epoch of it is over."""
        return self.epoch is not None and self.epoch != self.begins_with

    @property
    def confirmed_epoch(self) -> int | None:
        """The newest epoch that nobody can ask to be repeated; None before there is one."""
        if self.epoch is None:
            return None
        late = any(operator.tail is not None for operator in self.operators.values())
        return self.epoch - (2 if late else 1)

    def next_due(self) -> NextDue | None:
        """What waits for the next epoch; None while an epoch runs, or once nothing is accepted.

        Before the first epoch of the run the records say it: those of the newest epoch that every
        operator has finished, or of the one that the run starts from.
        """
        if self.failure is not None:
            return None
        if self.epoch is None:
            last = [self.lineages[uid].last_epoch for uid in self.specs if uid in self.lineages]
            finished = min(last, default=-1) if len(last) == len(self.specs) else -1
            epoch = max(finished, -1 if self.first_epoch is None else self.first_epoch - 1)
            return next_due(epoch, *resumed_time(self.specs, self.lineages, epoch + 1))
        if not all(operator.epoch.acked for operator in self.operators.values()):
            return None
        operators = [operator.time_after() for operator in self.operators.values()]
        return next_due(self.epoch, self.time.following(operators), operators)

    def pending_names(self) -> set[str]:
        """Objects of acks and bases that no record names yet."""
        return set().union(*(one.pending_names() for one in self.operators.values()))
