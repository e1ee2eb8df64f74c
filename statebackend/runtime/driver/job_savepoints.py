"""Savepoints of one job in its driver, in either mode: how they are made, listed and begun with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from recovery.savepoints.begin_with_savepoint import Beginning, begin_job
from recovery.savepoints.between_modes import lists_in
from recovery.savepoints.create_savepoint import Making
from recovery.savepoints.savepoint import (
    Savepoint,
    below,
    default_folder,
    read_savepoint,
    savepoints_folder,
)
from recovery.savepoints.savepoint_list import SavepointInfo, list_savepoints
from recovery.savepoints.state_at_epoch import StateAt, saved_state
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import OperatorLineage
from snapshot.storage.deadline import Deadline, DeadlineStore
from snapshot.storage.object_store import ObjectStore
from statebackend.runtime.driver.job import Job

__all__ = [
    "OpenSavepoint",
    "deadline_of",
    "listed",
    "making_of",
    "open_savepoint",
    "saved_lineages",
    "uri_of",
]

_log = logging.getLogger("statebackend.coordinator")
_CLEANING_S: Final = 10.0  # past the time: what was copied goes, if the store lets it


# --- beginning with one --------------------------------------------------------------------------


def uri_of(source: str | Savepoint) -> str:
    """Where a savepoint lies that a user has named."""
    return source if isinstance(source, str) else source.uri


@dataclass(frozen=True)
class OpenSavepoint:
    """A savepoint that a job is to begin with: its folder, and what `savepoint.json` says."""

    job: Job
    store: ObjectStore
    savepoint: Savepoint

    def state(self) -> StateAt:
        """The state that it holds. Raises as `saved_state`."""
        system = self.job.system
        log = CommitLog(
            self.store,
            job=self.savepoint.job,
            writer=system.process_name(),
            new_id=system.new_id,
            threads=system.threads,
        )
        return saved_state(self.store, self.savepoint, log)

    def begin(
        self,
        state: StateAt,
        log: CommitLog,
        begun: Beginning,
        *,
        query_id: str,
        check: Callable[[list[Manifest]], Any],
    ) -> None:
        """Give the job a state; may be cut, and repeated. Raises as `begin_job`.

        Args:
            state: what the job takes over of the savepoint's. log: the job's.
            begun: how far the job had begun.
            check: refuses what the job cannot take over, before anything is written.
        """
        check([kept.manifest for kept in state.records])
        begin_job(
            state,
            self.savepoint,
            self.store,
            self.job.store,
            log,
            after=begun.last,
            query_id=query_id,
            new_id=self.job.system.new_id,
            threads=self.job.system.threads,
        )

    def log_begun(self, query_id: str) -> None:
        """Say that the job has begun."""
        _log.warning(
            "job %s begins with the %s, after epoch %d; query %s",
            self.job.name,
            self.savepoint.described,
            self.savepoint.epoch,
            query_id,
        )


def open_savepoint(source: str | Savepoint, job: Job) -> OpenSavepoint:
    """Opens the savepoint that a job is to begin with. Raises as `read_savepoint`."""
    store = job.open_at(uri_of(source))
    return OpenSavepoint(job, store, read_savepoint(store))


def saved_lineages(source: str | Savepoint, job: Job) -> dict[str, OperatorLineage]:
    """The operators with a key of a savepoint, by uid.

    Raises as `read_savepoint`, and for a damaged log.
    """
    state = open_savepoint(source, job).state()
    lists = lists_in(state)
    return {uid: one for uid, one in state.lineages.items() if uid not in lists}


# --- making and listing them ---------------------------------------------------------------------


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


def listed(job: Job) -> list[SavepointInfo]:
    """The job's savepoints in the place where they go if nobody says another."""
    folder = savepoints_folder(job.uri)
    store = job.open_at(folder)
    return list_savepoints(store, lambda name: job.open_at(below(folder, name)), job=job.name)
