"""The same query at another parallelism: each key's state is where its rows now go, exactly."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from statebackend.errors import MaxParallelismChangedError
from statebackend.keygroups import key_group_range
from tests.spark.local.processors import DyingLedger
from tests.spark.local.world import sources

if TYPE_CHECKING:
    from tests.spark.local.world import World

KEYS = 40  # keys in every key group range of any parallelism below


def _more(world: World, batches: int = 2) -> None:
    world.input.add_batches(batches, keys=KEYS, rows=2 * KEYS)


@pytest.mark.parametrize("settings", [{}, {"inline_limit_bytes": 0}], ids=["inline", "objects"])
def test_from_parallelism_to_parallelism_by_the_local_copies(
    world: World, settings: dict[str, int]
) -> None:
    _more(world)
    world.check(world.run_ledger(parallelism=2, settings=settings))
    for parallelism in (3, 1, 4, 4, 2):
        _more(world)
        backend = world.run_ledger(parallelism=parallelism, settings=settings)
        world.check(backend)
        assert set(sources(backend).values()) == {"local"}
        assert len(backend.restores()) == parallelism
        assert sum(one.durable_reads for one in backend.restores()) == 0
    kept = {path.name for path in world.local.glob("*/ledger/*")}
    ranges = [key_group_range(n, 2, 128) for n in range(2)]
    assert kept == {f"{one.start}-{one.end}" for one in ranges}


def test_without_a_parallelism_the_checkpoints_is_taken(world: World) -> None:
    _more(world)
    world.run_ledger(parallelism=3)
    _more(world)
    backend = world.run_ledger(parallelism=None)
    world.check(backend)
    assert backend.lineages()["ledger"].parallelism == 3


def test_a_host_that_has_nothing_reads_the_parents_from_the_store(world: World) -> None:
    _more(world, 3)
    world.run_ledger(parallelism=2)
    world.forget_local()
    _more(world)
    backend = world.run_ledger(parallelism=3)
    world.check(backend)
    assert set(sources(backend).values()) == {"durable"}


@pytest.mark.promise
def test_local_and_durable_copies_are_mixed(world: World) -> None:
    _more(world, 3)
    world.run_ledger(parallelism=2)
    (folder,) = world.local.glob("*/ledger/64-127")
    shutil.rmtree(folder)
    _more(world)
    backend = world.run_ledger(parallelism=1)
    world.check(backend)
    assert sources(backend) == {("ledger", 0): "mixed"}


def test_a_worker_that_dies_in_the_first_batch_after_the_change(world: World) -> None:
    _more(world)
    world.run_ledger(parallelism=2)
    _more(world)
    flag = world.root / "flag"
    flag.touch()
    backend = world.backend(parallelism=3)
    frame = world.ledger(backend, processor=DyingLedger(str(flag), "k7"))
    assert "worker exited unexpectedly" in world.fail(backend, frame)
    world.check(world.run_ledger(parallelism=4))


def test_the_batch_that_spark_repeats_may_run_at_another_parallelism(world: World) -> None:
    """The epoch was durable, the driver died before Spark had committed the batch."""
    _more(world)
    world.run_ledger(parallelism=2)
    last = world.committed()[-1]
    (world.location / "commits" / str(last)).unlink()
    for crc in (world.location / "commits").glob(f".{last}.crc"):
        crc.unlink()
    backend = world.run_ledger(parallelism=3)
    world.check(backend)


def test_asynchronous_commits_are_rescaled_too(world: World) -> None:
    _more(world)
    world.run_ledger(parallelism=2, commit="async")
    _more(world)
    backend = world.run_ledger(parallelism=3, commit="async")
    world.check(backend)


def test_without_a_max_parallelism_the_checkpoints_and_no_other(world: World) -> None:
    """42 keys in 13 key groups, as Flink's test has it."""
    for _ in range(2):
        world.input.add_keys(*(f"k{n}" for n in range(42)))
    world.run_ledger(parallelism=2, max_parallelism=13)
    for parallelism in (4, 2):
        world.input.add_keys(*(f"k{n}" for n in range(42)))
        backend = world.run_ledger(parallelism=parallelism)
        world.check(backend)
        assert backend.lineages()["ledger"].max_parallelism == 13
    with pytest.raises(MaxParallelismChangedError, match="13"):
        world.ledger(world.backend(parallelism=2, max_parallelism=26))
