"""Which copy a subtask comes back from: the table of cases."""

from __future__ import annotations

import msgspec
import pytest

from recovery.decide.restore_plan import RestorePlan, StepSource, plan_restore
from snapshot.protocol.lineage import SubtaskLineage, resolve
from snapshot.protocol.messages import LocalCopy
from statebackend.errors import CorruptionError, NotRestorableError
from statebackend.keygroups import KeyGroupRange
from tests.recovery.driver import JOB_ID, Run, part_of

BASES = (4, 8)
EPOCHS = 11  # 0 to 10


@pytest.fixture(scope="module")
def lineage() -> SubtaskLineage:
    """Epochs 0 to 10 with bases beside 4 and 8; pruned as far as restoring 7 allows."""
    run = Run(1)
    for epoch in range(EPOCHS):
        run.begin(epoch)
        run.ack(epoch, base={b"k": b"%d" % epoch} if epoch in BASES else None)
        run.commit()
    one = resolve(run.records)["op"].subtasks[0]
    DIGESTS.update({e: one.deltas[e].entry.digest for e in one.deltas})
    CHAINS.update({e: one.chain_at(e) or "" for e in range(-1, EPOCHS)})
    one.prune(7)
    return one


CHAINS: dict[int, str] = {}
DIGESTS: dict[int, str] = {}


def copy_at(epoch: int, *deltas: int, **other: object) -> LocalCopy:
    """A local copy that stands at an epoch, with the local deltas of these."""
    found = LocalCopy(
        job_id=JOB_ID,
        epoch=epoch,
        chain=CHAINS[epoch],
        deltas=[(e, DIGESTS[e]) for e in deltas],
    )
    return msgspec.structs.replace(found, **other)


def shown(plan: RestorePlan) -> list[tuple[str, int, str]]:
    return [(step.ref.entry.kind, step.ref.entry.epoch, step.source.value) for step in plan.steps]


def planned(lineage: SubtaskLineage, copy: LocalCopy, epoch: int) -> RestorePlan:
    return plan_restore(copy, lineage, job_id=JOB_ID, epoch=epoch)


def test_a_copy_that_stands_at_the_epoch_needs_nothing(lineage: SubtaskLineage) -> None:
    assert planned(lineage, copy_at(9), 9) == RestorePlan(False, "", ())


def test_a_copy_one_behind_takes_its_local_delta(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, copy_at(8, 9), 9)
    assert not plan.fresh
    assert shown(plan) == [("delta", 9, "local")]


def test_a_copy_one_behind_without_its_delta_takes_the_durable_one(
    lineage: SubtaskLineage,
) -> None:
    plan = planned(lineage, copy_at(8), 9)
    assert not plan.fresh
    assert shown(plan) == [("delta", 9, "record")]


def test_each_delta_comes_from_the_nearest_place(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, copy_at(5, 6, 9, 10), 10)
    assert shown(plan) == [
        ("delta", 6, "local"),
        ("delta", 7, "record"),
        ("delta", 8, "record"),
        ("delta", 9, "local"),
        ("delta", 10, "local"),
    ]


def test_a_local_delta_of_an_attempt_that_did_not_win_is_not_taken(
    lineage: SubtaskLineage,
) -> None:
    other = part_of({b"k": b"another attempt's"}).digest
    plan = planned(lineage, copy_at(8, deltas=[(9, other)]), 9)
    assert shown(plan) == [("delta", 9, "record")]
    both = planned(lineage, copy_at(8, deltas=[(9, other), (9, DIGESTS[9])]), 9)
    assert shown(both) == [("delta", 9, "local")]


def test_a_delta_of_the_right_content_under_another_epoch_is_not_taken(
    lineage: SubtaskLineage,
) -> None:
    plan = planned(lineage, copy_at(8, deltas=[(10, DIGESTS[9])]), 9)
    assert shown(plan) == [("delta", 9, "record")]


