"""A continuous job as it was built so far: its sources, operators and sinks, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from recovery.savepoints.savepoint import Savepoint
from statebackend.continuous.job.graph import Graph, KeyedVertex, SinkNode, SourceVertex
from statebackend.errors import DuplicateUidError, SchemaError, SettingError
from statebackend.operators.declared_states import Declarations
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.runtime.driver.job import Job
from statebackend.runtime.time_plan import TimePlan
from statebackend.runtime.worker.shipped_constants import PackedProcessor
from statebackend.settings import Settings

__all__ = ["Flow", "JobSetup", "Operation", "check_event", "time_of"]


@dataclass(frozen=True)
class JobSetup:
    """What a continuous job needs of the `StateBackend` that it is built with.

    Attributes:
        spark: the session whose executors run the job.
        savepoint: what a new job begins with.
    """

    job: Job
    settings: Settings
    local_dir: str
    savepoint: str | Savepoint | None = None
    allow_dropped_state: bool = False
    spark: SparkSession | None = None


@dataclass(frozen=True)
class Operation:
    """A keyed operator as it was asked for; it becomes a vertex when the job starts.

    Attributes:
        plan: without the time zone and the like, which are the session's at the start.
        event_time: where the column of its input is by which rows are late; None: none are.
    """

    vertex: KeyedVertex
    plan: OperatorPlan
    packed: PackedProcessor
    declared: Declarations
    event_time: int | None


@dataclass
class Flow:
    """What was built of a backend's job so far."""

    setup: JobSetup
    sources: dict[str, SourceVertex] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    sinks: dict[str, SinkNode] = field(default_factory=dict)
    timed: set[str] = field(default_factory=set)  # vertices whose rows come with a watermark
    query: Any = None  # the last `ContinuousQuery` that was started

    def check_new(self, uid: Any, what: str) -> None:
        """Refuse a name that is none, or taken.

        Raises:
            SettingError, DuplicateUidError: saying which.
        """
        if not isinstance(uid, str) or not uid:
            raise SettingError(
                f"{what} was given the name {uid!r}.",
                todo="Give one that stays the same for the life of the job: state is found by it.",
            )
        if uid in self.sources or uid in self.operations or uid in self.sinks:
            raise DuplicateUidError(
                f"Job {self.setup.job.name!r} has something named {uid!r} already.",
                todo="Sources, operators and sinks have names of their own; to build another job, "
                "make a new StateBackend.",
            )

    def graph(self, parallelism: int, max_parallelism: int) -> Graph:
        """The vertices, at a parallelism."""
        keyed = {uid: one.vertex for uid, one in self.operations.items()}
        return Graph(
            parallelism,
            max_parallelism,
            sources=dict(self.sources),
            keyed=keyed,
            sinks=dict(self.sinks),
        )


def time_of(operation: Operation) -> TimePlan:
    """As tasks are told it. The watermark comes with the rows: the operator adds no delay to it."""
    if operation.plan.time_mode != "event":
        return TimePlan(operation.plan.time_mode)
    return TimePlan("event", operation.event_time, 0)


def check_event(
    rows: StructType, time_mode: str, event_time: str | None, timed: bool
) -> int | None:
    """Where the event time of an operator's rows is; None: it has none.

    Raises:
        SettingError, SchemaError: what does not go with the time mode.
    """
    if time_mode != "event":
        if event_time is not None:
            raise SettingError(
                f"event_time= was given with time_mode={time_mode!r}.",
                todo="Give time_mode='event', or leave it out.",
            )
        return None
    if not timed:
        raise SettingError(
            "The operator runs on event time, and its source makes no watermark.",
            todo="Give the source event_time= and watermark_delay=.",
        )
    if event_time is None:
        return None
    known = {field.name: field.dataType for field in rows}
    if not isinstance(known.get(event_time), TimestampType | TimestampNTZType):
        raise SchemaError(
            f"The event time {event_time!r} is no column of timestamps of the rows.",
            todo=f"Name one of the columns ({', '.join(known)}) that is.",
        )
    return rows.names.index(event_time)
