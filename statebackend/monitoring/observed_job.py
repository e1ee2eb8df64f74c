"""A job that this driver runs, as what watches it sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from snapshot.log.progress_book import ProgressBook
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_status import JobStatus
from statebackend.runtime.driver.session import RunSession
from statebackend.settings import Settings

__all__ = ["ObservedJob"]


@dataclass(frozen=True, kw_only=True)
class ObservedJob:
    """A job that this driver runs, as its observers see it.

    Attributes:
        progress: hands every event to who listens (`ProgressBook.listen`).
        session: of the run that runs; None: there is none just now.
        is_active: whether its query runs, or is about to run again.
        continuous: whether it is a continuous job.
        restarts: how often a continuous job was started again after a failure.
        status: how it stands now, as its own mode knows it. It may ask Spark.
        committed: the last batch that Spark has committed; None: Spark commits none.
    """

    job: Job
    settings: Settings
    progress: ProgressBook
    session: Callable[[], RunSession | None]
    is_active: Callable[[], bool]
    continuous: bool = False
    restarts: Callable[[], int] = lambda: 0
    status: Callable[[], JobStatus] = JobStatus
    committed: Callable[[], int] | None = None
