"""Keys are erased between runs, by processes that are cut: nothing else is lost, no key is back."""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from statebackend.tables import erase_from_log
from tests.sim.config import draw
from tests.sim.erasing import can_erase
from tests.sim.world import Result, simulate

pytestmark = pytest.mark.full  # `python -m tests.sim --erase-every-s 2` runs any seed so
EVENTS = 4_000


def seeds(count: int) -> list[int]:
    """The first whose worlds can have keys erased."""
    found = [n for n in range(8 * count) if can_erase(draw(Random(f"config {n}")))]
    return found[:count]


def run(seed: int) -> Result:
    return simulate(seed, events=EVENTS, erase_every_s=1.0)


def test_erasing_beside_all_that_befalls_a_job_finds_nothing() -> None:
    results = [run(seed) for seed in seeds(8)]
    found = [(result.seed, *one) for result in results for one in result.violations]
    assert not found, "replay: python -m tests.sim --erase-every-s 1 --events 4000 --seeds <seed>"
    counts = sum((result.counts for result in results), Counter[str]())
    assert counts["entries erased"] > 10
    assert counts["erase cut"] > 3
    assert counts["record without erased keys"] >= counts["entries erased"]


def test_a_local_copy_that_passes_for_what_was_made_without_the_keys_is_found_out() -> None:
    def same(data: bytes) -> Any:
        """A digest that leaves a lineage what it was."""
        return SimpleNamespace(hexdigest=lambda: data.decode().partition(" ")[0])

    with mock.patch.object(erase_from_log, "blake3", same):
        results = map(run, seeds(4))
        assert any(result.violations for result in results)


def test_keys_that_are_not_erased_are_found_out() -> None:
    with mock.patch.object(erase_from_log.ErasedKeys, "state_of", return_value=None):
        results = map(run, seeds(4))
        assert any("without the keys" in str(result.violations) for result in results)
