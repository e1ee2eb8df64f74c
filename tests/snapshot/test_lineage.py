"""Which slices make up a state: what is needed of the log, and what may be forgotten."""

from __future__ import annotations

import contextlib
import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.decide.lost_epochs import tolerant_lineages
from recovery.decide.restore_plan import plan_restore
from snapshot.formats.lineage_digest import chain_start
from snapshot.formats.record import Manifest, SliceEntry
from snapshot.protocol.lineage import OperatorLineage, SliceRef, SubtaskLineage, resolve
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import CorruptionError, NotRestorableError
from statebackend.keygroups import KeyGroupRange
from tests.recovery.driver import (
    JOB_ID,
    Changes,
    Run,
    State,
    changed,
    follow,
    part_of,
    state_by,
    without,
)

START = chain_start(JOB_ID, "op", (0, 7)).hex()


def entry(epoch: int, before: str, *, kind: str = "delta", content: bytes = b"") -> SliceEntry:
    digest = part_of({b"k": content or b"%d" % epoch}).digest
    return SliceEntry(
        operator="op",
        subtask=0,
        kind="base" if kind == "base" else "delta",
        epoch=epoch,
        key_group_start=0,
        key_group_end=7,
        attempt=0,
        rows=1,
        size_bytes=1,
        digest=digest,
        chain=follow(before, digest),
    )


def subtask_of(
    epochs: int, *, bases: tuple[int, ...] = (), start_epoch: int = -1
) -> SubtaskLineage:
    """Epochs 0 to `epochs` - 1, sequence = 10 times the epoch; a base beside its delta."""
    lineage = SubtaskLineage(KeyGroupRange(0, 7), START, start_epoch)
    before = START
    for epoch in range(start_epoch + 1, epochs):
        delta = entry(epoch, before)
        lineage.deltas[epoch] = SliceRef(10 * epoch, delta)
        if epoch in bases:
            base = msgspec.structs.replace(entry(epoch, before, kind="base"), chain=delta.chain)
            lineage.bases[epoch] = SliceRef(10 * epoch, base)
        before = delta.chain
    return lineage


def chain_at(lineage: SubtaskLineage, epoch: int) -> str:
    found = lineage.chain_at(epoch)
    assert found is not None
    return found


# --- one subtask ---------------------------------------------------------------------------------


def test_the_digest_after_an_epoch_is_that_of_its_delta() -> None:
    lineage = subtask_of(3)
    assert lineage.chain_at(-1) == START
    assert lineage.chain_at(1) == lineage.deltas[1].entry.chain
    assert lineage.chain_at(3) is None
    assert lineage.chain_at(-2) is None


def test_a_digest_is_known_by_the_epoch_itself_or_by_the_delta_after_it() -> None:
    lineage = subtask_of(6, bases=(3,))
    digests = {epoch: chain_at(lineage, epoch) for epoch in range(-1, 6)}
    lineage.prune(4)
    assert sorted(lineage.deltas) == [3, 4, 5]
    assert lineage.chain_at(2) is None
    for epoch in (2, 3, 4, 5):
        assert lineage.holds(epoch, digests[epoch])
        assert not lineage.holds(epoch, digests[epoch - 1])
    # Before that nothing tells right from wrong, so nothing is right.
    for epoch in (0, 1):
        assert not lineage.holds(epoch, digests[epoch])
    assert not lineage.holds(6, digests[5])


@pytest.mark.parametrize("digest", ["", "zz", "00", "00" * 31, "00" * 33, "0x" + "00" * 31])
def test_a_digest_that_is_none_is_held_by_nobody(digest: str) -> None:
    lineage = subtask_of(6, bases=(3,))
    lineage.prune(4)
    assert not lineage.holds(2, digest)
    assert not lineage.holds(4, digest)


def test_pruning_keeps_what_the_newest_base_needs_and_forgets_the_rest() -> None:
    lineage = subtask_of(8, bases=(1, 3, 6))
    lineage.prune(5)
    assert sorted(lineage.deltas) == [3, 4, 5, 6, 7]
    assert sorted(lineage.bases) == [3, 6]
    lineage.prune(7)
    assert sorted(lineage.deltas) == [6, 7]


