"""The product's face in Spark: frames with state, and the start of their query."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from recovery.savepoints.savepoint import Savepoint
from snapshot.storage.uris import job_folder
from statebackend.environment import warn_of_other_python
from statebackend.errors import (
    LocalDirError,
    SettingError,
    SparkConnectError,
    StorageError,
    UsageError,
)
from statebackend.monitoring.observers import check_observers
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.rpc.tls import driver_tls
from statebackend.runtime.driver.job import Job, store_options
from statebackend.runtime.driver.job_savepoints import saved_lineages
from statebackend.runtime.driver.store_patience import StorePatience
from statebackend.settings import ENABLED, Settings, check_keys
from statebackend.spark.data_sources import register_when_read
from statebackend.spark.frames.frame_builder import FrameBuilder, StatefulFrame
from statebackend.spark.frames.stateful_frames import FrameMaker
from statebackend.spark.local_directories import warn_if_short_lived
from statebackend.spark.query_failures import StatefulQuery, stateful_queries
from statebackend.spark.spark_internals import check_internals
from statebackend.spark.start.checked_batches import CheckedBatches, function_of
from statebackend.spark.start.go_back_to import check_go_back_to
from statebackend.spark.start.launch_dependencies import StartOptions
from statebackend.spark.start.query_identity import FoundJob, find_job, job_at
from statebackend.spark.start.started_query import StartedQuery
from statebackend.spark.start.stateful_writer import StatefulStreamWriter, WriterCalls
from statebackend.spark.start.watched_query import WatchedQuery, frames_of
from statebackend.system import SYSTEM

if TYPE_CHECKING:  # a start without them takes a third of a second less
    from statebackend.continuous.job.flow import Flow
    from statebackend.continuous.job.streams import ContinuousStream
    from statebackend.continuous.sources.source import Source
    from statebackend.once_batches import OnceBatches, Written

__all__ = ["StateBackend"]

F = TypeVar("F", bound=Callable[..., Any])


class StateBackend(FrameMaker, StartedQuery):
    """Keyed state for streaming queries, in RocksDB inside the executors.

    What a query keeps is a *job*: it has a name, and a folder under ``uri``.

    Example::

        backend = StateBackend(spark, uri="s3://bucket/state", job="clicks")
        counts = backend.transform_with_state(
            clicks.groupBy("user"), Counter(), "user string, n bigint", timeMode="None"
        )
        query = backend.write_stream(counts).option("checkpointLocation", folder).start(path)

    Args:
        spark: a classic session (not Spark Connect).
        uri: where durable copies go: ``s3://bucket/prefix``, or ``file:///path`` or an absolute
            path on a file system that driver and executors share. Without one (and without
            ``spark.statebackend.uri``) the state lies in the query's checkpoint location.
        job: a name under it, if there is to be one query only. Without it a query's job follows
            from its checkpoint location, and the backend may have several queries.
        local_dir: folder for local copies on each executor's host; may name environment
            variables of the executor (``$TMPDIR/state``). Default: a folder ``statebackend-<user>``
            in the executor's first Spark local directory.
        parallelism: subtasks per operator. Default: as in the last run of a job with a name;
            otherwise ``spark.sql.shuffle.partitions`` if that is set, or as many as Spark has
            cores. A continuous job takes the cores.
        max_parallelism: key groups, fixed for the job's life; default: by Flink's formula, or 1,024
            without ``job``.
        commit: ``"sync"`` (the default): what Spark has committed is durable. ``"async"``: the
            record of a batch is written while the next one runs; after a crash of the driver the
            query may go back by one batch, so its sources must be able to repeat one.
        savepoint: what a new job begins with, at a new checkpoint location; a job that has begun
            with it goes on as it is.
        allow_dropped_state: start although the checkpoint holds operators or states that the query
            no longer has; their state is dropped.
        settings: further settings by name (see docs/reference/settings.md); an argument beats a
            ``spark.statebackend.*`` key, a key beats the default.

    Nothing is opened or written before the first frame is made.

    Raises:
        SparkConnectError, SettingError, EnvironmentMissingError, SparkLostError: at once.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        uri: str | None = None,
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
        self._savepoint = savepoint
        with jvm.calls():
            check_keys(spark.conf.getAll, [ENABLED])
        self._settings = Settings.resolve(given, functools.partial(_configured, spark))
        driver_tls(self._settings)  # what they lack is said here
        check_observers(self._settings)
        self._uri, self._job = uri or self._settings.uri, None
        if job is not None:
            if not self._uri:
                raise SettingError(
                    "No uri was given.",
                    todo="Give uri= (or set spark.statebackend.uri) a file:/// or s3:// URI.",
                )
            self._job = self._open_job(self._uri, job)
        elif self._uri:
            self._check_uri()
        self._allow_dropped_state = allow_dropped_state
        if not self._settings.local_dir:
            warn_if_short_lived(spark)
        self._builder = FrameBuilder(spark, self._job, self._settings)
        self._newest: WatchedQuery | None = None
        self._jobs: dict[str, str] = {}  # that frames were started for last, by their names
        self._checked: list[CheckedBatches] = []  # those that are not known to be of a query
        self.writer_calls: Final = WriterCalls(self._begin)
        self._flow: Flow | None = None
        register_when_read("statebackend", _register)

    def _check_uri(self) -> None:
        """Refuse a wrong uri now, though the job's name comes with the first start."""
        try:
            self._open_job(self._uri, "a")
        except (UsageError, StorageError) as error:
            what = error.what.replace(job_folder(self._uri, "a"), self._uri)
            raise type(error)(what, todo=error.todo) from None

    def _open_job(self, uri: str, name: str) -> Job:
        job = Job(
            uri,
            name,
            options=store_options(self._settings),
            patience=StorePatience(
                self._settings.commit_timeout_s, now_s=SYSTEM.monotonic_s, sleep_s=SYSTEM.sleep_s
            ),
            system=SYSTEM,
        )
        if (savepoint := self._savepoint) is not None:
            job.begins = lambda: saved_lineages(savepoint, job)
        return job

    @property
    def spark(self) -> SparkSession:
        """The session it was made with."""
        return self._spark

    @property
    def parallelism(self) -> int:
        """Subtasks per operator: as given, else those of the job that ``job=`` names."""
        return self._builder.parallelism()[0]

    @property
    def max_parallelism(self) -> int:
        """Key groups, and so the most subtasks that the job can ever have."""
        return self._builder.parallelism()[1]

    # --- starting ------------------------------------------------------------------------------

    def write_stream(self, frame: DataFrame) -> DataStreamWriter:
        """Spark's ``frame.writeStream``, for a frame of this backend.

        Its ``start``, ``toTable`` and ``foreachBatch`` take Spark's arguments, check what
        :meth:`start` checks, and raise what it raises.

        Raises:
            SettingError: it is no streaming frame.
        """
        if not isinstance(frame, DataFrame) or not frame.isStreaming:
            raise SettingError(
                f"write_stream() was given a {type(frame).__name__} that is no streaming frame.",
                todo="Give it what transform_with_state() or another of the backend's methods "
                "returned, or a frame that was made of that.",
            )
        return StatefulStreamWriter(frame, self.writer_calls)

    def has_made(self, names: Iterable[str]) -> bool:
        """Whether one of the functions of a query, by `functions_in`, is of a frame of its own."""
        return bool(self._builder.named(names))

    def start(self, writer: DataStreamWriter, *, go_back_to: int | None = None) -> StreamingQuery:
        """Start a query over frames of this backend; :meth:`write_stream` is the shorter way.

        Checks what must hold, goes back by a batch if one is due, and takes over the job: a driver
        that ran it before is fenced.

        Args:
            writer: ``frame.writeStream...``, not started.
            go_back_to: only if the query cannot be started otherwise: give up what came after this
                epoch, and go on with the next batch. The error of a plain start names the epochs
                that can be given. Read "When the location and the log do not fit" in
                docs/howto/repair.md first. If the query can go on, this is ignored, with a warning.

        Raises:
            StateBackendError: (a kind of it: CheckpointLocationError, MissingUidError,
                StateMismatchError, ParallelismError, UnsupportedQueryError, JobRunningError,
                RewindError) no state was changed, and no other driver fenced.
            SettingError: the query has no frame of this backend, ``writer`` is none, or
                ``go_back_to`` is no epoch.
        """
        check_go_back_to(go_back_to)
        if not isinstance(writer, DataStreamWriter):
            raise SettingError(
                f"start() was given a {type(writer).__name__}.",
                todo="Give it frame.writeStream..., which is not started yet.",
            )
        return self._begin(
            writer, lambda: WriterCalls.spark_start(writer), self._checked, go_back_to
        )

    def _begin(
        self,
        writer: DataStreamWriter,
        start: Callable[[], StreamingQuery],
        checked: Sequence[CheckedBatches],
        go_back_to: int | None = None,
    ) -> StreamingQuery:
        try:
            return self._begun(writer, start, checked, go_back_to)
        except (UsageError, StorageError, LocalDirError) as error:
            # Its sentence has it all, but for what a user's own code raised.
            cause = error.__cause__ if isinstance(error, UsageError) else None
            raise error.with_traceback(None) from cause

    def _begun(
        self,
        writer: DataStreamWriter,
        start: Callable[[], StreamingQuery],
        checked: Sequence[CheckedBatches],
        go_back_to: int | None,
    ) -> StreamingQuery:
        check_internals(self._spark)
        frames = frames_of(self._builder, writer)
        job, found = self._job, None
        if job is None:
            found = find_job(self._spark, writer, self._uri, SYSTEM, self._open_job)
            job = found.job
        if found is not None and self._savepoint is not None:
            found.keep()  # or a beginning that is cut would not be found again
        watched = self._watched(job, frames, checked, go_back_to)
        watched.prepare(writer)
        if found is not None:
            found.keep()
        with watched.launch.given_up_on_error():
            query = watched.run(start, self._builder.credentials().value.token)
            self._keep(watched, frames)
            self._settle(found, watched, query)
        return StatefulQuery(query._jsq)

    def _settle(self, found: FoundJob | None, watched: WatchedQuery, query: StreamingQuery) -> None:
        """Look once more whose location it is, now that the query runs there."""
        if found is not None:
            found.after_start(query, watched.place, self._settings.commit_timeout_s)

    @contextlib.contextmanager
    def starting(
        self, *, checkpoint_location: str | None = None, go_back_to: int | None = None
    ) -> Iterator[None]:
        """For the other ways to start: ``with backend.starting(): query = writer.toTable("t")``.

        Exactly one query must be started inside, and the block be left at once: its tasks wait for
        the checks that are made then. :meth:`write_stream` is the shorter way.

        Args:
            checkpoint_location: the query's; with it, everything is checked before the block is
                entered, and a due rewind is done. A backend without ``job`` needs it.
            go_back_to: as for :meth:`start`; it needs ``checkpoint_location``.

        Raises:
            as :meth:`start`; the query is stopped then.
        """
        check_go_back_to(go_back_to)
        if not self._builder.newest():
            raise SettingError(
                "This backend has no operator yet.",
                todo="Make a frame with transform_with_state() first.",
            )
        job, found = self._job, None
        if job is None:
            if checkpoint_location is None:
                raise SettingError(
                    "Which job a query is follows from its checkpoint location, which starting() "
                    "was not given.",
                    todo="Give starting() checkpoint_location=, or StateBackend(...) job=.",
                )
            found = job_at(self._spark, checkpoint_location, self._uri, self._open_job)
            job = found.job
            if self._savepoint is not None:
                found.keep()
        uri = job.store.uri
        # Without a frame of its own it is another query over a frame that has one.
        own = self._builder.newest(lambda one: self._jobs.get(one.name, uri) == uri)
        frames = own or self._builder.newest()
        watched = self._watched(job, frames, self._checked, go_back_to)
        watched.prepare(None, checkpoint_location)
        if found is not None:
            found.keep()
        before = {query.id for query in watched.active()}
        with watched.launch.given_up_on_error():
            token = self._builder.credentials().value.token
            with watched.launch.armed(token), stateful_queries():
                yield
            started = [q for q in watched.active() if q.id not in before]
            watched.observe()
            watched.launch.bind_one(started)
            for query in started:
                self._settle(found, watched, query)
        self._keep(watched, frames)
        if started:
            watched.look_after(started[0])

    def _keep(self, watched: WatchedQuery, frames: Sequence[StatefulFrame]) -> None:
        """What was not refused is what this backend ran last."""
        self._newest = watched
        job = watched.job.store.uri
        self._jobs.update({one.name: job for one in frames})

    def _watched(
        self,
        job: Job,
        frames: Sequence[StatefulFrame],
        checked: Sequence[CheckedBatches],
        go_back_to: int | None,
    ) -> WatchedQuery:
        options = StartOptions(
            self._savepoint,
            self._allow_dropped_state,
            go_back_to,
            lambda query: self._is_checked(query, checked),
        )
        return WatchedQuery(self._spark, job, self._settings, frames, options)

    def _is_checked(self, query: StreamingQuery, checked: Sequence[CheckedBatches]) -> bool:
        """Whether a query's function is a wrapped one, or may call one that no query has."""
        own = function_of(query)
        if not isinstance(own, CheckedBatches):
            return bool(checked)
        if own in self._checked:
            self._checked.remove(own)
        return True

    def checked(self, function: F) -> F:
        """Wrap a ``foreachBatch`` function: it may not return before the epoch is complete.

        Without it, a function that reads only part of its frame fails the query in the *next*
        batch, which then goes back by one. With asynchronous commits it is required: a function
        that skips a batch which it has seen before must evaluate the frame all the same (for
        instance into a ``noop`` writer), since the state of that batch may have to be made again.
        A query that was given another function than this returns is refused in its second batch.
        The ``foreachBatch`` of :meth:`write_stream` does this by itself.
        """
        one = CheckedBatches(function)
        self._checked.append(one)
        return one  # type: ignore[return-value]

    def once(self, write: Written) -> OnceBatches:
        """As `statebackend.once`, for a query that :meth:`start` starts."""
        from statebackend.once_batches import once

        one = once(write)
        self._checked.append(one)
        return one

    def continuous(self, source: Source, *, name: str) -> ContinuousStream:
        """The rows of a source, for a continuous job (docs/concepts/two-modes.md).

        Args:
            source: a ``statebackend`` source, such as ``FileSource``.
            name: the source's, for the life of the job: its positions are found by it.

        Returns:
            a ``ContinuousStream``, to be built on and started.

        Raises:
            SettingError, DuplicateUidError: no source, or the name; the backend has no ``job=``.
        """
        from statebackend.continuous.job.flow import Flow, JobSetup
        from statebackend.continuous.job.streams import continuous

        if self._job is None:
            raise SettingError(
                "A continuous job has no checkpoint location, so its name must be given.",
                todo="Give StateBackend(...) job=.",
            )
        if self._flow is None:
            found = self._settings
            self._flow = Flow(
                JobSetup(
                    self._job,
                    found,
                    found.local_dir,
                    self._savepoint,
                    self._allow_dropped_state,
                    self._spark,
                )
            )
        return continuous(self._flow, source, name=name)

    def close(self) -> None:
        """Let the cached anchors go; a running query goes on, less well placed."""
        self._builder.close()


def _check_classic(spark: Any) -> None:
    if any(one.__module__.startswith("pyspark.sql.connect") for one in type(spark).__mro__):
        raise SparkConnectError(
            "The session is a Spark Connect session; the backend needs the driver's JVM.",
            todo="Run the driver with a classic session: "
            "SparkSession.builder.config('spark.api.mode', 'classic').",
        )
    if not isinstance(spark, SparkSession):
        raise SettingError(
            f"spark= is a {type(spark).__name__}, no session of Spark's.",
            todo="Give it what SparkSession.builder.getOrCreate() returned.",
        )


def _register(spark: SparkSession) -> None:
    from statebackend.spark.state_data_source import register  # a start needs none of it

    register(spark)


def _configured(spark: SparkSession, key: str) -> str | None:
    with jvm.calls():
        return spark.conf.get(key, None)
