"""One query of a backend: its operators found, its job taken over, its executors looked after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from statebackend.errors import DuplicateUidError, SettingError, UnsupportedQueryError
from statebackend.monitoring.observed_job import ObservedJob
from statebackend.monitoring.observers import observe, prepare_observers
from statebackend.runtime.driver.attempt_timeouts import watch_attempts
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.runtime.driver.services import Services
from statebackend.settings import Settings
from statebackend.spark.frames.frame_builder import FrameBuilder, StatefulFrame
from statebackend.spark.frames.rebalancing import Rebalancer, SparkPlaces
from statebackend.spark.query_status import status_of
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.launch import Launch
from statebackend.spark.start.launch_dependencies import StartOptions
from statebackend.spark.start.worker_probe import check_workers
from statebackend.spark.start.writer_inspection import functions_in

__all__ = ["WatchedQuery", "frames_of"]

_log = logging.getLogger("statebackend.spark")


def frames_of(builder: FrameBuilder, writer: DataStreamWriter) -> list[StatefulFrame]:
    """The stateful frames that a writer's query is made of.

    Raises:
        SettingError: there is none, or one is another backend's.
    """
    names = functions_in(writer)
    frames = builder.named(names)
    if not frames:
        raise SettingError(
            "The query has no operator of this backend.",
            todo="Make its frame with transform_with_state() or another of the backend's methods; "
            "a query without state is started with Spark's own writeStream.",
        )
    if len(frames) < len(names):
        raise UnsupportedQueryError(
            "The query has operators of several backends.",
            todo="Make all of its frames with one StateBackend.",
        )
    return frames


class WatchedQuery:
    """Starts one query by a `Launch`, watches it, and holds what its backend knows of it.

    Args:
        frames: the query's stateful frames.
    """

    def __init__(
        self,
        spark: SparkSession,
        job: Job,
        settings: Settings,
        frames: Sequence[StatefulFrame],
        options: StartOptions,
    ) -> None:
        self.job, self._spark, self._settings = job, spark, settings
        prepare_observers(settings)  # before anything is claimed
        self._sessions = _distinct([spark, *(one.session for one in frames)])
        self.launch = Launch(
            spark,
            job,
            sessions=self._sessions,
            operators=_by_uid(frames),
            heartbeats=[one.heartbeat for one in frames if one.heartbeat is not None],
            settings=settings,
            options=options,
        )
        self._anchors = [one.anchor for one in frames]
        self.rebalancer = Rebalancer(
            lambda: SparkPlaces(spark, self._anchors[0]),
            job=job.name,
            automatic=settings.rebalance == "auto",
            settle_s=settings.rebalance_settle_s,
        )

    def prepare(self, writer: DataStreamWriter | None, path: str | None = None) -> None:
        """As `Launch.prepare`, when each subtask has its place, and the workers were asked."""
        for anchor in self._anchors:
            anchor.ready()  # so there are executors that can be asked
        check_workers(self._spark, self._settings.local_dir)
        self.launch.prepare(writer, path)

    def run(self, start: Callable[[], StreamingQuery], token: str) -> StreamingQuery:
        """Start the query, which was prepared; the job is taken over then.

        Args:
            start: has Spark start it. token: by which its tasks are known.

        Raises:
            as `Launch.bind`; the query is stopped then.
        """
        with self.launch.given_up_on_error():
            with self.launch.armed(token):
                query = self.launch.query = start()
            self.observe()
            self.launch.bind(query)
        self.look_after(query)
        return query

    @property
    def place(self) -> CheckpointLocation:
        """The checkpoint location of the query that was started."""
        assert self.launch.location_path is not None
        return CheckpointLocation(self._spark, self.launch.location_path)

    def observe(self) -> None:
        """Have the query observed, from before its first epoch."""
        session, uri = self.launch.session, self.job.store.uri

        def is_active() -> bool:
            known = Services.running.get(uri)
            return known is not None and known.session is session and known.active() is not None

        observe(
            ObservedJob(
                job=self.job,
                settings=self._settings,
                progress=session.progress,
                session=lambda: session,
                is_active=is_active,
                status=lambda: status_of(self.launch.query),
                committed=lambda: self.place.progress().last_commit,
            )
        )

    def look_after(self, query: StreamingQuery) -> None:
        """Watch a query's executors and attempts, as long as it runs."""
        session = self.launch.session
        self.rebalancer.watch(lambda: query.isActive, session.progress, lambda: session.epoch)
        if session.attempts is not None:
            watch_attempts(self._spark, session.attempts, lambda: query.isActive)

    def active(self) -> list[StreamingQuery]:
        """The queries that run in the sessions of its frames, of any job."""
        return [query for session in self._sessions for query in session.streams.active]


def _by_uid(frames: Iterable[StatefulFrame]) -> dict[str, Operator]:
    operators: dict[str, Operator] = {}
    for frame in frames:
        uid = frame.operator.uid
        if uid in operators:
            raise DuplicateUidError(
                f"The query has two operators with the uid {uid!r}.",
                todo="Give each operator of a query a uid= of its own. One that is made by Spark's "
                "method is named after its class (or function): give it a subclass.",
            )
        operators[uid] = frame.operator
    return operators


def _distinct(sessions: Iterable[SparkSession]) -> list[SparkSession]:
    found: list[SparkSession] = []
    for session in sessions:
        if all(session is not other for other in found):
            found.append(session)
    return found
