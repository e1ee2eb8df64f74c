"""What a backend tells of the query that it started last, and does with it."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from recovery.savepoints.savepoint import Savepoint, SavepointInfo
from snapshot.log.progress import CheckpointProgress, ProgressBook
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import RestoreReport
from statebackend.errors import SettingError, StateBackendError, StoreUnreachableError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import listed as listed_savepoints
from statebackend.runtime.driver.session import RunSession
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.query_savepoints import take as take_savepoint
from statebackend.spark.start.query_start import QueryStart

__all__ = ["StartedQuery"]


class StartedQuery:
    """The query that was started last: its job, how it fares, its savepoints."""

    _spark: SparkSession
    _job: Job | None
    _newest: QueryStart | None
    _flow: Any  # of a continuous job; None: it is none

    @property
    def job(self) -> str:
        """The job's name: as given, else of the query that was started last.

        Raises:
            SettingError: none was given, and no query has been started.
        """
        return self._known_job().name

    def _known_job(self) -> Job:
        job = self._newest.job if self._newest is not None else self._job
        if job is None:
            raise SettingError(
                "Which job this is follows from the checkpoint location, and no query has been "
                "started.",
                todo="Start the query first, or give StateBackend(...) job=.",
            )
        return job

    @property
    def _session(self) -> RunSession | None:
        return self._newest.launch.session if self._newest is not None else None

    def restores(self) -> list[RestoreReport]:
        """How each subtask got its state back since the query was started last."""
        return list(self._session.restores) if self._session else []

    def progress(self) -> CheckpointProgress:
        """What the newest epochs cost, by operator and subtask: sizes, durations, requests.

        The same events go to the logger ``statebackend.progress``, one JSON object each.
        """
        book = self._session.progress if self._session else ProgressBook(self._known_job().name)
        return book.summary(self.epoch)

    @property
    def epoch(self) -> int | None:
        """The epoch that is running; None before the first."""
        return self._session.epoch if self._session else None

    @property
    def failure(self) -> StateBackendError | None:
        """The typed error that made the coordinator stop, for example after being fenced."""
        return self._session.failure if self._session else None

    def lineages(self) -> dict[str, OperatorLineage]:
        """What the job's log holds now, by operator uid."""
        return self._known_job().lineages()

    def rebalance(self) -> None:
        """Spread subtasks over the executors that are there now; a running query follows.

        Only as many move as must for each executor to have its share. A running query does this by
        itself when executors have joined it, unless ``spark.statebackend.rebalance`` is ``off``.
        """
        if self._newest is not None:
            self._newest.rebalancer.by_hand(self._newest.launch.session.progress, self.epoch)

    def savepoint(self, to: str | None = None, *, timeout_s: float = 600.0) -> Savepoint:
        """Copy the newest epoch, with where the sources stood after it, into a folder of its own.

        Beside a running query, which goes on meanwhile, or after it has stopped. Of a continuous
        job: as `ContinuousQuery.savepoint`.

        Args:
            to: the savepoint's folder, which must be empty; also in another store. Default: one of
                its own under ``<uri>/.savepoints/<job>/``.
            timeout_s: after so long it is given up, and what was copied goes.

        Raises:
            SettingError: no query was started, or something lies in ``to`` already.
            NotRestorableError: no batch is finished yet.
            UnsupportedQueryError: operators of Spark's own keep state in the checkpoint location.
            StoreUnreachableError: it took too long, or a store cannot be reached.
        """
        if self._flow is not None and self._flow.query is not None:
            made: Savepoint = self._flow.query.savepoint(to, timeout_s=timeout_s)
            return made

        def open_location(path: str) -> CheckpointLocation:
            return CheckpointLocation(self._spark, path)

        launch = self._newest.launch if self._newest is not None else None
        return take_savepoint(open_location, self._known_job(), launch, to, timeout_s)

    def savepoints(self) -> list[SavepointInfo]:
        """The job's savepoints under ``<uri>/.savepoints/``, the newest last."""
        return listed_savepoints(self._known_job())

    def wait_durable(self, timeout_s: float = 60.0) -> None:
        """With asynchronous commits: wait until the records that are on their way are durable.

        For the end of a query, which may come before the end of its last commit.

        Raises:
            CommitUnknownError, FencedError, StoreUnreachableError: why they are not.
        """
        if (session := self._session) is not None:
            done = session.drain(timeout_s)
            if session.failure is not None:
                raise session.failure
            if not done:
                raise StoreUnreachableError(
                    f"The last record of job {self.job!r} is not durable after {timeout_s:g} s.",
                    todo="Wait longer, or look at the store: the log says what it waits for.",
                )
