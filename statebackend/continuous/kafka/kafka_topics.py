"""What a cluster says about topics: their ids, their partitions, and offsets to begin at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from statebackend.continuous.kafka.kafka_connection import (
    CALL_S,
    KafkaConnection,
    is_unknown_topic,
    kafka_module,
    retry_while_unknown,
)
from statebackend.errors import SettingError
from statebackend.system import SYSTEM, System

__all__ = ["Start", "Topic", "TopicReader", "check_start"]

Start = str | datetime
_COMMITTED: Final = "committed"


class Topic(msgspec.Struct, frozen=True):
    """A topic.

    Attributes:
        id: its own for ever: a topic that is made anew under the same name has another.
        partitions: how many.
    """

    id: str
    partitions: int


class TopicReader:
    """Asks a cluster, on the driver. Close it.

    Args:
        group: of consumers, whose committed offsets are asked for; "": none.
        isolation: ``read_committed`` or ``read_uncommitted``: where a partition ends.
    """

    def __init__(
        self, connection: KafkaConnection, group: str, isolation: str, system: System = SYSTEM
    ) -> None:
        kafka = kafka_module()
        from confluent_kafka.admin import AdminClient

        self._connection, self._kafka, self._system = connection, kafka, system
        self.servers = connection.servers
        self._watcher = connection.watcher()
        self._admin: Any = connection.client(AdminClient, error_cb=self._watcher)
        self._consumer: Any = connection.client(
            kafka.Consumer,
            group_id=group or "statebackend",
            isolation_level=isolation,
            enable_auto_commit=False,
            error_cb=self._watcher,
        )

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def names(self) -> list[str]:
        """Of all topics that are not Kafka's own.

        Raises:
            ConnectorError: the cluster does not say.
        """
        try:
            found = self._admin.list_topics(timeout=CALL_S).topics
        except self._kafka.KafkaException as error:
            self._failed("Listing the topics", error)
        return sorted(name for name in found if not name.startswith("__"))

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Those that there are. It takes 10 s to find out that one is not there.

        Raises:
            ConnectorError: the cluster does not say.
        """
        wanted, found = set(names), dict[str, Topic]()

        def ask() -> None:
            missing = sorted(wanted - found.keys())
            asked = self._admin.describe_topics(
                self._kafka.TopicCollection(missing), request_timeout=CALL_S
            )
            errors = []
            for name, answer in asked.items():
                try:
                    said = answer.result()
                except self._kafka.KafkaException as error:
                    errors.append(error)
                else:
                    found[name] = Topic(str(said.topic_id), len(said.partitions))
            if errors:
                raise min(errors, key=is_unknown_topic)

        try:
            if wanted:
                retry_while_unknown(ask, self._system)
        except self._kafka.KafkaException as error:
            if not is_unknown_topic(error):
                self._failed(f"Describing topics {', '.join(sorted(wanted))}", error)
        return found

    def _failed(self, what: str, error: BaseException) -> Any:
        self._admin.poll(0)  # why the cluster did not answer, such as a wrong password
        self._consumer.poll(0)
        self._watcher.check(what)
        self._connection.failed(what, error)

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The offsets of a partition's first record and behind its last one.

        Raises:
            ConnectorError: the cluster does not say.
        """
        place = self._kafka.TopicPartition(topic, partition)
        try:
            low, high = self._consumer.get_watermark_offsets(place, timeout=CALL_S)
        except self._kafka.KafkaException as error:
            self._failed(f"Asking for the offsets of {topic}[{partition}]", error)
        return int(low), int(high)

    def first(self, topic: str, partitions: int, start: Start) -> dict[int, int]:
        """Where a job that has read nothing begins, by partition.

        A group that has committed nothing begins at the earliest record.

        Raises:
            ConnectorError: the cluster does not say.
        """
        bounds = {number: self.bounds(topic, number) for number in range(partitions)}
        if start == "earliest":
            return {number: low for number, (low, _) in bounds.items()}
        if start == "latest":
            return {number: high for number, (_, high) in bounds.items()}
        found = self._looked_up(topic, partitions, start)
        instead = 0 if start == _COMMITTED else 1
        return {
            number: found[number] if found[number] >= 0 else bounds[number][instead]
            for number in range(partitions)
        }

    def _looked_up(self, topic: str, partitions: int, start: Start) -> Mapping[int, int]:
        """By a time or a group; below 0: there is none."""
        place, kafka = self._kafka.TopicPartition, self._kafka
        try:
            if isinstance(start, datetime):
                at_ms = round(start.timestamp() * 1000)
                asked = [place(topic, number, at_ms) for number in range(partitions)]
                found = self._consumer.offsets_for_times(asked, timeout=CALL_S)
            else:
                asked = [place(topic, number) for number in range(partitions)]
                found = self._consumer.committed(asked, timeout=CALL_S)
        except kafka.KafkaException as error:
            self._failed(f"Asking where to begin in {topic!r}", error)
        for one in found:
            if one.error is not None:
                self._failed(f"Asking where to begin in {topic!r}", kafka.KafkaException(one.error))
        return {one.partition: one.offset for one in found}


def check_start(start: Start, group: str) -> None:
    """Refuse what is no place to begin.

    Raises:
        SettingError: saying what there is.
    """
    if isinstance(start, datetime) and start.tzinfo is not None:
        return
    if start == _COMMITTED and not group:
        raise SettingError('start="committed" needs group_id=.', todo="Name the group.")
    if start not in ("earliest", "latest", _COMMITTED):
        raise SettingError(
            f"No source starts at {start!r}.",
            todo='Give "earliest", "latest", "committed" with group_id=, or a datetime with a time '
            "zone.",
        )
