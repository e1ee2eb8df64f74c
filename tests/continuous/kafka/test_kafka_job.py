"""Kafka to Kafka in one process: slots fail, partitions come, the parallelism changes."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.sinks.kafka_sink import KafkaSink
from statebackend.continuous.sources.kafka_source import KafkaSource
from statebackend.errors import NotReplayableError
from tests.continuous.runtime.conftest import *  # noqa: F403  (the fixture `world`)
from tests.continuous.runtime.world import World, soon
from tests.kafkarounds.kafkajob import OUTPUT, PerRow
from tests.kafkarounds.rounds import KEYS, truth

if TYPE_CHECKING:
    from tests.support.kafkaclient import KafkaClient

pytestmark = pytest.mark.kafka


def feed(client: KafkaClient, topic: str, first: int, last: int) -> None:
    for value in range(first, last):
        key = value * 7 % KEYS
        row = json.dumps({"key": key, "value": value}).encode()
        client._producer.produce(topic, row, str(key))
    assert not client._producer.flush(60)


def built(world: World, client: KafkaClient, topic: str, **options: Any) -> None:
    source = KafkaSource(
        topic, bootstrap_servers=client.servers, value="json: key bigint, value bigint"
    )
    rows = world.source(source).key_by("key")
    counted = rows.process(PerRow(), uid="count", output_schema=OUTPUT)
    sink = KafkaSink(f"{topic}-out", bootstrap_servers=client.servers, key="key", **options)
    counted.sink(sink, uid="out")


def came(client: KafkaClient, topic: str) -> Counter[tuple[int, ...]]:
    return Counter(tuple(json.loads(v).values()) for v in client.values(f"{topic}-out"))


@pytest.mark.parametrize("exactly_once", [True, False])
def test_every_row_comes_through_failures_and_another_parallelism(
    world: World, client: KafkaClient, exactly_once: bool
) -> None:
    topic = client.topic(3)
    client.topic(2, f"{topic}-out")
    id = {"transactional_id": topic}
    fed = 0
    for parallelism in (2, 3, 1):
        world.renew()
        built(world, client, topic, exactly_once=exactly_once, **id)
        query = world.start(parallelism, restart=FixedDelay(100, 0.1))
        for slot in (None, -1):
            soon(lambda query=query: query.is_running)
            feed(client, topic, fed, fed + 500)
            if slot is not None:
                world.cluster.slots[slot]._link.broken("drawn", 0, RuntimeError("drawn"))
            fed += 500
            soon(lambda fed=fed: len(came(client, topic)) >= fed, 120.0)
        assert query.restarts >= 1
        assert query.stop()
    rows = came(client, topic)
    assert set(rows) == truth(fed)
    if exactly_once:
        assert max(rows.values()) == 1


def test_partitions_that_are_added_are_read_and_a_deleted_topic_ends_the_job(
    world: World, client: KafkaClient
) -> None:
    topic = client.topic(1)
    client.topic(1, f"{topic}-out")
    built(world, client, topic, transactional_id=topic)
    query = world.start(2, restart=FixedDelay(2, 0.1), discover_every_s=0.2)
    feed(client, topic, 0, 100)
    soon(lambda: len(came(client, topic)) == 100)
    client.add_partitions(topic, 3)
    for value in range(3):
        row = json.dumps({"key": 1000 + value, "value": 1}).encode()
        client.send(topic, [row], partition=value)
    soon(lambda: len(came(client, topic)) == 103)
    lags = [one.get("lag") for one in query.checkpoints()[-1].subtasks.values()]
    assert 0 in lags
    client.delete(topic)
    soon(lambda: not query.is_active)
    assert isinstance(query.exception(), NotReplayableError), query.exception()