def test_without_a_copy_the_newest_base_and_the_deltas_after_it(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, LocalCopy(), 10)
    assert plan.fresh
    assert "no local copy" in plan.reason
    assert shown(plan) == [("base", 8, "record"), ("delta", 9, "record"), ("delta", 10, "record")]
    assert shown(planned(lineage, LocalCopy(), 8)) == [("base", 8, "record")]


def test_a_base_after_the_epoch_asked_for_is_not_taken(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, LocalCopy(), 7)
    assert shown(plan) == [("base", 4, "record"), *(("delta", e, "record") for e in (5, 6, 7))]


@pytest.mark.parametrize(
    ("name", "epoch", "reason"),
    [
        ("another job's", 9, "another job"),
        ("ahead", 8, "stands at epoch 9, after epoch 8"),
        ("another branch", 9, "lineage at epoch 9"),
        ("half way past", 9, "half way past epoch 9"),
        ("half way elsewhere", 10, "half way to another epoch 10"),
        ("too old", 9, "too old for the deltas"),
    ],
)
def test_a_copy_that_does_not_do_is_left_with_the_reason(
    lineage: SubtaskLineage, name: str, epoch: int, reason: str
) -> None:
    copy = {
        "another job's": copy_at(9, job_id="job-1"),
        "ahead": copy_at(9),
        "another branch": copy_at(9, chain=CHAINS[8]),
        "half way past": copy_at(9, applying=CHAINS[10]),
        "half way elsewhere": copy_at(9, 10, applying=CHAINS[8]),
        "too old": copy_at(3, 4, 5, 6, 7, 8, 9, chain=CHAINS[3]),
    }[name]
    if name == "too old":
        # Its delta is kept (beside the base), the ones between are not.
        old = SubtaskLineage(lineage.key_groups, lineage.start_chain, lineage.start_epoch)
        old.deltas = {e: ref for e, ref in lineage.deltas.items() if e not in (5, 6)}
        old.bases = dict(lineage.bases)
        plan = planned(old, copy, epoch)
    else:
        plan = planned(lineage, copy, epoch)
    assert plan.fresh
    assert reason in plan.reason
    assert all(step.source is not StepSource.LOCAL for step in plan.steps)
    assert plan.steps[0].ref.entry.kind == "base"
    assert plan.steps[-1].ref.entry.epoch == epoch


def test_a_copy_half_way_to_the_epoch_asked_for_is_brought_there(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, copy_at(9, 10, applying=CHAINS[10]), 10)
    assert shown(plan) == [("delta", 10, "local")]


def test_a_copy_half_way_is_good_for_later_epochs_too(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, copy_at(8, applying=CHAINS[9]), 10)
    assert shown(plan) == [("delta", 9, "record"), ("delta", 10, "record")]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_copy_from_before_what_is_kept_cannot_be_told_right_from_wrong(
    lineage: SubtaskLineage, epoch: int
) -> None:
    plan = planned(lineage, copy_at(epoch), 9)
    assert plan.fresh
    assert "lineage" in plan.reason


def test_a_copy_from_just_before_the_oldest_base_is_known_by_the_delta_beside_it(
    lineage: SubtaskLineage,
) -> None:
    plan = planned(lineage, copy_at(3), 6)
    assert not plan.fresh
    assert shown(plan) == [("delta", e, "record") for e in (4, 5, 6)]
    assert planned(lineage, copy_at(3, chain=CHAINS[2]), 6).fresh


def test_a_base_newer_than_the_copy_does_not_make_it_worthless(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, copy_at(7, 8), 9)
    assert not plan.fresh
    assert shown(plan) == [("delta", 8, "local"), ("delta", 9, "record")]


def test_a_copy_whose_next_delta_is_damaged_is_left_for_a_base(lineage: SubtaskLineage) -> None:
    damaged = {lineage.deltas[8].key}
    plan = plan_restore(copy_at(7), lineage, job_id=JOB_ID, epoch=8, avoid=damaged)
    assert plan.reason == "it needs the delta of epoch 8, which is damaged"
    assert shown(plan) == [("base", 8, "record")]
    beside = plan_restore(copy_at(7, 8), lineage, job_id=JOB_ID, epoch=8, avoid=damaged)
    assert shown(beside) == [("delta", 8, "local")]


