"""A job that has run once, and frames that a wrong use is tried on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from statebackend import StateBackend
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger
from tests.spark.local.world import World, checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

__all__ = ["df", "old"]


@pytest.fixture(scope="module")
def old(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A job with one epoch, which no test here may change."""
    world = World(spark, tmp_path_factory.mktemp("old") / "world")
    world.input.add_batches(1)
    backend = world.run_ledger(max_parallelism=64)
    before = checkpoints(backend)
    yield world
    assert checkpoints(backend) == before
    assert world.committed() == [0]
    world.input.add_batches(1)
    world.check(world.run_ledger(max_parallelism=64))
    for made in world.backends:
        made.close()


def _frame(backend: StateBackend, df: DataFrame, processor: Any = None, **given: Any) -> DataFrame:
    given = {"keys": "k", "output_schema": LEDGER_OUTPUT, "uid": "ledger", **given}
    return backend.transform_with_state(df, processor=processor or Ledger(), **given)


@pytest.fixture
def df(old: World) -> DataFrame:
    return old.input.stream(old.spark)
