"""States that belong to no key: each subtask begins with its part, and the log holds all parts."""

from __future__ import annotations

from snapshot.formats.record import Record, SliceEntry
from statebackend.operators.operator_snapshot import StoredOperatorState
from statebackend.state.operator_state import decode_lists, decode_maps
from tests.sim.checkers.ledger import Checker
from tests.sim.keyless import KeylessState, Part, decoded_part
from tests.sim.location import Committed
from tests.sim.task import Attempt

__all__ = ["Keyless"]

_EPOCHS_KEPT = 16
_NONE = StoredOperatorState()


class Keyless(Checker):
    """Compares them with the model, when an attempt begins and when Spark commits a batch.

    Attributes:
        durable: by epoch, what its record holds.
    """

    name = "operator state"

    def __init__(self, world: object) -> None:
        super().__init__(world)
        self.durable: dict[int, KeylessState] = {}
        self._newest = -1
        self._objects: dict[str, str] = {}  # of contents: the object that had each of them last
        self._gone: set[str] = set()

    # --- the log -------------------------------------------------------------------------------

    def record(self, sequence: int, record: Record) -> None:
        """Read what it holds: nothing of them is put together from earlier records."""
        manifest = record.manifest
        if sequence < self._newest or not self.world.config.keyless:
            return
        self._newest = sequence
        if manifest.kind != "checkpoint" or manifest.operator != "op":
            return
        for known in [epoch for epoch in self.durable if epoch >= manifest.epoch]:
            del self.durable[known]
        lists: dict[int, StoredOperatorState] = {}
        maps = _NONE
        for entry in manifest.slices:
            if entry.kind == "operator":
                found = decode_lists(self._bytes(record, entry))
                lists[entry.subtask] = StoredOperatorState(lists=found)
            elif entry.kind == "broadcast":
                maps = StoredOperatorState(maps=decode_maps(self._bytes(record, entry)))
        rules = decoded_part(maps).rules
        parts = (decoded_part(lists.get(n, _NONE)) for n in range(manifest.parallelism))
        self.durable[manifest.epoch] = KeylessState(tuple(Part(p.lists, rules) for p in parts))
        if len(self.durable) > _EPOCHS_KEPT:
            del self.durable[min(self.durable)]

    def _bytes(self, record: Record, entry: SliceEntry) -> bytes:
        sched = self.world.sched
        if entry.object is None:
            sched.note("operator state in a record", entry.kind)
            return record.slice(entry)
        found = self.world.bucket.objects.get(entry.object)
        if found is None:
            self.violated(f"{record.name} names {entry.object}, which is not there")
        self._note_return(entry.digest, entry.object)
        data: bytes = found[0]
        return data

    def _note_return(self, digest: str, name: str) -> None:
        before = self._objects.get(digest)
        sched = self.world.sched
        if before == name:
            sched.note("operator state keeps its object", name)
        elif before is not None and before in self._gone:
            sched.note("operator state returns after its object was deleted", name)
        else:
            sched.note("operator state in an object", name)
        self._objects[digest] = name

    def deleted(self, name: str) -> None:
        """What is of the same content later has another object."""
        self._gone.add(name)

    def after(self, committed: Committed, session: str = "") -> KeylessState | None:
        """What the batch after a committed one begins with, in a session.

        Spark may have the commit of a driver that was overtaken, and the log that of its
        replacement, which ran the batch again. At another parallelism the parts are others then.
        Whoever committed it himself goes on from what he has, overtaken or not. But if he read it
        in part, he has no record of it: the one that is there is of an earlier run of the batch.
        """
        made: KeylessState | None = committed.keyless
        durable = self.durable.get(committed.plan.batch)
        if made is None or durable is None or len(durable.parts) == len(made.parts):
            return made
        if session == committed.session != "" and committed.output is not None:
            return made
        self.world.sched.note("operator state of a batch that was run again at another parallelism")
        return durable

    # --- attempts and batches ------------------------------------------------------------------

    def restored(self, attempt: Attempt, found: Part) -> None:
        """What an attempt begins with is what the batch before made."""
        before = attempt.keyless
        if before is None:
            return
        if before.parts and len(before.parts) != attempt.parallelism:
            self.world.sched.note("operator state dealt out anew")
        expected = before.begun(attempt.subtask, attempt.parallelism)
        if found != expected:
            self.violated(f"{attempt} begins with {found}, not with {expected}")

    def committed(self, committed: Committed) -> None:
        """What Spark has committed is durable; with asynchronous commits the batch before is."""
        batch, one = committed.plan.batch, committed
        if self.world.config.asynchronous:
            before = self.world.shared.commits.get(batch - 1)
            if before is None:
                return
            batch, one = batch - 1, before
        durable = self.durable.get(batch)
        if one.output is None or one.keyless is None or durable is None:
            return  # that the log has the batch at all is asked for by another checker
        if durable != self.after(one):
            self.violated(f"the log holds {durable} of batch {batch}, not {one.keyless}")