def test_without_a_base_nothing_is_forgotten() -> None:
    lineage = subtask_of(5)
    lineage.prune(4)
    assert sorted(lineage.deltas) == [0, 1, 2, 3, 4]
    assert lineage.oldest_needed(4) == 0


@pytest.mark.parametrize(
    ("epoch", "needed"), [(-1, 0), (0, 0), (1, 0), (2, 20), (3, 20), (4, 20), (5, 50)]
)
def test_the_oldest_record_needed_is_the_base_s(epoch: int, needed: int) -> None:
    assert subtask_of(6, bases=(2, 5)).oldest_needed(epoch) == needed


@given(st.integers(1, 12), st.data())
def test_what_is_kept_for_an_epoch_leads_to_it_and_to_every_later_one(
    epochs: int, data: st.DataObject
) -> None:
    # Bases made apart are named by records of later epochs: by any, or by none yet.
    lineage = subtask_of(epochs, bases=tuple(range(epochs)))
    for epoch in range(epochs):
        late = data.draw(st.one_of(st.none(), st.integers(epoch, epochs - 1)), f"base of {epoch}")
        base = lineage.bases.pop(epoch)
        if late is not None:
            lineage.bases[epoch] = SliceRef(10 * late, base.entry)
    wanted = data.draw(st.integers(-1, epochs - 1), "the oldest epoch that may be asked for")
    needed = lineage.oldest_needed(wanted)
    for slices in (lineage.deltas, lineage.bases):
        for epoch in [e for e, ref in slices.items() if needed is None or ref.sequence < needed]:
            del slices[epoch]
    for epoch in range(wanted, epochs):
        assert not lineage.gap_before(epoch)


def test_giving_an_epoch_up_forgets_what_stood_on_it() -> None:
    lineage = subtask_of(6, bases=(2, 4))
    lineage.drop_from(3)
    assert sorted(lineage.deltas) == [0, 1, 2]
    assert sorted(lineage.bases) == [2]


# --- one operator --------------------------------------------------------------------------------


def record(
    sequence: int, epoch: int, slices: list[SliceEntry], *, oldest_needed: int = 0
) -> Manifest:
    return Manifest(
        kind="checkpoint",
        job="clicks",
        job_id=JOB_ID,
        generation=1,
        sequence=sequence,
        writer="w",
        write_id="i",
        oldest_needed=oldest_needed,
        operator="op",
        epoch=epoch,
        stamp_ms=epoch,
        parallelism=1,
        max_parallelism=8,
        slices=slices,
    )


def test_a_record_that_breaks_the_lineage_is_refused() -> None:
    lineage = OperatorLineage.new(
        "op", job_id=JOB_ID, parallelism=1, max_parallelism=8, first_epoch=0
    )
    lineage.add(record(0, 0, [entry(0, START)]))
    with pytest.raises(CorruptionError, match=r"Record 1 .*'op', subtask 0, at epoch 1"):
        lineage.add(record(1, 1, [entry(1, START)]))


def test_a_record_of_an_epoch_replaces_it_and_all_that_came_after() -> None:
    run = Run(1)
    for epoch in range(4):
        run.finish(epoch)
    manifests = list(run.records)
    other = entry(1, manifests[0].slices[0].chain, content=b"other")
    manifests.append(record(4, 1, [other]))
    lineage = resolve(manifests)["op"]
    assert sorted(lineage.epochs) == [0, 1]
    assert lineage.epochs[1].sequence == 4
    assert lineage.last_epoch == 1
    assert lineage.subtasks[0].chain_at(1) == other.chain
    assert lineage.subtasks[0].chain_at(2) is None


def half_broken(run: Run) -> Manifest:
    """The newest record again, one sequence later: its last slice does not follow."""
    last = run.records[-1]
    *sound, wrong = last.slices
    assert wrong.kind == "delta"
    slices = [*sound, msgspec.structs.replace(wrong, chain="00" * 32)]
    return msgspec.structs.replace(last, sequence=last.sequence + 1, slices=slices)


