"""A savepoint is a committed epoch, whole, and stays so whatever becomes of its job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from recovery.decide.restore_plan import plan_restore
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.savepoint_list import list_savepoints
from recovery.savepoints.state_at_epoch import saved_state
from snapshot.formats.file_index import decode_index
from snapshot.formats.record import Manifest, Record, SliceEntry, parse_record, record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import CorruptionError, NotRestorableError, StateBackendError
from tests.sim.checkers.ledger import Checker
from tests.sim.disk import files_state
from tests.sim.kernel import Process
from tests.sim.location import Committed, State, clipped, difference
from tests.sim.places import InstantStore, plan_file
from tests.sim.savepoints import SAVEPOINTS
from tests.sim.seams import decoded

if TYPE_CHECKING:
    from statebackend.spark.start.launch import Launch

__all__ = ["Saves"]

_JSON, _BEGUN = "savepoint.json", "savepoint.begun"


class Saves(Checker):
    """Watches the folders of savepoints, and the jobs that begin with one.

    Attributes:
        made_by: who makes what is in a folder. deleting, used: by somebody, at present.
        taken: whoever wanted one was told that it is there.
        launches: of drivers that make one. holding: what is made with a cleaner held, and whose.
    """

    name = "savepoints"

    def __init__(self, world: object) -> None:
        super().__init__(world)
        self.made_by: dict[str, Process] = {}
        self.taken: set[str] = set()
        self.deleting: set[str] = set()
        self.used: list[str] = []
        self.launches: dict[str, Launch] = {}
        self.holding: list[tuple[str, Launch]] = []
        self._committed: dict[int, list[Committed]] = {}
        self._logged: dict[int, list[State]] = {}
        self._whole: dict[str, tuple[int, State]] = {}
        self._reader = Process("checker")
        config = self.world.config
        self._flips = bool(config.flipped_read or config.flipped_base)

    # --- what is there -------------------------------------------------------------------------

    def inside(self, prefix: str) -> list[str]:
        """The objects of a folder."""
        return sorted(name for name in self.world.bucket.objects if name.startswith(prefix))

    def folders(self) -> list[str]:
        """What somebody made, or began to make, and is known by its name."""
        objects = self.world.bucket.objects
        return [one for one in self.made_by if one + _BEGUN in objects or one + _JSON in objects]

    def complete(self) -> list[str]:
        """Those that exist."""
        return [one for one in self.made_by if self.is_complete(one)]

    def is_complete(self, prefix: str) -> bool:
        objects = self.world.bucket.objects
        if not {prefix + _JSON, prefix + _BEGUN} <= objects.keys():
            return False
        said = json.loads(objects[prefix + _JSON][0])["savepoint"]
        begun = json.loads(objects[prefix + _BEGUN][0])
        return bool(begun["id"] == said["id"]) and not begun.get("deleted", False)

    def in_doubt(self, prefix: str) -> bool:
        """Whether its maker has not come to the end, and may have to take it back."""
        if prefix in self.launches and all(one != prefix for one, _ in self.holding):
            return False
        return not self.made_by[prefix].dead

    # --- what happens --------------------------------------------------------------------------

    def committed(self, committed: Committed) -> None:
        """Spark has committed a batch."""
        self._committed.setdefault(committed.plan.batch, []).append(committed)

    def record(self, sequence: int, record: Record) -> None:
        """The job's log says an epoch's state."""
        if record.manifest.kind != "checkpoint":
            return
        state = self.world.once.durable.get(record.manifest.epoch)
        states = self._logged.setdefault(record.manifest.epoch, [])
        if state is not None and state not in states:
            states.append(dict(state))

    def cleaning(self, launch: Launch | None) -> None:
        """A driver begins, or ends, to delete what nobody needs.

        Args:
            launch: of the query whose cleaner it is: that of another query is not held.
        """
        for prefix, its in self.holding:
            if its is launch:
                self.violated(f"a driver cleans while it makes {prefix}")

    def created(self, name: str) -> None:
        """Another object."""
        if name.startswith(SAVEPOINTS) and name.endswith("/" + _JSON):
            prefix = name.removesuffix(_JSON)
            if not self.is_complete(prefix):
                self.world.sched.note("savepoint.json after its deletion", prefix)
                return
            self._whole[prefix] = self._checked(prefix)
            self.world.sched.note("savepoint complete", prefix)

    def rewritten(self, name: str) -> None:
        """An object has other bytes: of a savepoint only that which says that it is deleted."""
        if name.startswith(SAVEPOINTS) and name.endswith("/" + _BEGUN):
            self._is_gone(name.removesuffix(_BEGUN))
        elif name.startswith(SAVEPOINTS):
            self.violated(f"{name} was written over")

    def deleted(self, name: str) -> None:
        """An object is gone: never of a complete savepoint."""
        if not name.startswith(SAVEPOINTS):
            return
        prefix = "/".join(name.split("/")[:2]) + "/"
        if self.is_complete(prefix):
            self.violated(f"{name} was deleted, of a savepoint that is complete")
        if prefix in self._whole and name == prefix + _JSON:
            # What began it was read damaged, so that nothing could be said in it.
            if not self._flips:
                self.violated(f"{name} was deleted, and nothing said so before")
            self._is_gone(prefix)

    def _is_gone(self, prefix: str) -> None:
        """Somebody says that it is deleted."""
        if self.is_complete(prefix):
            self.violated(f"{prefix} was begun again, and is complete")
        # A maker that cannot say it to be complete takes it back, which may land when it is dead.
        if prefix not in self.deleting and prefix in self.taken:
            self.violated(f"{prefix} was deleted by nobody who was told to")
        self._whole.pop(prefix, None)

    def not_made(self, what: str, error: StateBackendError) -> None:
        """What it finds is never damaged: at most it is gone."""
        if isinstance(error, CorruptionError) and not self._flips:
            self.violated(f"{what} could not be made: {error}")

    def failed(self, what: str, error: StateBackendError) -> None:
        """Deleting, or beginning with one, never fails for want of what a savepoint holds."""
        if not self._flips and isinstance(error, CorruptionError | NotRestorableError):
            self.violated(f"{what} failed: {error}")

    def is_deleted(self, prefix: str) -> None:
        """Somebody has come to the end of deleting it."""
        left = [name for name in self.inside(prefix) if not self._is_mark(name)]
        if left:
            self.violated(f"{prefix} was deleted, and {left[0]} is still there")

    def _is_mark(self, name: str) -> bool:
        """Of a deletion: it may land once more when all is gone, and stands for nothing then."""
        data = self.world.bucket.objects[name][0] if name.endswith("/" + _BEGUN) else b"{}"
        return bool(json.loads(data).get("deleted", False))

    def begun(self, prefix: str, clone: str, location: Mapping[str, bytes]) -> None:
        """A job has begun with a savepoint, at its own location."""
        epoch, state = self._whole[prefix]
        store = self._store(clone)
        manifests = CommitLog(store, job="clone", writer="", new_id=str).manifests()
        self._compare(clone, manifests, epoch, state, (None, 1, 3))
        wanted = {
            name.removeprefix(f"{prefix}spark/"): self.world.bucket.objects[name][0]
            for name in self.inside(f"{prefix}spark/")
        }
        found = dict(location)
        if found.pop("metadata").decode() != f'{{"id": "{manifests[-1].query_id}"}}':
            self.violated(f"{clone}: the location is another query's than the job")
        wanted.pop("metadata")
        if found != wanted:
            self.violated(f"{clone}: the location holds {sorted(found)}, not {sorted(wanted)}")

    # --- what one is ---------------------------------------------------------------------------

    def _store(self, prefix: str) -> InstantStore:
        return InstantStore(self.world, self._reader, prefix)

    def _checked(self, prefix: str) -> tuple[int, State]:
        """Epoch and state of one that has just become complete."""
        savepoint = read_savepoint(self._store(prefix))
        epoch = savepoint.epoch
        committed = self._committed.get(epoch)
        if committed is None:
            self.violated(f"{prefix} is of epoch {epoch}, which Spark had not committed")
            raise AssertionError
        state = self._state(prefix)
        if state not in self._logged.get(epoch, []):
            self.violated(f"{prefix}: the log never held this state of epoch {epoch}")
        fitting = [one for one in committed if one.state == state]
        if not fitting and all(one.output is not None for one in committed):
            self.world.sched.note("savepoint of another evaluation", prefix)
            # Known: where a stage that is run again gives other rows and commits are asynchronous,
            # Spark may commit one evaluation while its record is still on its way.
            config = self.world.config
            if not (config.indeterminate and config.asynchronous):
                self.violated(
                    f"{prefix} holds what Spark never committed of epoch {epoch}: "
                    f"{difference(state, committed[-1].state)}"
                )
        plan = self.world.bucket.objects[f"{prefix}spark/offsets/{epoch}"][0]
        if plan not in [plan_file(one.plan) for one in fitting or committed]:
            self.violated(f"{prefix}: the plan is not that of the epoch's rows")
        self._compare(prefix, self._manifests(prefix), epoch, state, (1, 2, 5))
        return epoch, state

    def _manifests(self, prefix: str) -> list[Manifest]:
        return CommitLog(self._store(prefix), job="job", writer="", new_id=str).manifests()

    def _state(self, prefix: str) -> State:
        store = self._store(prefix)
        try:
            savepoint = read_savepoint(store)
            log = CommitLog(store, job=savepoint.job, writer="", new_id=str)
            saved_state(store, savepoint, log)
            return self._restored(prefix, log.manifests(), savepoint.epoch, None)
        except StateBackendError as error:
            self.violated(f"{prefix} is complete, and does not come back: {error}")
            raise

    def _compare(
        self,
        prefix: str,
        manifests: list[Manifest],
        epoch: int,
        expected: State,
        parallelisms: tuple[int | None, ...],
    ) -> None:
        for parallelism in parallelisms:
            try:
                found = self._restored(prefix, manifests, epoch, parallelism)
            except StateBackendError as error:
                self.violated(f"{prefix} does not come back at parallelism {parallelism}: {error}")
                raise
            if found != expected:
                self.violated(
                    f"{prefix} comes back as another state at parallelism {parallelism}: "
                    f"{difference(found, expected)}"
                )

    def _restored(
        self, prefix: str, manifests: list[Manifest], epoch: int, parallelism: int | None
    ) -> State:
        """All subtasks' states, each from the folder's objects alone."""
        lineage = resolve(manifests).get("op")
        if lineage is None or lineage.last_epoch != epoch:
            self.violated(f"{prefix} goes to another epoch than {epoch}")
            raise AssertionError
        state: State = {}
        for known in lineage.at(parallelism or lineage.parallelism, epoch).subtasks:
            plan = plan_restore(
                LocalCopy(), known, job_id=lineage.job_id, epoch=epoch, ancestors={}
            )
            own: State = {}
            for step in plan.steps:
                assert step.ref is not None
                if step.keep is None:
                    own = self._laid(own, prefix, step.ref.sequence, step.ref.entry)
                    continue
                before = clipped(own, range(step.keep.start, step.keep.end + 1))
                others = {key: value for key, value in own.items() if key not in before}
                laid = self._laid(before, prefix, step.ref.sequence, step.ref.entry)
                own = {**others, **clipped(laid, range(step.keep.start, step.keep.end + 1))}
            groups = range(known.key_groups.start, known.key_groups.end + 1)
            if own != clipped(own, groups):
                self.violated(f"{prefix}: subtask {known.key_groups} has keys of others")
            state |= own
        return state

    def _laid(self, state: State, prefix: str, sequence: int, entry: SliceEntry) -> State:
        store = self._store(prefix)
        name = record_name(sequence)
        if entry.object is None:
            data = parse_record(store.get(name), name).slice(entry)
        else:
            data = store.get(entry.object)
        if entry.kind == "files":
            return files_state({f.name: store.get(f.object) for f in decode_index(data).files})
        state = dict(state) if entry.kind == "delta" else {}
        for key, value in decoded(data, arrow=self.world.config.arrow):
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        return state

    # --- at the end ----------------------------------------------------------------------------

    def at_the_end(self) -> None:
        """Everybody has stopped, and the job was cleaned: all is there still."""
        if self.world.violations:
            return
        for prefix, (epoch, state) in sorted(self._whole.items()):
            self._compare(prefix, self._manifests(prefix), epoch, state, (None, 2, 3))
        listed = list_savepoints(
            self._store(SAVEPOINTS), lambda name: self._store(f"{SAVEPOINTS}{name}/")
        )
        found = {f"{one.uri.removeprefix('sim://')}/" for one in listed if one.complete}
        if found != self._whole.keys() or any(one.problem for one in listed):
            self.violated(f"listed are {sorted(found)}, there are {sorted(self._whole)}")
        self._whole.clear()
        for one in listed:
            prefix = f"{one.uri.removeprefix('sim://')}/"
            self.deleting.add(prefix)
            delete_savepoint(self._store(prefix))
            self.is_deleted(prefix)
