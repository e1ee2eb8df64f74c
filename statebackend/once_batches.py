"""A ``foreachBatch`` function whose writes count once, however often its batch is repeated.

Spark repeats a batch whose function had already written when the driver was killed. A table that
keeps a version for each application lets such a writer find out; for a topic of Kafka, a topic of
markers does. What stands here gives the names: the application is of the job and its query, and the
version is the batch's number.

A function that skips a batch has read nothing of its frame, and the state of that batch may have to
be made again. So the frame is evaluated here if the function did not do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.sql import DataFrame

from statebackend.continuous.sinks.sink import BatchSink, SinkContext, run_name
from statebackend.continuous.sinks.table_files import application_of
from statebackend.errors import (
    IncompleteEpochError,
    OutputLostError,
    SettingError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.session import RunSession
from statebackend.spark.java_errors import ShortJavaError
from statebackend.spark.start.checked_batches import CheckedBatches, session_of
from statebackend.system import SYSTEM

__all__ = ["BatchOnce", "OnceBatches", "once"]

_RECORDS_S: Final = 60.0
_CONF: Final = "spark.databricks.delta.write."
_ICEBERG: Final = "snapshot-property.statebackend."


@dataclass(frozen=True)
class BatchOnce:
    """What makes the writes of one batch idempotent; the third argument of a function of `once`.

    Attributes:
        job_id: the job's identity. query_id: Spark's id of the query: one that begins with a
            savepoint of the job has another, and the same numbers of batches.
        batch_id: the batch's number, which is its epoch.
    """

    job_id: str
    query_id: str
    batch_id: int
    new_id: Callable[[], str]
    await_records: Callable[[], None] = lambda: None
    _appended: set[tuple[str, str]] = field(
        default_factory=set, init=False, repr=False, compare=False
    )

    def application(self, part: str = "") -> str:
        """The name under which a table knows these writes.

        Args:
            part: tells several writes of one batch into one table from each other.
        """
        return application_of(self.query_id, self.job_id, f"foreachBatch {part}")

    def delta(self, part: str = "") -> dict[str, str]:
        """Options of Spark's writer for a Delta table: a batch that it has is skipped.

        ``frame.write.format("delta").options(**once.delta()).mode("append").save(path)``
        """
        return {"txnAppId": self.application(part), "txnVersion": str(self.batch_id)}

    @contextmanager
    def delta_session(self, frame: DataFrame, part: str = "") -> Iterator[None]:
        """For a Delta ``MERGE``, ``UPDATE`` or ``DELETE`` inside: skipped by a table that has it.

        One of them for each ``part``: Delta compares the version of every one.
        """
        conf = frame.sparkSession.conf
        said = {f"{_CONF}{name}": value for name, value in self.delta(part).items()}
        try:
            for key, value in said.items():
                conf.set(key, value)
            yield
        finally:
            for key in said:
                conf.unset(key)

    def iceberg(self, part: str = "") -> dict[str, str]:
        """Options of Spark's writer for an Iceberg table, by which `in_iceberg` knows the batch."""
        return {
            f"{_ICEBERG}application": self.application(part),
            f"{_ICEBERG}version": str(self.batch_id),
        }

    def in_iceberg(self, frame: DataFrame, table: str, part: str = "") -> bool:
        """Whether an Iceberg table has this batch; ask before writing it.

        The snapshots since must not have expired. A driver that is frozen between the question and
        its write, and thaws after another has gone on, writes the batch again: `append` does not.
        """
        spark = frame.sparkSession
        spark.catalog.refreshTable(table)  # a catalog of Iceberg's keeps tables for some time
        found = spark.sql(
            f"SELECT max(CAST(summary['statebackend.version'] AS BIGINT)) FROM {table}.snapshots "
            f"WHERE summary['statebackend.application'] = '{self.application(part)}'"
        ).first()
        newest = found[0] if found is not None else None
        return newest is not None and int(newest) >= self.batch_id

    def append(self, frame: DataFrame, sink: BatchSink, part: str = "") -> None:
        """Append a frame to the output of a `DeltaSink`, `IcebergSink` or `KafkaSink`, at once.

        A table's files are written by the executors, in parallel, and come with one commit. A
        topic's records are encoded by the executors, and written by the driver in one transaction;
        it must have room for them. A batch that the output has is skipped.

        Raises:
            SchemaError, ConnectorError: as the sink.
            OutputLostError: as the sink; or the output has later batches already.
            SettingError: a `KafkaSink` with ``exactly_once=False``; a second frame for one output
                and part, which would be taken for the first.
        """
        sink.check(frame.schema)
        if (repr(sink), part) in self._appended:
            raise SettingError(
                f"Batch {self.batch_id} is appended to {sink!r} twice.",
                todo="Give each append a part= of its own, or unite the frames.",
            )
        uid = f"append {part}"  # apart from what the function writes itself
        application = application_of(self.query_id, self.job_id, uid)
        committer = sink.batch_committer(self.query_id, part)
        try:
            last = committer.last_batch(application)
            if last > self.batch_id:
                raise _output_ahead(sink, last, self.batch_id)
            if last < self.batch_id:
                run = run_name(0, self.new_id())
                # By the query in place of the job's name: a clone may have the same name.
                of = SinkContext(self.query_id, uid, run, job_id=self.job_id)
                written = frame.mapInArrow(_Written(sink, of, self.batch_id), "committable binary")
                found = [bytes(row[0]) for row in written.collect()]
                self.await_records()
                committer.commit_batch(application, self.batch_id, found)
            self._appended.add((repr(sink), part))
        finally:
            committer.close()


