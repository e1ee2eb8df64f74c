"""A fixed portion finds nothing and reaches every rare branch; a seed is always the same run."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sim.__main__ import SEED, main
from tests.sim.branches import BRANCHES, unreached
from tests.sim.config import ALWAYS, STRIKES, calm
from tests.sim.world import Result, simulate
from tests.support.faults import struck

ROOT = Path(__file__).parents[2]
SEEDS = (*range(48), 76)  # 76: a commit whose outcome stays unknown is rare
EVENTS = 6_000
TOGETHER = pytest.mark.xdist_group("the simulation's fixed portion")

pytestmark = pytest.mark.full  # 50 s; `tox -e tests` simulates 32 seeds itself before the tests


@pytest.fixture(scope="module")
def portion() -> list[Result]:
    """The fixed portion; its seeds are printed, each can be run again alone."""
    results = [simulate(seed, events=EVENTS) for seed in SEEDS]
    for result in results:
        print(f"{SEED}={result.seed} {result.events} events, digest {result.digest}")
    return results


@TOGETHER
def test_the_fixed_portion_finds_nothing(portion: list[Result]) -> None:
    found = [(result.seed, *one) for result in portion for one in result.violations]
    assert not found, f"replay with {SEED}=<seed> python -m tests.sim --events {EVENTS}"
    assert sum(result.epochs for result in portion) > 1_000


@TOGETHER
def test_every_rare_branch_is_reached(portion: list[Result]) -> None:
    assert len(BRANCHES) >= 25
    counts = sum((result.counts for result in portion), Counter[str]())
    assert not unreached(counts)
    faults = {*ALWAYS, *(fault for kinds in STRIKES.values() for fault in kinds)}
    assert struck(counts).keys() == faults


def test_a_world_without_faults_is_quick_and_exact() -> None:
    result = simulate(1, events=3_000, config=calm())
    assert not result.violations
    assert result.epochs > 20
    assert not [kind for kind in result.counts if kind.startswith(("task failed", "query failed"))]


@pytest.mark.parametrize("seed", [3, 8, 13])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, again = (simulate(seed, events=2_000) for _ in range(2))
    assert (first.digest, first.events, first.counts) == (again.digest, again.events, again.counts)
    assert simulate(seed + 1, events=2_000).digest != first.digest


def test_a_fresh_process_with_another_hash_order_gives_the_same_run() -> None:
    code = "from tests.sim.world import simulate; print(simulate(5, events=2000).digest)"
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
    assert digests == {simulate(5, events=2_000).digest}


def test_a_seed_is_replayed_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SEED, "5")
    assert main(["--events", "2000"]) == 0
    said = capsys.readouterr().out
    assert simulate(5, events=2_000).digest in said
    assert "driver started" in said


def test_the_runner_says_which_seed_failed_and_how_to_run_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--seeds", "0:1", "--events", "2000", "--jobs", "1"]
    assert main([*given, "--planted", "generation not raised"]) == 1
    said = capsys.readouterr().out
    assert f"replay: {SEED}=0 python -m tests.sim" in said
    assert '"checker": "single writer"' in said


def test_a_world_asks_the_machine_for_no_time_no_ids_and_no_threads() -> None:
    def guarded(really: Any) -> Any:
        def asked(*args: Any, **named: Any) -> Any:
            if threading.get_ident() == own:
                raise AssertionError("the machine was asked")
            return really(*args, **named)  # threads that other tests left behind

        return asked

    own = threading.get_ident()
    real = [(time, name) for name in ("monotonic", "time", "time_ns", "perf_counter", "sleep")]
    real += [(uuid, "uuid4"), (os, "urandom"), (random, "random"), (secrets, "token_urlsafe")]
    # A store counts its requests under a real lock, which nobody keeps while time goes by.
    real += [(threading, name) for name in ("Event", "Condition", "Semaphore")]
    for seed in (3, 100, 113):
        with pytest.MonkeyPatch.context() as patched:
            for module, name in real:
                patched.setattr(module, name, guarded(getattr(module, name)))
            patched.setattr(threading.Thread, "start", guarded(threading.Thread.start))
            assert simulate(seed, events=4_000).violations == []
