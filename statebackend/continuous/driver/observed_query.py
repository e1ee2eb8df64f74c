"""A continuous job, as the observers of its driver see it."""

from __future__ import annotations

from typing import Protocol

from snapshot.log.progress_book import ProgressBook
from statebackend.continuous.job.flow import JobSetup
from statebackend.continuous.job.job_options import RunOptions
from statebackend.errors import StateBackendError
from statebackend.monitoring.observed_job import ObservedJob
from statebackend.monitoring.observers import observe
from statebackend.runtime.driver.job_status import JobStatus, UnderWay
from statebackend.runtime.driver.session import RunSession

__all__ = ["observe_query"]


class Run(Protocol):
    """One run of it."""

    def under_way(self) -> UnderWay | None:
        """The oldest checkpoint that is not complete; None: none has begun."""


class Query(Protocol):
    """A continuous query, as far as it is observed."""

    @property
    def is_active(self) -> bool:
        """Whether it runs, or is about to be started again."""

    @property
    def restarts(self) -> int:
        """How often it was started again after a failure."""

    @property
    def session(self) -> RunSession | None:
        """Of the run that runs; None: there is none."""

    @property
    def run(self) -> Run | None:
        """The newest run; None before the first."""

    def exception(self) -> StateBackendError | None:
        """Why it has ended for good."""


def observe_query(
    query: Query, setup: JobSetup, progress: ProgressBook, options: RunOptions
) -> None:
    """Have a job watched by what its settings ask for, over all its restarts."""
    observe(
        ObservedJob(
            job=setup.job,
            settings=setup.settings,
            progress=progress,
            session=lambda: query.session,
            is_active=lambda: query.is_active,
            continuous=True,
            restarts=lambda: query.restarts,
            status=lambda: _status(query, options),
        )
    )


def _status(query: Query, options: RunOptions) -> JobStatus:
    error, run = query.exception(), query.run
    return JobStatus(
        failure=f"[{error.code}] {error.what}" if error is not None else "",
        under_way=run.under_way() if run is not None and query.is_active else None,
        interval_s=options.checkpoint_interval_s,
    )
