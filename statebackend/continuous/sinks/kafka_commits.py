"""Pieces of checkpoints into a topic of Kafka, each once: on the driver.

A transaction holds the records of some pieces and a *marker*: a record in a compacted topic of the
sink's own that says which pieces of which subtask are in. Both are there, or neither is. A piece
has a number, by the run and the subtask that made it, and all pieces with lower ones are committed
before it: so a marker is one number for each subtask of a run. It is not an offset of a group of
consumers: the brokers forget those some days after the last one.

All of a sink is written by the driver, under one transactional id. So a new start has one id to
take over, whatever the parallelism was and is, and readers see a checkpoint's records together. It
does so in this order:

1. `init_transactions`: the cluster ends what another process with this id has open, by commit or
   abort, and takes nothing from that process any more.
2. Read the markers, committed ones only, to the topic's end. Nobody can add one now.
3. Write what they do not name.

A process that was frozen and thaws is at any point of this. What it writes after another one's
step 1 is refused. If it begins with its own step 1, it sees the other's markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

import msgspec
import pyarrow as pa
from blake3 import blake3

from statebackend.continuous.kafka.kafka_connection import CALL_S, KafkaConnection, kafka_module
from statebackend.continuous.kafka.kafka_markers import PARTITION, MarkerTopic, Marks
from statebackend.continuous.kafka.kafka_producing import RecordProducer
from statebackend.continuous.kafka.kafka_rows import RECORD
from statebackend.continuous.sinks.committables import decode_committable
from statebackend.continuous.sinks.sink import BatchCommitter
from statebackend.errors import ConnectorError, OutputLostError
from statebackend.system import SYSTEM, System

__all__ = ["Commits", "KafkaCommitter", "Piece", "encode_piece", "names_of"]

FORMAT_VERSION: Final = 1
TRANSACTION_BYTES: Final = 32 << 20  # of records, before they are compressed
_NAME: Final = re.compile(r"[^a-zA-Z0-9._-]+")


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a subtask, prepared; a committable.

    Attributes:
        number: rises by one with each piece of a subtask in a run.
        size_bytes: of the records.
        records: see `encode_piece`.
    """

    v: int = FORMAT_VERSION
    run: str
    subtask: int
    number: int
    topic: str
    size_bytes: int
    records: bytes


def encode_piece(records: Sequence[pa.RecordBatch]) -> bytes:
    """Keys and values as an Arrow stream, compressed."""
    table = pa.Table.from_batches(records, RECORD)
    stream = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(stream, RECORD, options=options) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(stream.getvalue())


def _decoded(piece: Piece) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(piece.records) as reader:
        yield from reader


def names_of(job: str, uid: str, id: str, topic: str) -> tuple[str, str]:
    """The transactional id of a sink, and its topic of markers, as the user named them or not."""
    digest = blake3(f"{job}\0{uid}".encode()).hexdigest()[:8]
    shown = _NAME.sub("-", f"{job}-{uid}")[:100]
    found = id or f"statebackend-{shown}-{digest}"
    return found, topic or f"{_NAME.sub('-', found)}-commits"