def test_slices_of_a_record_that_breaks_half_way_are_void_in_the_next_one() -> None:
    # `verify` goes on after such a record: nothing of it may pass for a part of the epoch.
    run = Run(2)
    for epoch in range(3):
        run.finish(epoch)
    broken = half_broken(run)
    base = msgspec.structs.replace(broken.slices[0], kind="base")
    broken = msgspec.structs.replace(broken, slices=[base, *broken.slices])
    last = msgspec.structs.replace(run.records[-1], sequence=broken.sequence + 1)
    only = msgspec.structs.replace(last, slices=[one for one in last.slices if one.subtask == 1])
    found, breaks = tolerant_lineages([*run.records[:-1], broken])
    assert [sequence for sequence, _ in breaks] == [broken.sequence]
    assert sorted(found["op"].epochs) == [0, 1]
    assert 2 in found["op"].subtasks[0].deltas  # half of it was taken in
    found, _ = tolerant_lineages([*run.records[:-1], broken, only])
    assert sorted(found["op"].subtasks[0].deltas) == [0, 1]
    assert found["op"].subtasks[0].bases == {}
    assert not found["op"].is_known(2)
    found, _ = tolerant_lineages([*run.records[:-1], broken, last])
    assert {one.deltas[2].sequence for one in found["op"].subtasks} == {last.sequence}
    assert found["op"].is_known(2)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=20))
def test_deltas_lie_in_the_order_of_their_epochs_whatever_the_log(
    told: list[tuple[int, bool]],
) -> None:
    run = Run(2)
    for epoch in range(7):
        run.finish(epoch)
    lineage = resolve(run.records)["op"]
    for sequence, (epoch, sound) in enumerate(told, 7):
        manifest = msgspec.structs.replace(run.records[epoch], sequence=sequence)
        if not sound:
            wrong = msgspec.structs.replace(manifest.slices[1], chain="00" * 32)
            manifest = msgspec.structs.replace(manifest, slices=[manifest.slices[0], wrong])
        with contextlib.suppress(CorruptionError):
            lineage.add(manifest)
        for subtask in lineage.subtasks:
            assert list(subtask.deltas) == sorted(subtask.deltas)
            assert not any(e > epoch for e in subtask.deltas)


def test_claims_say_nothing_about_state() -> None:
    run = Run(1)
    run.finish(0)
    claim = msgspec.structs.replace(
        run.records[0], kind="claim", sequence=1, operator="", slices=[], epoch=-1
    )
    assert resolve([claim, *run.records, claim]) == resolve(run.records)
    assert resolve([claim]) == {}


def test_operators_are_resolved_apart() -> None:
    run = Run({"a": 1, "b": 3})
    run.finish(0)
    run.finish(1, ["b"])
    resolved = resolve(run.records)
    assert {uid: (one.last_epoch, one.parallelism) for uid, one in resolved.items()} == {
        "a": (0, 1),
        "b": (1, 3),
    }


def test_an_operator_without_an_epoch_can_be_asked_for_what_was_before_it() -> None:
    lineage = OperatorLineage.new(
        "op", job_id=JOB_ID, parallelism=2, max_parallelism=8, first_epoch=5
    )
    assert lineage.last_epoch == 4
    assert lineage.has(4)
    lineage.require(4)
    assert lineage.oldest_needed(4) is None
    with pytest.raises(NotRestorableError, match="complete epochs: none"):
        lineage.require(5)


def test_an_epoch_that_is_not_there_is_never_replaced_by_an_older_one() -> None:
    run = Run(1, base_every_epochs=2)
    for epoch in range(6):
        due = run.begin(epoch).base_due
        run.ack(epoch, base={b"k": b"%d" % epoch} if due else None)
        run.commit()
    lineage = resolve(without(run.records, run.records[-1].oldest_needed))["op"]
    for epoch in (4, 5):
        lineage.require(epoch)
    for epoch in (0, 3, 6):
        with pytest.raises(NotRestorableError, match=f"after epoch {epoch} .*4 to 5"):
            lineage.require(epoch)


# --- what a log must keep ------------------------------------------------------------------------


