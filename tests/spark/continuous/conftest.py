"""Jobs in the one session of two local slots."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value

from statebackend.backend import StateBackend
from tests.continuous.runtime import jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def jobs_travel_by_value() -> Iterator[None]:
    """Workers need not be able to import the tests."""
    register_pickle_by_value(jobs)
    yield
    with contextlib.suppress(ValueError):
        unregister_pickle_by_value(jobs)


@pytest.fixture
def backend(spark: SparkSession, tmp_path: Path) -> Callable[..., StateBackend]:
    """Makes backends of one job."""

    def make(**settings: Any) -> StateBackend:
        return StateBackend(
            spark,
            uri=f"file://{tmp_path}/state",
            job="continuous",
            local_dir=str(tmp_path / "local"),
            settings=settings,
        )

    return make
