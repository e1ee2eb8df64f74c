"""One consumer of a process, and the partitions of a subtask that are read through it.

A consumer has threads and connections of its own, so the partitions share one. What it gives of a
partition waits here until that partition's reader asks for it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from statebackend.continuous.kafka.kafka_connection import KafkaConnection, Options, kafka_module
from statebackend.continuous.kafka.kafka_topics import TopicReader
from statebackend.errors import NotReplayableError, StateBackendError
from statebackend.threads import THREADS, Threads

__all__ = ["FetchedPartition", "PartitionFetcher"]

HELD_ROWS: Final = 65_536  # above so many that wait here, nothing more is taken
# With 100,000 records of a partition at hand, librdkafka asks for no more for a second by default,
# in which a subtask could have read several times as many.
_DEFAULTS: Final[Options] = {"fetch.queue.backoff.ms": 20}
_GONE: Final = frozenset(
    {
        *("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"),
        *("UNKNOWN_TOPIC_ID", "INCONSISTENT_TOPIC_ID"),
    }
)
_OUT_OF_RANGE: Final = frozenset({"OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET"})
# A savepoint would bring the same offsets along.
_WITHOUT: Final = (
    "To go on without what is gone, give the source another name=, with start= where it is to "
    "begin in all its topics, and start once with allow_dropped_state=True: the state stays."
)
_log = logging.getLogger("statebackend.kafka")


@dataclass
class FetchedPartition:
    """A partition that is read.

    Attributes:
        offset: of the record to go on with.
        waiting: records in their order, in pieces; a number: the partition's end so far.
        high: the end of the partition, as far as it is known.
    """

    topic: str
    topic_id: str
    partition: int
    offset: int
    waiting: deque[list[Any] | int] = field(default_factory=deque)
    rows: int = 0
    high: int = -1
    error: StateBackendError | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.topic}[{self.partition}]"

    def take(self, max_rows: int) -> list[Any]:
        """The next records, at most so many; moves the offset behind them."""
        found: list[Any] = []
        while self.waiting and len(found) < max_rows:
            first = self.waiting.popleft()
            if isinstance(first, int):
                self.offset = max(self.offset, first)  # past records that readers do not see
                continue
            room = max_rows - len(found)
            if len(first) > room:
                self.waiting.appendleft(first[room:])
            found += first[:room]
            self.offset = int(found[-1].offset()) + 1
        self.rows -= len(found)
        return found


class PartitionFetcher:
    """Reads partitions from given offsets on. Thread-safe: subtasks may be threads of a process."""

    def __init__(
        self,
        connection: KafkaConnection,
        group: str,
        isolation: str,
        threads: Threads = THREADS,
    ) -> None:
        self._kafka = kafka_module()
        self._lock = threads.lock()
        self._connection, self._group, self._isolation = connection, group, isolation
        self._watcher = connection.watcher()
        self._partitions: dict[tuple[str, int], FetchedPartition] = {}
        self._checked: set[tuple[str, str]] = set()
        self._consumer: Any = connection.client(
            self._kafka.Consumer,
            _DEFAULTS,
            group_id=group or "statebackend",
            isolation_level=isolation,
            enable_auto_commit=False,
            enable_auto_offset_store=False,
            auto_offset_reset="error",
            enable_partition_eof=True,
            error_cb=self._watcher,
        )

    def add(self, topic: str, topic_id: str, partition: int, offset: int) -> FetchedPartition:
        """Read a partition from an offset on.

        Raises:
            NotReplayableError: the topic is gone, or is another one of that name.
            ConnectorError: the cluster cannot be reached.
        """
        found = FetchedPartition(topic, topic_id, partition, offset)
        place = self._kafka.TopicPartition(topic, partition, offset)
        with self._lock:
            if (topic, topic_id) not in self._checked:
                self._check(topic, topic_id)
                self._checked.add((topic, topic_id))
            try:
                self._consumer.incremental_assign([place])
            except self._kafka.KafkaException as error:
                self._connection.failed(f"Reading {found.name}", error)
            self._partitions[topic, partition] = found
        return found

    def remove(self, partition: FetchedPartition) -> bool:
        """Read it no longer; whether none is left."""
        key = partition.topic, partition.partition
        with self._lock:
            if self._partitions.get(key) is partition:
                del self._partitions[key]
                self._consumer.incremental_unassign([self._kafka.TopicPartition(*key)])
            return not self._partitions

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def _check(self, topic: str, topic_id: str) -> None:
        reader = TopicReader(self._connection, self._group, self._isolation)
        try:
            check_topic(topic, topic_id, reader)
        finally:
            reader.close()

    def take(self, partition: FetchedPartition, max_rows: int) -> list[Any]:
        """The next records of a partition, at most so many. Does not wait for any.

        Raises:
            ConnectorError: the cluster does not let this user read.
            NotReplayableError: records are gone, or the topic is.
        """
        with self._lock:
            if not partition.waiting:
                self._fill(max_rows)
            found = partition.take(max_rows)
            if not found and partition.error is not None:
                raise partition.error
            return found

    def _fill(self, max_rows: int) -> None:
        """Take what has come, if not too much waits here already."""
        if sum(one.rows for one in self._partitions.values()) >= HELD_ROWS:
            return
        found = self._consumer.consume(max_rows, timeout=0)
        self._watcher.check("Reading")
        if not found:
            return
        if any(map(self._kafka.Message.error, found)):
            for one in found:
                error = one.error()
                self._failed(one, error) if error is not None else self._keep([one])
            return
        start = 0
        for end in [*self._borders(found), len(found)]:
            self._keep(found[start:end])
            start = end

    def _borders(self, records: list[Any]) -> list[int]:
        """Where records of another partition begin: they come by the hundred from one."""
        message = self._kafka.Message
        numbers = np.fromiter(map(message.partition, records), np.int32, len(records))
        changes = numbers[1:] != numbers[:-1]
        if len({topic for topic, _ in self._partitions}) > 1:
            topics = np.array(list(map(message.topic, records)))
            changes |= topics[1:] != topics[:-1]
        return [int(at) for at in np.flatnonzero(changes) + 1]

    def _keep(self, records: list[Any]) -> None:
        partition = self._partitions.get((records[0].topic(), records[0].partition()))
        if partition is not None:
            partition.waiting.append(records)
            partition.rows += len(records)

    def _failed(self, record: Any, error: Any) -> None:
        partition = self._partitions.get((record.topic(), record.partition()))
        name = error.name()
        if name == "_PARTITION_EOF":
            if partition is not None:
                partition.waiting.append(int(record.offset()))
                partition.high = int(record.offset())
            return
        if partition is None:
            of_topic = [o for o in self._partitions.values() if o.topic == record.topic()]
            for one in of_topic:
                one.error = one.error or self._error(one, name, error)
        else:
            partition.error = partition.error or self._error(partition, name, error)

    def _error(
        self, partition: FetchedPartition, name: str, error: Any
    ) -> StateBackendError | None:
        """What an error of librdkafka means; None: it passes by itself."""
        if name in _OUT_OF_RANGE:
            return NotReplayableError(
                f"Records from offset {partition.offset} on of {partition.name} of the Kafka "
                f"cluster {self._connection.servers} are gone: {error.str().rstrip('.')}.",
                todo="Keep records (retention.ms, retention.bytes) until every checkpoint that is "
                f"to be restored has read them. {_WITHOUT}",
            )
        try:
            if name in _GONE:  # or it is new, and this connection does not know it yet
                self._check(partition.topic, partition.topic_id)
                return None
            self._connection.failed(f"Reading {partition.name}", self._kafka.KafkaException(error))
        except StateBackendError as made:
            return made

    def lag(self, partition: FetchedPartition) -> int | None:
        """How many records behind the end of a partition its reader is; None: not known yet."""
        place = self._kafka.TopicPartition(partition.topic, partition.partition)
        with self._lock:
            _, high = self._consumer.get_watermark_offsets(place, cached=True)
        partition.high = max(partition.high, high)
        return max(0, partition.high - partition.offset) if partition.high >= 0 else None


def check_topic(topic: str, topic_id: str, reader: TopicReader) -> None:
    """Refuse to go on with a topic that is gone, or was made anew.

    Raises:
        NotReplayableError: saying which. ConnectorError: the cluster does not say.
    """
    found = reader.topics([topic]).get(topic)
    if found is None:
        raise gone(topic, reader.servers)
    if found.id != topic_id:
        raise made_anew(topic, reader.servers)


def gone(topic: str, servers: str) -> NotReplayableError:
    """The error for a topic that is not there any more."""
    return NotReplayableError(
        f"The topic {topic!r} of the Kafka cluster {servers} is gone, and the job reads it.",
        todo=_WITHOUT,
    )


def made_anew(topic: str, servers: str) -> NotReplayableError:
    """The error for another topic of the same name."""
    return NotReplayableError(
        f"The topic {topic!r} of the Kafka cluster {servers} was deleted and made anew: it is not "
        "the one that the job has read.",
        todo=_WITHOUT,
    )
