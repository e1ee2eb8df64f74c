"""The product's face in Spark: frames with state, and the start of their query."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from recovery.savepoints.savepoint import Savepoint, SavepointInfo
from snapshot.log.progress import CheckpointProgress, ProgressBook
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import RestoreReport
from statebackend.continuous.job.dataflow import ContinuousStream, continuous
from statebackend.continuous.job.flow import Flow, JobSetup
from statebackend.continuous.sources.source import Source
from statebackend.errors import (
    SettingError,
    SparkConnectError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.rpc.tls import driver_tls
from statebackend.runtime.driver.attempt_timeouts import watch_attempts
from statebackend.runtime.driver.environment import warn_of_other_python
from statebackend.runtime.driver.housekeeping import StorePatience
from statebackend.runtime.driver.job import Job, store_options
from statebackend.runtime.driver.job_savepoints import listed as listed_savepoints
from statebackend.runtime.driver.job_savepoints import saved_lineages
from statebackend.settings import Settings
from statebackend.spark.frames.frame_builder import FrameBuilder
from statebackend.spark.frames.rebalancing import Rebalancer
from statebackend.spark.frames.stateful_frames import FrameMaker
from statebackend.spark.java_errors import ShortJavaError
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.launch import Launch
from statebackend.spark.start.query_savepoints import take as take_savepoint
from statebackend.spark.start.start_point import check_go_back_to
from statebackend.system import SYSTEM, default_local_dir

__all__ = ["StateBackend"]

_log = logging.getLogger("statebackend.spark")
F = TypeVar("F", bound=Callable[..., Any])


class StateBackend(FrameMaker):
    """The state of one streaming query (one *job*), in RocksDB inside the executors.

    Make one, make a frame with one of its methods, and start the query with `start`. Nothing is
    opened or written before the first frame is made. A backend is for one start: make a new one to
    start the query again.

    Args:
        spark: a classic session (not Spark Connect).
        uri: where the durable copy goes: ``s3://bucket/prefix``, or ``file:///path`` or an absolute
            path on a file system that driver and executors share.
        job: the job's name, a folder under ``uri``. Keep it: the state is found by it.
        local_dir: a folder on each executor's disk for the local copy. Environment variables of the
            executor are filled in (``$TMPDIR/state``).
        parallelism: how many subtasks each operator has. Default: what the job had last, for a new
            job ``spark.sql.shuffle.partitions``.
        max_parallelism: how many key groups there are, fixed for the job's life. Default: 128, or
            more if the parallelism is above 85.
        commit: ``"sync"`` (the default): what Spark has committed is durable. ``"async"``: a batch
            is made durable while the next one runs. After a crash of the driver the query may go
            back by one batch, so its sources must be able to repeat one.
        savepoint: what a new job begins with, at a new checkpoint location. A job that has begun
            with it goes on as it is.
        allow_dropped_state: start although the query no longer has an operator or a state that the
            job holds. That state is dropped.
        settings: further settings by name (docs/reference/settings.md). A setting that is given
            here counts before a key ``spark.statebackend.*``, and a key before the default.

    Raises:
        SparkConnectError: the session is one of Spark Connect.
        SettingError: a setting or argument is out of range.
        EnvironmentMissingError: Java, or another part of the environment, is missing.
        SparkLostError: Spark's JVM is gone.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        uri: str,
        job: str | None = None,
        local_dir: str | None = None,
        parallelism: int | None = None,
        max_parallelism: int | None = None,
        commit: str | None = None,
        savepoint: str | Savepoint | None = None,
        allow_dropped_state: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        _check_classic(spark)
        self._spark = spark
        if (spark.sparkContext.master or "").startswith("local"):
            warn_of_other_python(spark.sparkContext.pythonExec)
        given = {
            "local_dir": local_dir,
            "parallelism": parallelism,
            "max_parallelism": max_parallelism,
            "commit": commit,
            **(settings or {}),
        }
        self._settings = Settings.resolve(given, functools.partial(_configured, spark))
        driver_tls(self._settings)  # what it lacks is said here
        self._job = Job(
            uri,
            job or "default",
            options=store_options(self._settings),
            patience=StorePatience(
                self._settings.commit_timeout_s, now_s=SYSTEM.monotonic_s, sleep_s=SYSTEM.sleep_s
            ),
            system=SYSTEM,
        )
        self._allow_dropped_state = allow_dropped_state
        self._savepoint = savepoint
        if savepoint is not None:
            self._job.begins = lambda: saved_lineages(savepoint, self._job)
        if not self._settings.local_dir:
            _warn_of_default_local_dir()
        self._builder = FrameBuilder(spark, self._job, self._settings, self._settings.local_dir)
        self._rebalancer = Rebalancer(
            self._builder.places,
            job=self._job.name,
            automatic=self._settings.rebalance == "auto",
            settle_s=self._settings.rebalance_settle_s,
        )
        self._launch: Launch | None = None
        self._checked = False
        found = self._settings
        setup = JobSetup(self._job, found, found.local_dir, savepoint, allow_dropped_state, spark)
        self._continuous = Flow(setup)

    @property
    def job(self) -> str:
        """The job's name."""
        return self._job.name

    @property
    def spark(self) -> SparkSession:
        """The session it was made with."""
        return self._spark

    @property
    def parallelism(self) -> int:
        """Subtasks per operator: as given, else the job's own, else the default."""
        return self._builder.parallelism()[0]

    @property
    def max_parallelism(self) -> int:
        """Key groups, and so the most subtasks that the job can ever have."""
        return self._builder.parallelism()[1]

    # --- starting ------------------------------------------------------------------------------

    def start(self, writer: DataStreamWriter, *, go_back_to: int | None = None) -> StreamingQuery:
        """Start a query over frames of this backend, in place of ``writer.start()``.

        Checks what must hold, goes back by a batch if one is due, and takes over the job: a driver
        that ran it before is fenced. A refusal changes no state and fences nobody.

        Args:
            writer: ``frame.writeStream...``, not started.
            go_back_to: only if the query cannot be started otherwise: give up what came after this
                epoch, and go on with the next batch. The error of a plain start names the epochs
                that can be given. Read "When the location and the log do not fit" in
                docs/howto/repair.md first. If the query can go on, this is ignored, with a warning.

        Returns:
            Spark's query.

        Raises:
            CheckpointLocationError: checkpoint location and job do not belong together.
            RewindError: they are not of the same moment.
            StateMismatchError: a state's kind or schema is not what the job holds.
            MissingUidError: an operator of the job is missing in the query.
            ParallelismError: the parallelism is out of range.
            UnsupportedQueryError: the query cannot be made exact.
            JobRunningError: this driver runs the job already.
            SettingError: there is no frame yet, or ``go_back_to`` is no epoch.
        """
        launch = self._new_launch(go_back_to)
        launch.prepare(writer)
        self._launch = launch
        with launch.armed(self._builder.credentials().value.token):
            query = writer.start()
        launch.bind(query)
        self._look_after(query, launch)
        return query

    @contextlib.contextmanager
    def starting(
        self, *, checkpoint_location: str | None = None, go_back_to: int | None = None
    ) -> Iterator[None]:
        """A block for other ways to start: ``with backend.starting(): writer.toTable("t")``.

        Exactly one query must be started inside, and the block be left at once: its tasks wait for
        the checks that are made then.

        Args:
            checkpoint_location: the query's; with it, everything is checked before the block is
                entered, and a due rewind is done.
            go_back_to: as for `start`; it needs ``checkpoint_location``.

        Raises as `start`. The query is stopped then.
        """
        launch = self._new_launch(go_back_to)
        launch.prepare(None, checkpoint_location)
        self._launch = launch
        before = {query.id for query in self._active()}
        with launch.armed(self._builder.credentials().value.token):
            yield
        started = [q for q in self._active() if q.id not in before]
        launch.bind_one(started)
        if started:
            self._look_after(started[0], launch)

    def _look_after(self, query: StreamingQuery, launch: Launch) -> None:
        session = launch.session
        self._rebalancer.watch(lambda: query.isActive, session.progress, lambda: session.epoch)
        if session.attempts is not None:
            watch_attempts(self._spark, session.attempts, lambda: query.isActive)

    def _active(self) -> list[StreamingQuery]:
        return [query for session in self._builder.sessions for query in session.streams.active]

    def _new_launch(self, go_back_to: int | None) -> Launch:
        check_go_back_to(go_back_to)
        if not self._builder.operators:
            raise SettingError(
                f"Job {self._job.name!r} has no operator yet.",
                todo="Make a frame with transform_with_state() first.",
            )
        return Launch(
            self._spark,
            self._job,
            sessions=self._builder.sessions,
            operators=self._builder.operators,
            heartbeat=self._builder.heartbeat,
            local_dir=self._builder.local_dir,
            settings=self._settings,
            allow_dropped_state=self._allow_dropped_state,
            checked=lambda: self._checked,
            savepoint=self._savepoint,
            go_back_to=go_back_to,
        )

    def checked(self, function: F) -> F:
        """Wrap a ``foreachBatch`` function, so that a batch read in part fails at once.

        Without it, a function that reads only part of its frame fails the query in the *next*
        batch. With asynchronous commits it is required. There, a function that skips a batch must
        evaluate the frame all the same (for instance into a ``noop`` writer), since the state of
        that batch may have to be made again.

        Args:
            function: ``function(frame, batch_id)``.

        Returns:
            the function to give to ``foreachBatch``. With asynchronous commits a query that was
            given another one is refused in its second batch.
        """
        self._checked = True

        @functools.wraps(function)
        def checked_function(frame: DataFrame, batch_id: int, *rest: Any) -> Any:
            try:
                result = function(frame, batch_id, *rest)
            except Py4JJavaError as error:
                raise ShortJavaError(error).with_traceback(error.__traceback__) from None
            if self._launch is not None:
                self._launch.session.check_finished(batch_id)
            return result

        return checked_function  # type: ignore[return-value]

    def continuous(self, source: Source, *, name: str) -> ContinuousStream:
        """Begin a continuous job with the rows of a source (docs/concepts/two-modes.md).

        Args:
            source: a ``statebackend`` source, such as ``FileSource``.
            name: the source's, for the life of the job: its positions are found by it.

        Returns:
            a ``ContinuousStream``, to be built on and started.

        Raises:
            SettingError: it is no source.
            DuplicateUidError: the name is taken.
        """
        return continuous(self._continuous, source, name=name)

    # --- what is going on ----------------------------------------------------------------------

    def restores(self) -> list[RestoreReport]:
        """How each subtask got its state back since the query was started: from where, and why."""
        return list(self._launch.session.restores) if self._launch else []

    def progress(self) -> CheckpointProgress:
        """What the newest epochs cost, by operator and subtask: sizes, times, requests.

        The same events go to the logger ``statebackend.progress``, one JSON object each.
        """
        book = self._launch.session.progress if self._launch else ProgressBook(self._job.name)
        return book.summary(self.epoch)

    @property
    def epoch(self) -> int | None:
        """The epoch that is running; None before the first."""
        return self._launch.session.epoch if self._launch else None

    @property
    def failure(self) -> StateBackendError | None:
        """Why the job takes nothing more, such as another driver that took it over; or None."""
        return self._launch.session.failure if self._launch else None

    def lineages(self) -> dict[str, OperatorLineage]:
        """What the job's log holds now, by operator uid."""
        return self._job.lineages()

    def rebalance(self) -> None:
        """Spread subtasks over the executors that are there now; a running query follows.

        Only as many move as must for each executor to have its share. A running query does this by
        itself when executors have joined it, unless ``spark.statebackend.rebalance`` is ``off``.
        """
        book = self._launch.session.progress if self._launch else None
        self._rebalancer.by_hand(book, self.epoch)

    def savepoint(self, to: str | None = None, *, timeout_s: float = 600.0) -> Savepoint:
        """Copy the job's state, and where its sources stood, into a folder of its own.

        The state is that after the newest epoch. A running query goes on meanwhile; one that has
        stopped may be copied too. Of a continuous job: as `ContinuousQuery.savepoint`.

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
        if self._continuous.query is not None:
            made: Savepoint = self._continuous.query.savepoint(to, timeout_s=timeout_s)
            return made

        def open_location(path: str) -> CheckpointLocation:
            return CheckpointLocation(self._spark, path)

        return take_savepoint(open_location, self._job, self._launch, to, timeout_s)

    def savepoints(self) -> list[SavepointInfo]:
        """The job's savepoints under ``<uri>/.savepoints/``, the newest last."""
        return listed_savepoints(self._job)

    def wait_durable(self, timeout_s: float = 60.0) -> None:
        """With asynchronous commits: wait until the records that are on their way are durable.

        For the end of a query, which may come before the end of its last commit.

        Raises:
            CommitUnknownError: it is not known whether the last record was written.
            FencedError: another driver has taken over the job.
            StoreUnreachableError: the store did not answer in time.
        """
        if self._launch is not None:
            done = self._launch.session.drain(timeout_s)
            if self._launch.session.failure is not None:
                raise self._launch.session.failure
            if not done:
                raise StoreUnreachableError(
                    f"The last record of job {self.job!r} is not durable after {timeout_s:g} s.",
                    todo="Wait longer, or look at the store: the log says what it waits for.",
                )

    def close(self) -> None:
        """Free the small frame that Spark caches for this backend. A running query goes on.

        Its subtasks are less well placed then. Call it when the query is over.
        """
        self._builder.close()


def _check_classic(spark: SparkSession) -> None:
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise SparkConnectError(
            "The session is a Spark Connect session; the backend needs the driver's JVM.",
            todo="Run the driver with a classic session: "
            "SparkSession.builder.config('spark.api.mode', 'classic').",
        )


def _warn_of_default_local_dir() -> None:
    warnings.warn(
        "local_dir is not set: task-local copies go to statebackend-<user> in the temporary "
        f"directory of each executor's host (here: {default_local_dir()}). Set local_dir= "
        "(or spark.statebackend.localDir) to a local disk that survives restarts.",
        stacklevel=3,
    )


def _configured(spark: SparkSession, key: str) -> str | None:
    with jvm.calls():
        return spark.conf.get(key, None)