class Commits:
    """A sink's transactions; opened when first used.

    Args:
        id: the transactional id. topic: that of the markers.
    """

    def __init__(
        self, connection: KafkaConnection, id: str, topic: str, system: System = SYSTEM
    ) -> None:
        self._connection, self._id, self._system = connection, id, system
        self._markers = MarkerTopic(connection, topic, system)
        self._producer: RecordProducer | None = None
        self._marks = Marks()

    def open(self, *, begun: bool) -> None:
        """Take the sink over.

        Args:
            begun: whether the sink must have markers already.

        Raises:
            ConnectorError: the cluster cannot be reached, or does not let this user do it.
            OutputLostError: there are no markers, and there must be.
        """
        if self._producer is not None:
            return
        there = self._markers.make()
        producer = self._taken_over(self._id)
        try:
            marks = self._markers.read()
            if marks.id and marks.id != self._id:  # the user has named it anew
                self._taken_over(marks.id).close()
                marks = self._markers.read()
            if begun and not (there and marks.id):
                raise OutputLostError(
                    f"The topic {self._markers.name!r} of the Kafka cluster "
                    f"{self._connection.servers} does not say what the sink has committed.",
                    todo="If the topic was deleted, bring it back. If it is lost, compare the "
                    "output with the rows of the last checkpoint, which may be missing: then give "
                    "the sink another uid=, and start once with allow_dropped_state=True.",
                )
            if marks.id != self._id:
                marks.id = self._id
                self._transaction(producer, [], [marks.begun_record()])
        except BaseException:
            producer.close()
            raise
        self._producer, self._marks = producer, marks

    def _taken_over(self, id: str) -> RecordProducer:
        what = f"Taking over the transactional id {id!r}"
        producer = RecordProducer(self._connection, what, self._system, transactional_id=id)
        try:
            self._until_done(what, lambda: producer.client.init_transactions(CALL_S))
        except BaseException:
            try:
                # Why the cluster did not answer, such as a wrong password.
                producer.poll_and_check()
            finally:
                producer.close()
            raise
        producer.what = "Writing in a transaction"
        return producer

    def write(self, pieces: Iterable[Piece]) -> None:
        """Commit those that are not.

        Raises:
            ConnectorError: it may be tried again, from `open` on.
        """
        left = [one for one in pieces if not self._marks.has(one.run, one.subtask, one.number)]
        for some in _portions(left):
            self._commit(some, [(one.run, one.subtask, one.number) for one in some])

    def last_batch(self, run: str) -> int:
        """The last number that `write_batch` has committed; -1: none."""
        return self._marks.newest(run, 0)

    def write_batch(self, run: str, number: int, pieces: Sequence[Piece]) -> None:
        """Commit a batch that is not, all of it in one transaction.

        A batch that is repeated may come in other pieces, so it is marked as a whole: as a piece
        of subtask 0 of a run that has no others.

        Raises:
            ConnectorError: as `write`.
        """
        if number > self.last_batch(run):
            self._commit(pieces, [(run, 0, number)])

    def _commit(self, pieces: Sequence[Piece], marked: Sequence[tuple[str, int, int]]) -> None:
        producer = self._producer
        assert producer is not None
        marks = self._marks.after(marked)
        runs = dict.fromkeys(run for run, _, _ in marked)
        try:
            self._transaction(producer, pieces, [marks.record(run) for run in runs])
        except BaseException:
            self.close()
            raise
        self._marks = marks

    def _transaction(
        self, producer: RecordProducer, pieces: Sequence[Piece], markers: Sequence[pa.RecordBatch]
    ) -> None:
        # A failure is not tried again here, but by the next start: to end a failed transaction,
        # librdkafka may take the transactional id over anew, and then the markers must be read.
        kafka, client, began_s = kafka_module(), producer.client, self._system.monotonic_s()
        try:
            client.begin_transaction()
            for piece in pieces:
                for records in _decoded(piece):
                    producer.send(piece.topic, records)
            for marker in markers:
                producer.send(self._markers.name, marker, PARTITION)
            self._until_done("Committing", lambda: client.commit_transaction(CALL_S))
        except (kafka.KafkaException, ConnectorError) as error:
            self._raise_failure(producer, error, self._system.monotonic_s() - began_s)

    def _raise_failure(self, producer: RecordProducer, error: Exception, took_s: float) -> NoReturn:
        """Raises why a transaction has failed."""
        try:
            producer.poll_and_check()  # which record, and why
        except ConnectorError as found:
            error = found
        cause = error.__cause__ if isinstance(error, ConnectorError) else error
        if not isinstance(cause, kafka_module().KafkaException):
            raise error
        limit_s = float(self._connection.options.get("transaction.timeout.ms", 60_000)) / 1000
        if _is_fenced(cause) and took_s > limit_s:
            raise ConnectorError(
                f"The Kafka cluster {self._connection.servers} has given up a transaction that "
                f"took {took_s:.0f} s, or another process has taken over the transactional id "
                f"{self._id!r} meanwhile.",
                todo="If it was the time, raise transaction.timeout.ms in options=, and "
                "transaction.max.timeout.ms on the brokers.",
            ) from error
        self._failed("Writing in a transaction", cause)

    def _until_done(self, what: str, call: Any) -> None:
        """Repeat what may be repeated, for a while."""
        kafka, until_s = kafka_module(), self._system.monotonic_s() + 2 * CALL_S
        while True:
            try:
                call()
                return
            except kafka.KafkaException as error:
                if not error.args[0].retriable() or self._system.monotonic_s() > until_s:
                    self._failed(what, error)

    def _failed(self, what: str, error: BaseException) -> NoReturn:
        if _is_fenced(error):
            raise ConnectorError(
                f"Another process has taken over the transactional id {self._id!r} of the Kafka "
                f"cluster {self._connection.servers}.",
                todo="If it is no newer start of this job, another sink has its transactional_id= "
                "or commits_topic=: give that one names of its own.",
            ) from error
        self._connection.failed(what, error)

    def close(self) -> None:
        """Let go of the producer. A transaction that is open is ended by who comes next."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


def _is_fenced(error: BaseException) -> bool:
    said: Any = error.args[0]
    return said.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")


def _portions(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces for one transaction after the other, in their order."""
    some: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        if some and size_bytes + piece.size_bytes > TRANSACTION_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(piece)
        size_bytes += piece.size_bytes
    if some:
        yield some


class KafkaCommitter(BatchCommitter):
    """Commits pieces.

    Args:
        eager: take the sink over at once; else only when there is something to commit.
        target: the topic of batches, of which each has its own.
    """

    def __init__(self, commits: Commits, *, eager: bool, target: str = "") -> None:
        self._commits, self._eager, self._target = commits, eager, target

    def commit(self, committables: Sequence[bytes]) -> None:
        """In a transaction, what no earlier one holds."""
        pieces = [decode_committable(data, Piece, FORMAT_VERSION) for data in committables]
        if pieces or self._eager:
            self._commits.open(begun=bool(pieces))
            self._commits.write(pieces)

    def last_batch(self, application: str) -> int:
        """Takes the sink over first: whoever had it before writes nothing any more."""
        self._commits.open(begun=False)
        return self._commits.last_batch(self._run(application))

    def commit_batch(self, application: str, batch_id: int, committables: Sequence[bytes]) -> None:
        """In one transaction."""
        pieces = [decode_committable(data, Piece, FORMAT_VERSION) for data in committables]
        self._commits.open(begun=False)
        if pieces:
            self._commits.write_batch(self._run(application), batch_id, pieces)

    def _run(self, application: str) -> str:
        return f"{application} {self._target}"

    def close(self) -> None:
        """Disconnect."""
        self._commits.close()
