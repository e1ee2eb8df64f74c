"""Where a subtask's rows go: the sinks that are chained to it, and the channels to what is next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from snapshot.barrier import Barrier, Cancel, EndOfInput, Event
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.sinks.base import Prepared, SinkWriter
from statebackend.errors import StateBackendError

__all__ = ["Output"]


class Output:
    """Used by the subtask's thread; any thread may `fail` it.

    Args:
        outboxes: one for each vertex that reads the subtask's.
        writers: of its sinks, by uid.
    """

    def __init__(self, outboxes: Sequence[Outbox], writers: Mapping[str, SinkWriter]) -> None:
        self._outboxes, self._writers = tuple(outboxes), dict(writers)
        self._prepared = {uid: Prepared() for uid in writers}
        self._ended = False
        self.rows = 0
        """Emitted so far."""

    def emit(self, batch: pa.RecordBatch) -> None:
        """Rows; waits while there is no room for them.

        Raises:
            ConnectorError: a sink cannot take them.
            StateBackendError: a channel has failed.
        """
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        for writer in self._writers.values():
            writer.write(batch)
        for outbox in self._outboxes:
            outbox.emit(batch)

    def send(self, event: Event) -> None:
        """An event, behind all rows; nothing goes behind the end. Raises as `emit`."""
        if self._ended:
            return
        self._ended = isinstance(event, EndOfInput)
        for outbox in self._outboxes:
            outbox.send(event)

    def forward(self, event: Barrier | Cancel) -> None:
        """As `send`."""
        self.send(event)

    @property
    def next_flush_s(self) -> float | None:
        """When `flush_if_due` will have something to do."""
        due = [s for s in (outbox.next_flush_s for outbox in self._outboxes) if s is not None]
        return min(due, default=None)

    def flush_if_due(self, now_s: float) -> None:
        """Send what has waited for long enough. Raises as `emit`."""
        for outbox in self._outboxes:
            outbox.flush_if_due(now_s)

    def prepare(self, checkpoint: int) -> dict[str, list[bytes]]:
        """What the sinks have to be committed with a checkpoint; at its barrier.

        Raises:
            ConnectorError: a sink cannot make its rows safe.
        """
        return {
            uid: self._prepared[uid].prepared(checkpoint, writer.prepare(checkpoint))
            for uid, writer in self._writers.items()
        }

    def completed(self, checkpoint: int) -> None:
        """A checkpoint's output is committed."""
        for prepared in self._prepared.values():
            prepared.completed(checkpoint)

    @property
    def blocked_s(self) -> float:
        """Seconds spent so far waiting for receivers."""
        return sum(outbox.blocked_s for outbox in self._outboxes)

    def fail(self, error: StateBackendError) -> None:
        """Wake whoever waits for room."""
        for outbox in self._outboxes:
            outbox.fail(error)

    def close(self) -> None:
        """Let go of everything; what is not prepared is thrown away."""
        for writer in self._writers.values():
            writer.close()
        for outbox in self._outboxes:
            outbox.close()
