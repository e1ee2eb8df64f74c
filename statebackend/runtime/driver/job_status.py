"""How a job stands, as only its own mode knows it: what Spark says, what a checkpoint waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snapshot.protocol.running_job import RunningJob

__all__ = ["JobStatus", "UnderWay", "under_way_in"]


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """A checkpoint that is not durable yet.

    Attributes:
        began_s: by the driver's monotonic clock; None: not known.
        missing: by operator, the subtasks that have not acked.
        parallelism: by operator.
        writing: all have acked, and its records are on their way.
    """

    epoch: int
    began_s: float | None
    missing: Mapping[str, Sequence[int]]
    parallelism: Mapping[str, int]
    writing: bool = False


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What a job's page asks for beside its records.

    Attributes:
        failure: why it has ended; empty: it has not failed.
        input: whether there is input; None: not known.
        behind: how it does not keep up; empty: it does.
        under_way: of a continuous job. The session knows it of a query with micro-batches.
        interval_s: from one checkpoint to the next; None: nobody said.
    """

    failure: str = ""
    input: bool | None = None
    behind: str = ""
    under_way: UnderWay | None = None
    interval_s: float | None = None


def under_way_in(run: RunningJob) -> UnderWay | None:
    """The epoch of a query with micro-batches that is not durable yet; None: all are."""
    operators = run.operators
    if run.epoch is None or not operators:
        return None
    if all(one.epoch.complete for one in operators.values()):
        return None
    missing = {uid: one.epoch.missing() for uid, one in operators.items()}
    return UnderWay(
        epoch=run.epoch,
        began_s=None,
        missing=missing,
        parallelism={uid: one.spec.parallelism for uid, one in operators.items()},
        writing=not any(missing.values()),
    )
