"""Savepoints of a continuous job: made of a checkpoint of their own kind, while the job goes on.

That checkpoint is always aligned, so that the copy goes to any parallelism, and its output is
committed before it counts. What the log names at this moment is kept in mind, and nothing of it is
cleaned until it is copied, also not by the next run of the job, where this one fails meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from recovery.savepoints.create_savepoint import complete_epoch, create_savepoint
from recovery.savepoints.savepoint import Savepoint
from snapshot.barriers.checkpoint_trigger import Kind
from snapshot.barriers.pending_checkpoints import Subtask
from snapshot.formats.record import Manifest
from snapshot.storage.deadline import Deadline
from statebackend.continuous.driver.checkpoint_book import Asked, CheckpointBook
from statebackend.continuous.driver.run_state import Settled
from statebackend.continuous.driver.takeover import Taken
from statebackend.continuous.job.slot_messages import Acked
from statebackend.errors import NotRestorableError, ObjectNotFoundError, StateBackendError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import deadline_of, making_of
from statebackend.work_done import Progress

__all__ = ["SavepointRequests"]

_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class _Cut:
    """A complete checkpoint, and the log as it was then."""

    epoch: int
    manifests: list[Manifest]
    uncommitted: bool = False


@dataclass
class _Wanted:
    """Somebody waits for a checkpoint.

    Attributes:
        after: its number is higher. asked: the run that was asked for it.
        held: what keeps it from being cleaned.
    """

    kind: Kind
    held: contextlib.ExitStack
    after: int = -1
    asked: Asked | None = None
    cut: _Cut | None = None


class SavepointRequests:
    """The savepoints of one query, over all its runs. Thread-safe.

    Args:
        book: is told of every checkpoint, too.
    """

    def __init__(self, job: Job, book: CheckpointBook) -> None:
        self._job, self._book = job, book
        self._changed = job.system.threads.condition()
        self._run: Asked | None = None
        self._taken: Taken | None = None
        self._wanted: list[_Wanted] = []
        self._over = False
        self._error: StateBackendError | None = None

    # --- what the query tells ------------------------------------------------------------------

    def run_begins(self, run: Asked, taken: Taken) -> None:
        """Requests go there from now on; what is being copied is not cleaned by it either."""
        with self._changed:
            self._run, self._taken = run, taken
            for one in self._wanted:
                one.held.enter_context(taken.session.cleaner.held())
            self._changed.notify_all()

    def settled(self, settled: Settled, parts: Mapping[Subtask, Acked]) -> None:
        """As `CheckpointBook.settled`; no later checkpoint is being written yet."""
        kind = settled.request.kind if settled.request is not None else None
        with self._changed:
            waiting = [
                one
                for one in self._wanted
                if one.kind == kind and one.cut is None and settled.checkpoint > one.after
            ]
            if waiting and settled.reason is None and self._taken is not None:
                cut = _Cut(settled.epoch, self._taken.log.live())
                for one in waiting:
                    one.cut = cut
            for one in waiting:
                one.asked = None  # one that was given up is asked for again
            self._changed.notify_all()
        self._book.settled(settled, parts)

    def job_ended(self, error: StateBackendError | None) -> None:
        """There will be no checkpoint any more."""
        with self._changed:
            self._over, self._error, self._run = True, error, None
            self._changed.notify_all()

    # --- making one ----------------------------------------------------------------------------

    def take(
        self,
        to: str | None,
        timeout_s: float,
        *,
        last: bool = False,
        progress: Progress | None = None,
    ) -> Savepoint:
        """A savepoint; of a job that has ended it is one of its last complete checkpoint.

        Args:
            to: its folder; None: one of its own.
            last: the job ends with its checkpoint.
            progress: see `Making`.

        Raises:
            StoreUnreachableError: it took too long, or a store cannot be reached.
            NotRestorableError: the job has ended without a complete checkpoint.
            StateBackendError: the job failed for good meanwhile; or as `create_savepoint`.
        """
        deadline = deadline_of(self._job, timeout_s)
        with deadline.telling():
            for attempt in range(_ATTEMPTS):
                with contextlib.ExitStack() as held:
                    cut = self._cut("last" if last else "savepoint", held, deadline)
                    making = making_of(
                        self._job,
                        deadline,
                        to,
                        location=None,
                        manifests=lambda cut=cut: cut.manifests,
                        epoch=cut.epoch,
                        uncommitted=cut.uncommitted,
                        progress=progress,
                    )
                    try:
                        return create_savepoint(making)
                    except ObjectNotFoundError:  # somebody else cleans the job
                        if attempt == _ATTEMPTS - 1:
                            raise
        raise AssertionError

    def _cut(self, kind: Kind, held: contextlib.ExitStack, deadline: Deadline) -> _Cut:
        wanted = _Wanted(kind, held)
        was_over = self._hold(wanted, deadline)
        if not was_over:
            with deadline.doing(f"waiting for the checkpoint of kind {kind!r}"):
                self._await(wanted, deadline)
        if wanted.cut is not None:
            return wanted.cut
        if self._error is not None and not was_over:
            raise self._error
        with deadline.doing("reading the job's log"):
            manifests = self._job.log().manifests()
        try:
            epoch = complete_epoch(manifests)
        except NotRestorableError as error:
            raise error from self._error  # why there is none, where it is known
        return _Cut(epoch, manifests, uncommitted=epoch != self._book.epoch)

    def _hold(self, wanted: _Wanted, deadline: Deadline) -> bool:
        """Keep what there is from being cleaned, and get in line; whether the job has ended.

        A cleaning is not waited for under the lock: the run's loop needs that.
        """
        while True:
            taken = self._taken
            if taken is not None:
                with deadline.doing("waiting for the end of a cleaning"):
                    wanted.held.enter_context(taken.session.cleaner.held(deadline.left_s))
            with self._changed:
                if self._taken is taken:  # from now on `run_begins` knows of it
                    self._wanted.append(wanted)
                    wanted.held.callback(self._forget, wanted)
                    return self._over

    def _await(self, wanted: _Wanted, deadline: Deadline) -> None:
        with self._changed:
            while wanted.cut is None and not self._over:
                run = self._run
                if run is not None and wanted.asked is not run:
                    wanted.asked = run
                    wanted.after = max(wanted.after, run.number)
                    run.request(wanted.kind)
                self._changed.wait(max(deadline.left_s, 0.0))
                deadline.check()

    def _forget(self, wanted: _Wanted) -> None:
        with self._changed:
            self._wanted.remove(wanted)
