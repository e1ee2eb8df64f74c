"""When faults strike is a function of the seed alone."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.drill.catalogue import ALL
from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.needs import Given, missing
from recovery.drill.faults.stage import Stage
from recovery.drill.run.strike_schedule import Strike, planned, soak, target_rng

SEEDS = st.integers(0, 2**31)


def nothing(stage: Stage, rng: Random) -> str:
    return ""


def fault(name: str, **given: object) -> DrillFault:
    return DrillFault(name=name, summary="", promise="", strike=nothing, **given)  # type: ignore[arg-type]


A, B, C = fault("a"), fault("b", weight=5), fault("c", weight=0)


@given(SEEDS)
def test_a_seed_replays_the_same_plan(seed: int) -> None:
    assert planned([A, B, C, A], seed=seed) == planned([A, B, C, A], seed=seed)
    first = list(islice(soak([A, B], seed=seed), 50))
    assert first == list(islice(soak([B, A], seed=seed), 50))
    assert target_rng(seed, 1, "a").random() == target_rng(seed, 1, "a").random()


def test_other_seeds_give_other_plans() -> None:
    epochs = {tuple(s.after_epoch for s in planned([A, B, C], seed=seed)) for seed in range(50)}
    assert len(epochs) > 10
    names = {tuple(f.name for f, _ in islice(soak([A, B], seed=n), 8)) for n in range(50)}
    assert len(names) > 10
    assert len({target_rng(n, 0, "a").random() for n in range(50)}) == 50


@given(SEEDS)
def test_drawn_strikes_leave_epochs_between_them_and_keep_their_order(seed: int) -> None:
    strikes = planned([A, B, C], seed=seed)
    assert [s.fault.name for s in strikes] == ["a", "b", "c"]
    epochs = [0, *(s.after_epoch for s in strikes)]
    assert all(1 <= after - before <= 3 for before, after in pairwise(epochs))


def test_a_told_epoch_is_kept_and_strikes_of_the_user_s_own_come_in_their_turn() -> None:
    strikes = planned([Strike(fault=C, after_epoch=9), A, B], seed=3, at_epoch=4)
    assert [(s.fault.name, s.after_epoch) for s in strikes] == [("a", 4), ("b", 4), ("c", 9)]


@given(SEEDS)
def test_a_soak_draws_by_weight_and_never_what_has_none(seed: int) -> None:
    drawn = [f.name for f, gap in islice(soak([A, B, C], seed=seed), 300) if 1 <= gap <= 3]
    assert len(drawn) == 300
    assert set(drawn) == {"a", "b"}
    assert drawn.count("b") > 2 * drawn.count("a")
    assert list(soak([C], seed=seed)) == []


@pytest.mark.parametrize(
    ("need", "having"),
    [
        ("two-hosts", {"cluster": "two-hosts"}),
        ("s3", {"s3": True}),
        ("async", {"commit": "async"}),
        ("compiler", {"compiler": True}),
        ("timers", {"timers": True}),
    ],
)
def test_what_a_drill_lacks_for_a_fault_is_said(need: str, having: dict[str, object]) -> None:
    bare: dict[str, object] = {
        "cluster": "local[2]",
        "s3": False,
        "commit": "sync",
        "compiler": False,
        "timers": False,
    }
    needy = fault("needy", needs=frozenset({need}))
    assert missing(needy, Given(**bare))  # type: ignore[arg-type]
    assert missing(needy, Given(**{**bare, **having})) == ""  # type: ignore[arg-type]
    assert missing(A, Given(**bare)) == ""  # type: ignore[arg-type]


def test_every_fault_of_the_catalogue_says_what_happens_and_what_is_promised() -> None:
    assert {"executor-killed", "driver-killed", "host-lost"} <= set(ALL)
    for name, entry in ALL.items():
        assert name == entry.name
        assert entry.summary.endswith(".")
        assert entry.promise.endswith(".")
