"""Topics, and records in them, by a client that knows nothing of what is tested."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

__all__ = ["KafkaClient"]


class KafkaClient:
    """A user of a cluster.

    Args:
        options: of librdkafka, such as those to log in.
    """

    def __init__(self, servers: str, **options: Any) -> None:
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient

        self.servers = servers
        self._options = {"bootstrap.servers": servers, "log_level": 2, **options}
        self.admin = AdminClient(self._options)
        # Without it a record that is sent once more may come behind the next one.
        in_order = {"enable.idempotence": True, "partitioner": "murmur2_random"}
        self._make = lambda: Producer({**self._options, **in_order})
        self._producer = self._make()

    def topic(self, partitions: int = 1, name: str = "", **config: Any) -> str:
        """A new one; ``config`` by Kafka's names, with ``_`` for ``.``."""
        from confluent_kafka.admin import NewTopic

        name = name or f"t-{uuid.uuid4().hex[:12]}"
        given = {key.replace("_", "."): str(value) for key, value in config.items()}
        (made,) = self.admin.create_topics([NewTopic(name, partitions, config=given)]).values()
        made.result(30)
        return name

    def add_partitions(self, topic: str, total: int) -> None:
        from confluent_kafka.admin import NewPartitions

        (made,) = self.admin.create_partitions([NewPartitions(topic, total)]).values()
        made.result(30)
        self._producer = self._make()  # the other one knows the old number for some minutes

    def delete(self, topic: str) -> None:
        (done,) = self.admin.delete_topics([topic]).values()
        done.result(30)
        while topic in self.admin.list_topics(timeout=10).topics:
            time.sleep(0.05)

    def forget_before(self, topic: str, partition: int, offset: int) -> None:
        """Delete records as retention does."""
        from confluent_kafka import TopicPartition

        (done,) = self.admin.delete_records([TopicPartition(topic, partition, offset)]).values()
        done.result(30)

    def send(self, topic: str, values: Iterable[bytes | None], **more: Any) -> None:
        """Records that the cluster has on return; ``more``: of `produce`."""
        for value in values:
            self._producer.produce(topic, value, **more)
        assert not self._producer.flush(60)

    def transaction(self, topic: str, values: Iterable[bytes], *, commit: bool) -> None:
        """Records in a transaction, which is committed or aborted."""
        from confluent_kafka import Producer

        producer = Producer({**self._options, "transactional.id": uuid.uuid4().hex})
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=0)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)

    def size(self, topic: str, partitions: int) -> int:
        """How many offsets a topic has: records, and the marks of transactions."""
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import OffsetSpec

        wanted = {TopicPartition(topic, n): OffsetSpec.latest() for n in range(partitions)}
        return sum(one.result(30).offset for one in self.admin.list_offsets(wanted).values())

    def records(self, topic: str, *, committed: bool = True) -> list[Any]:
        """All that readers see, up to the end."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                **self._options,
                "group.id": "reader",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        try:
            partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
            found, ended = [], set()
            while len(ended) < len(partitions):
                record = consumer.poll(30)
                assert record is not None
                if record.error() is None:
                    found.append(record)
                else:
                    assert record.error().name() == "_PARTITION_EOF", record.error()
                    ended.add(record.partition())
            return found
        finally:
            consumer.close()

    def values(self, topic: str, *, committed: bool = True) -> list[Any]:
        """The values of `records`."""
        return [record.value() for record in self.records(topic, committed=committed)]