def _output_ahead(sink: BatchSink, last: int, batch_id: int) -> OutputLostError:
    """Only the last batch is ever repeated: no output has one whose state may have to go back."""
    return OutputLostError(
        f"{sink!r} has batch {last} of this query already, and the query runs batch {batch_id}: "
        "another driver has gone on with it, or it was taken back.",
        todo="If another driver runs the query, stop this one. If it was taken back, undo the rows "
        "of the batches since, where you can, and append with another part=.",
    )


def _await_records(session: RunSession) -> None:
    """With asynchronous commits the state goes back by a batch: the output must not be ahead."""
    if not session.drain(_RECORDS_S):
        raise StoreUnreachableError(
            f"The store has not taken the state of the batches so far in {_RECORDS_S:g} s.",
            todo="See whether it is slow; the next start repeats the batch.",
        )
    if session.failure is not None:
        raise session.failure


@dataclass(frozen=True)
class _Written:
    """The function of each task: what its rows became, to be committed."""

    sink: BatchSink
    of: SinkContext
    batch_id: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        # No two tries of a task write to one file.
        run = f"{self.of.run}-{task.taskAttemptId()}"
        writer = self.sink.open(replace(self.of, run=run, subtask=task.partitionId()))
        try:
            for batch in batches:
                writer.write(batch)
            found = writer.prepare(self.batch_id)
            writer.await_prepared(self.batch_id)
        except BaseException:
            writer.abort()
            raise
        for one in found:
            yield pa.record_batch([pa.array([one], pa.binary())], names=["committable"])


Written = Callable[[DataFrame, int, BatchOnce], Any] | BatchSink


def once(write: Written) -> OnceBatches:
    """A ``foreachBatch`` function whose writes count once, however often its batch is repeated.

    For queries of ``backend.write_stream`` and, with ``statebackend.install``, of Spark's own
    ``writeStream``. Where ``backend.start(writer)`` starts the query, take ``backend.once``.

    Args:
        write: a `DeltaSink`, `IcebergSink` or `KafkaSink` that every batch is appended to; or a
            function of the frame, the batch's number and a `BatchOnce`, which has what makes a
            write idempotent.

    Raises:
        SettingError: it is neither.
    """
    return OnceBatches(write, SYSTEM.new_id)


class OnceBatches(CheckedBatches):
    """Runs the user's function with a `BatchOnce`; evaluates the frame where it was skipped."""

    def __init__(self, function: Written, new_id: Callable[[], str]) -> None:
        if isinstance(function, BatchSink):
            super().__init__(_appending(function))
        elif callable(function):
            super().__init__(function)
        else:
            raise SettingError(
                f"once() was given a {type(function).__name__}.",
                todo="Give it a function of frame, batch id and once, a DeltaSink, an IcebergSink "
                "or a KafkaSink.",
            )
        self._new_id = new_id

    def __call__(self, frame: DataFrame, batch_id: int, *rest: Any) -> Any:
        """What the user's function returns.

        Raises:
            SettingError: the query has no operator of ours, so no job.
        """
        session = session_of(frame)
        if session is None:
            raise SettingError(
                "A function of once() ran in a query without an operator of this backend.",
                todo="Use it for a query of backend.write_stream(...).",
            )
        try:
            awaited = partial(_await_records, session)
            once = BatchOnce(*session.identity(), batch_id, self._new_id, awaited)
            result = self._function(frame, batch_id, once)
            _evaluate(session, frame, batch_id)
        except Py4JJavaError as error:
            raise ShortJavaError(error).with_traceback(error.__traceback__) from None
        session.check_finished(batch_id)
        return result


def _appending(sink: BatchSink) -> Callable[[DataFrame, int, BatchOnce], None]:
    def append(frame: DataFrame, batch_id: int, once: BatchOnce) -> None:
        once.append(frame, sink)

    return append


def _evaluate(session: RunSession, frame: DataFrame, batch_id: int) -> None:
    """Make the state of a batch whose output the sink had, so that nothing read the frame."""
    try:
        session.check_finished(batch_id)
    except IncompleteEpochError:
        frame.write.format("noop").mode("overwrite").save()
