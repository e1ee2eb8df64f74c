"""What cleaning deletes is told by the history, and the history tells nothing that was not so."""

from __future__ import annotations

from snapshot.formats.history_object import HISTORY_PREFIX, decode_history, summary_of
from snapshot.formats.record import Record
from snapshot.retention.history_keeping import OBJECTS_KEPT
from statebackend.errors import FormatError
from tests.sim.checkers.ledger import Checker

__all__ = ["KeptHistory"]


class KeptHistory(Checker):
    """Compares the objects of the history with the records that were ever in the log."""

    name = "history"

    def __init__(self, world: object) -> None:
        super().__init__(world)
        self._were: dict[int, Record] = {}  # checkpoints that were ever durable
        self._told: set[int] = set()

    def record(self, sequence: int, record: Record) -> None:
        """It is durable, for ever."""
        if record.manifest.kind == "checkpoint":
            self._were[sequence] = record

    def created(self, name: str) -> None:
        """A summary follows from its record."""
        if not name.startswith(HISTORY_PREFIX):
            return
        try:
            found = decode_history(name, self.world.bucket.objects[name][0])
        except FormatError as error:
            self.violated(f"{name} does not read: {error}")
            return
        for one in found:
            record = self._were.get(one.sequence)
            if record is None:
                self.violated(f"{name} tells of record {one.sequence}, which never was")
            elif summary_of(record.manifest) != one:
                self.violated(f"{name} tells of record {one.sequence} what it did not say")
            self._told.add(one.sequence)

    def record_deleted(self, sequence: int, record: Record) -> None:
        """It was told of before."""
        if record.manifest.kind == "checkpoint" and sequence not in self._told:
            self.violated(f"record {sequence} is gone, and no object of the history tells of it")

    def deleted(self, name: str) -> None:
        """There were too many that are newer. No world comes to the bound in epochs."""
        if not name.startswith(HISTORY_PREFIX):
            return
        there = self.world.bucket.objects
        newer = sum(one.startswith(HISTORY_PREFIX) and one > name for one in there)
        if newer < OBJECTS_KEPT:
            self.violated(f"{name} was deleted, and only {newer} objects are newer")
