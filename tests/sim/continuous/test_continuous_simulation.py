"""A fixed portion of continuous jobs finds nothing; a seed is always the same run."""

from __future__ import annotations

import pytest

from tests.sim.__main__ import SEED
from tests.sim.continuous.config import JobConfig
from tests.sim.continuous.world import simulate
from tests.support.faults import struck

EVENTS = 2_000


@pytest.mark.parametrize("seed", range(3))
def test_the_fixed_portion_finds_nothing(seed: int) -> None:
    result = simulate(seed, events=EVENTS)
    assert not result.violations, f"{SEED}={seed} python -m tests.sim.continuous --events {EVENTS}"
    assert result.epochs > 3
    assert result.rows > 20
    assert struck(result.counts)


def test_a_job_without_faults_runs_once_and_its_old_objects_go() -> None:
    config = JobConfig(arrow=True, inline_budget_bytes=0, parallelism=2)
    result = simulate(1, events=800, config=config)
    assert not result.violations
    assert not struck(result.counts)
    assert result.epochs > 6
    assert result.counts["objects deleted"] > 20


def test_timers_fire_in_two_operators_in_a_row() -> None:
    config = JobConfig(arrow=True, inline_budget_bytes=0, parallelism=2, timed=True, chained=True)
    result = simulate(1, events=800, config=config)
    assert not result.violations
    assert result.counts["timer fired"] > 20
    assert result.counts["timer of a bucket fired"] > 20


def test_a_job_begins_with_a_savepoint_and_runs_beside_the_first() -> None:
    config = JobConfig(arrow=True, parallelism=2, savepoint_every_s=0.4)
    result = simulate(1, events=2_500, config=config)
    assert not result.violations
    assert result.counts["savepoint taken"]
    assert result.counts["job begun with a savepoint"] == 1


def test_splits_are_found_one_after_the_other_and_checkpoints_are_asked_for() -> None:
    config = JobConfig(arrow=True, parallelism=2, found_later=True, asked_every_s=0.5)
    result = simulate(1, events=1_500, config=config)
    assert not result.violations
    assert result.counts["split found later"] == 2
    assert result.counts["checkpoint asked for"] > 1


def test_micro_batches_run_on_the_same_store_and_hosts() -> None:
    result = simulate(0, events=1_500, config=JobConfig(arrow=True, parallelism=2, beside=True))
    assert not result.violations
    assert result.rows > 20
    assert result.counts["batch committed"] > 20
    assert result.counts["driver cleaned"] > 20


def test_a_seed_is_always_the_same_run() -> None:
    one, other = (simulate(5, events=1_000) for _ in range(2))
    assert one.digest == other.digest
    assert one.counts == other.counts
