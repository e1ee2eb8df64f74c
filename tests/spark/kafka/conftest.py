"""A session with Spark's own Kafka connector, and a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.continuous.kafka.conftest import *  # noqa: F403  (a broker)
from tests.spark.local.conftest import *  # noqa: F403  (a world per test)
from tests.support.kafka import connector_jars
from tests.support.local_session import local_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory, aws_environment: None
) -> Iterator[SparkSession]:
    """Two local slots, with the connector."""
    jars = ",".join(map(str, connector_jars()))
    session = local_session(tmp_path_factory.mktemp("spark"), {"spark.jars": jars})
    yield session
    session.stop()
