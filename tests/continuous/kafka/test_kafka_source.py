"""Topics of Kafka as a source, on a broker."""

from __future__ import annotations

import json
import pickle
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from statebackend.continuous.sources.kafka_source import KafkaSource
from statebackend.continuous.sources.source import Json, Split, SplitReader
from statebackend.errors import DamagedInputError, NotReplayableError, SettingError
from tests.support.kafka import KafkaCluster
from tests.support.kafkaclient import KafkaClient

pytestmark = pytest.mark.kafka


def source(client: KafkaClient, topics: Any, **options: Any) -> KafkaSource:
    given = {"value": "json: n bigint", **options}
    return KafkaSource(topics, bootstrap_servers=client.servers, **given)


def numbers(*values: int) -> list[bytes]:
    return [json.dumps({"n": value}).encode() for value in values]


def opened(found: KafkaSource, position: Json | None = None) -> SplitReader:
    (split,) = found.discover(None).splits
    return found.open(split, position)


def taken(reader: SplitReader, count: int, max_rows: int = 1_000) -> list[Any]:
    """The first column of so many rows; less, if they do not come in time."""
    rows: list[Any] = []
    until = time.monotonic() + 60
    while len(rows) < count and time.monotonic() < until:
        batch = reader.read(min(max_rows, count - len(rows)))
        rows += [] if batch is None else batch.column(0).to_pylist()
    return rows


def test_from_any_position_the_rest_is_the_same(client: KafkaClient) -> None:
    topic = client.topic()
    client.send(topic, numbers(*range(10)))
    client.transaction(topic, numbers(-1, -2), commit=False)
    client.transaction(topic, numbers(10, 11), commit=True)
    client.send(topic, numbers(12))
    found = source(client, topic)
    (split,) = pickle.loads(pickle.dumps(found)).discover(None).splits
    for first in range(13):
        reader = found.open(split, None)
        assert taken(reader, first) == list(range(first))
        position = json.loads(json.dumps(reader.position))
        reader.close()
        reader.close()
        reader = found.open(split, position)
        assert taken(reader, 13 - first) == list(range(first, 13))
        reader.close()


def test_only_committed_records_are_read_unless_others_are_wanted(client: KafkaClient) -> None:
    topic = client.topic()
    client.transaction(topic, numbers(1), commit=False)
    client.send(topic, numbers(2))
    reader = opened(source(client, topic))
    assert taken(reader, 1) == [2]
    reader.close()
    reader = opened(source(client, topic, read_uncommitted=True))
    assert taken(reader, 2) == [1, 2]
    reader.close()


def test_a_bounded_source_ends_where_the_topic_did(client: KafkaClient) -> None:
    topic = client.topic()
    client.send(topic, numbers(1))
    client.transaction(topic, numbers(2), commit=True)  # the last offset is no record
    found = source(client, topic, bounded=True)
    splits = found.discover(None)
    assert splits.done
    client.send(topic, numbers(3))
    reader = found.open(splits.splits[0], None)
    assert taken(reader, 2) == [1, 2]
    until = time.monotonic() + 60
    while not reader.ended and time.monotonic() < until:
        assert reader.read(10) is None
    assert reader.ended
    reader.close()
    reader = opened(source(client, client.topic(), bounded=True))
    assert reader.ended
    reader.close()


def test_where_a_job_begins(client: KafkaClient) -> None:
    from confluent_kafka import Consumer, TopicPartition

    topic = client.topic(retention_ms=-1)  # its times are old
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(5):
        at = start + timedelta(minutes=number)
        client.send(topic, numbers(number), timestamp=round(at.timestamp() * 1000))
    consumer = Consumer({"bootstrap.servers": client.servers, "group.id": topic})
    consumer.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    consumer.close()
    wanted = {
        "earliest": 0,
        "latest": 5,
        start + timedelta(seconds=90): 2,
        start + timedelta(days=1): 5,
        "committed": 3,
    }
    for begin, first in wanted.items():
        (split,) = source(client, topic, start=begin, group_id=topic).discover(None).splits
        assert split.data["first"] == first, begin
    (split,) = source(client, topic, start="committed", group_id="none").discover(None).splits
    assert split.data["first"] == 0


def test_new_partitions_and_topics_are_found(client: KafkaClient) -> None:
    prefix = client.topic(2)
    client.send(prefix, numbers(1, 2))
    found = source(client, re.compile(f"{prefix}.*"), start="latest")
    first = found.discover(None)
    assert [split.id for split in first.splits] == [f"{prefix}/0", f"{prefix}/1"]
    before = found.open(first.splits[0], None)  # its connection knows the topic as it is now
    assert not first.done
    assert found.discover(first.state).splits == ()
    client.add_partitions(prefix, 3)
    other = client.topic(1, f"{prefix}-b")
    client.topic(1, f"b-{prefix}")
    client.send(prefix, numbers(7), partition=2)
    client.send(other, numbers(8))
    second = found.discover(json.loads(json.dumps(first.state)))
    assert [split.id for split in second.splits] == [f"{prefix}/2", f"{prefix}-b/0"]
    for split, value in zip(second.splits, (7, 8), strict=True):
        reader = found.open(split, None)
        assert taken(reader, 1) == [value]  # from the first on, also where the job began "latest"
        reader.close()
    assert found.discover(second.state).splits == ()
    before.close()


def test_a_topic_that_was_never_there_is_named(client: KafkaClient) -> None:
    with pytest.raises(SettingError, match="no-such-topic"):
        source(client, "no-such-topic").discover(None)
    found = source(client, re.compile("no-such-topic")).discover(None)
    assert (found.splits, found.done) == ((), False)


