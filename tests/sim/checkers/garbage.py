"""What nobody needs does not stay for ever."""

from __future__ import annotations

from recovery.decide.restore_plan import plan_restore
from snapshot.formats.history_object import HISTORY_PREFIX
from snapshot.formats.object_names import parse_base_name, parse_data_name
from snapshot.formats.record import Manifest, Record, parse_record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import SubtaskLineage, resolve
from snapshot.protocol.messages import LocalCopy
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view
from snapshot.retention.history_keeping import KnownHistory
from statebackend.errors import StateBackendError
from tests.sim.bucket import SimStore
from tests.sim.checkers.exactly_once import ExactlyOnce
from tests.sim.checkers.ledger import Checker
from tests.sim.location import State, clipped, difference
from tests.sim.savepoints import CLONES, SAVEPOINTS
from tests.sim.threads import SimThreads

__all__ = ["Garbage"]


class Garbage(Checker):
    """Looks when all is quiet."""

    name = "garbage"
    _before_calm: frozenset[str] = frozenset()

    def begin_calm(self) -> None:
        """From here on nothing goes wrong: what is named by nobody now must go."""
        named = frozenset().union(*self.world.references.named.values())
        self._before_calm = frozenset(self.world.bucket.objects) - named

    def record(self, sequence: int, record: Record) -> None:
        """An upload that was whole before the calm may be named by a record of the calm."""
        self._before_calm -= self.world.references.named.get(sequence, frozenset())

    def at_the_end(self) -> None:
        """After some quiet batches; then everybody stops, somebody claims the job and cleans."""
        world = self.world
        if world.violations:
            return
        self._drivers_own()
        for app in list(world.apps):
            world.kill_app(app)
        world.supervised = False
        found: list[list[Manifest]] = []

        def settle() -> None:
            store = SimStore(world.bucket, world.outside, world.config)
            threads, new_id = SimThreads(world.sched, world.outside), world.sched.new_id
            log = CommitLog(store, job=world.job, writer="janitor", new_id=new_id, threads=threads)
            log.claim()
            for _ in range(2):
                clean(
                    store,
                    lambda: outside_view(store, log),
                    prefixes=ALL_PREFIXES,
                    history=KnownHistory(outside=True),
                )
            found.append(log.manifests())

        world.do_outside(settle)
        if found:
            self._nothing_left()
            self._restorable(found[0])

    def _drivers_own(self) -> None:
        """A driver that cleans after each epoch leaves nothing of those before it."""
        world, app = self.world, self.world.newest
        if not world.cleans_each_epoch or app is None:
            return
        generation = max(r.manifest.generation for r in world.references.records.values())
        named = frozenset().union(*world.references.named.values())
        for name in sorted(self._before_calm & world.bucket.objects.keys()):
            place = parse_data_name(name) or parse_base_name(name)
            if place is not None and place.generation < generation and name not in named:
                self.violated(f"{name} of an earlier generation is still there")

    def _nothing_left(self) -> None:
        references = self.world.references
        named = frozenset().union(*references.named.values())
        for name in self.world.bucket.objects:
            if name.startswith((SAVEPOINTS, CLONES, HISTORY_PREFIX)):
                continue
            sequence = parse_record_name(name)
            if sequence is None:
                if name not in named:
                    self.violated(f"{name} is needed by nobody and was not deleted")
            elif sequence < references.oldest_needed:
                record = self.world.ledger.records[sequence]
                if record.manifest.kind != "claim":
                    self.violated(f"record {sequence} is needed by nobody and was not deleted")

    def _restorable(self, manifests: list[Manifest]) -> None:
        """From the objects alone comes what the batches made, at every parallelism."""
        world = self.world
        for once in (world.once, *([world.second_once] if world.config.second else [])):
            self._comes_back(manifests, once)

    def _comes_back(self, manifests: list[Manifest], once: ExactlyOnce) -> None:
        """One operator, as its checker knows it."""
        lineage = resolve(manifests).get(once.uid)
        if lineage is None or not lineage.epochs:
            if once.durable:
                self.violated("the log holds no epoch, and some were durable")
            return
        epoch = lineage.last_epoch
        expected = once.durable[epoch]
        for parallelism in {lineage.parallelism: None, 1: None, 2: None, 3: None, 5: None}:
            for known in lineage.at(parallelism, epoch).subtasks:
                state = self._from_log(known, lineage.job_id, epoch)
                groups = range(known.key_groups.start, known.key_groups.end + 1)
                if state != clipped(expected, groups):
                    self.violated(
                        f"key groups {known.key_groups} at parallelism {parallelism} do not come "
                        f"back from the log alone: {difference(state, clipped(expected, groups))}"
                    )

    def _from_log(self, known: SubtaskLineage, job_id: str, epoch: int) -> State:
        try:
            plan = plan_restore(LocalCopy(), known, job_id=job_id, epoch=epoch, ancestors={})
        except StateBackendError as error:
            self.violated(f"key groups {known.key_groups} do not come back: {error}")
            raise
        state: State = {}
        for step in plan.steps:
            assert step.ref is not None  # a local store: there is none
            record = self.world.ledger.records[step.ref.sequence]
            if step.keep is None:
                state = self.world.once.laid(state, record, step.ref.entry)
                continue
            groups = range(step.keep.start, step.keep.end + 1)
            before = clipped(state, groups)
            others = {key: value for key, value in state.items() if key not in before}
            laid = self.world.once.laid(before, record, step.ref.entry)
            state = {**others, **clipped(laid, groups)}
        return state
