"""Takes savepoints of a query in this driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from recovery.savepoints.create_savepoint import Making, create_savepoint
from recovery.savepoints.savepoint import Savepoint
from snapshot.storage.deadline import Deadline
from statebackend.errors import (
    NotRestorableError,
    SettingError,
)
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import deadline_of, making_of
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.system import System
from statebackend.work_done import Progress

if TYPE_CHECKING:
    from statebackend.spark.start.launch import Launch

__all__ = ["SparkLocation", "take"]

_WAIT_S: Final = 0.05


class SparkLocation:
    """A checkpoint location read through Spark's file-system layer; see `LocationFiles`."""

    def __init__(self, location: CheckpointLocation, deadline: Deadline) -> None:
        self._location, self._deadline = location, deadline

    @property
    def path(self) -> str:
        """As Spark has it."""
        return self._location.path

    def list(self, folder: str) -> list[str]:
        """Every file below a folder."""
        with self._deadline.doing(f"listing {folder!r} in {self.path}"):
            return self._location.files(folder)

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file in pieces."""
        pieces = self._location.chunks(name)
        while True:
            with self._deadline.doing(f"reading {name!r} in {self.path}"):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece


def take(
    open_location: Callable[[str], CheckpointLocation],
    job: Job,
    launch: Launch | None,
    to: str | None,
    timeout_s: float,
    progress: Progress | None = None,
) -> Savepoint:
    """A savepoint of the query that a launch started, whether it runs or has stopped.

    Args:
        open_location: a checkpoint location by its path. progress: see `Making`.

    Raises:
        SettingError: nothing was started. Else as `create_savepoint`.
    """
    if launch is None or launch.location_path is None:
        raise SettingError(
            f"Job {job.name!r} has not been started by this backend, so where Spark's checkpoint "
            f"location is is not known.",
            todo="Start the query first, or use `statebackend savepoint create` with "
            "--checkpoint-location.",
        )
    deadline = deadline_of(job, timeout_s)
    location = open_location(launch.location_path)
    place = SparkLocation(location, deadline)
    making = making_of(job, deadline, to, location=place, progress=progress)
    with deadline.telling():
        return _taken(making, launch, deadline, job.system)


def _taken(making: Making, launch: Launch, deadline: Deadline, system: System) -> Savepoint:
    running = launch.is_active()
    if not running:  # its last record may be on its way
        with deadline.doing("waiting for the last record of the query"):
            if not launch.session.drain(deadline.left_s):
                raise deadline.error()
    with contextlib.ExitStack() as held:
        with deadline.doing("waiting for the end of a cleaning"):
            held.enter_context(launch.session.cleaner.held(deadline.left_s))
        while True:
            try:
                return create_savepoint(making)
            except NotRestorableError:
                # A query that has just been started has nothing yet; one that was rescaled needs
                # one more epoch.
                if not running or deadline.left_s < _WAIT_S:
                    raise
            running = launch.is_active()  # asked before the next look: it may be the last
            system.sleep_s(_WAIT_S)
