"""A topic of Kafka as a sink: exactly once by transactions, or at once and at least once.

At least once: records go to the cluster as they come, and a checkpoint is acked when the cluster
has all those before its barrier. Nobody stands still for that. At the barrier the writer sets a
*mark*, and the subtask goes on with the rows behind it. The thread that makes the state durable
then waits until each record before the mark has its delivery report, without an error. So a
checkpoint never completes before its output is delivered, and a restore repeats whatever is not.

Exactly once: a transaction that is open cannot be handed from one process to another, so none is
open while a checkpoint is made. What rows there are is encoded in the subtasks, and at the barrier
it becomes a part of the checkpoint itself. When the checkpoint is complete the driver writes it
into the topic, in a transaction (see `kafka_commits`). So it does with a batch of a streaming query
(see ``once``), which is written whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.continuous.kafka.kafka_connection import KafkaConnection, Options, Secrets
from statebackend.continuous.kafka.kafka_producing import Mark, RecordProducer
from statebackend.continuous.kafka.kafka_rows import RowEncoder, as_names
from statebackend.continuous.kafka.kafka_values import AvroValue
from statebackend.continuous.sinks.kafka_commits import (
    Commits,
    KafkaCommitter,
    Piece,
    encode_piece,
    names_of,
)
from statebackend.continuous.sinks.sink import (
    BatchCommitter,
    BatchSink,
    Committer,
    SinkContext,
    SinkWriter,
)
from statebackend.errors import SettingError

__all__ = ["KafkaSink"]

PIECE_BYTES: Final = 1 << 20


class KafkaSink(BatchSink):
    """Writes a record into a topic for each row; needs the extra ``kafka``.

    Exactly once by default, for readers with ``isolation.level=read_committed``: records appear
    when their checkpoint is complete. Until then they are in the checkpoint, and they pass through
    the driver.

    With ``exactly_once=False`` they appear at once, and after a failure those since the last
    checkpoint come again.
    """

    def __init__(
        self,
        topic: str,
        *,
        bootstrap_servers: str,
        value: str | AvroValue = "json",
        key: str | Sequence[str] | None = None,
        exactly_once: bool = True,
        transactional_id: str = "",
        commits_topic: str = "",
        options: Options | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """Name the topic, which must be there; nothing is opened.

        Args:
            topic: to write to.
            bootstrap_servers: ``host:port`` of some brokers, separated by commas.
            value: ``"json"``: an object of all columns; ``"raw"``: the column ``value``, a string
                or binary; or an `AvroValue`.
            key: the column that is the record's key: a string or binary as it is, other types as
                JSON. Several columns: a JSON object. None: no key.
            exactly_once: by transactions; False: at least once, without waiting for a checkpoint.
            transactional_id: the sink's own in the cluster; by default from the job's name and the
                sink's uid, or from the query's id and the topic. Two jobs with one id end each
                other's transactions.
            commits_topic: a compacted topic of the sink's own, in which it notes what is
                committed; made if it is not there. By default named after ``transactional_id``.
            options: of librdkafka, by its names, such as ``compression.type``. No secrets.
            secrets: a function that gives the options that are secret, such as ``sasl.password``,
                in each process that connects.

        Raises:
            SettingError: a form or option that is none, or an option that is secret.
        """
        if not topic:
            raise SettingError("The Kafka sink has no topic.", todo="Name one.")
        self._topic = topic
        self._encoder = RowEncoder(value, as_names(key))
        self._exactly_once = exactly_once
        self._names = transactional_id, commits_topic
        self._connection = KafkaConnection(bootstrap_servers, dict(options or {}), secrets)

    def __repr__(self) -> str:
        return f"KafkaSink({self._connection.servers}, {self._topic})"

    def __getstate__(self) -> dict[str, Any]:
        """For the subtasks, which connect only if they write at once."""
        if not self._exactly_once:
            return self.__dict__
        plain = KafkaConnection(self._connection.servers, self._connection.options)
        return {**self.__dict__, "_connection": plain}

    def check(self, schema: T.StructType) -> None:
        """Refuse columns that the value or the key has no form for."""
        self._encoder.check(schema)

    def open(self, context: SinkContext) -> SinkWriter:
        """A writer: of pieces for the checkpoint, or into the topic."""
        if self._exactly_once:
            return _PieceWriter(self._topic, self._encoder, context)
        return _DirectWriter(self._topic, self._encoder, self._connection)

    def committer(self, job: str, uid: str) -> Committer:
        """Writes what a checkpoint holds into the topic, in a transaction."""
        id, topic = names_of(job, uid, *self._names)
        # One that writes at once still commits what was prepared before it was changed to that.
        return KafkaCommitter(Commits(self._connection, id, topic), eager=self._exactly_once)

    def batch_committer(self, query_id: str, part: str) -> BatchCommitter:
        """Writes a batch into the topic, in one transaction.

        Raises:
            SettingError: the sink has no transactions.
        """
        if not self._exactly_once:
            raise SettingError(
                "once() was given a KafkaSink(exactly_once=False).",
                todo='Leave exactly_once= out, or write with Spark\'s format("kafka").',
            )
        id, topic = names_of(query_id, f"{self._topic} {part}".strip(), *self._names)
        return KafkaCommitter(Commits(self._connection, id, topic), eager=True, target=self._topic)


class _PieceWriter(SinkWriter):
    """Keeps records until the checkpoint takes them, compressed."""

    def __init__(self, topic: str, encoder: RowEncoder, context: SinkContext) -> None:
        self._topic, self._encoder, self._context = topic, encoder, context
        self._records: list[pa.RecordBatch] = []
        self._bytes = 0
        self._ready: list[bytes] = []
        self._number = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        records = self._encoder.records(batch)
        self._records.append(records)
        self._bytes += records.nbytes
        if self._bytes >= PIECE_BYTES:
            self._pack()

    def _pack(self) -> None:
        of = self._context
        piece = Piece(
            run=of.run,
            subtask=of.subtask,
            number=self._number,
            topic=self._topic,
            size_bytes=self._bytes,
            records=encode_piece(self._records),
        )
        self._ready.append(msgspec.msgpack.encode(piece))
        self._number += 1
        self._records, self._bytes = [], 0

    def prepare(self, checkpoint: int) -> list[bytes]:
        if self._records:
            self._pack()
        ready, self._ready = self._ready, []
        return ready

    def abort(self) -> None:
        self._records, self._bytes, self._ready = [], 0, []


class _DirectWriter(SinkWriter):
    """Into the topic at once; a checkpoint waits until the cluster has them, and rows do not."""

    def __init__(self, topic: str, encoder: RowEncoder, connection: KafkaConnection) -> None:
        self._topic, self._encoder = topic, encoder
        self._producer = RecordProducer(connection, f"Writing to {topic!r}")
        self._marks: dict[int, Mark] = {}  # by checkpoint, until nobody has to wait for it
        self._closed = False

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._producer.send(self._topic, self._encoder.records(batch))

    def prepare(self, checkpoint: int) -> list[bytes]:
        self._producer.check()
        self._marks[checkpoint] = self._producer.mark()
        return []

    def await_prepared(self, checkpoint: int) -> None:
        # Several checkpoints may be waited for at once: whoever comes last finds no mark any more.
        for number, mark in sorted(self._marks.copy().items()):
            if number <= checkpoint:
                self._producer.await_delivered(mark)
                self._marks.pop(number, None)

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._producer.close()
