"""Topics of Kafka as a source: partitions as splits, offsets as positions.

A position is the offset of the next record. A partition that has lost records behind a position,
and a topic that is gone or was made anew, are noticed (`NotReplayableError`), not read over.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.continuous.kafka.kafka_connection import (
    KafkaConnection,
    Options,
    Secrets,
    is_passing,
    kafka_module,
)
from statebackend.continuous.kafka.kafka_fetch import (
    FetchedPartition,
    PartitionFetcher,
    gone,
    made_anew,
)
from statebackend.continuous.kafka.kafka_topics import Start, Topic, TopicReader, check_start
from statebackend.continuous.kafka.kafka_values import UNREADABLE, ValueFormat, as_format
from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.errors import ConnectorError, DamagedInputError, SettingError, ValueMismatchError
from statebackend.schema.types import arrow_schema
from statebackend.spark_forms import Duration
from statebackend.threads import THREADS

__all__ = ["KafkaSource"]

_COLUMNS: Final[dict[str, T.DataType]] = {
    "key": T.BinaryType(),
    "topic": T.StringType(),
    "partition": T.IntegerType(),
    "offset": T.LongType(),
    "timestamp": T.TimestampType(),
}
_OPENED: Final = ("_fetcher", "_lock")
_log = logging.getLogger("statebackend.kafka")


class _Known(msgspec.Struct, frozen=True):
    """What was found so far: topics by name."""

    topics: dict[str, Topic]


class KafkaSource(Source):
    """Reads topics of Kafka, each partition in its order; needs the extra ``kafka``.

    New partitions of a topic, and new topics that match a pattern, are read from their first record
    on.

    Records must be kept until every checkpoint that is to be restored has read them.
    """

    splits_end = False

    def __init__(
        self,
        topics: str | Sequence[str] | re.Pattern[str],
        *,
        bootstrap_servers: str,
        value: str | ValueFormat = "raw",
        include: Sequence[str] = (),
        start: Start = "earliest",
        group_id: str = "",
        read_uncommitted: bool = False,
        bounded: bool = False,
        event_time: str | None = None,
        watermark_delay: str | timedelta = "0 seconds",
        idle_after_s: Duration | None = None,
        options: Options | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """Name the topics; nothing is opened.

        Args:
            topics: one, several, or a compiled pattern that a topic's whole name must match.
            bootstrap_servers: ``host:port`` of some brokers, separated by commas.
            value: how values become columns: ``"raw"`` and ``"text"`` give one column ``value``;
                ``"json: user string, ms bigint"`` names fields of JSON objects; ``"avro: {...}"``
                holds an Avro schema; or an `AvroValue` or a `ProtobufValue`.
            include: of the record: ``key``, ``topic``, ``partition``, ``offset``, ``timestamp``.
            start: where a job without a checkpoint begins: ``"earliest"``, ``"latest"``, a datetime
                with a time zone, or ``"committed"``: at what ``group_id`` has committed, or at a
                partition's earliest record.
            group_id: see ``start``. The job commits nothing there.
            read_uncommitted: also read records of transactions that are open or were aborted.
            bounded: end with the last record that is there at the first start of the job.
            event_time: the column that says when a row happened; None: there is no watermark.
            watermark_delay: how late rows may come: "10 seconds", or a timedelta.
            idle_after_s: a partition without rows for so long no longer holds the watermark back.
            options: of librdkafka, by its names, such as ``security.protocol``. No secrets.
            secrets: gives those that are secret, such as ``sasl.password``, in each process.

        Raises:
            SettingError: a topic, start, form or option that is none, or an option that is secret.
            SchemaError, UnsupportedTypeError: a schema that is none, or a type without columns.
        """
        self._format = as_format(value)
        self._include = _included(include, self._format.schema)
        super().__init__(
            T.StructType([*self._format.schema, *self._include]),
            bounded=bounded,
            event_time=event_time,
            watermark_delay=watermark_delay,
            idle_after_s=idle_after_s,
        )
        self._arrow = arrow_schema(self.schema)
        check_start(start, group_id)
        self._pattern = topics if isinstance(topics, re.Pattern) else None
        self._topics = _named(topics)
        self._connection = KafkaConnection(bootstrap_servers, dict(options or {}), secrets)
        self._start, self._group = start, group_id
        self._isolation = "read_uncommitted" if read_uncommitted else "read_committed"
        self._fetcher: PartitionFetcher | None = None
        self._lock = THREADS.lock()

    def __repr__(self) -> str:
        what = self._pattern.pattern if self._pattern else ", ".join(self._topics)
        return f"KafkaSource({self._connection.servers}, {what})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OPENED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _fetcher=None, _lock=THREADS.lock())

    # --- on the driver -------------------------------------------------------------------------

    def discover(self, state: Json | None) -> Discovery:
        """New topics and partitions; where they begin, and end if the source is bounded.

        A job that runs waits for brokers that are down: then it finds nothing new.

        Raises:
            ConnectorError: the cluster does not say, or cannot be reached by a job that begins.
            SettingError: a topic that the user named is not there at the first start.
            NotReplayableError: a topic that the job has read is gone, or was made anew.
        """
        try:
            return self._discovered(state)
        except ConnectorError as error:
            if state is None or not is_passing(error):
                raise
            _log.warning("new partitions of %r are not looked for: %s", self, error)
            return Discovery((), state, done=False)

    def _discovered(self, state: Json | None) -> Discovery:
        known = msgspec.convert(state, _Known).topics if state is not None else {}
        reader = TopicReader(self._connection, self._group, self._isolation)
        try:
            found = reader.topics(self._wanted(reader, known))
            self._check(known, found)
            splits: list[Split] = []
            for name, topic in sorted(found.items()):
                splits += self._splits(reader, name, topic, known.get(name), state is None)
        finally:
            reader.close()
        new_state = msgspec.to_builtins(_Known({**known, **found}))
        return Discovery(tuple(splits), new_state, done=self.bounded)

    def _wanted(self, reader: TopicReader, known: Iterable[str]) -> list[str]:
        if self._pattern is None:
            return [*{*self._topics, *known}]
        matching = (name for name in reader.names() if self._pattern.fullmatch(name))
        return [*{*matching, *known}]

    def _check(self, known: dict[str, Topic], found: dict[str, Topic]) -> None:
        servers = self._connection.servers
        for name, topic in known.items():
            if name not in found:
                raise gone(name, servers)
            if found[name].id != topic.id:
                raise made_anew(name, servers)
        missing = [name for name in self._topics if name not in found]
        if missing:
            raise SettingError(
                f"The Kafka cluster {servers} has no topic {missing[0]!r}.",
                todo="Make it first, or name another one.",
            )

    def _splits(
        self, reader: TopicReader, name: str, topic: Topic, before: Topic | None, first_look: bool
    ) -> list[Split]:
        if before is not None:  # partitions that were added begin with their very first record
            new = range(before.partitions, topic.partitions)
            first = dict.fromkeys(new, 0)
        else:
            new = range(topic.partitions)
            start = self._start if first_look else "earliest"
            first = reader.first(name, topic.partitions, start)
            if not first_look and any(first.values()):
                _log.warning("topic %r was found late: its first records are gone already", name)
        ends = {n: reader.bounds(name, n)[1] for n in new} if self.bounded else {}
        return [
            Split(
                id=f"{name}/{number}",
                data={
                    "topic": name,
                    "topic_id": topic.id,
                    "partition": number,
                    "first": first[number],
                    "end": ends.get(number),
                },
            )
            for number in new
        ]

    # --- in a subtask --------------------------------------------------------------------------

    def open(self, split: Split, position: Json | None) -> SplitReader:
        """Read a partition; all those of a process share a connection.

        Raises:
            ConnectorError: the cluster cannot be reached.
            NotReplayableError: the topic is gone, or was made anew.
        """
        data = split.data
        offset = data["first"] if position is None else position["offset"]
        with self._lock:
            if self._fetcher is None:
                self._fetcher = PartitionFetcher(self._connection, self._group, self._isolation)
            fetcher = self._fetcher
            place = data["topic"], data["topic_id"], data["partition"]
            return _Reader(self, fetcher, fetcher.add(*place, offset), data["end"])

    def batch(self, records: Sequence[Any], name: str) -> pa.RecordBatch:
        """The rows of some records of a partition.

        Raises:
            DamagedInputError: naming the first record that does not read.
        """
        message = kafka_module().Message
        values = list(map(message.value, records))
        try:
            columns = self._format.columns(values)
        except UNREADABLE as error:
            raise self._damaged(records, values, name, error) from error
        for field in self._include:
            columns.append(_COLUMN_OF[field.name](message, records))
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def _damaged(
        self, records: Sequence[Any], values: Sequence[bytes | None], name: str, error: Exception
    ) -> DamagedInputError:
        at, why = records[0], error
        for record, value in zip(records, values, strict=True):
            try:
                self._format.columns([value])
            except UNREADABLE as found:
                at, why = record, found
                break
        said = why.what if isinstance(why, ValueMismatchError) else str(why)
        return DamagedInputError(
            f"The value of the record at offset {at.offset()} of {name} of the Kafka cluster "
            f"{self._connection.servers} cannot be read: {said.rstrip('.')}.",
            todo='Read the values with value="raw", and take them apart in the processor.',
        )

    def let_go(self, partition: FetchedPartition) -> None:
        """A partition is read no longer."""
        with self._lock:
            if self._fetcher is not None and self._fetcher.remove(partition):
                self._fetcher.close()
                self._fetcher = None


class _Reader(SplitReader):
    def __init__(
        self,
        source: KafkaSource,
        fetcher: PartitionFetcher,
        partition: FetchedPartition,
        end: int | None,
    ) -> None:
        self._source, self._fetcher, self._partition = source, fetcher, partition
        self._end = end
        self._closed = False

    @property
    def position(self) -> Json:
        return {"offset": self._partition.offset}

    @property
    def ended(self) -> bool:
        return self._end is not None and self._partition.offset >= self._end

    @property
    def lag(self) -> int | None:
        return self._fetcher.lag(self._partition)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if self.ended:
            return None
        records = self._fetcher.take(self._partition, max_rows)
        if self._end is not None and records and records[-1].offset() >= self._end:
            records = [one for one in records if one.offset() < self._end]
        return self._source.batch(records, self._partition.name) if records else None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._source.let_go(self._partition)


def _named(topics: str | Sequence[str] | re.Pattern[str]) -> tuple[str, ...]:
    if isinstance(topics, re.Pattern):
        return ()
    found = (topics,) if isinstance(topics, str) else tuple(topics)
    if not found or len(set(found)) < len(found) or not all(found):
        raise SettingError(
            f"No source reads the topics {list(found)!r}.",
            todo="Name each topic once, or give a pattern: re.compile(...).",
        )
    return found


def _included(names: Sequence[str], schema: T.StructType) -> list[T.StructField]:
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or isinstance(names, str) or len(set(names)) < len(names):
        raise SettingError(
            f"include={names!r} names no columns of a record.",
            todo=f"Give some of {', '.join(_COLUMNS)}, each once.",
        )
    taken = [name for name in names if name in schema.names]
    if taken:
        raise SettingError(
            f"The value has a column {taken[0]!r} already.",
            todo="Leave it out of include=, or read the value raw.",
        )
    return [T.StructField(name, _COLUMNS[name]) for name in names]


def _timestamps(message: Any, records: Sequence[Any]) -> pa.Array:
    ms = [at if kind else None for kind, at in map(message.timestamp, records)]
    return pa.array(ms, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))


_COLUMN_OF: Final[dict[str, Callable[[Any, Sequence[Any]], pa.Array]]] = {
    "key": lambda message, records: pa.array(map(message.key, records), pa.binary()),
    "topic": lambda message, records: pa.array(map(message.topic, records), pa.string()),
    "partition": lambda message, records: pa.array(map(message.partition, records), pa.int32()),
    "offset": lambda message, records: pa.array(map(message.offset, records), pa.int64()),
    "timestamp": _timestamps,
}
