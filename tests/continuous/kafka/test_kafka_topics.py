"""Topics that were made a moment ago, which brokers hear of one after the other."""

from __future__ import annotations

from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from statebackend.continuous.kafka.kafka_connection import KafkaConnection, retry_while_unknown
from statebackend.continuous.kafka.kafka_topics import TopicReader
from statebackend.system import System
from tests.support.kafkaclient import KafkaClient

UNKNOWN = KafkaError.UNKNOWN_TOPIC_OR_PART


class Clock:
    """Goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    @property
    def system(self) -> System:
        return cast("System", self)

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep_s(self, seconds: float) -> None:
        self.now_s += seconds


class Broker:
    """Says no until a time; how often it was asked."""

    def __init__(self, clock: Clock, known_at_s: float, error: int = UNKNOWN) -> None:
        self._clock, self._known_at_s, self._error, self.asked = clock, known_at_s, error, 0

    def __call__(self) -> str:
        self.asked += 1
        if self._clock.now_s < self._known_at_s:
            raise KafkaException(KafkaError(self._error))
        return "known"


def test_a_broker_that_has_not_heard_of_a_topic_is_asked_again() -> None:
    clock = Clock()
    broker = Broker(clock, known_at_s=3)
    assert retry_while_unknown(broker, clock.system) == "known"
    assert 2 < broker.asked < 100


def test_a_topic_that_is_not_there_is_given_up_after_ten_seconds() -> None:
    clock = Clock()
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
        retry_while_unknown(Broker(clock, known_at_s=60), clock.system)
    assert 10 <= clock.now_s < 11


def test_another_error_is_told_at_once() -> None:
    clock = Clock()
    broker = Broker(clock, 60, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        retry_while_unknown(broker, clock.system)
    assert (broker.asked, clock.now_s) == (1, 0)


class Admin:
    """Knows some topics, and others from the second question on."""

    def __init__(self, known: dict[str, int], late: dict[str, int]) -> None:
        self._known, self._late, self.questions = known, late, list[list[str]]()

    def describe_topics(self, names: Any, request_timeout: float) -> dict[str, Any]:
        asked = list(names.topic_names)
        self.questions.append(asked)
        answers = {name: Answer(self._known.get(name)) for name in asked}
        self._known |= self._late
        return answers


class Answer:
    def __init__(self, partitions: int | None) -> None:
        self.topic_id, self.partitions = "id", range(partitions or 0)
        self._known = partitions is not None

    def result(self) -> Answer:
        if not self._known:
            raise KafkaException(KafkaError(UNKNOWN))
        return self


def test_only_topics_that_were_not_known_are_asked_for_again() -> None:
    reader = TopicReader(KafkaConnection("localhost:1"), "", "read_committed", Clock().system)
    reader._admin = admin = Admin({"old": 2}, late={"new": 3})
    found = reader.topics(["old", "new", "none"])
    reader.close()
    assert {name: topic.partitions for name, topic in found.items()} == {"old": 2, "new": 3}
    assert admin.questions[:3] == [["new", "none", "old"], ["new", "none"], ["none"]]


@pytest.mark.kafka
def test_a_source_finds_topics_that_were_made_this_moment(client: KafkaClient) -> None:
    connection = KafkaConnection(client.servers)
    for _ in range(40):
        reader = TopicReader(connection, "", "read_committed")
        topic = client.topic()
        assert list(reader.topics([topic])) == [topic]
        reader.close()
