"""Every row counts once: in what an attempt is given, and in what the log holds.

The log is read here as the design says it is to be read, a few lines beside the real resolver: a
record of epoch e takes the place of e and all after it, its deltas go on top of e - 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from snapshot.formats.file_index import decode_index
from snapshot.formats.record import Record, SliceEntry
from snapshot.protocol.messages import BeginReply
from statebackend.keygroups import key_group_range
from statebackend.state.table import StateTable
from tests.sim.checkers.ledger import Checker
from tests.sim.disk import files_state
from tests.sim.erasing import erased_in, without
from tests.sim.location import GROUPS, Committed, State, clipped, difference
from tests.sim.seams import decoded
from tests.sim.task import Attempt

if TYPE_CHECKING:
    from tests.sim.app import App

__all__ = ["ExactlyOnce"]

_EPOCHS_KEPT = 16


class ExactlyOnce(Checker):
    """Compares states with the plain model.

    Attributes:
        durable: by epoch, the state as the log has it. newest: the last record that counts.
    """

    name = "exactly once"
    uid = "op"
    _first = 0
    newest = -1

    def __init__(self, world: object) -> None:
        super().__init__(world)
        self.durable: dict[int, State] = {}
        self._parallelisms: dict[int, int] = {}

    # --- the log -------------------------------------------------------------------------------

    def record(self, sequence: int, record: Record) -> None:
        """Replay it."""
        manifest = record.manifest
        if sequence < self.newest:
            return  # it was delivered late, into a slot that was cleaned
        self.newest = sequence
        if manifest.kind != "checkpoint":
            if self.uid == "op":
                self.world.sched.note("claim", f"{sequence}: {manifest.writer}, run {manifest.run}")
            return
        if manifest.operator != self.uid:
            return
        epoch, parallelism = manifest.epoch, manifest.parallelism
        self.world.sched.note("record", f"{sequence}: epoch {epoch} by {manifest.writer}")
        if not any(entry.kind == "delta" for entry in manifest.slices):
            self._anew(sequence, record)
            return
        before = self.durable.get(epoch - 1)
        if before is None:
            if epoch != manifest.first_epoch:
                self.violated(f"record {sequence} of epoch {epoch} follows nothing")
            before = {}
        for known in [e for e in self.durable if e >= epoch]:
            del self.durable[known]
            self.world.sched.note("record supersedes", str(sequence))
            if known == epoch and self._parallelisms[epoch] != parallelism:
                self.world.sched.note("record supersedes one of another parallelism")
        state = dict(before)
        for entry in manifest.slices:
            self._owner(entry, parallelism)
            if entry.kind == "delta":
                data = self._bytes(record, entry)
                self._lay(state, data)
                self._owned(entry, [key for key, _ in self._rows(data)])
        self.durable[epoch] = state
        self._parallelisms[epoch] = parallelism
        for entry in manifest.slices:
            if entry.kind in ("base", "files"):
                self._check_base(sequence, record, entry)
        if len(self.durable) > _EPOCHS_KEPT:
            del self.durable[min(self.durable)]

    def _anew(self, sequence: int, record: Record) -> None:
        """An epoch whose keys were erased: a base for each subtask, and no more."""
        manifest = record.manifest
        epoch, state = manifest.epoch, State()
        for entry in manifest.slices:
            self._owner(entry, manifest.parallelism)
            if entry.kind == "base":
                state |= self.laid({}, record, entry)
        known = self.durable.get(epoch)
        erased = self.world.erased if self.uid == "op" else frozenset()
        if known is None or not self.world.erased:
            self.violated(f"record {sequence} of epoch {epoch} is written anew, of nothing")
        elif state != without(known, erased):
            self.violated(
                f"record {sequence} is not epoch {epoch} without the keys that are erased: "
                f"{difference(state, without(known, erased))}"
            )
        for later in [e for e in self.durable if e > epoch]:
            del self.durable[later]
        self.durable[epoch] = state
        self._parallelisms[epoch] = manifest.parallelism
        if self.uid == "op":
            self.world.sched.note("record without erased keys", str(sequence))
            erased_in(self.world, epoch)

    def _owner(self, entry: SliceEntry, parallelism: int) -> None:
        """Each subtask has the key groups that are its own at this parallelism."""
        groups = key_group_range(entry.subtask, parallelism, GROUPS)
        if (entry.key_group_start, entry.key_group_end) != (groups.start, groups.end):
            self.violated(f"subtask {entry.subtask} of {parallelism} has other key groups: {entry}")

    def _owned(self, entry: SliceEntry, keys: Iterable[bytes]) -> None:
        """Every key is in the slices of one subtask."""
        for key in keys:
            group = int.from_bytes(key[:2], "big")
            if not entry.key_group_start <= group <= entry.key_group_end:
                self.violated(f"{key!r} is in a slice of subtask {entry.subtask}")

    def _rows(self, data: bytes) -> list[tuple[bytes, bytes | None]]:
        return decoded(data, arrow=self.world.config.arrow)

    def _bytes(self, record: Record, entry: SliceEntry) -> bytes:
        if entry.object is None:
            return record.slice(entry)
        found = self.world.bucket.objects.get(entry.object)
        if found is None:
            self.violated(f"{record.name} names {entry.object}, which is not there")
        data: bytes = found[0]
        return data

    def _lay(self, state: State, data: bytes) -> None:
        for key, value in self._rows(data):
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value

    def laid(self, state: State, record: Record, entry: SliceEntry) -> State:
        """A state with one slice on top; a base takes its place."""
        data = self._bytes(record, entry)
        if entry.kind == "files":
            objects = self.world.bucket.objects
            index = decode_index(data)
            gone = [file.object for file in index.files if file.object not in objects]
            if gone:
                self.violated(f"{record.name} names a base whose {gone[0]} is not there")
            if len({file.object.rpartition("/")[0] for file in index.files}) > 1:
                self.world.sched.note("file named again")
            if any("/" in file.name for file in index.files):
                self.world.sched.note("base committed in parts")
            return files_state({file.name: objects[file.object][0] for file in index.files})
        state = dict(state) if entry.kind == "delta" else {}
        self._lay(state, data)
        return state

    def _check_base(self, sequence: int, record: Record, entry: SliceEntry) -> None:
        state = self.laid({}, record, entry)
        where = "apart" if entry.epoch < record.manifest.epoch else "inline"
        kind = "files" if entry.kind == "files" else f"base {where}"
        self.world.sched.note(f"base committed: {kind}", str(sequence))
        self._owned(entry, state)
        known = self.durable.get(entry.epoch)
        groups = range(entry.key_group_start, entry.key_group_end + 1)
        if known is not None and state != clipped(known, groups):
            self.violated(f"record {sequence}: the base of epoch {entry.epoch} is another state")

    # --- attempts ------------------------------------------------------------------------------

    def restored(self, attempt: Attempt, table: StateTable, reply: BeginReply) -> None:
        """What an attempt begins with is what the batches before it made; its store only what
        the log holds."""
        if attempt.expected is None:
            return
        found = dict(table.snapshot())
        if found != attempt.expected:
            self.violated(
                f"{attempt} begins with another state: {difference(found, attempt.expected)}"
            )
        durable = self.durable.get(reply.durable_epoch)
        store = dict(table.base.scan())
        is_current = attempt.app is self.world.newest
        if durable is None or not is_current:
            return
        expected = clipped(durable, attempt.key_groups)
        if store != expected:
            self.violated(
                f"the store of {attempt} is not what the log holds of epoch {reply.durable_epoch}: "
                f"{difference(store, expected)}"
            )

    def own(self, committed: Committed) -> Committed | None:
        """What a batch made of this operator."""
        return committed

    def committed(self, app: App, committed: Committed) -> None:
        """What Spark has committed is durable; with asynchronous commits the batch before is."""
        batch = committed.plan.batch
        if self.world.config.asynchronous:
            before = self.world.shared.commits.get(batch - 1)
            if before is None:
                return
            batch, committed = batch - 1, before
        own = self.own(committed)
        if own is None or own.output is None:
            return
        durable = self.durable.get(batch)
        if durable is None and self.durable and batch < min(self.durable):
            self.world.sched.note("a commit that Spark has purged is written again", str(batch))
        elif durable is None:
            self.violated(f"Spark has committed batch {batch}, and the log does not hold it")
        elif durable != own.state:
            self.violated(f"the log holds another state than batch {batch}'s")