def test_a_parents_copy_whose_next_delta_is_damaged_is_left_for_its_base(
    lineage: SubtaskLineage,
) -> None:
    whole, part = KeyGroupRange(0, 7), KeyGroupRange(0, 3)
    child = SubtaskLineage(part, "", 8, rescaled=True, parents=(lineage.until(8),))
    for damaged, wanted in ((set(), ["local", "record"]), ({lineage.deltas[8].key}, ["record"])):
        plan = plan_restore(
            LocalCopy(),
            child,
            job_id=JOB_ID,
            epoch=8,
            avoid=damaged,
            ancestors={whole: copy_at(7)},
        )
        assert [step.source.value for step in plan.steps] == wanted


def test_a_copy_without_a_store_keeps_its_deltas_to_itself(lineage: SubtaskLineage) -> None:
    plan = planned(lineage, LocalCopy(deltas=[(9, DIGESTS[9])]), 9)
    assert plan.fresh
    assert shown(plan) == [("base", 8, "record"), ("delta", 9, "record")]


def test_a_way_that_is_not_known_any_more_is_never_an_empty_one(lineage: SubtaskLineage) -> None:
    lineage.bases.clear()
    for epoch in [e for e in lineage.deltas if e <= 9]:
        del lineage.deltas[epoch]
    with pytest.raises(NotRestorableError):
        planned(lineage, LocalCopy(), 9)


def test_a_damaged_base_is_made_up_for_by_an_older_one_or_named() -> None:
    run = Run(1)
    for epoch in range(6):
        run.begin(epoch)
        run.ack(epoch, base={b"k": b"%d" % epoch} if epoch in (1, 4) else None)
        run.commit()
    one = resolve(run.records)["op"].subtasks[0]
    newest = one.bases[4].key
    plan = plan_restore(LocalCopy(), one, job_id=JOB_ID, epoch=5, avoid={newest})
    assert [(kind, epoch) for kind, epoch, _ in shown(plan)] == [
        ("base", 1),
        *(("delta", epoch) for epoch in range(2, 6)),
    ]
    one.prune(4)
    with pytest.raises(CorruptionError, match="base of epoch 4"):
        plan_restore(LocalCopy(), one, job_id=JOB_ID, epoch=5, avoid={newest})


def test_slices_that_have_objects_of_their_own_are_read_from_there() -> None:
    run = Run(1)
    run.finish(0)
    one = run.lineage().subtasks[0]
    ref = one.deltas[0]
    one.deltas[0] = type(ref)(
        ref.sequence, msgspec.structs.replace(ref.entry, object="data/1", offset=None)
    )
    assert shown(planned(one, LocalCopy(), 0)) == [("delta", 0, "object")]


def test_the_first_epoch_starts_from_an_empty_store() -> None:
    run = Run(1)
    run.begin(0)
    one = run.lineage().subtasks[0]
    plan = planned(one, LocalCopy(), -1)
    assert plan.fresh
    assert plan.steps == ()
    # Attempted again where it was made: the empty store is there.
    made = LocalCopy(job_id=JOB_ID, epoch=-1, chain=one.start_chain)
    assert planned(one, made, -1) == RestorePlan(False, "", ())
    # With something of a given-up attempt applied to it, it is not.
    assert planned(one, msgspec.structs.replace(made, epoch=0), -1).fresh


def test_an_empty_copy_of_before_the_first_epoch_takes_all_deltas() -> None:
    run = Run(1)
    for epoch in range(3):
        run.finish(epoch)
    one = run.lineage().subtasks[0]
    made = LocalCopy(job_id=JOB_ID, epoch=-1, chain=one.start_chain)
    plan = planned(one, made, 2)
    assert not plan.fresh
    assert [kind for _, kind, _ in shown(plan)] == [0, 1, 2]
