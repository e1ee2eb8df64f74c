"""Records into a producer of librdkafka: many at a time, in order, and no error unheard."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from statebackend.continuous.kafka.kafka_connection import KafkaConnection, kafka_module
from statebackend.system import SYSTEM, System

__all__ = ["RecordProducer"]

# In librdkafka, which sends them; by default it takes 1 GiB, and nothing above that.
QUEUED_ROWS: Final = 200_000
QUEUED_BYTES: Final = 128 << 20
_CHUNK_ROWS: Final = 10_000
_CHUNK_BYTES: Final = 8 << 20
_WAIT_S: Final = 0.05
_PURGED: Final = ("_PURGE_QUEUE", "_PURGE_INFLIGHT")  # thrown away with an aborted transaction


class RecordProducer:
    """A producer, and what became of its records.

    Args:
        connection: to the cluster. what: for errors.
        own: settings of librdkafka, with ``_`` for ``.``.
    """

    def __init__(
        self, connection: KafkaConnection, what: str, system: System = SYSTEM, **own: Any
    ) -> None:
        self._kafka = kafka_module()
        self._connection, self._what, self._system = connection, what, system
        self._watcher = connection.watcher()
        self._failed: Any = None
        defaults = {"partitioner": "murmur2_random"}  # a key goes where Java's clients put it
        with_defaults = KafkaConnection(
            connection.servers, {**defaults, **connection.options}, connection.secrets
        )
        self.client: Any = with_defaults.client(
            self._kafka.Producer,
            enable_idempotence=True,
            delivery_report_only_error=True,
            queue_buffering_max_messages=2 * QUEUED_ROWS,
            error_cb=self._watcher,
            **own,
        )

    def send(self, topic: str, records: pa.RecordBatch, partition: int = -1) -> None:
        """Hand over records, in their order; waits for room, not for the cluster.

        Args:
            partition: for all of them; -1: by their keys.

        Raises:
            ConnectorError: earlier ones could not be written.
        """
        row_bytes = records.nbytes // max(1, records.num_rows) + 1
        chunk_rows = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes))
        for start in range(0, records.num_rows, chunk_rows):
            piece = records.slice(start, chunk_rows)
            keys, values = (column.to_pylist() for column in piece.columns)
            messages = [
                {"value": value, "key": key} for key, value in zip(keys, values, strict=True)
            ]
            self._make_room(min(QUEUED_ROWS, QUEUED_BYTES // row_bytes))
            queued = self.client.produce_batch(
                topic, messages, partition, on_delivery=self._delivered
            )
            if queued != len(messages):  # such as a record that is too large
                errors = (one["_error"] for one in messages if "_error" in one)
                self._failed = self._failed or next(errors, None)
            self.check()

    def _make_room(self, queued_rows: int) -> None:
        self.client.poll(0)
        while len(self.client) > queued_rows:
            self.check()
            self.client.poll(_WAIT_S)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None and error.name() not in _PURGED:
            self._failed = self._failed or error

    def check(self) -> None:
        """Raises `ConnectorError` for records that could not be written."""
        self._watcher.check(self._what)
        if self._failed is not None:
            self._connection.failed(self._what, self._kafka.KafkaException(self._failed))

    def flush(self) -> None:
        """Wait until the cluster has all of them; librdkafka gives each up after some minutes.

        Raises:
            ConnectorError: some could not be written.
        """
        while self.client.flush(1.0):
            self.check()
        self.check()

    def close(self) -> None:
        """Throw away what was not sent, and disconnect.

        A transaction that is open stays so: `Producer.close` would talk to the cluster first.
        """
        client, self.client = self.client, None
        if client is not None:
            client.purge()