@pytest.mark.parametrize("when", ["at a restart", "while reading"])
def test_records_that_are_gone_unread_are_noticed(client: KafkaClient, when: str) -> None:
    topic = client.topic()
    client.send(topic, numbers(1, 2, 3, 4))
    found = source(client, topic)
    (split,) = found.discover(None).splits
    reader = found.open(split, None)
    assert taken(reader, 1) == [1]
    position = reader.position
    if when == "at a restart":
        client.forget_before(topic, 0, 3)
    else:  # what was fetched ahead is still read: only then is something missing
        assert taken(reader, 3) == [2, 3, 4]
        reader.close()
        reader = found.open(split, {"offset": 4})
        client.send(topic, numbers(5, 6))
        client.forget_before(topic, 0, 5)
        position = {"offset": 4}
    reader.close()
    reader = found.open(split, position)
    with pytest.raises(NotReplayableError, match=rf"{topic}\[0\].*retention|gone"):
        taken(reader, 1)
    reader.close()


def test_retention_overtakes_a_reader_that_is_slow(client: KafkaClient) -> None:
    topic = client.topic()
    for number in range(40):
        client.send(topic, numbers(number))
    ahead = {"max.partition.fetch.bytes": 100, "queued.min.messages": 1}
    reader = opened(source(client, topic, options=ahead))
    assert taken(reader, 1) == [0]
    client.forget_before(topic, 0, 39)
    seen = [0]

    def to_the_end() -> None:
        while seen[-1] < 39:
            seen.extend(taken(reader, 1))

    with pytest.raises(NotReplayableError, match="gone"):
        to_the_end()
    assert seen == list(range(len(seen)))  # it did not go on with the first record that is left
    reader.close()


@pytest.mark.parametrize("anew", [False, True])
def test_a_topic_that_is_gone_or_made_anew_is_noticed(client: KafkaClient, anew: bool) -> None:
    topic = client.topic()
    client.send(topic, numbers(1, 2))
    found = source(client, topic)
    discovered = found.discover(None)
    reader = found.open(discovered.splits[0], None)
    assert taken(reader, 1) == [1]
    position = reader.position
    reader.close()
    client.delete(topic)
    if anew:
        client.topic(1, topic)
        client.send(topic, numbers(7, 8, 9))
    said = "made anew" if anew else "is gone"
    with pytest.raises(NotReplayableError, match=said):
        found.discover(discovered.state)
    with pytest.raises(NotReplayableError, match=said):
        found.open(discovered.splits[0], position)


def test_a_value_that_does_not_read_is_named(client: KafkaClient) -> None:
    topic = client.topic()
    client.send(topic, [*numbers(1, 2), b"x", *numbers(3)])
    reader = opened(source(client, topic))
    with pytest.raises(DamagedInputError, match=rf"offset 2 of {topic}\[0\]"):
        taken(reader, 4)
    reader.close()


def test_columns_of_the_record_come_behind_those_of_the_value(client: KafkaClient) -> None:
    topic = client.topic(2, retention_ms=-1)  # its time is old
    at = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    ms = round(at.timestamp() * 1000)
    client.send(topic, [None], key=b"k", partition=1, timestamp=ms)
    names = ["key", "topic", "partition", "offset", "timestamp"]
    found = source(client, topic, value="text", include=names, event_time="timestamp")
    reader = found.open(found.discover(None).splits[1], None)
    batch = None
    until = time.monotonic() + 60
    while batch is None and time.monotonic() < until:
        batch = reader.read(1)
    assert batch is not None
    want = {"key": b"k", "topic": topic, "partition": 1, "offset": 0, "timestamp": at}
    assert batch.to_pylist() == [{"value": None, **want}]
    reader.close()


def test_how_far_a_reader_is_behind(client: KafkaClient) -> None:
    topic = client.topic(2)
    client.send(topic, numbers(*range(100)), partition=0)
    client.send(topic, numbers(1), partition=1)
    found = source(client, topic)
    readers = [found.open(split, None) for split in found.discover(None).splits]
    assert taken(readers[0], 10) == list(range(10))
    assert taken(readers[1], 1) == [1]
    assert [reader.lag for reader in readers] == [90, 0]
    for reader in readers:
        reader.close()


def test_reading_goes_on_when_the_broker_comes_back(
    kafka: KafkaCluster, client: KafkaClient
) -> None:
    topic = client.topic()
    client.send(topic, numbers(1, 2))
    reader = opened(source(client, topic))
    assert taken(reader, 2) == [1, 2]
    kafka.restart(0, away_s=1.0)
    assert reader.read(1) is None
    kafka.wait()
    client.send(topic, numbers(3))
    assert taken(reader, 1) == [3]
    reader.close()


def test_partitions_share_a_connection_and_keep_their_order(client: KafkaClient) -> None:
    topic = client.topic(4)
    for partition in range(4):
        client.send(topic, numbers(*range(300)), partition=partition)
    found = source(client, topic)
    splits: tuple[Split, ...] = found.discover(None).splits
    readers = [found.open(split, None) for split in splits]
    rows: list[list[int]] = [[] for _ in readers]
    until = time.monotonic() + 60
    while min(map(len, rows)) < 300 and time.monotonic() < until:
        for kept, reader in zip(rows, readers, strict=True):
            batch = reader.read(7)
            kept += [] if batch is None else batch.column(0).to_pylist()
    assert rows == [list(range(300))] * 4
    for reader in readers:
        reader.close()