class History:
    """A job under a random life; after every record, what its newest one lets go is deleted."""

    def __init__(self, rng: random.Random, parallelism: dict[str, int], every: int) -> None:
        self.rng = rng
        self.run = Run(parallelism, base_every_epochs=every)
        self.records = self.run.records
        self.attempts = itertools.count()
        self.epoch = 0
        self.confirmed = -1
        self.truth: dict[int, dict[tuple[str, int], tuple[State, str]]] = {-1: {}}
        self.now: dict[tuple[str, int], tuple[State, str]] = {}

    def draw_changes(self, state: State) -> Changes:
        keys = [b"%d" % n for n in range(4)]
        drawn = {key: b"%d" % self.rng.randrange(100) for key in self.rng.sample(keys, 2)}
        gone = {key: None for key in state if self.rng.random() < 0.3}
        return {**drawn, **gone} if self.rng.random() < 0.9 else {}

    def finish(self, uid: str) -> None:
        """One operator's part of the running epoch; then the check."""
        run, epoch = self.run, self.epoch
        for subtask in range(run.parallelism[uid]):
            admitted = run.begin(epoch, subtask, uid)
            self.confirmed = max(self.confirmed, epoch - 1)
            state, digest = self.truth[epoch - 1].get((uid, subtask), ({}, admitted.chain))
            assert admitted.chain == digest
            changes = self.draw_changes(state)
            after = changed(state, changes)
            run.ack(
                epoch,
                subtask,
                uid,
                changes=changes,
                attempt=next(self.attempts),
                base=after if admitted.base_due else None,
            )
            self.now[uid, subtask] = after, follow(digest, part_of(changes).digest)
        manifest = run.commit(uid)
        if manifest is not None:
            self.records[:] = without(self.records, manifest.oldest_needed)
        self.check(self.epoch - 1)

    def whole_epoch(self) -> None:
        for uid in self.run.parallelism:
            self.finish(uid)
        if self.rng.random() < 0.3:  # a superseding record
            self.finish(self.rng.choice(list(self.run.parallelism)))
        self.truth[self.epoch], self.now = self.now, {}
        # Until the next epoch begins, Spark may go on from here or repeat.
        self.check(self.epoch - 1, self.epoch)
        self.epoch += 1

    def part_of_an_epoch(self) -> None:
        for uid in self.rng.sample(list(self.run.parallelism), len(self.run.parallelism) - 1):
            self.finish(uid)

    def restart(self, *, parallelism: dict[str, int] | None = None, back: bool = False) -> None:
        # Spark repeats its last batch if it had not committed it; nobody can have begun the next.
        if back and self.epoch - 1 > self.confirmed:
            self.epoch -= 1
        self.now = {}
        self.run = self.run.again(parallelism)

    def check(self, *epochs: int) -> None:
        """From what is kept, these epochs come back, every subtask of them."""
        resolved = resolve(self.records)
        oldest = self.records[-1].oldest_needed
        for epoch in epochs:
            for (uid, subtask), (state, digest) in self.truth[epoch].items():
                operator = resolved[uid]
                operator.require(epoch)
                lineage = operator.subtasks[subtask]
                assert lineage.chain_at(epoch) == digest
                assert lineage.holds(epoch, digest)
                plan = plan_restore(LocalCopy(), lineage, job_id=JOB_ID, epoch=epoch)
                assert all(step.ref.sequence >= oldest for step in plan.steps)
                assert state_by(plan, self.run.slices) == state


@settings(max_examples=max(30, settings.default.max_examples))
@given(
    st.integers(0, 2**32),
    st.dictionaries(st.sampled_from("ab"), st.integers(1, 3), min_size=1),
    st.integers(1, 4),
    st.lists(
        st.sampled_from(["epoch", "epoch", "epoch", "part", "restart", "back", "add"]), max_size=25
    ),
)
def test_the_newest_record_never_lets_go_of_what_a_restart_may_ask_for(
    seed: int, parallelism: dict[str, int], every: int, life: list[str]
) -> None:
    history = History(random.Random(seed), parallelism, every)
    for step in life:
        if step == "epoch":
            history.whole_epoch()
        elif step == "part":
            history.part_of_an_epoch()
        elif step == "add":
            history.restart(parallelism={**history.run.parallelism, "c": 2})
        else:
            history.restart(back=step == "back")
    history.whole_epoch()
    oldest = [record.oldest_needed for record in history.records]
    assert oldest == sorted(oldest)
