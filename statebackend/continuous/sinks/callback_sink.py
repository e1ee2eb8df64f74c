"""A function as a sink."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from statebackend.continuous.sinks.sink import Committer, NoCommitter, Sink, SinkContext, SinkWriter

__all__ = ["CallbackSink"]

Callback = Callable[[pa.RecordBatch, SinkContext], None]


class CallbackSink(Sink):
    """Calls a function with each batch, in the subtasks, as it comes. At least once.

    After a failure the rows since the last checkpoint come again. Where that must not show, have
    the function write by a key of the rows.
    """

    def __init__(self, function: Callback) -> None:
        """Take the function: ``function(batch, context)``.

        It is shipped to the subtasks, as a processor is. Whatever it raises fails the job, which
        then restarts from its last checkpoint.
        """
        self._function = function

    def open(self, context: SinkContext) -> SinkWriter:
        """A writer that calls the function."""
        return _Writer(self._function, context)

    def committer(self, job: str, uid: str) -> Committer:
        """One with nothing to do."""
        return NoCommitter()


class _Writer(SinkWriter):
    def __init__(self, function: Callback, context: SinkContext) -> None:
        self._function = function
        self._context = context

    def write(self, batch: pa.RecordBatch) -> None:
        self._function(batch, self._context)

    def prepare(self, checkpoint: int) -> list[bytes]:
        return []
