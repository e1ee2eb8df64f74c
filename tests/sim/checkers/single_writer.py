"""One writer at a time: in the log, and in every local store."""

from __future__ import annotations

from snapshot.formats.record import LOG_PREFIX, Record
from tests.sim.checkers.ledger import Checker

__all__ = ["SingleWriter"]


class SingleWriter(Checker):
    """Watches who writes what.

    A record that lands in a slot far below the tip was delivered late: it must be of a generation
    that is over or the very write that had filled the slot, and below all that is needed.
    """

    name = "single writer"

    def __init__(self, world: object) -> None:
        super().__init__(world)
        self._tip: Record | None = None
        self._writers: dict[int, str] = {}
        self._write_ids: dict[int, str] = {}

    def record(self, sequence: int, record: Record) -> None:
        """A slot was filled."""
        manifest, tip = record.manifest, self._tip
        if manifest.sequence != sequence:
            self.violated(f"slot {sequence} holds record {manifest.sequence}")
        if tip is not None and sequence < tip.manifest.sequence:
            if sequence >= tip.manifest.oldest_needed:
                self.violated(f"slot {sequence} was free, and is needed")
            again = self._write_ids.get(sequence) == manifest.write_id
            other = manifest.writer != tip.manifest.writer
            least = tip.manifest.generation + (0 if other else 1)
            if manifest.kind == "claim" and manifest.generation >= least:
                # A driver that froze in its claim: it finds the newer records, and claims anew. One
                # of the same generation as its was made meanwhile, in a later slot.
                self.world.sched.note("a claim lands in a slot that was cleaned", str(sequence))
                return
            if manifest.generation >= tip.manifest.generation and not again:
                self.violated(f"slot {sequence}, long gone, was filled by the present writer")
            return
        expected = tip.manifest.sequence + 1 if tip else 0
        if sequence != expected:
            self.violated(f"record {sequence} leaves a gap after {expected - 1}")
        if tip is not None:
            self._follows(record, tip)
        known = self._writers.setdefault(manifest.generation, manifest.writer)
        if known != manifest.writer:
            self.violated(f"generation {manifest.generation} has two writers")
        self._tip = record
        self._write_ids[sequence] = manifest.write_id

    def _follows(self, record: Record, tip: Record) -> None:
        manifest, before = record.manifest, tip.manifest
        raised = manifest.generation - before.generation
        if raised != (1 if manifest.kind == "claim" else 0):
            self.violated(
                f"record {manifest.sequence}, a {manifest.kind} of generation "
                f"{manifest.generation}, follows generation {before.generation}"
            )
        if manifest.oldest_needed < before.oldest_needed:
            self.violated(f"record {manifest.sequence}: oldest_needed falls")

    def rewritten(self, name: str) -> None:
        """An object was written over."""
        if name.startswith(LOG_PREFIX):
            self.violated(f"{name} was written over")

    def opened(self) -> None:
        """A local store was opened."""
        if self.world.opened.collisions:
            self.violated(self.world.opened.collisions[0])
