"""A sink's topic of markers: what of its output is committed, for ever.

It is compacted, and of its partitions the first one is used. The record of key ``sink`` says under
which transactional id the sink writes; the record of a run says, for each of its subtasks, the
number of the last piece that is committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

import msgspec
import pyarrow as pa

from statebackend.continuous.kafka.kafka_connection import (
    CALL_S,
    KafkaConnection,
    is_unknown_topic,
    kafka_module,
    retry_while_unknown,
)
from statebackend.continuous.kafka.kafka_rows import RECORD
from statebackend.errors import (
    ConnectorError,
    CorruptionError,
    SettingError,
    UnsupportedFormatError,
)
from statebackend.system import SYSTEM, System

__all__ = ["PARTITION", "MarkerTopic", "Marks"]

FORMAT_VERSION: Final = 1
PARTITION: Final = 0
_SINK: Final = "sink"
# Small segments: only those that are full are compacted, and a start reads what is left.
_CONFIG: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(4 << 20),
    "min.cleanable.dirty.ratio": "0.1",
}


class _Head(msgspec.Struct, frozen=True):
    v: int


class _Begun(msgspec.Struct, frozen=True, kw_only=True):
    v: int
    transactional_id: str


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    v: int
    last: dict[str, int]


class Marks:
    """What markers say.

    Attributes:
        id: the transactional id; "": the sink has not begun.
    """

    def __init__(self, id: str = "", last: dict[str, dict[int, int]] | None = None) -> None:
        self.id = id
        self._last = last if last is not None else {}

    def has(self, run: str, subtask: int, number: int) -> bool:
        """Whether a piece is committed."""
        return number <= self.newest(run, subtask)

    def newest(self, run: str, subtask: int) -> int:
        """The last piece that is committed; -1: none."""
        return self._last.get(run, {}).get(subtask, -1)

    def after(self, pieces: Iterable[tuple[str, int, int]]) -> Marks:
        """As it is when these pieces are committed too."""
        last = {run: dict(numbers) for run, numbers in self._last.items()}
        for run, subtask, number in pieces:
            of_run = last.setdefault(run, {})
            of_run[subtask] = max(number, of_run.get(subtask, -1))
        return Marks(self.id, last)

    def take(self, key: bytes | None, value: bytes | None) -> None:
        """Take in a record of the topic; a later one of its key replaces it.

        Raises:
            CorruptionError: it is none of a sink's. UnsupportedFormatError: of another release's.
        """
        if key is None or value is None:
            return
        try:
            _check_format(msgspec.json.decode(value, type=_Head).v)
            if key.decode() == _SINK:
                self.id = msgspec.json.decode(value, type=_Begun).transactional_id
            else:
                found = msgspec.json.decode(value, type=_Run)
                self._last[key.decode()] = {int(n): last for n, last in found.last.items()}
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptionError(
                f"The record {key!r} in a sink's topic of commits is none of the sink's: {error}.",
                todo="Have nobody else write to the topic; see its records.",
            ) from error

    def begun_record(self) -> pa.RecordBatch:
        """That says under which id the sink writes."""
        return _record(_SINK, _Begun(v=FORMAT_VERSION, transactional_id=self.id))

    def record(self, run: str) -> pa.RecordBatch:
        """Of a run."""
        last = {str(subtask): number for subtask, number in sorted(self._last[run].items())}
        return _record(run, _Run(v=FORMAT_VERSION, last=last))


def _check_format(found: int) -> None:
    if found != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"A record in a sink's topic of commits has format {found}.",
            todo=f"This release reads format {FORMAT_VERSION}: use the one that wrote it.",
        )


def _record(key: str, value: msgspec.Struct) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"key": key.encode(), "value": msgspec.json.encode(value)}], schema=RECORD
    )


class MarkerTopic:
    """The topic, as a driver makes and reads it."""

    def __init__(self, connection: KafkaConnection, name: str, system: System = SYSTEM) -> None:
        self._connection, self.name, self._system = connection, name, system

    def make(self) -> bool:
        """Make it if it is not there; whether it was.

        Raises:
            ConnectorError: it cannot be made. SettingError: it is not compacted.
        """
        kafka, admins = kafka_module(), import_module("confluent_kafka.admin")
        admin = self._connection.client(admins.AdminClient)
        if not self._is_there(admin):  # who may not make topics may use one that is there
            topic = admins.NewTopic(self.name, num_partitions=1, config=dict(_CONFIG))
            (made,) = admin.create_topics([topic], request_timeout=CALL_S).values()
            try:
                made.result()
            except kafka.KafkaException as error:
                if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                    self._connection.failed(f"Making the topic {self.name!r}", error)
            else:
                return False
        self._check(admin)
        return True

    def _is_there(self, admin: Any) -> bool:
        kafka = kafka_module()
        try:
            wanted = kafka.TopicCollection([self.name])
            (asked,) = admin.describe_topics(wanted, request_timeout=CALL_S).values()
            asked.result()
        except kafka.KafkaException as error:
            if is_unknown_topic(error):
                return False
            self._connection.failed(f"Looking for the topic {self.name!r}", error)
        return True

    def _check(self, admin: Any) -> None:
        policy = self._policy(admin)
        if policy != "compact":
            raise SettingError(
                f"The topic {self.name!r} has cleanup.policy={policy}: it would forget what the "
                "sink has committed.",
                todo="Set its cleanup.policy to compact, or name another commits_topic=.",
            )

    def _policy(self, admin: Any) -> str:
        kafka, admins = kafka_module(), import_module("confluent_kafka.admin")
        resource = admins.ConfigResource(admins.ResourceType.TOPIC, self.name)

        def ask() -> str:
            (asked,) = admin.describe_configs([resource], request_timeout=CALL_S).values()
            return str(asked.result()["cleanup.policy"].value)

        try:
            return retry_while_unknown(ask, self._system)
        except kafka.KafkaException as error:
            self._connection.failed(f"Asking how the topic {self.name!r} is kept", error)

    def read(self) -> Marks:
        """All that is committed.

        Raises:
            ConnectorError: it cannot be read, or another transaction in it does not end.
        """
        kafka = kafka_module()
        marks, place = Marks(), kafka.TopicPartition(self.name, PARTITION, 0)
        own: dict[str, Any] = {"group_id": "statebackend", "enable_auto_commit": False}
        seen = self._connection.client(kafka.Consumer, isolation_level="read_uncommitted", **own)
        consumer = self._connection.client(
            kafka.Consumer,
            isolation_level="read_committed",
            enable_partition_eof=True,
            auto_offset_reset="earliest",
            fetch_wait_max_ms=10,  # at the end, where nothing more comes
            **own,
        )
        until_s = self._system.monotonic_s() + 2 * CALL_S
        try:
            _, end = seen.get_watermark_offsets(place, timeout=CALL_S)
            consumer.assign([place])
            at = 0
            while at < end:
                record = consumer.poll(1.0)
                if self._system.monotonic_s() > until_s:
                    raise ConnectorError(
                        f"The topic {self.name!r} of the Kafka cluster {self._connection.servers} "
                        f"could be read to offset {at} of {end} only: a transaction in it is open.",
                        todo="Wait until it ends (transaction.timeout.ms); let nobody else write "
                        "there.",
                    )
                if record is None:
                    continue
                error = record.error()
                if error is None:
                    marks.take(record.key(), record.value())
                    at = int(record.offset()) + 1
                elif error.name() == "_PARTITION_EOF":
                    at = int(record.offset())
                elif not error.retriable():
                    raise kafka.KafkaException(error)
        except kafka.KafkaException as error:
            self._connection.failed(f"Reading the topic {self.name!r}", error)
        finally:
            consumer.close()
            seen.close()
        return marks
