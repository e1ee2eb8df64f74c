"""A world per test, in the one session of two local slots."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value

from tests.spark.local import batched_processors, processors
from tests.spark.local.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def processors_travel_by_value() -> Iterator[None]:
    """Workers need not be able to import the tests."""
    for module in (processors, batched_processors):
        register_pickle_by_value(module)
    yield
    for module in (processors, batched_processors):
        with contextlib.suppress(ValueError):  # another folder's conftest has this fixture too
            unregister_pickle_by_value(module)


@pytest.fixture
def make_world(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds; their queries are stopped and their anchors let go afterwards."""
    made: list[World] = []

    def make(name: str = "world", **given: Any) -> World:
        made.append(World(spark, tmp_path / name, **given))
        return made[-1]

    yield make
    for query in spark.streams.active:
        query.stop()
    for world in made:
        for backend in world.backends:
            backend.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()
