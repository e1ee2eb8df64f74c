"""Takes savepoints of a query in this driver, and lists them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from recovery.savepoints.create import Making, create_savepoint
from recovery.savepoints.savepoint import (
    Savepoint,
    SavepointInfo,
    below,
    default_folder,
    list_savepoints,
    savepoints_folder,
)
from snapshot.storage.deadline import Deadline, DeadlineStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    NotRestorableError,
    SettingError,
)
from statebackend.runtime.driver.job import Job
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.system import System

if TYPE_CHECKING:
    from statebackend.spark.start.launch import Launch

__all__ = ["SparkLocation", "deadline_of", "listed", "making_of", "take"]

_WAIT_S: Final = 0.05
_CLEANING_S: Final = 10.0  # past the time: what was copied goes, if the store lets it


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
) -> Savepoint:
    """A savepoint of the query that a launch started, whether it runs or has stopped.

    Args:
        open_location: a checkpoint location by its path.

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
    making = making_of(job, deadline, to, location=SparkLocation(location, deadline))
    with deadline.telling():
        return _taken(making, launch, deadline, job.system)


def deadline_of(job: Job, timeout_s: float) -> Deadline:
    """For a savepoint of a job."""
    return Deadline(f"The savepoint of job {job.name!r}", timeout_s, now_s=job.system.monotonic_s)


def making_of(job: Job, deadline: Deadline, to: str | None, **more: Any) -> Making:
    """How a savepoint of a job is made in this driver.

    Args:
        to: its folder; None: one of its own. more: the other fields of `Making`.
    """
    store, system = DeadlineStore(job.store, deadline), job.system

    def open_target(savepoint_id: str) -> ObjectStore:
        place = job.open_at(to or default_folder(job.uri, job.name, savepoint_id))
        target = DeadlineStore(place, deadline)
        job.probe(target)
        return target

    given: dict[str, Any] = {
        "store": store,
        "job": job.name,
        "manifests": lambda: job.log(store).manifests(),
        "open_target": open_target,
        "new_id": system.new_id,
        "now_ms": system.wall_ms,
        "writer": system.process_name(),
        "threads": system.threads,
        "cleaning": lambda: deadline.cleaning(_CLEANING_S),
        **more,
    }
    return Making(**given)


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


def listed(job: Job) -> list[SavepointInfo]:
    """The job's savepoints in the place where they go if nobody says another."""
    folder = savepoints_folder(job.uri)
    store = job.open_at(folder)
    return list_savepoints(store, lambda name: job.open_at(below(folder, name)), job=job.name)
