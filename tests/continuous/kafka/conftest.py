"""A broker that the tests of a run share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kafka import KafkaCluster, start_kafka
from tests.support.kafkaclient import KafkaClient


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    found = start_kafka(tmp_path_factory.mktemp("kafka"))
    yield found
    found.stop()


@pytest.fixture(scope="session")
def client(kafka: KafkaCluster) -> KafkaClient:
    return KafkaClient(kafka.bootstrap)
