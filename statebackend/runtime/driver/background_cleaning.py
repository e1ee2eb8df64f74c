"""Deletes what a job needs no more, in the background of its driver: garbage collection."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Final

from snapshot.formats.file_index import FileIndex, decode_index
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.lineage import SliceRef
from snapshot.protocol.tenure import Tenure
from snapshot.retention.deletable import RecordKind, View, view_of
from snapshot.retention.garbage_collection import CleanReport, clean
from snapshot.retention.history_keeping import KnownHistory
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    FormatError,
    ObjectNotFoundError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.restore_records import DamagedSliceError, Records
from statebackend.threads import THREADS, Future, Lock, Threads
from statebackend.work_queue import WorkQueue

__all__ = ["Cleaner"]

_log = logging.getLogger("statebackend.coordinator")
_LOOKS: Final = 5


class Cleaner:
    """Deletes what nobody needs any more, in the background, once in so many epochs.

    Only after a commit of this driver, and never in the way of one.

    Args:
        clean: does it, as `snapshot.retention.garbage_collection.clean`.
    """

    def __init__(
        self,
        store: ObjectStore,
        log: CommitLog,
        records: Records,
        state_lock: Lock,
        *,
        every_epochs: int,
        min_age_ms: int,
        threads: Threads = THREADS,
        clean: Callable[..., CleanReport] = clean,
    ) -> None:
        self._store, self._commit_log, self._records = store, log, records
        self._state_lock = state_lock
        self._every_epochs, self._min_age_ms = every_epochs, min_age_ms
        self._kinds: dict[int, RecordKind] = {}
        self._history = KnownHistory()
        self._background, self._do = WorkQueue("statebackend-clean", threads), clean
        self._running: Future[None] | None = None
        self._last_epoch: int | None = None
        self._holders = 0
        self._cleaning = False
        self._changed = threads.condition()
        self.reports: list[CleanReport] = []

    def after_commit(self, coordinator: Coordinator, tenure: Tenure, epoch: int) -> None:
        """Start a cleaning if one is due and none is running."""
        due = self._every_epochs > 0 and epoch % self._every_epochs == 0
        if not due or epoch == self._last_epoch:
            return
        if self._running is not None and not self._running.done():
            return
        self._last_epoch = epoch
        self._running = self._background.submit(lambda: self._run(coordinator, tenure))

    @contextlib.contextmanager
    def held(self, timeout_s: float | None = None) -> Iterator[None]:
        """Nothing is deleted meanwhile of what the log names now; one that runs ends first.

        Args:
            timeout_s: how long that is waited for.

        Raises:
            StoreUnreachableError: it did not end.
        """
        with self._changed:
            self._holders += 1
            ended = self._changed.wait_for(lambda: not self._cleaning, timeout_s)
        try:
            if not ended:
                raise StoreUnreachableError(
                    f"A cleaning of the job's objects has not ended after {timeout_s:g} s.",
                    todo="Look at the store: a request of it may hang.",
                )
            yield
        finally:
            with self._changed:
                self._holders -= 1

    def drain(self, timeout_s: float) -> None:
        """Wait for the cleaning that runs."""
        self._background.drain(timeout_s)

    def _run(self, coordinator: Coordinator, tenure: Tenure) -> None:
        with self._changed:
            if self._holders:
                return  # the next one that is due finds what this one would have found
            self._cleaning = True
        try:
            self._clean(coordinator, tenure)
        finally:
            with self._changed:
                self._cleaning = False
                self._changed.notify_all()

    def _clean(self, coordinator: Coordinator, tenure: Tenure) -> None:
        try:
            report = self._do(
                self._store,
                lambda: self._look(coordinator, tenure),
                min_age_ms=self._min_age_ms,
                history=self._history,
            )
        except StateBackendError as error:
            _log.warning("a cleaning was given up: %s", error)
            return
        manifests = self._commit_log.live()
        live: dict[int, RecordKind] = {m.sequence: m.kind for m in manifests}
        self._kinds = report.remembered({**self._kinds, **live})
        self._history = (report.history or self._history).remembering(manifests)
        tenure.cleaned_below = max(tenure.cleaned_below, report.cleaned_below)
        self.reports = [*self.reports[-16:], report]

    def _look(self, coordinator: Coordinator, tenure: Tenure) -> View:
        indexes: dict[str, FileIndex | None] = {}
        for _ in range(_LOOKS):
            self._read_indexes(self._commit_log.live(), indexes)  # not under the lock
            with self._state_lock:
                manifests = self._commit_log.live()
                if any(digest not in indexes for digest, _ in _indexes_of(manifests)):
                    continue  # a base was committed meanwhile
                return view_of(
                    manifests,
                    indexes,
                    kinds=self._kinds,
                    own_generation=tenure.generation,
                    confirmed_epoch=coordinator.run.confirmed_epoch,
                    open_grants=coordinator.uploads.open_grants(),
                    pending=coordinator.run.pending_names(),
                )
        raise StoreUnreachableError(
            "File indexes came faster than they could be read.", todo="The next cleaning goes on."
        )

    def _read_indexes(self, manifests: list[Manifest], found: dict[str, FileIndex | None]) -> None:
        for digest, ref in _indexes_of(manifests):
            if digest not in found:
                try:
                    found[digest] = decode_index(self._records.index(ref))
                except (DamagedSliceError, FormatError, ObjectNotFoundError):
                    found[digest] = None


def _indexes_of(manifests: list[Manifest]) -> Iterator[tuple[str, SliceRef]]:
    for manifest in manifests:
        for entry in manifest.slices:
            if entry.kind == "files":
                yield entry.digest, SliceRef(manifest.sequence, entry)
