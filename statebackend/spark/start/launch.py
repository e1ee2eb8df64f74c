"""Starting a query on a job: checks, the one-batch rewind, and the takeover.

The order is what matters. Everything that can be refused is refused before Spark starts anything;
the claim, which fences another driver, comes only when the query is known to be the job's own; and
tasks wait until all that is done.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from recovery.savepoints.savepoint import Savepoint
from snapshot.barriers.job_watermark import NextDue, next_due
from snapshot.formats.record import Manifest
from snapshot.log.progress_book import ProgressBook
from snapshot.protocol.initial_state_checks import check_initial, lacks_initial, takes_initial
from snapshot.protocol.running_operator import resumed_time
from snapshot.protocol.tenure import next_generation
from snapshot.retention.garbage_collection import CleanReport, clean
from statebackend.errors import (
    JobRunningError,
    StateBackendError,
    StateMismatchError,
    UnsupportedQueryError,
)
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.runtime.driver.attempt_timeouts import Attempts
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_start import JobStart
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.runtime.driver.services import RunningQuery
from statebackend.settings import Settings
from statebackend.spark.frames.event_time import check_event_time
from statebackend.spark.frames.heartbeat import HeartbeatFile, check_trigger
from statebackend.spark.frames.initial_state_writer import write_initial
from statebackend.spark.frames.physical_plan import check_plan
from statebackend.spark.session_settings import (
    check_batches_kept,
    few_rows_at_once,
    retried_whole,
    runs_without_data,
    set_for_a_start,
    wanted_at_start,
    warn_of_partial_retries,
)
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.launch_dependencies import StartOptions, Surroundings
from statebackend.spark.start.output_checks import check_output
from statebackend.spark.start.query_from_savepoint import (
    NewQuery,
    begin_with,
    has_begun,
    warn_of_sources,
)
from statebackend.spark.start.query_identity import refuse_other_place
from statebackend.spark.start.sparks_own_state import refuse_sparks_own
from statebackend.spark.start.start_point import StartPoint, refuse_hidden
from statebackend.spark.start.writer_inspection import (
    location_path,
    only_our_python,
    options_of,
    output_mode,
)
from statebackend.spark.worker.batch_context import ENDPOINT_PROPERTY, JOB_PROPERTY

__all__ = ["Launch", "Operator"]

_log = logging.getLogger("statebackend.spark")
_ASYNC = "asyncprogresstrackingenabled", "_asyncprogresstrackingoverridesinksupportcheck"


class Launch:
    """One start of one job's query.

    Args:
        around: what it asks of Spark and of this process; else by ``spark`` and ``settings``.
        clean: deletes what nobody needs; see `Cleaner`.
    """

    def __init__(
        self,
        spark: SparkSession,
        job: Job,
        *,
        sessions: Sequence[SparkSession],
        operators: Mapping[str, Operator],
        settings: Settings,
        options: StartOptions,
        heartbeats: Sequence[HeartbeatFile] = (),
        around: Surroundings | None = None,
        clean: Callable[..., CleanReport] = clean,
    ) -> None:
        self._spark, self._job = spark, job
        self._around = around or Surroundings(spark, settings)
        self._savepoint = options.savepoint
        self._prepared: str | None = None  # the path of the location that was checked
        self.location_path: str | None = None  # Spark's, once a query is bound
        self.query: StreamingQuery | None = None  # that Spark started; it is stopped on an error
        self._refused = False  # and all is done that is to be done then
        self._sessions = sessions  # of the frames: Spark checks a query in its frame's session
        self._operators = dict(operators)
        self._settings = settings
        self._checked = options.checked
        self._heartbeats = heartbeats
        self._name = job.system.new_id()
        self._start = JobStart(
            job,
            self._operators,
            settings,
            run=self._name,
            progress=ProgressBook(job.name, job.system.threads, job.figures),
            allow_dropped_state=options.allow_dropped_state,
            heartbeat=bool(settings.heartbeat),
            attempts=Attempts(limit_s) if (limit_s := settings.attempt_timeout_s) else None,
            on_epoch_acked=self._beat if heartbeats else None,
            clean=clean,
        )
        self.session = self._start.session
        self._point = StartPoint(
            job,
            self._start.log,
            self._operators,
            run=self._name,
            go_back_to=options.go_back_to,
            check=self._check_initial,
        )
        self._file_manager: str | None = None
        self._narrow = False
        self._runs_without_data = all(map(runs_without_data, sessions))

    # --- before Spark starts anything ----------------------------------------------------------

    def prepare(self, writer: DataStreamWriter | None, path: str | None = None) -> None:
        """Check everything that can be known before the start; do a due rewind.

        Args:
            writer: the query's, where there is one. path: else its checkpoint location.
        """
        with jvm.calls():
            self._refuse_running()
            self._check_plans()
        # What is wrong with its port is said before anything is claimed or taken back.
        self._around.server()
        options = options_of(writer)
        self._check_settings(options)
        self._prepared = path = path or location_path(writer, options)
        if (location := self._around.location(path) if path else None) is None:
            self._point.check_without_location()
        if writer is not None:
            self._look_at(writer, location, options)
        if self._savepoint is not None and not has_begun(self._savepoint, self._job, location):
            self._begin_with(self._savepoint, writer, location, options)
        # The location first: Spark commits only what is in the log, so what is read of the log
        # afterwards is never behind it, even while another driver goes on.
        progress = location.progress() if location else None
        hidden, drafts = (location.taken_back(), location.drafts()) if location else ([], [])
        manifests = self._start.log.manifests()
        self._start.check(manifests)
        begun = bool(manifests) or self._savepoint is not None
        if (
            location is not None
            and progress is not None
            and not begun
            and progress.last_commit >= 0
        ):
            refuse_sparks_own(location)
        if location is None or progress is None:
            self._write_initial(0)
        else:
            self._get_ready(self._point.find(location, progress, hidden, manifests))
            if progress.last_offset < 0 and progress.last_commit < 0:
                location.remove_drafts(drafts)  # last: a start that is refused changes nothing

    def _check_settings(self, options: Mapping[str, str]) -> None:
        """Refuse options and settings of Spark's with which state could not be exact."""
        if any(options.get(name, "").lower() == "true" for name in _ASYNC):
            raise UnsupportedQueryError(
                "Asynchronous progress tracking is on: it merges batches on restart, and "
                "state could not be exact.",
                todo="Leave the option asyncProgressTrackingEnabled out.",
            )
        check_batches_kept(self._sessions, asynchronous=self._settings.commit == "async")

    def _look_at(
        self,
        writer: DataStreamWriter,
        location: CheckpointLocation | None,
        options: Mapping[str, str],
    ) -> None:
        """Check a query's event time; find out which of Spark's settings it may start with."""
        if location is not None:
            self._file_manager = location.file_manager(options.get("path"))
        times = [one.time for one in self._operators.values()]
        mode, frame = output_mode(writer), writer._df
        check_output(frame._jdf.queryExecution().analyzed(), mode, self._operators.values())
        check_event_time(writer, times, append=mode == "append")
        if all(one.narrow for one in self._operators.values()):
            nodes = sum(one.nodes for one in self._operators.values())
            self._narrow = only_our_python(writer, nodes)

    def _begin_with(
        self,
        savepoint: str | Savepoint,
        writer: DataStreamWriter | None,
        location: CheckpointLocation | None,
        options: Mapping[str, str],
    ) -> None:
        query = NewQuery.of(writer, location, options.get("path"), self._operators)
        begin_with(savepoint, self._job, location, self._start.specs_in, query)
        if writer is not None and location is not None:
            warn_of_sources(writer._df)

    def _get_ready(self, manifests: list[Manifest]) -> None:
        """Have what the first batch needs before Spark asks for it.

        An availableNow query with nothing new asks once, and ends.
        """
        epoch = self._point.first_epoch
        assert epoch is not None
        self._write_initial(epoch)
        known = self._job.resolved
        lineages = known.take(manifests) if self._point.gives_up else known.of(manifests)
        self._point.forget_given_up(lineages.values())
        self._beat(next_due(epoch - 1, *resumed_time(self._start.specs, lineages, epoch)))

    def _check_plans(self) -> None:
        """Refuse operators that Spark would plan so that they cannot work."""
        made = [(one, one.frame) for one in self._operators.values() if one.frame is not None]
        if not made:
            return
        warn_of_partial_retries(self._spark)
        wanted = wanted_at_start(narrow=False, file_manager=None)
        with self._around.starting, set_for_a_start(self._sessions, wanted):
            for operator, frame in made:
                check_plan(frame, operator.uid, operator.parallelism)

    def _beat(self, due: NextDue) -> None:
        """Have Spark run a batch when a timer is due, although there may be no data.

        Not if the session has batches without data off: timers then wait for data, as in Spark.
        """
        if not self._runs_without_data:
            return
        for one in self._heartbeats:
            # As Spark: once more when the watermark moved, also for rows that are late by it then.
            # A timer that a handler sets in the past waits: it would make batches without end.
            one.write(
                self._name,
                due.epoch,
                watermark_moves=due.watermark_moves,
                processing_due_ms=due.processing_due_ms,
            )

    def _silence(self, run: str) -> None:
        """What a run said that is over is no reason for a batch."""
        for one in self._heartbeats:
            one.remove(run)

    def _check_initial(self, manifests: list[Manifest], epoch: int) -> None:
        """Refuse to repeat an operator's first epoch without the initial state that it had."""
        given = {uid: one.initial is not None for uid, one in self._operators.items()}
        if lacks := lacks_initial(manifests, given, epoch):
            raise StateMismatchError(
                f"Batch {epoch} is repeated. In it the operator(s) "
                f"{', '.join(map(repr, lacks))} of job {self._job.name!r} took in an initial "
                f"state, which this start does not give: it would be lost.",
                todo="Give initial_state= as before, until that batch is committed. If the "
                "operator is to begin with nothing, give an empty frame.",
            )

    def _write_initial(self, epoch: int) -> None:
        """Have the initial state of new operators in the store before their first epoch."""
        wanted = {
            uid: operator.initial
            for uid, operator in self._operators.items()
            if operator.initial is not None and takes_initial(self._start.lineages.get(uid), epoch)
        }
        if not wanted:
            return
        # The generation that the claim after the start takes; if another driver takes it first,
        # this start is refused.
        generation = next_generation(self._start.log.manifests())
        for uid, state in wanted.items():
            spec = self._start.specs[uid]
            with retried_whole(state.frame.sparkSession, self._around.starting):
                parts = write_initial(
                    state,
                    uri=self._job.store_uri,
                    options=self._job.options,
                    local_dir=self._settings.local_dir,
                    parallelism=spec.parallelism,
                    max_parallelism=spec.max_parallelism,
                    generation=generation,
                    epoch=epoch,
                )
            self._start.specs[uid] = msgspec.structs.replace(spec, initial=parts)

    def _refuse_running(self) -> None:
        for one in list(self._around.running.values()):
            one.active()  # lets go of queries that have ended, of any job
        known = self._around.running.get(self._job.store.uri)
        if known is None:
            return
        if (query := known.active()) is not None:
            raise JobRunningError(
                f"Job {self._job.name!r} in {self._job.uri} is being run by query "
                f"{query.name or query.id} of this driver.",
                todo="Stop that query first, or give this one another checkpoint location (and a "
                "StateBackend another job=).",
            )
        known.server.remove(known.name)
        self._silence(known.name)
        # What it had on its way when it ended is part of what this start finds in the log.
        known.session.drain(self._settings.commit_timeout_s)

    # --- the start -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """From before :meth:`armed` to after :meth:`bind`: whatever ends it, no query waits."""
        try:
            yield
        except BaseException as error:
            if not self._refused:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, StateBackendError):
            why = str(error) or type(error).__name__
            text = f"The query could not be bound to job {self._job.name!r} ({why})."
            error = UnsupportedQueryError(text)
        self._refused = True
        self.session.refuse(error)
        self._silence(self._name)
        try:
            if self.query is not None:
                self.query.stop()
        finally:
            self._around.server().remove(self._name)

    @contextlib.contextmanager
    def armed(self, token: str) -> Iterator[None]:
        """While open, a query that is started finds this session and passes Spark's check."""
        context = self._spark.sparkContext
        endpoint = self._around.server().add(self._name, token, self.session)
        self._around.sessions[self._name] = self.session
        with self._around.starting:  # the check is the session's: one start at a time
            narrow = self._narrow and few_rows_at_once(self._sessions)
            wanted = wanted_at_start(narrow=narrow, file_manager=self._file_manager)
            place = self._job.place(self._settings.local_dir)
            said = {
                ENDPOINT_PROPERTY: endpoint.to_property(),
                JOB_PROPERTY: msgspec.json.encode(place).decode(),
            }
            before: dict[str, Any] = {name: context.getLocalProperty(name) for name in said}
            for name, value in said.items():
                context.setLocalProperty(name, value)
            try:
                with set_for_a_start(self._sessions, wanted):
                    yield
            finally:
                for name, value in before.items():
                    context.setLocalProperty(name, value)

    def is_active(self) -> bool:
        """Whether the query that was started runs."""
        return self.query is not None and bool(self.query.isActive)

    def bind_one(self, started: list[StreamingQuery]) -> None:
        """As :meth:`bind`, for the one query that a block started."""
        if not started:
            # It ended before the block did: it had no new data, or failed on its own.
            self._around.server().remove(self._name)
            _log.warning("no query was active at the end of starting(): nothing was bound")
            return
        if len(started) != 1:
            error = UnsupportedQueryError(
                f"{len(started)} queries were started inside starting(); there must be one.",
                todo="Start one query per job, and no other at the same time; if it failed at "
                "once, its own error says why.",
            )
            self._refused = True
            self.session.refuse(error)
            raise error
        self.bind(started[0])

    def bind(self, query: StreamingQuery) -> None:
        """Check the query that was started, take over the job, and let its tasks in."""
        self.query = query
        with self.given_up_on_error():
            self._bind(query)

    def _check_run(self, query: StreamingQuery, stream: Any) -> None:
        """Refuse what only the started query shows: how it runs, its trigger, its sink."""
        kind = stream.getClass().getSimpleName()
        if kind != "MicroBatchExecution":
            raise UnsupportedQueryError(
                f"The query runs as {kind}, not in micro-batches.",
                todo="Use a processing-time, once or availableNow trigger, and no asynchronous "
                "progress tracking.",
            )
        self._around.check_output(query, self._operators.values())
        if self._settings.commit == "async":
            checked = self._checked(query)
            self.session.checks.required = self._around.check_sink(query, checked=checked)
        if self._heartbeats and self._runs_without_data:
            check_trigger(str(stream.trigger().getClass().getSimpleName()))

    def _bind(self, query: StreamingQuery) -> None:
        stream: Any = query._jsq.streamingQuery()
        self._check_run(query, stream)
        # The location is read before the log, see prepare().
        self.location_path = str(stream.resolvedCheckpointRoot())
        place = self._around.location(self.location_path)
        if self._prepared is not None and self._prepared != self.location_path:
            refuse_other_place(self._around.location(self._prepared), place)
        location = place.progress()
        refuse_hidden(place)
        manifests = self._start.log.manifests()
        first_epoch, manifests = self._point.started_at(str(query.id), location, manifests)
        # Before whoever goes on is fenced.
        self._point.check_not_overtaken(manifests, first_epoch)
        self._point.check_plan_stands(place, first_epoch)
        self._check_initial(manifests, first_epoch)
        check_initial(self._start.specs.values(), next_generation(manifests))
        initial = [uid for uid, one in self._operators.items() if one.initial is not None]
        held = self._start.claim(str(query.id), manifests, first_epoch, initial)
        self._point.check_not_overtaken(held, first_epoch)
        lineages = self._start.lineages_in(held)
        self._point.forget_given_up(lineages.values())
        server = self._around.server()
        self._start.open(
            lineages,
            query_id=str(query.id),
            first_epoch=first_epoch,
            asynchronous=self._settings.commit == "async",
            stamps=self._around.stamps_of(self._job.store.uri),
            check_plan=place.check_planned,
        )
        run = RunningQuery(server, self._name, self.session, query)
        self._around.running[self._job.store.uri] = run
        generation = self._start.tenure.generation
        _log.info("job %s: generation %d runs query %s", self._job.name, generation, query.id)
