"""What a launch is given: what is asked of it, and what it asks of Spark and of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from recovery.savepoints.savepoint import Savepoint
from snapshot.protocol.stamps import Stamps
from statebackend.rpc.driver_server import Server
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.runtime.driver.services import RunningQuery, Services
from statebackend.runtime.driver.session import RunSession
from statebackend.settings import Settings
from statebackend.spark.frames.repeatable_sources import check_sink
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.output_checks import check_output

__all__ = ["StartOptions", "Surroundings"]


@dataclass(frozen=True)
class StartOptions:
    """What a start is asked for beside its query.

    Attributes:
        savepoint: what a new job begins with.
        go_back_to: the epoch after which it goes on, if it cannot go on otherwise.
        checked: whether the query's function is wrapped in ``backend.checked()``. It is asked once
            the query runs, since that may happen inside the block of ``backend.starting()``.
    """

    savepoint: str | Savepoint | None = None
    allow_dropped_state: bool = False
    go_back_to: int | None = None
    checked: Callable[[StreamingQuery], bool] = lambda query: False


class Surroundings:
    """The real ones: a session, and what its process has one of."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark, self._settings = spark, settings

    @property
    def starting(self) -> AbstractContextManager[object]:
        """Entered by one start at a time: Spark's checks are the session's."""
        return Services.starting

    @property
    def running(self) -> dict[str, RunningQuery]:
        """Which jobs this process runs, by their folders."""
        return Services.running

    @property
    def sessions(self) -> MutableMapping[str, RunSession]:
        """The sessions of this process's queries, by their names; one goes with its query."""
        return Services.sessions

    def server(self) -> Server:
        """The driver's, by which executors reach it."""
        return Services.get(self._spark, self._settings)

    def stamps_of(self, uri: str) -> Stamps | None:
        """What the last run of a job in this process saw of its frames; None: there was none."""
        known = self.running.get(uri)
        return known.session.stamps if known else None

    def location(self, path: str) -> CheckpointLocation:
        """A checkpoint location, by Spark's file-system layer."""
        return CheckpointLocation(self._spark, path)

    def check_sink(self, query: StreamingQuery, *, checked: bool) -> bool:
        """Refuse a sink that asynchronous commits do not go with; whether batches need a check."""
        return check_sink(query, checked=checked)

    def check_output(self, query: StreamingQuery, operators: Iterable[Operator]) -> None:
        """Refuse a query that cuts its output short, or asks for it in a wrong mode."""
        stream: Any = query._jsq.streamingQuery()
        check_output(stream.analyzedPlan(), str(stream.outputMode()), operators)
