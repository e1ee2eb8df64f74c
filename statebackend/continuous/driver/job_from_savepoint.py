"""Continuous jobs that begin with a savepoint, of a continuous job or of a streaming query.

Where the sources of a continuous job stood is state like any other, and goes on at any parallelism.
What its sinks had prepared is not taken over. It was committed before the savepoint was made; or it
is the original job's, which commits it when it goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from recovery.savepoints.begin_with_savepoint import Standing, has_begun_with, standing
from recovery.savepoints.between_modes import CONTINUOUS, lists_in, state_for_stream, without
from recovery.savepoints.savepoint import Savepoint
from recovery.savepoints.state_at_epoch import StateAt, last_epochs
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from statebackend.continuous.driver.driver_lists import sink_states
from statebackend.errors import CheckpointLocationError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import open_savepoint, uri_of

__all__ = ["begin_with"]

_log = logging.getLogger("statebackend.continuous")


def begin_with(source: str | Savepoint, job: Job, check: Callable[[list[Manifest]], Any]) -> None:
    """Give a new job a savepoint's state; may be cut, and repeated.

    It does nothing for a job that has begun with this savepoint, nor for the very job that it was
    taken of, where that has not gone on since.

    Args:
        source: the savepoint, or its URI.
        check: refuses what the job cannot take over, before anything is written.

    Raises:
        CheckpointLocationError: the job has begun with something else.
        NotRestorableError, CorruptionError, UnsupportedFormatError: of the savepoint.
        FencedError: another driver has begun meanwhile.
    """
    log = job.log()
    if has_begun_with(log, job.open_at(uri_of(source)).uri):
        return  # the savepoint may be gone since
    saved = open_savepoint(source, job)
    state = saved.state()
    if _is_of(saved.savepoint, job, log):
        return
    begun = standing(log, job.name, saved.savepoint)
    if begun.standing is Standing.BEGUN:
        return
    state = _taken_over(saved.savepoint, state)
    saved.begin(state, log, begun, query_id=CONTINUOUS, check=check)
    saved.log_begun(CONTINUOUS)


def _taken_over(savepoint: Savepoint, saved: StateAt) -> StateAt:
    if not savepoint.continuous:
        _log.warning(
            "the savepoint %s is of a streaming query: where its sources stood is not taken over; "
            "the job's sources begin where they would in a new job",
            savepoint.id,
        )
        return state_for_stream(saved)
    names = sink_states().keys()
    sinks = [uid for uid, one in lists_in(saved).items() if names == one.schemas.keys() - {""}]
    if savepoint.uncommitted and sinks:
        _log.warning(
            "what the sinks %s had prepared for epoch %d may not be committed: that is for job %s "
            "in %s to do, when it is started again",
            ", ".join(sorted(sinks)),
            savepoint.epoch,
            savepoint.job,
            savepoint.job_uri,
        )
    return without(saved, sinks)


def _is_of(savepoint: Savepoint, job: Job, log: CommitLog) -> bool:
    """Whether a savepoint is of this very job, which stands where it stood then.

    Raises:
        CheckpointLocationError: it is of this job, which has gone on.
    """
    if not savepoint.continuous or savepoint.job_uri != job.store.uri:
        return False
    manifests = log.manifests()
    if not manifests or manifests[-1].job_id != savepoint.job_id:
        return False
    epoch = min(last_epochs(manifests).values(), default=-1)
    if epoch == savepoint.epoch:
        return True
    raise CheckpointLocationError(
        f"The savepoint {savepoint.id} is of job {job.name!r} itself, after epoch "
        f"{savepoint.epoch}, and the job stands after epoch {epoch}.",
        todo="Leave savepoint= out to go on from there, or go back to the savepoint in a job= of "
        "another name.",
    )
