"""The product's face in Spark: frames with state, and the start of their query."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pyspark import Broadcast
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from snapshot.lineage import OperatorLineage
from snapshot.messages import RestoreReport
from snapshot.progress import CheckpointProgress, ProgressBook
from statebackend import system
from statebackend.errors import (
    DuplicateUidError,
    SchemaError,
    SettingError,
    SparkConnectError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.keygroups import check_parallelism, default_max_parallelism
from statebackend.ops.rowconv import arrow_schema
from statebackend.schema.keys import KeyCodec
from statebackend.settings import Settings
from statebackend.spark.housekeeping import StorePatience
from statebackend.spark.job import Job, store_options
from statebackend.spark.launch import Launch, Operator
from statebackend.spark.plan import Anchor, anchored
from statebackend.spark.sources import check_sources
from statebackend.spark.task import SubtaskTask
from statebackend.spark.taskspec import task_spec
from statebackend.spark.tws import parse_schema, record_states

__all__ = ["StateBackend"]

_log = logging.getLogger("statebackend.spark")
F = TypeVar("F", bound=Callable[..., Any])


class StateBackend:
    """Keyed state for one streaming query (one *job*), in RocksDB inside the executors.

    Args:
        spark: a classic session (not Spark Connect).
        uri: where durable copies go: ``s3://bucket/prefix``, or ``file:///path`` or an absolute
            path on a file system that driver and executors share.
        job: a name under it; one job is one streaming query.
        local_dir: directory for task-local copies on each executor's host; may name environment
            variables of the executor (``$TMPDIR/state``).
        parallelism: subtasks per operator; default ``spark.sql.shuffle.partitions``.
        max_parallelism: key groups, fixed for the job's life; default by Flink's formula.
        commit: ``"sync"`` (the default): what Spark has committed is durable. ``"async"``: the
            record of a batch is written while the next one runs; after a crash of the driver the
            query may go back by one batch, so its sources must be able to repeat one.
        allow_dropped_state: start although the checkpoint holds operators or states that the query
            no longer has; their state is dropped.
        settings: further settings by name (see docs/settings.md); an argument beats a
            ``spark.statebackend.*`` key, a key beats the default.

    Nothing is opened or written before the first frame is made.

    Raises:
        SparkConnectError, SettingError: at once.
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
        allow_dropped_state: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if type(spark).__module__.startswith("pyspark.sql.connect"):
            raise SparkConnectError(
                "The session is a Spark Connect session; the backend needs the driver's JVM.",
                todo="Run the driver with a classic session: "
                "SparkSession.builder.config('spark.api.mode', 'classic').",
            )
        self._spark = spark
        given = {
            "local_dir": local_dir,
            "parallelism": parallelism,
            "max_parallelism": max_parallelism,
            "commit": commit,
            **(settings or {}),
        }
        self._settings = Settings.resolve(given, lambda key: spark.conf.get(key, None))
        self._job = Job(
            uri,
            job or "default",
            options=store_options(self._settings),
            patience=StorePatience(
                self._settings.commit_timeout_s, now_s=system.monotonic_s, sleep_s=system.sleep_s
            ),
        )
        self._allow_dropped_state = allow_dropped_state
        self._local_dir = self._settings.local_dir or _fallback_local_dir()
        self._operators: dict[str, Operator] = {}
        self._sessions = [spark]
        self._anchor: Anchor | None = None
        self._launch: Launch | None = None
        self._token: Broadcast[str] | None = None
        self._checked = False
        self._resolved: tuple[int, int] | None = None

    @property
    def job(self) -> str:
        """The job's name."""
        return self._job.name

    # --- frames --------------------------------------------------------------------------------

    def transform_with_state(
        self,
        df: DataFrame,
        *,
        keys: str | list[str],
        processor: StatefulProcessor,
        output_schema: StructType | str,
        uid: str,
    ) -> DataFrame:
        """Spark's ``transformWithState`` (row flavour) with state kept here.

        Args:
            df: a streaming frame.
            keys: names of the key columns.
            processor: any ``pyspark.sql.streaming.StatefulProcessor``, unmodified.
            output_schema: of the rows that it returns.
            uid: the operator's name for the life of the job: state is found by it.

        Returns:
            a streaming frame; start its query with :meth:`start`.

        Raises:
            UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
            StorageError: the store at ``uri`` cannot be reached or written.
        """
        names = _key_names(df, keys)
        self._check_uid(uid)
        if self._settings.commit == "async":
            vouched = self._settings.repeatable_sources.split(",")
            check_sources(df, [name.strip() for name in vouched])
        output = parse_schema(output_schema, f"the output of operator {uid!r}")
        key_schema = StructType([df.schema[name] for name in names])
        KeyCodec(key_schema)
        arrow_schema(df.schema)
        parallelism, max_parallelism = self._parallelism()
        operator = Operator(
            uid=uid,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            key_schema=key_schema,
            states={d.name: d for d in record_states(processor, uid)},
        )
        spec = task_spec(
            operator,
            self._job,
            self._settings,
            local_dir=self._local_dir,
            input_schema=df.schema,
            key_positions=tuple(df.columns.index(name) for name in names),
            output_schema=output,
            # A worker that ends with its task would take what is not flushed along.
            keep_stores=self._spark_conf("spark.python.worker.reuse", "true") != "false",
        )
        frame = anchored(df, names, self._anchored_at(parallelism), max_parallelism)
        if all(df.sparkSession is not session for session in self._sessions):
            self._sessions.append(df.sparkSession)
        result = frame.mapInArrow(SubtaskTask(spec, processor, self._shared_token()), output)
        self._operators[uid] = operator
        return result

    def _spark_conf(self, key: str, default: str) -> str:
        return self._spark.sparkContext.getConf().get(key, default) or default

    def _shared_token(self) -> Broadcast[str]:
        """What tasks show the coordinator; by broadcast, so that no closure or log has it."""
        if self._token is None:
            self._token = self._spark.sparkContext.broadcast(secrets.token_urlsafe(24))
        return self._token

    def _anchored_at(self, parallelism: int) -> Anchor:
        if self._anchor is None:
            self._check_locality()
            self._anchor = Anchor(self._spark, parallelism)
        return self._anchor

    def _check_uid(self, uid: str) -> None:
        if not isinstance(uid, str) or not uid:
            raise SettingError(
                f"An operator was given the uid {uid!r}.",
                todo="Give uid= a name that stays the same for the life of the job.",
            )
        if uid in self._operators:
            raise DuplicateUidError(
                f"Job {self._job.name!r} has an operator {uid!r} already.",
                todo="Give each operator a uid of its own; to build a query anew, make a new "
                "StateBackend.",
            )

    def _parallelism(self) -> tuple[int, int]:
        """Given, else the checkpoint's, else the defaults; the same for every operator."""
        if self._resolved is not None:
            return self._resolved
        lineages = self._job.lineages()
        known = next(iter(lineages.values()), None)
        parallelism = self._settings.parallelism or (
            known.parallelism
            if known
            else int(self._spark.conf.get("spark.sql.shuffle.partitions", "200") or 200)
        )
        max_parallelism = self._settings.max_parallelism or (
            known.max_parallelism if known else default_max_parallelism(parallelism)
        )
        check_parallelism(parallelism, max_parallelism)
        if known is not None:
            self._job.check_parallelism(known, parallelism, max_parallelism)
        self._resolved = parallelism, max_parallelism
        return self._resolved

    def _check_locality(self) -> None:
        conf = self._spark.sparkContext.getConf()
        if conf.get("spark.speculation", "false") == "true":
            _log.warning(
                "spark.speculation is on: Spark keeps the output of the first twin to finish, and "
                "the state may be the other's. With processors that give the same for the same "
                "input this makes no difference."
            )
        if conf.get("spark.shuffle.reduceLocality.enabled", "true") != "false":
            message = (
                "spark.shuffle.reduceLocality.enabled is not false: subtasks may move between "
                "executors, and local copies be used less. Set it when the session is built."
            )
            if not (conf.get("spark.master") or "").startswith("local["):
                warnings.warn(message, stacklevel=4)
            _log.info(message)

    # --- starting ------------------------------------------------------------------------------

    def start(self, writer: DataStreamWriter) -> StreamingQuery:
        """Start a query over frames of this backend.

        Checks what must hold, goes back by a batch if one is due, and takes over the job: a driver
        that ran it before is fenced.

        Args:
            writer: ``frame.writeStream...``, not started.

        Raises:
            CheckpointLocationError, MissingUidError, StateMismatchError, ParallelismError,
            UnsupportedQueryError, JobRunningError, RewindError: no state was changed, and no other
            driver fenced.
        """
        launch = self._new_launch()
        launch.prepare(writer)
        self._launch = launch
        with launch.armed(self._shared_token().value):
            query = writer.start()
        launch.bind(query)
        return query

    @contextlib.contextmanager
    def starting(self, *, checkpoint_location: str | None = None) -> Iterator[None]:
        """For the other ways to start: ``with backend.starting(): query = writer.toTable("t")``.

        Exactly one query must be started inside, and the block be left at once: its tasks wait for
        the checks that are made then.

        Args:
            checkpoint_location: the query's; with it, everything is checked before the block is
                entered, and a due rewind is done.

        Raises:
            as :meth:`start`; the query is stopped then.
        """
        launch = self._new_launch()
        launch.prepare(None, checkpoint_location)
        self._launch = launch
        before = {query.id for query in self._active()}
        with launch.armed(self._shared_token().value):
            yield
        started = [q for q in self._active() if q.id not in before]
        launch.bind_one(started)

    def _active(self) -> list[StreamingQuery]:
        return [query for session in self._sessions for query in session.streams.active]

    def _new_launch(self) -> Launch:
        if not self._operators:
            raise SettingError(
                f"Job {self._job.name!r} has no operator yet.",
                todo="Make a frame with transform_with_state() first.",
            )
        return Launch(
            self._spark,
            self._job,
            sessions=self._sessions,
            operators=self._operators,
            settings=self._settings,
            allow_dropped_state=self._allow_dropped_state,
            checked=self._checked,
        )

    def checked(self, function: F) -> F:
        """Wrap a ``foreachBatch`` function: it may not return before the epoch is complete.

        Without it, a function that reads only part of its frame fails the query in the *next*
        batch, which then goes back by one. With asynchronous commits it is required: a function
        that skips a batch which it has seen before must evaluate the frame all the same (for
        instance into a ``noop`` writer), since the state of that batch may have to be made again.
        """
        self._checked = True

        @functools.wraps(function)
        def checked_function(frame: DataFrame, batch_id: int, *rest: Any) -> Any:
            result = function(frame, batch_id, *rest)
            if self._launch is not None:
                self._launch.session.check_finished(batch_id)
            return result

        return checked_function  # type: ignore[return-value]

    # --- what is going on ----------------------------------------------------------------------

    def restores(self) -> list[RestoreReport]:
        """How each subtask got its state back since the query was started last."""
        return list(self._launch.session.restores) if self._launch else []

    def progress(self) -> CheckpointProgress:
        """What the newest epochs cost, by operator and subtask: sizes, durations, requests.

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
        """The typed error that made the coordinator stop, for example after being fenced."""
        return self._launch.session.failure if self._launch else None

    def lineages(self) -> dict[str, OperatorLineage]:
        """What the job's log holds now, by operator uid."""
        return self._job.lineages()

    def rebalance(self) -> None:
        """Spread subtasks over the executors that are there now; a running query follows."""
        if self._anchor is not None:
            self._anchor.place_again()

    def wait_durable(self, timeout_s: float = 60.0) -> None:
        """With asynchronous commits: wait until the records that are on their way are durable.

        For the end of a query, which may come before the end of its last commit.

        Raises:
            CommitUnknownError, FencedError, StoreUnreachableError: why they are not.
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
        """Let the cached anchor go; a running query goes on, less well placed."""
        if self._anchor is not None:
            self._anchor.release()
            self._anchor = None


def _key_names(df: DataFrame, keys: str | list[str]) -> list[str]:
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names or not all(isinstance(name, str) for name in names):
        raise SchemaError(
            f"The keys are {keys!r}.", todo="Give the names of one or more columns of the frame."
        )
    for name in names:
        if df.columns.count(name) != 1:
            raise SchemaError(
                f"The frame has {df.columns.count(name)} columns named {name!r} "
                f"({', '.join(df.columns)}).",
                todo="Name existing columns; give an expression a name with withColumn() first.",
            )
    if len(set(names)) != len(names):
        raise SchemaError(f"The keys {names} name a column twice.", todo="Name each once.")
    if not df.isStreaming:
        raise SchemaError(
            "The frame is not a streaming frame.", todo="Read it with spark.readStream."
        )
    return names


def _fallback_local_dir() -> str:
    path = system.default_local_dir()
    warnings.warn(
        f"local_dir is not set: task-local copies go to {path} on each executor's host. Set "
        f"local_dir= (or spark.statebackend.localDir) to a local disk that survives restarts.",
        stacklevel=3,
    )
    return path
