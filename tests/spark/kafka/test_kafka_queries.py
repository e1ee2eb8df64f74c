"""Streaming queries that read topics by Spark's connector: topics that change under them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from statebackend import KafkaSink
from tests.spark.local.repeated_batches import (
    check_refusals,
    check_rows,
    run_beside_a_clone,
    run_with_repeats,
)
from tests.spark.local.world import durable_state, failure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tests.spark.local.world import World
    from tests.support.kafkaclient import KafkaClient

pytestmark = pytest.mark.kafka


class Topic:
    """A topic that a world's query reads; its world knows each record that was sent."""

    def __init__(self, world: World, client: KafkaClient, **config: Any) -> None:
        self._world, self.client = world, client
        self.name = client.topic(**config)
        self._next = 1

    def send(self, *keys: str, partition: int = 0) -> None:
        """A record for each key, ids counting up."""
        rows = [{"k": key, "id": self._next + n} for n, key in enumerate(keys)]
        self._next += len(rows)
        for row in rows:
            value = json.dumps(row).encode()
            self.client.send(self.name, [value], key=row["k"], partition=partition)
        self._world.input.rows += rows

    def stream(self, **options: Any) -> DataFrame:
        """Its rows; each batch has ten records at most."""
        options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 10, **options}
        return (
            self._world.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.client.servers)
            .option("subscribe", self.name)
            .options(**options)
            .load()
            .select(F.from_json(F.col("value").cast("string"), "k string, id bigint").alias("v"))
            .select("v.*")
        )


@pytest.fixture
def topic(world: World, client: KafkaClient) -> Topic:
    return Topic(world, client)


def run(world: World, topic: Topic, commit: str = "sync", **options: Any) -> None:
    """Take in what is there, and check every row and value."""
    backend = world.backend(commit=commit)
    world.run(backend, world.ledger(backend, topic.stream(**options)))
    world.check(backend)


def failed(world: World, topic: Topic, commit: str = "sync", **options: Any) -> str:
    """What a start ends with."""
    backend = world.backend(commit=commit)
    return failure(world.start(backend, world.ledger(backend, topic.stream(**options))))


def state(world: World) -> Any:
    backend = world.backend()
    found = durable_state(backend, "ledger")["acc"]
    backend.close()
    return found


def test_partitions_that_are_added_are_read_from_their_first_record(
    world: World, topic: Topic
) -> None:
    topic.send(*"abcabcabcabc")
    run(world, topic)
    topic.client.add_partitions(topic.name, 3)
    topic.send(*"abcd", partition=0)
    topic.send(*"efef", partition=2)
    run(world, topic)


def test_of_a_compacted_topic_the_records_that_are_left_are_counted(
    world: World, client: KafkaClient
) -> None:
    # What a cleaner leaves is offsets with gaps. Aborted transactions leave them at once.
    topic = Topic(world, client)
    for letter in "abc":
        topic.send(*f"{letter}xy")
        client.transaction(topic.name, [b'{"k":"never","id":1}'] * 3, commit=False)
    run(world, topic, **{"kafka.isolation.level": "read_committed"})
    topic.send(*"abz")
    run(world, topic, **{"kafka.isolation.level": "read_committed"})


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_records_that_went_unread_end_the_query_and_change_no_state(
    world: World, topic: Topic, commit: str
) -> None:
    topic.send(*"abcab")
    run(world, topic, commit)
    before = state(world)
    topic.send(*"abcabc")
    topic.client.forget_before(topic.name, 0, 8)
    assert re.search("KAFKA_DATA_LOSS|data.{0,40}lost|missing", failed(world, topic, commit))
    assert state(world) == before
    # The user takes the loss: the state goes on with what is left.
    del world.input.rows[5:8]
    run(world, topic, commit, failOnDataLoss="false")


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_batch_that_is_repeated_needs_its_records(
    world: World, topic: Topic, commit: str
) -> None:
    """The driver ended before Spark's commit of the last batch, and retention was shorter."""
    topic.send(*"abcabcabca")
    run(world, topic, commit)
    topic.send(*"abcab")
    run(world, topic, commit)
    last = world.committed()[-1]
    for path in (world.location / "commits").glob(f"*{last}*"):
        path.unlink()
    kept = state(world)
    topic.client.forget_before(topic.name, 0, 12)
    assert re.search("KAFKA_DATA_LOSS|data.{0,40}lost|missing", failed(world, topic, commit))
    assert state(world) == kept


def test_a_deleted_topic_ends_the_query_and_is_named(world: World, topic: Topic) -> None:
    topic.send(*"abcab")
    run(world, topic)
    before = state(world)
    topic.client.delete(topic.name)
    assert topic.name in failed(world, topic)
    assert state(world) == before


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_batch_that_fails_after_the_topic_has_it_is_there_once(
    world: World, client: KafkaClient, commit: str
) -> None:
    out = client.topic(2)
    sink = KafkaSink(out, bootstrap_servers=client.servers, key="k")
    run_with_repeats(world, commit, lambda frame, once: once.append(frame, sink))
    check_rows(world, [json.loads(value) for value in client.values(out)])


def test_a_query_that_begins_with_a_savepoint_has_batches_of_its_own(
    world: World, client: KafkaClient
) -> None:
    out = client.topic()
    run_beside_a_clone(world, KafkaSink(out, bootstrap_servers=client.servers))
    rows = [json.loads(value) for value in client.values(out)]
    assert sum(len(row["ids"]) for row in rows) == 4 * 20 + 2 * 20


def test_a_batch_that_would_be_taken_for_another_one_is_refused(
    world: World, client: KafkaClient
) -> None:
    topics = [client.topic(), client.topic()]
    own = {"transactional_id": topics[0], "commits_topic": f"{topics[0]}-c"}
    frame = world.spark.createDataFrame([(1,)], "n bigint")
    for name in topics:  # under one name, one after the other
        check_refusals(frame, KafkaSink(name, bootstrap_servers=client.servers, **own))
        assert len(client.values(name)) == 3
