"""Records into a producer of librdkafka: many at a time, in order, and no error unheard."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from statebackend.continuous.kafka.kafka_connection import KafkaConnection, Options, kafka_module
from statebackend.errors import ConnectorError
from statebackend.system import SYSTEM, System

__all__ = ["Mark", "RecordProducer"]

# In librdkafka, which sends them; by default it takes 1 GiB, and nothing above that.
QUEUED_ROWS: Final = 200_000
QUEUED_BYTES: Final = 128 << 20
_CHUNK_ROWS: Final = 10_000
_CHUNK_BYTES: Final = 8 << 20
_WAIT_S: Final = 0.05
_LOOK_S: Final = 0.01  # between two looks whether records are delivered
# A key goes where Java's clients put it. What is sent together is handed over together.
_DEFAULTS: Final[Options] = {"partitioner": "murmur2_random", "linger.ms": 1}
_PURGED: Final = ("_PURGE_QUEUE", "_PURGE_INFLIGHT")


class _Unreported:
    """Called with each record that failed; lives as long as one of its records has no report.

    The client holds it once for each record that was sent with it, since it may have to call it,
    and lets go of it with that record's report. Calling Python for each record that *was* delivered
    costs more than sending it.
    """

    __slots__ = ("__weakref__", "_failed")

    def __init__(self, failed: Callable[[Any], None]) -> None:
        self._failed = failed

    def __call__(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failed(error)


@dataclass(frozen=True)
class Mark:
    """A place among the records of a producer; see `RecordProducer.mark`.

    Attributes:
        before: the records from the mark before to this one. sent: how many are before it in all.
    """

    before: weakref.ref[_Unreported]
    sent: int


class RecordProducer:
    """A producer, and what became of its records.

    One thread sends and sets marks. Any thread may wait for what is before a mark.

    Args:
        connection: to the cluster. what: for errors.
        own: settings of librdkafka, with ``_`` for ``.``.
    """

    def __init__(
        self, connection: KafkaConnection, what: str, system: System = SYSTEM, **own: Any
    ) -> None:
        # An aborted transaction throws its records away. Without one, only a fatal error does.
        self._expected_errors = _PURGED if "transactional_id" in own else ()
        self._kafka = kafka_module()
        self._connection, self.what, self._system = connection, what, system
        self._watcher = connection.watcher()
        self._failed: Any = None
        self._unreported = _Unreported(self._undelivered)
        self._sent = self._polls = 0
        self.client: Any = connection.client(
            self._kafka.Producer,
            _DEFAULTS,
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
            self._sent += len(messages)
            with self._keeping_errors():
                queued = self.client.produce_batch(
                    topic, messages, partition, on_delivery=self._unreported
                )
            if queued != len(messages):  # such as a record that is too large
                errors = (one["_error"] for one in messages if "_error" in one)
                self._failed = self._failed or next(errors, None)
            self.check()

    def _make_room(self, queued_rows: int) -> None:
        self._poll(self.client)
        self._polls += 1
        while len(self.client) > queued_rows:
            self.check()
            self._poll(self.client, _WAIT_S)

    def _poll(self, client: Any, timeout_s: float = 0.0) -> None:
        with self._keeping_errors():
            client.poll(timeout_s)

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """The client raises a fatal error once, in the thread that called it; all must know it."""
        try:
            yield
        except self._kafka.KafkaException as error:
            self._failed = self._failed or error.args[0]
            self.check()

    def poll_and_check(self) -> None:
        """As `check`, with what the client has not reported yet."""
        self._poll(self.client)
        self.check()

    def _undelivered(self, error: Any) -> None:
        if error.name() not in self._expected_errors:
            self._failed = self._failed or error

    def check(self) -> None:
        """Raises `ConnectorError` for records that could not be written."""
        self._watcher.check(self.what)
        if self._failed is not None:
            self._connection.failed(self.what, self._kafka.KafkaException(self._failed))

    def mark(self) -> Mark:
        """Behind all records so far; each mark is waited for after those before it."""
        made = Mark(weakref.ref(self._unreported), self._sent)
        self._unreported = _Unreported(self._undelivered)
        return made

    def await_delivered(self, mark: Mark) -> None:
        """Wait until the cluster has all records from the mark before to this one.

        librdkafka gives each up after ``message.timeout.ms``, some minutes by default. Reports are
        left to the sending thread while it sends: each needs the interpreter's lock, and two
        threads would pass it on for every record.

        Raises:
            ConnectorError: some could not be written, or the producer is closed.
        """
        while True:
            there = mark.before() is None
            client = self.client
            if client is None:  # which gives a report, of an error, for all that was not sent
                raise ConnectorError(
                    f"{self.what} ended before the cluster had all records.",
                    todo="Nothing to do: the next run writes them again.",
                )
            self.check()
            # By the client's own count there can be no more than were sent behind the mark.
            if there and len(client) <= self._sent - mark.sent:
                return
            polls = self._polls
            self._system.sleep_s(_LOOK_S)
            if self._polls == polls:
                self._poll(client)

    def close(self) -> None:
        """Throw away what was not sent, and disconnect.

        A transaction that is open stays so: `Producer.close` would talk to the cluster first.
        """
        client, self.client = self.client, None
        if client is not None:
            client.purge()
