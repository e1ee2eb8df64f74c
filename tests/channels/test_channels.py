"""A fixed portion of dataflows: every completed cut is consistent, and nothing is lost or twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.channels.__main__ import SEED, main
from tests.channels.branches import unreached
from tests.channels.plan import ALWAYS, STRIKES, draw, truth
from tests.channels.world import Result, simulate
from tests.support.faults import struck

ROOT = Path(__file__).parents[2]
SEEDS = range(400)
TOGETHER = pytest.mark.xdist_group("the channels' fixed portion")


@pytest.fixture(scope="module")
def portion() -> list[Result]:
    """The fixed portion; each seed can be run again alone."""
    results = [simulate(seed) for seed in SEEDS]
    print(f"{SEED}={SEEDS.start}..{SEEDS.stop - 1}")
    return results


@TOGETHER
def test_the_fixed_portion_finds_nothing(portion: list[Result]) -> None:
    found = [(result.seed, *one) for result in portion for one in result.violations]
    assert not found, f"replay with {SEED}=<seed> python -m tests.channels"
    assert sum(result.cuts for result in portion) > 1_500


@TOGETHER
def test_every_rare_branch_is_reached(portion: list[Result]) -> None:
    counts = sum((result.counts for result in portion), Counter[str]())
    assert not unreached(counts)
    faults = {*ALWAYS, *(fault for kinds in STRIKES.values() for fault in kinds)}
    assert struck(counts).keys() == faults


@pytest.mark.parametrize("seed", [3, 8, 13])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, again = simulate(seed), simulate(seed)
    assert (first.digest, first.steps, first.counts) == (again.digest, again.steps, again.counts)
    assert simulate(seed + 1).digest != first.digest


def test_a_fresh_process_with_another_hash_order_gives_the_same_run() -> None:
    code = "from tests.channels.world import simulate; print(simulate(5).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": order},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()
        for order in ("1", "2")
    }
    assert digests == {simulate(5).digest}


def test_worlds_are_of_every_shape() -> None:
    worlds = [draw(Random(f"config {seed}")) for seed in SEEDS]
    hows = Counter(edge.how for world in worlds for edge in world.edges)
    assert set(hows) == {"key", "forward", "broadcast", "rebalance"}
    assert any(sum(e.receiver == v.number for e in w.edges) > 1 for w in worlds for v in w.vertices)
    assert {world.mode for world in worlds} == {"exactly_once", "at_least_once"}
    assert max(sum(vertex.kind == "keyed" for vertex in w.vertices) for w in worlds) == 3
    assert max(sum(truth(w)[w.vertices[-1].number].values()) for w in worlds) > 150


def test_a_seed_is_replayed_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SEED, "5")
    assert main([]) == 0
    said = capsys.readouterr().out
    assert simulate(5).digest in said
    assert "aligned snapshot" in said


def test_the_runner_says_which_seed_failed_and_how_to_run_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--seeds", "0:4", "--planted", "the first barrier triggers"]) == 1
    said = capsys.readouterr().out
    assert f"replay: {SEED}=0 python -m tests.channels" in said
    assert '"checker": "cut"' in said
