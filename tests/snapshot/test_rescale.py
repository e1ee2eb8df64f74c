"""Lineages over changes of parallelism: what leads to a state, and what must be kept for it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.decide.lost_epochs import Needs, slice_key
from recovery.decide.restore_plan import RestorePlan, StepSource, plan_restore
from snapshot.formats.delta import decode_delta
from snapshot.formats.record import Manifest
from snapshot.protocol.lineage import SubtaskLineage, resolve
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import CorruptionError, NotRestorableError
from statebackend.keygroups import KeyGroupRange, key_group_range, subtask_of
from tests.recovery.driver import JOB_ID, MAX_PARALLELISM, Run, State, changed, replayed

Changes = dict[bytes, bytes | None]


def key(group: int, name: int = 0) -> bytes:
    return bytes([0, group, name])


def part_of_state(state: State, groups: KeyGroupRange) -> State:
    return {k: v for k, v in state.items() if k[1] in groups}


def carried_out(plan: RestorePlan, slices: dict[str, bytes]) -> State:
    """The state that a plan without any local copy brings back."""
    state: State = {}
    for step in plan.steps:
        assert step.ref is not None
        entry = step.ref.entry
        changes = replayed({}, slices[entry.digest], entry.digest)
        # A delta may delete: take its rows one by one.
        if entry.kind == "delta":
            state = replayed_some(state, slices[entry.digest], step.keep)
        else:
            state.update(changes if step.keep is None else part_of_state(changes, step.keep))
    return state


def replayed_some(state: State, data: bytes, keep: KeyGroupRange | None) -> State:
    if not data:
        return state
    rows = decode_delta(data)
    pairs = zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True)
    return changed(state, {k: v for k, v in pairs if keep is None or k[1] in keep})


class World:
    """A run after the other, and what the state is after each epoch."""

    def __init__(self, parallelism: int, every: int = 64) -> None:
        self.run = Run(parallelism, base_every_epochs=every)
        self.epoch = 0
        self.truth: dict[int, State] = {-1: {}}

    @property
    def parallelism(self) -> int:
        return self.run.parallelism["op"]

    def epochs(self, *epochs: Changes) -> None:
        for changes in epochs:
            after = changed(self.truth[self.epoch - 1], changes)
            for subtask in range(self.parallelism):
                groups = key_group_range(subtask, self.parallelism, MAX_PARALLELISM)
                admitted = self.run.begin(self.epoch, subtask)
                own: Changes = {k: v for k, v in changes.items() if k[1] in groups}
                base = part_of_state(after, groups) if admitted.base_due else None
                self.run.ack(self.epoch, subtask, changes=own, base=base)
            assert self.run.commit() is not None
            self.truth[self.epoch] = after
            self.epoch += 1

    def again(self, parallelism: int, *, back: int = 0) -> None:
        """Another run, which repeats the last epochs where ``back`` is not 0."""
        self.epoch -= back
        self.run = self.run.again({"op": parallelism}, first_epoch=self.epoch)

    def cleaned(self) -> None:
        """What nobody needs is gone from the log."""
        records = self.run.records
        oldest = records[-1].oldest_needed if records else 0
        self.run.records[:] = [one for one in records if one.sequence >= oldest]

    def check(self) -> None:
        """From the log alone, at the parallelism it was left in and at every other one."""
        resolved = resolve(self.run.records)
        if not resolved:
            return
        for parallelism in range(1, MAX_PARALLELISM + 1):
            lineage = resolved["op"].at(parallelism, self.epoch - 1)
            lineage.require(self.epoch - 1)
            found: State = {}
            for one in lineage.subtasks:
                state = carried_out(planned(one, self.epoch - 1), self.run.slices)
                assert state == part_of_state(self.truth[self.epoch - 1], one.key_groups)
                assert not found.keys() & state.keys()
                found.update(state)
            assert found == self.truth[self.epoch - 1]


def planned(lineage: SubtaskLineage, epoch: int, **more: object) -> RestorePlan:
    return plan_restore(
        LocalCopy(),
        lineage,
        job_id=JOB_ID,
        epoch=epoch,
        ancestors={},
        **more,  # type: ignore[arg-type]
    )


@st.composite
def changes(draw: st.DrawFn) -> Changes:
    keys = st.builds(key, st.integers(0, MAX_PARALLELISM - 1), st.integers(0, 3))
    values = st.one_of(st.none(), st.integers(0, 99).map(lambda n: b"%d" % n))
    return draw(st.dictionaries(keys, values, max_size=8))


STEPS = st.one_of(
    st.tuples(st.just("epochs"), st.lists(changes(), min_size=1, max_size=3)),
    st.tuples(st.just("again"), st.integers(1, MAX_PARALLELISM)),
    st.tuples(st.just("repeat"), st.integers(1, MAX_PARALLELISM)),
    st.tuples(st.just("clean"), st.just(0)),
)


@pytest.mark.full  # long random histories; test_rescale_store has short ones
@settings(max_examples=80, deadline=None)
@given(st.integers(1, MAX_PARALLELISM), st.sampled_from([2, 3, 64]), st.lists(STEPS, max_size=8))
def test_whatever_is_run_repeated_cleaned_and_rescaled_the_state_is_the_models(
    parallelism: int, every: int, steps: list[tuple[str, object]]
) -> None:
    world = World(parallelism, every)
    repeatable = False
    for what, value in steps:
        if what == "epochs":
            world.epochs(*value)  # type: ignore[misc]
            repeatable = True
        elif what == "clean":
            world.cleaned()
        else:
            # Spark repeats at most the newest batch, whatever the parallelism is then.
            back = int(what == "repeat" and repeatable)
            world.again(int(value), back=back)  # type: ignore[call-overload]
            repeatable = repeatable and not back
        world.check()


def scaled(first: int, *then: int, every: int = 64) -> World:
    """Three epochs at each parallelism."""
    world = World(first, every)
    rng = random.Random(1)
    for number, parallelism in enumerate((first, *then)):
        if number:
            world.again(parallelism)
        for _ in range(3):
            world.epochs({key(g, rng.randrange(3)): b"%d" % rng.randrange(100) for g in range(8)})
    return world


def test_a_subtask_whose_key_groups_stay_keeps_its_lineage() -> None:
    world = scaled(2, 4)
    world.run = world.run.again({"op": 2}, first_epoch=world.epoch)
    lineage = resolve(world.run.records)["op"]
    assert [one.rescaled for one in lineage.subtasks] == [True] * 4
    same = scaled(3)
    before = resolve(same.run.records)["op"]
    # Of 8 groups over 3 and over 5: only the first subtask has the same, none has.
    after = before.at(8, same.epoch - 1)
    kept = {one.key_groups for one in before.subtasks} & {one.key_groups for one in after.subtasks}
    for one in after.subtasks:
        assert one.rescaled is (one.key_groups not in kept)


def test_the_way_back_without_an_epoch_in_between_is_no_change_at_all() -> None:
    world = scaled(2)
    before = resolve(world.run.records)["op"]
    assert before.at(5, world.epoch - 1).at(2, world.epoch - 1) is before


def test_what_the_parents_need_is_needed_until_every_child_has_a_base() -> None:
    world = scaled(2, 3, every=64)
    oldest = world.run.records[-1].oldest_needed
    lineage = resolve(world.run.records)["op"]
    assert any(one.parents and one.base_before(world.epoch - 1) is None for one in lineage.subtasks)
    needed = lineage.before
    assert needed is not None
    assert oldest <= min(s.oldest_needed(2) or 0 for s in needed.subtasks)
    for _ in range(40):  # the first base of each child comes soon, and not with the others'
        world.epochs({key(1, 1): b"x"})
    assert not any(one.parents for one in world.run.lineage().subtasks)
    after = world.run.records[-1].oldest_needed
    first_of_three = next(m.sequence for m in world.run.records if m.parallelism == 3)
    assert after >= first_of_three
    world.cleaned()
    world.check()


def test_local_copies_are_looked_for_before_anything_is_decided() -> None:
    world = scaled(2)
    lineage = resolve(world.run.records)["op"].at(1, world.epoch - 1).subtasks[0]
    plan = plan_restore(LocalCopy(), lineage, job_id=JOB_ID, epoch=world.epoch - 1)
    assert plan.look_for == (KeyGroupRange(0, 3), KeyGroupRange(4, 7))
    assert plan.steps == ()


def test_each_parent_comes_from_the_nearest_copy() -> None:
    world = scaled(2)
    epoch = world.epoch - 1
    before = resolve(world.run.records)["op"]
    left, right = before.subtasks
    child = before.at(1, epoch).subtasks[0]
    copy = LocalCopy(
        job_id=JOB_ID,
        epoch=epoch - 1,
        chain=left.chain_at(epoch - 1) or "",
        deltas=[(epoch, left.deltas[epoch].entry.digest)],
    )
    strange = LocalCopy(job_id="another", epoch=epoch, chain=right.chain_at(epoch) or "")
    plan = plan_restore(
        LocalCopy(),
        child,
        job_id=JOB_ID,
        epoch=epoch,
        ancestors={left.key_groups: copy, right.key_groups: strange},
    )
    store, delta, *durable = plan.steps
    assert (store.ref, store.found_at, store.keep) == (None, left.key_groups, left.key_groups)
    assert (delta.source, delta.found_at) == (StepSource.LOCAL, left.key_groups)
    assert [step.source for step in durable] == [StepSource.RECORD] * 3
    assert {step.keep for step in durable} == {right.key_groups}


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5, 7, 8])
def test_every_key_group_is_in_one_subtask_and_the_one_that_the_formula_gives(
    parallelism: int,
) -> None:
    world = scaled(3)
    lineage = resolve(world.run.records)["op"].at(parallelism, world.epoch - 1)
    for group in range(MAX_PARALLELISM):
        owners = [n for n, one in enumerate(lineage.subtasks) if group in one.key_groups]
        assert owners == [subtask_of(group, parallelism, MAX_PARALLELISM)]


def test_a_damaged_slice_of_a_parent_is_named_and_never_left_out() -> None:
    world = scaled(2, 1)
    epoch = world.epoch - 1
    lineage = resolve(world.run.records)["op"]
    child = lineage.subtasks[0]
    bad = child.parents[1].deltas[1]
    with pytest.raises(CorruptionError, match="subtask 1"):
        planned(child, epoch, avoid={bad.key})
    needs = Needs({"op": lineage})
    assert needs.lost([]) == []
    lost = needs.lost([slice_key(bad.sequence, bad.entry)])
    assert {(one.subtask, one.epoch) for one in lost} == {(0, epoch), (0, epoch - 1)}
    assert "cannot be restored" in needs.meaning(slice_key(bad.sequence, bad.entry), lost)


def test_a_child_whose_only_base_is_damaged_is_never_taken_for_empty() -> None:
    world = scaled(2, 1, every=2)
    epoch = world.epoch - 1
    lineage = resolve(world.run.records)["op"]
    lineage.prune(epoch)
    child = lineage.subtasks[0]
    assert child.parents == ()
    avoid = {ref.key for ref in child.bases.values()}
    with pytest.raises(CorruptionError):
        planned(child, epoch, avoid=avoid)
    child.bases.clear()
    with pytest.raises(NotRestorableError):
        planned(child, epoch)
    assert child.gap_before(epoch)


def manifests_without(records: list[Manifest], parallelism: int) -> list[Manifest]:
    return [one for one in records if one.parallelism != parallelism]


def test_a_log_whose_earlier_parallelism_is_cleaned_away_goes_on_from_its_bases() -> None:
    world = scaled(2, 3, every=2)
    for _ in range(4):
        world.epochs({key(1, 1): b"y"})
    world.run.records[:] = manifests_without(world.run.records, 2)
    world.check()


def test_which_of_two_equal_origins_was_taken_is_said_by_the_record() -> None:
    """When the log is read, less of it may be there than when the record was written."""
    world = World(4)
    for number in range(4):
        world.epochs({key(g): b"%d" % number for g in range(MAX_PARALLELISM)})
    world.again(5)
    world.epochs({key(1): b"five"})
    world.again(3, back=1)  # the same batch, from the state that both came from
    world.epochs({key(1): b"three"})
    for left_out in range(len(world.run.records)):
        resolve(world.run.records[left_out:])  # no record breaks a lineage
    world.check()
