"""What a backend tells of the query that it started last, and does with it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pyspark.sql import SparkSession

from recovery.savepoints.savepoint import Savepoint
from recovery.savepoints.savepoint_list import SavepointInfo
from snapshot.log.checkpoint_progress import CheckpointProgress
from snapshot.log.progress_book import ProgressBook
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import RestoreReport
from statebackend.errors import (
    JobRunningError,
    SettingError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import deadline_of
from statebackend.runtime.driver.job_savepoints import listed as listed_savepoints
from statebackend.runtime.driver.restore_wait import restored_in, wait_restored
from statebackend.runtime.driver.session import RunSession
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.query_savepoints import SparkLocation
from statebackend.spark.start.query_savepoints import take as take_savepoint
from statebackend.spark.start.watched_query import WatchedQuery
from statebackend.tables.erase_keys import EraseReport, erase_in_job
from statebackend.tables.state_lookup import LookedUp, StateLookup
from statebackend.work_done import Progress

__all__ = ["StartedQuery"]

_ERASE_S: Final = 600.0


class StartedQuery:
    """The query that was started last: its job, how it fares, its savepoints."""

    _spark: SparkSession
    _job: Job | None
    _newest: WatchedQuery | None
    _lookups: StateLookup | None = None
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

    def wait_restored(self, timeout_s: float = 600.0, *, progress: Progress | None = None) -> bool:
        """Wait until each subtask of the query that was started last has its state back.

        With micro-batches a subtask has it once its first batch is done: without input there is
        no batch, and no restore.

        Args:
            timeout_s: how long to wait.
            progress: told how many subtasks have it, and of how many.

        Returns:
            whether all have it; False: not in time, or the query has ended before.
        """
        system = self._known_job().system
        query = self._flow.query if self._flow is not None else None
        if query is not None:
            known = functools.partial(_restored_of, query)
            return wait_restored(known, lambda: query.is_active, timeout_s, progress, system)
        if self._newest is None:
            return False
        launch = self._newest.launch
        known = functools.partial(restored_in, launch.session)
        return wait_restored(known, launch.is_active, timeout_s, progress, system)

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

    def savepoint(
        self, to: str | None = None, *, timeout_s: float = 600.0, progress: Progress | None = None
    ) -> Savepoint:
        """Copy the newest epoch, with where the sources stood after it, into a folder of its own.

        Beside a running query, which goes on meanwhile, or after it has stopped. Of a continuous
        job: as `ContinuousQuery.savepoint`.

        Args:
            to: the savepoint's folder, which must be empty; also in another store. Default: one of
                its own under ``<uri>/.savepoints/<job>/``.
            timeout_s: after so long it is given up, and what was copied goes.
            progress: told the bytes of objects that were copied, and of all that are.

        Raises:
            SettingError: no query was started, or something lies in ``to`` already.
            NotRestorableError: no batch is finished yet.
            UnsupportedQueryError: operators of Spark's own keep state in the checkpoint location.
            StoreUnreachableError: it took too long, or a store cannot be reached.
        """
        if self._flow is not None and self._flow.query is not None:
            query = self._flow.query
            made: Savepoint = query.savepoint(to, timeout_s=timeout_s, progress=progress)
            return made

        def open_location(path: str) -> CheckpointLocation:
            return CheckpointLocation(self._spark, path)

        launch = self._newest.launch if self._newest is not None else None
        return take_savepoint(open_location, self._known_job(), launch, to, timeout_s, progress)

    def lookup(self, uid: str, state: str, key: Any) -> Any:
        """The newest confirmed value of a key: never of an epoch that may be rolled back.

        It comes from the worker that has the key's store open, by way of the driver. Where none
        has, it is read from the durable copy, and the subtask's state is fetched for that.

        Args:
            uid: of the operator. state: of keys, by its name.
            key: a value; a tuple, where there are several key columns; or a dict by their names.

        Returns:
            a Row; of a list state a list of rows; of a map state a dict of rows. None: the key has
            no such state, or it has expired.

        Raises:
            SettingError: there is no such operator or state, or it belongs to no key.
            UsageError: the key is not of the key columns' types.
            NotRestorableError: no epoch of the job is confirmed yet.
            StoreUnreachableError, CorruptionError: from the store.
        """
        return self.lookup_all(uid, state, [key])[0]

    def lookup_all(self, uid: str, state: str, keys: Iterable[Any]) -> list[Any]:
        """As :meth:`lookup`, of many keys at once: their values, in the order of the keys."""
        query = self._flow.query if self._flow is not None else None
        if query is not None:
            session, committed = query.session, None
        else:
            launch = self._newest.launch if self._newest is not None else None
            # Of one that has ended, or was fenced, somebody else may have gone on.
            runs = launch is not None and launch.is_active() and self.failure is None
            session, committed = self._session if runs else None, None
            if launch is not None and launch.location_path is not None:
                location = CheckpointLocation(self._spark, launch.location_path)
                committed = lambda: location.progress().last_commit  # noqa: E731
        job = self._known_job()
        if self._lookups is None or self._lookups.job is not job:
            self._lookups = StateLookup(job)
        # A string is not a list of keys: its letters would be looked up.
        wanted: Any = keys if isinstance(keys, str | bytes | Mapping) else list(keys)
        return self._lookups.values(LookedUp(session, committed), uid, state, wanted)

    def erase(
        self,
        uid: str,
        keys: Any,
        *,
        rewrite_savepoints: bool = False,
        dry_run: bool = False,
        scratch_dir: str | None = None,
        progress: Progress | None = None,
    ) -> EraseReport:
        """Erase keys of an operator everywhere, once the query that was started last has stopped.

        See :func:`statebackend.erase_keys`, which does it without Spark.

        Args:
            uid: of the operator. keys: a list of values, or tuples of several key columns.
            rewrite_savepoints: the job's savepoints too; else the report lists them.
            dry_run: as `statebackend.erase_keys` has it; ``scratch_dir`` and ``progress``, too.

        Raises:
            JobRunningError: the query runs: stop it, erase, and start it again.
            SettingError, UsageError, StateBackendError: as `statebackend.erase_keys`.
        """
        query = self._flow.query if self._flow is not None else None
        launch = self._newest.launch if self._newest is not None else None
        job = self._known_job()
        if query.is_active if query is not None else launch is not None and launch.is_active():
            raise JobRunningError(
                f"Keys of job {job.name!r} cannot be erased while its query runs.",
                todo="Stop the query, erase the keys, and start it again.",
            )
        location = None
        if query is None and launch is not None and launch.location_path is not None:
            launch.session.drain(_ERASE_S)  # its last record may be on its way
            place = CheckpointLocation(self._spark, launch.location_path)
            location = SparkLocation(place, deadline_of(job, _ERASE_S))
        report = erase_in_job(
            job.uri,
            job.name,
            job.store,
            location,
            uid,
            keys,
            rewrite_savepoints=rewrite_savepoints,
            dry_run=dry_run,
            scratch_dir=scratch_dir,
            progress=progress,
            options=job.options,
            system=job.system,
        )
        self._lookups = None  # what it has fetched holds the keys yet
        return report

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


def _restored_of(query: Any) -> tuple[int, int]:
    """How many subtasks of a continuous query's newest run have their state, and of how many."""
    return query.run.restored if query.run is not None else (0, 0)
