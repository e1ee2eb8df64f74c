"""What a sink is: writers in the subtasks, which prepare, and a committer on the driver.

A checkpoint takes effect outside in two phases. At its barrier each writer *prepares*: what it was
given so far is made safe without being visible, and described by *committables*, which are part of
the checkpoint. Once the checkpoint is complete the driver *commits* them. After a restore they are
committed once more, since nobody knows how far the last driver came: commits are idempotent.

Rows need not wait until all of it is safe. A writer that only has to hear of it may begin it in
`prepare` and wait in `await_prepared`, which another thread calls: the subtask acks the checkpoint
when both have returned.

A checkpoint that is aborted takes nothing back: its rows were read, and will not be read again
unless the job restores. `statebackend.continuous.sinks.committables` keeps them for the next one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import types as T

__all__ = [
    "BatchCommitter",
    "BatchSink",
    "Committer",
    "NoCommitter",
    "Sink",
    "SinkContext",
    "SinkWriter",
    "generation_of",
    "run_name",
]


_RUN: Final = re.compile(r"([0-9]{10,})-.+")


def run_name(generation: int, run: str) -> str:
    """A run as sinks know it: by its name alone one sees which of two is the later one."""
    return f"{generation:010d}-{run}"


def generation_of(run: str) -> int | None:
    """The generation in what `run_name` made; None: it is of a release that named none."""
    found = _RUN.fullmatch(run)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class SinkContext:
    """Where a writer runs: job, sink, run and subtask.

    Attributes:
        job: the job's name.
        uid: the sink's, in the job.
        run: an id of its own for each start of the job, also after a failure; no other has it. It
            begins with the driver's generation (see `run_name`).
        subtask: index, from 0.
        parallelism: how many there are.
        job_id: the job's identity: another one that has its name later has another.
    """

    job: str
    uid: str
    run: str
    subtask: int = 0
    parallelism: int = 1
    job_id: str = ""


class SinkWriter(ABC):
    """Takes one subtask's rows, in one thread; what `Sink.open` returns."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        Raises:
            ConnectorError: they cannot be written.
        """

    @abstractmethod
    def prepare(self, checkpoint: int) -> list[bytes]:
        """Make safe all that was written since the last call; at the barrier of a checkpoint.

        No row is taken meanwhile. What takes long may be left to `await_prepared`.

        Returns:
            Committables: small, complete in themselves, in any order.

        Raises:
            ConnectorError: it cannot be made safe.
        """

    def await_prepared(self, checkpoint: int) -> None:
        """Wait until all that was written before a checkpoint's barrier is safe.

        In another thread, while rows are written on; not for a checkpoint that was aborted by then.
        So what is before an earlier barrier counts as well. The checkpoint is not acked before it
        returns. Once the writer is closed it must not return any more, but raise.

        Raises:
            ConnectorError: it cannot be made safe, or the writer is closed.
        """
        return

    def abort(self) -> None:
        """Throw away what was written since the last `prepare`; the writer is not used again."""
        return

    def close(self) -> None:
        """Let go of everything; as `abort`, if something was written since. Twice does nothing."""
        self.abort()


class Committer(ABC):
    """Makes visible what the writers prepared; on the driver, in one thread."""

    @abstractmethod
    def commit(self, committables: Sequence[bytes]) -> None:
        """Make visible; what is visible already stays as it is.

        A call that fails may have committed some of them, and is repeated. One that takes longer
        than the job's ``timeout_s`` is given up, and may still be at work when the next run commits
        the same: whichever comes second finds it done.

        Raises:
            ConnectorError: it may be tried again.
            OutputLostError: it may not.
            CorruptionError, UnsupportedFormatError: committables of another kind or release.
        """

    def discard(self, committables: Sequence[bytes]) -> None:
        """Throw away what will never be committed; what was committed stays."""
        return

    def sweep(self, run: str) -> None:
        """Remove what earlier runs of this job left behind, before the writers of ``run`` open.

        Only after what the restored checkpoint holds was committed. What is of a later run (see
        `generation_of`) stays: this driver may have been fenced, and not know it yet.
        """
        return

    def close(self) -> None:
        """Let go of connections; the run is over. Not called while a call of it is at work."""
        return


class BatchCommitter(Committer):
    """A committer that also knows whole batches of a streaming query, by their numbers.

    An *application* is what writes them: see ``BatchOnce.application``.
    """

    @abstractmethod
    def last_batch(self, application: str) -> int:
        """The last batch of an application that is committed; -1: none.

        Raises:
            ConnectorError: nobody says.
        """

    @abstractmethod
    def commit_batch(self, application: str, batch_id: int, committables: Sequence[bytes]) -> None:
        """Make a batch visible, all of it at once; nothing, if it is visible already.

        Raises:
            ConnectorError, OutputLostError: as `commit`.
        """


class NoCommitter(Committer):
    """For sinks whose writers write at once."""

    def commit(self, committables: Sequence[bytes]) -> None:
        """There is nothing to commit."""
        return


class Sink(ABC):
    """An output of a continuous job; subclass it for one of your own.

    It is shipped to the subtasks, so it must be picklable.
    """

    def check(self, schema: T.StructType) -> None:
        """Refuse rows that cannot be written; when the job is built.

        Raises:
            UnsupportedTypeError: naming the field.
        """
        return

    @abstractmethod
    def open(self, context: SinkContext) -> SinkWriter:
        """A writer, in its subtask."""

    @abstractmethod
    def committer(self, job: str, uid: str) -> Committer:
        """The committer of this sink, on the driver."""


class BatchSink(Sink):
    """A sink that the batches of a streaming query can be appended to as well: see ``once``."""

    @abstractmethod
    def batch_committer(self, query_id: str, part: str) -> BatchCommitter:
        """What commits the batches of a query, on the driver.

        Args:
            part: tells several writes of one batch from each other.

        Raises:
            SettingError: this sink has none.
        """
