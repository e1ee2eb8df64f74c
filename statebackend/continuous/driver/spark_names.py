"""The names of Spark's ``StreamingQuery``, for a continuous job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from snapshot.log.progress_events import ContinuousCheckpoint
from statebackend.errors import SettingError, StateBackendError

__all__ = ["SparkNames"]


class SparkNames(ABC):
    """Code that waits for, watches and stops a ``StreamingQuery`` does so with a continuous job."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether it runs, or is about to be started again."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether every subtask runs now."""

    @property
    @abstractmethod
    def job(self) -> str:
        """The job's name."""

    @abstractmethod
    def exception(self) -> StateBackendError | None:
        """Why it has ended for good."""

    @abstractmethod
    def await_termination(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the job."""

    @abstractmethod
    def checkpoints(self) -> list[ContinuousCheckpoint]:
        """The newest checkpoints that are over."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The job's folder: the same in every start, and no other job's."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job

    @property
    def isActive(self) -> bool:
        """As ``is_active``."""
        return self.is_active

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """As ``await_termination``; as in Spark, None is returned where no ``timeout`` was given.

        Args:
            timeout: in seconds.

        Raises:
            SettingError: ``timeout`` is not above 0.
            StateBackendError: the job has failed for good.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise SettingError(
                f"The timeout is {timeout!r}.", todo="Give seconds above 0, or leave it out."
            )
        ended = self.await_termination(timeout)
        return None if timeout is None else ended

    @property
    def status(self) -> dict[str, Any]:
        """As Spark's: ``message``, ``isDataAvailable`` and ``isTriggerActive``.

        The two are one here: rows are taken as they come, while every subtask runs.
        """
        error, running = self.exception(), self.is_running
        if error is not None:
            message = f"Terminated with exception: {error}"
        elif not self.is_active:
            message = "Stopped"
        else:
            message = "Processing rows" if running else "Starting its subtasks"
        return {"message": message, "isDataAvailable": running, "isTriggerActive": running}

    @property
    def recentProgress(self) -> list[ContinuousCheckpoint]:
        """The newest complete checkpoints, the oldest first."""
        return [one for one in self.checkpoints() if not one.aborted]

    @property
    def lastProgress(self) -> ContinuousCheckpoint | None:
        """The newest complete checkpoint; None before the first."""
        return next(reversed(self.recentProgress), None)
