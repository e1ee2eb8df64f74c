"""Nothing that somebody needs is deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapshot.formats.file_index import decode_index
from snapshot.formats.record import Record
from statebackend.errors import (
    CorruptionError,
    NotRestorableError,
    RewindError,
    StateBackendError,
)
from tests.sim.checkers.ledger import Checker
from tests.sim.task import Attempt

if TYPE_CHECKING:
    from tests.sim.app import App

__all__ = ["References"]


class References(Checker):
    """Keeps account of what the records that are needed name.

    Attributes:
        named: by sequence, the objects that this record names, also by way of a file index.
    """

    name = "references"

    def __init__(self, world: object) -> None:
        super().__init__(world)
        self.named: dict[int, frozenset[str]] = {}
        self.records: dict[int, Record] = {}
        self.tip = -1
        self.oldest_needed = 0
        config = self.world.config
        self._flips = bool(config.flipped_read or config.flipped_base)
        self._lags = bool(config.listing_lag_s)

    def record(self, sequence: int, record: Record) -> None:
        """What it names must be there."""
        if sequence < self.tip:
            return
        self.tip, self.oldest_needed = sequence, record.manifest.oldest_needed
        objects = self.world.bucket.objects
        named = self._names(record)
        for name in sorted(named):
            if name not in objects:
                self.violated(f"record {sequence} names {name}, which is not there")
        self.named[sequence], self.records[sequence] = named, record
        for old in [s for s in self.named if s < self.oldest_needed]:
            del self.named[old], self.records[old]

    def _names(self, record: Record) -> frozenset[str]:
        objects, names = self.world.bucket.objects, []
        for entry in record.manifest.slices:
            if entry.object is not None:
                names.append(entry.object)
            if entry.kind == "files":
                if entry.object is None:
                    data = record.slice(entry)
                elif entry.object in objects:
                    data = objects[entry.object][0]
                else:
                    continue
                names.extend(file.object for file in decode_index(data).files)
        return frozenset(names)

    def record_deleted(self, sequence: int, record: Record) -> None:
        """Only a checkpoint below all that is needed may go."""
        if record.manifest.kind == "claim":
            self.violated(f"the claim {sequence} was deleted")
        if sequence >= self.oldest_needed:
            self.violated(f"record {sequence} was deleted, and {self.oldest_needed} is needed")

    def deleted(self, name: str) -> None:
        """An object that is named by a record which is needed must stay."""
        for sequence, named in self.named.items():
            if name in named:
                self.violated(f"{name} was deleted, and record {sequence} names it")

    # --- what people would see -----------------------------------------------------------------

    def failed(self, attempt: Attempt, error: StateBackendError) -> None:
        """The present driver's tasks find all that they need."""
        app = attempt.app
        is_current = (
            app is self.world.newest
            and app.stage is not None
            and attempt in app.stage.attempts
            and attempt.session in app.sessions
        )
        if is_current:
            self._lost(error)

    def query_failed(self, app: App, error: Exception) -> None:
        """A query, or its start, never fails for want of what the log should hold."""
        if app is self.world.newest or len(self.world.apps) == 1:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        if self._flips:  # what was asked for may be there all the same
            return
        if isinstance(error, CorruptionError | NotRestorableError):
            self.violated(f"what is needed is not there: {error}")
        if self._lags and isinstance(error, RewindError) and "batches would have" in str(error):
            self.violated(f"the log holds more than was looked at: {error}")
