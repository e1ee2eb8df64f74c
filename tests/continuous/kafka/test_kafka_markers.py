"""The topic in which a sink notes what it has committed, on a broker."""

from __future__ import annotations

import pytest

from statebackend.continuous.kafka.kafka_connection import KafkaConnection
from statebackend.continuous.kafka.kafka_markers import MarkerTopic
from tests.support.kafkaclient import KafkaClient

pytestmark = pytest.mark.kafka


def test_a_topic_of_markers_that_was_made_this_moment_is_waited_for(client: KafkaClient) -> None:
    connection = KafkaConnection(client.servers)
    for _ in range(40):
        topic = MarkerTopic(connection, client.topic(cleanup_policy="compact"))
        assert topic.make()
