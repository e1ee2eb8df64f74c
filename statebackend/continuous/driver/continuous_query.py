"""A continuous job that was started: its handle, and the restarts behind it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from recovery.decide.restart_strategy import Restarts, is_final
from recovery.savepoints.savepoint import Savepoint
from snapshot.log.checkpoint_progress import CheckpointProgress
from snapshot.log.progress_book import ProgressBook
from snapshot.log.progress_events import ContinuousCheckpoint
from snapshot.protocol.messages import RestoreReport
from snapshot.protocol.tenure import Tenure
from statebackend.continuous.driver.checkpoint_book import CheckpointBook
from statebackend.continuous.driver.driver_lists import DriverLists
from statebackend.continuous.driver.driver_tasks import Stopped, failure_of
from statebackend.continuous.driver.observed_query import observe_query
from statebackend.continuous.driver.run_loop import JobRun
from statebackend.continuous.driver.savepoint_requests import SavepointRequests
from statebackend.continuous.driver.slot_stage import Cluster
from statebackend.continuous.driver.spark_names import SparkNames
from statebackend.continuous.driver.takeover import (
    QUERY_ID,
    Taken,
    take_over,
)
from statebackend.continuous.job.flow import Flow
from statebackend.continuous.job.graph import Graph
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.slot_messages import Register
from statebackend.continuous.worker.slot import Run
from statebackend.errors import (
    OutputLostError,
    StateBackendError,
    UnsupportedFormatError,
    UsageError,
)
from statebackend.monitoring.observers import prepare_observers
from statebackend.runtime.driver.job import taken_from
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.worker.participant import Membership
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.runtime.worker.task_spec import TaskSpec, task_spec
from statebackend.threads import Thread
from statebackend.work_done import Progress

__all__ = ["ContinuousQuery"]

_log = logging.getLogger("statebackend.continuous")


class _Final(Exception):
    """What would be so again, however often the job is started."""

    def __init__(self, error: StateBackendError) -> None:
        super().__init__(str(error))
        self.error = error


class ContinuousQuery(SparkNames):
    """A continuous job that runs, and is started again when it fails.

    What `ContinuousStream.start` returns. It has the names of Spark's ``StreamingQuery``, too.
    """

    running_jobs: ClassVar[dict[str, ContinuousQuery]] = {}

    def __init__(
        self,
        flow: Flow,
        graph: Graph,
        options: RunOptions,
        operators: Mapping[str, Operator],
        cluster: Cluster,
    ) -> None:
        self._flow, self._graph, self._options = flow, graph, options
        self._operators, self._cluster = operators, cluster
        self._setup = flow.setup
        self._processors: dict[str, ShippedProcessor] = {}
        self._specs: dict[str, TaskSpec] = {}
        self._system = system = self._setup.job.system
        job, threads = self._setup.job, system.threads
        self._book = ProgressBook(job.name, threads, job.figures)
        self.run: JobRun | None = None  # the newest
        self._tenure: Tenure | None = None
        self._names: set[str] = set()  # of all its runs
        self._session: RunSession | None = None  # of the run that runs
        self._restores: list[RestoreReport] = []  # of those before
        self._checkpoints = CheckpointBook(job.name, system, self._book.publish, job.figures)
        self._savings = SavepointRequests(job, self._checkpoints)
        self._done, self._stop = threads.event(), threads.event()
        self._error: StateBackendError | None = None
        self._begun = False  # a run had everything that it begins with
        self._restarts = 0
        self._thread: Thread | None = None  # once it is begun

    # --- for users -----------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether it runs, or is about to be started again."""
        return not self._done.is_set()

    @property
    def is_running(self) -> bool:
        """Whether every subtask runs now."""
        run = self.run
        return self.is_active and run is not None and run.running

    def exception(self) -> StateBackendError | None:
        """Why it has ended for good; None while it runs, or if it came to its end."""
        return self._error

    @property
    def epoch(self) -> int | None:
        """The epoch of the last complete checkpoint since this start; None before the first."""
        return self._checkpoints.epoch

    @property
    def restarts(self) -> int:
        """How often it was started again after a failure."""
        return self._restarts

    def await_termination(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the job.

        Returns:
            whether it has ended; False after ``timeout_s``.

        Raises:
            StateBackendError: it has failed, and the restart strategy gave it up.
        """
        ended = self._done.wait(timeout_s)
        if ended and self._error is not None:
            raise self._error
        return ended

    def stop(self, timeout_s: float = 60.0) -> bool:
        """End the job, without another checkpoint.

        The next start goes on from the last complete one, and reads again what came after it.

        Returns:
            whether it has ended within ``timeout_s``.
        """
        self._stop.set()
        run = self.run
        if run is not None:
            run.stop()
        return self._done.wait(timeout_s)

    def checkpoint(self, timeout_s: float = 60.0) -> int | None:
        """Take a checkpoint now, and wait until it is complete.

        While the job starts, or starts again, that is waited for as well.

        Returns:
            the epoch of a complete checkpoint that began after the call; None: there was none
            within ``timeout_s``, or the job has ended.
        """
        return self._checkpoints.ask("checkpoint", timeout_s)

    def savepoint(
        self, to: str | None = None, *, timeout_s: float = 600.0, progress: Progress | None = None
    ) -> Savepoint:
        """Take a checkpoint and copy it into a folder of its own; the job goes on meanwhile.

        Of a job that has ended, the last complete checkpoint is copied.

        Args:
            to: the savepoint's folder, which must be empty; also in another store. Default: one of
                its own under ``<uri>/.savepoints/<job>/``.
            timeout_s: after so long it is given up, and what was copied goes.
            progress: told the bytes of objects that were copied, and of all that are.

        Raises:
            SettingError: something lies in ``to`` already.
            NotRestorableError: the job has ended, and completed no checkpoint.
            StoreUnreachableError: it took too long, or a store cannot be reached.
            StateBackendError: why the job failed for good meanwhile.
        """
        return self._savings.take(to, timeout_s, progress=progress)

    def stop_with_savepoint(
        self, to: str | None = None, *, timeout_s: float = 600.0, progress: Progress | None = None
    ) -> Savepoint:
        """As `savepoint`, and end the job with that checkpoint: no row after it is committed.

        If the checkpoint is given up, the job goes on. If it takes longer than ``timeout_s``, the
        job ends as soon as it is complete; `savepoint` copies it then.
        """
        made = self._savings.take(to, timeout_s, last=True, progress=progress)
        self._done.wait(timeout_s)
        return made

    def checkpoints(self) -> list[ContinuousCheckpoint]:
        """The newest checkpoints that are over, complete or not, the oldest first.

        The same go to the logger ``statebackend.progress``, one JSON object each.
        """
        return list(self._checkpoints.newest)

    def progress(self) -> CheckpointProgress:
        """What the newest epochs cost, by operator and subtask, as `StateBackend.progress`."""
        return self._book.summary(self.epoch)

    def restores(self) -> list[RestoreReport]:
        """How each keyed subtask got its state back, over all restarts."""
        before = list(self._restores)  # first: of a run that ends meanwhile nothing comes twice
        session = self._session
        return [*before, *(session.restores if session is not None else [])]

    @property
    def session(self) -> RunSession | None:
        """Of the run that runs; None: there is none."""
        return self._session

    def slots(self) -> list[Register]:
        """The processes that make up the job now."""
        slots = self.run.endpoint.slots if self.run is not None else {}
        return [one for _, one in sorted(slots.items())]

    # --- the thread ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Ship the processors, and go."""
        cluster = self._cluster
        cluster.server()  # what is wrong with its port is said before the job is claimed
        prepare_observers(self._setup.settings)
        for uid, one in self._flow.operations.items():
            self._processors[uid] = cluster.ship(one.packed)
            self._specs[uid] = task_spec(
                self._operators[uid],
                replace(one.plan, timezone=cluster.timezone),
                self._setup.job.place(self._setup.local_dir),
                self._setup.settings,
                keep_stores=cluster.keeps_workers,
                may_follow=False,
                packed=False,
                stays_open=True,
                memory=cluster.memory,
            )
        observe_query(self, self._setup, self._book, self._options)
        self._thread = self._system.threads.start(self._go, f"statebackend-{self._setup.job.name}")

    def forget(self) -> None:
        """It is not what runs the job (any more)."""
        running, uri = ContinuousQuery.running_jobs, self._setup.job.store.uri
        if running.get(uri) is self:
            del running[uri]

    def _go(self) -> None:
        try:
            self._error = self._run_to_the_end()
        except BaseException as error:
            self._error = StateBackendError(
                f"The driver of job {self.job!r} failed: {type(error).__name__}: {error}.",
                todo="See the log.",
            )
            _log.exception("job %s", self.job)
        finally:
            self.forget()
            self._done.set()
            self._checkpoints.job_ended()
            self._savings.job_ended(self._error)

    def _run_to_the_end(self) -> StateBackendError | None:
        """Run the job, and again each time it fails, until it ends; why it has failed for good."""
        restarts, before = Restarts(self._options.restart), 0
        while True:
            try:
                self._run_once(before)
                return None
            except Stopped:
                return None
            except _Final as final:
                return final.error
            except Exception as caught:
                error = failure_of(caught, f"The driver of job {self.job!r} failed")
                if self._is_final(caught):
                    return error
            restarts, delay_s = restarts.failed(self._system.monotonic_s(), self._system.draw())
            if self._stop.is_set():
                return None
            if delay_s is None:
                return error
            _log.warning("job %s starts again in %g s: %s", self.job, delay_s, error)
            self._restarts += 1
            before = max(before, self.run.number if self.run else 0)
            if self._stop.wait(delay_s):
                return None

    def _is_final(self, caught: Exception) -> bool:
        """Whether a run failed so that another one would fail, too."""
        has_run = self.run is not None and self.run.has_run
        # A mistake in the code is not one of the moment.
        mistake = not isinstance(caught, StateBackendError | OSError)
        return is_final(caught, has_run=has_run) or (mistake and not self._begun)

    @property
    def job(self) -> str:
        """The job's name."""
        return self._setup.job.name

    @property
    def id(self) -> str:
        """The job's folder: the same in every start, and no other job's."""
        return self._setup.job.store.uri

    def _run_once(self, before: int) -> None:
        setup, job = self._setup, self._setup.job
        name, token = self._named(), self._system.new_secret()
        try:
            taken = take_over(
                job,
                self._operators,
                setup.settings,
                run=name,
                progress=self._book,
                allow_dropped_state=setup.allow_dropped_state,
            )
        except (UsageError, UnsupportedFormatError) as error:
            raise _Final(error) from error
        self._tenure, self._session = taken.tenure, taken.session
        server = self._cluster.server()
        background = self._system.threads.pool(4, "statebackend-lists")
        endpoint = server.add(name, token, taken.session)  # replaced by the run's, below
        try:
            lists = DriverLists(
                self._graph,
                job=self.job,
                local_name=job.local_name,
                member=Membership(taken.session, endpoint.session, QUERY_ID),
                store=job.store,
                background=background,
                system=self._system,
            )
            run = JobRun(
                self._graph,
                self._options,
                taken,
                lists,
                before=before,
                on_settled=self._savings.settled,
                system=self._system,
            )
            server.add(name, token, run.endpoint)
            self.run = run
            self._checkpoints.run_begins(run)
            self._savings.run_begins(run, taken)
            try:
                if self._stop.is_set():
                    raise Stopped()
                self._prepare(run)
                self._begun = True
                shipped = self._shipped(taken, endpoint.location)
                run.launch(self._cluster.stage(shipped, endpoint.credentials))
                run.loop()
                self._closed(run)
            finally:
                run.close()
        finally:
            server.remove(name)
            taken.session.lookups.close()
            self._session, self._restores = None, self._restores + taken.session.restores
            background.shutdown(wait=False)

    def _named(self) -> str:
        """The next run's name. A job that another driver has taken over is never taken back."""
        log, last = self._setup.job.log(), self._tenure
        if last is not None and (fenced := taken_from(log, last, self._names)):
            raise fenced
        name = self._system.new_id()
        self._names.add(name)  # before its claim: one that fails may have landed
        return name

    def _prepare(self, run: JobRun) -> None:
        """As `JobRun.prepare`.

        What is damaged may read the next time. What was lost, or is of a later release, does not.
        """
        try:
            run.prepare(self.job)
        except (OutputLostError, UnsupportedFormatError) as error:
            raise _Final(error) from error

    def _closed(self, run: JobRun) -> None:
        """As `JobRun.closed`; a failure is final, as another run could only close it again."""
        try:
            run.closed()
        except StateBackendError as error:
            raise _Final(error) from error

    def _shipped(self, taken: Taken, location: str) -> Run:
        """What the slots are told."""
        return Run(
            job=self.job,
            job_id=taken.tenure.job_id,
            run=taken.run,
            generation=taken.tenure.generation,
            location=location,
            session=taken.run,
            query_id=QUERY_ID,
            graph=self._graph,
            options=self._options,
            specs=self._specs,
            processors=self._processors,
        )
