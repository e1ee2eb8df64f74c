"""Where a subtask's rows go: the sinks that are chained to it, and the channels to what is next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput, Event
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.sinks.committables import Prepared
from statebackend.continuous.sinks.sink import SinkWriter
from statebackend.continuous.worker.overtaken_rows import ChannelQueue
from statebackend.errors import StateBackendError
from statebackend.system import SYSTEM, System

__all__ = ["Output", "Route"]


@dataclass(frozen=True)
class Route:
    """The channels to one vertex.

    Attributes:
        edge: its number among that vertex's inputs.
        in_order: no barrier overtakes rows there. So it is where rows go to every subtask: what
            came of them must be the same in all, and some would have them in their state, and
            others in flight.
    """

    vertex: str
    edge: int
    outbox: Outbox
    in_order: bool = False

    def lanes(self) -> list[ChannelQueue]:
        """Its channels, by their number."""
        receivers = range(len(self.outbox.channels))
        return [ChannelQueue("out", self.vertex, self.edge, other) for other in receivers]


class Output:
    """Used by the subtask's thread; any thread may `fail` it.

    Whoever has a subtask emit or send asks `ready` first, and now and then after it: see `Outbox`.

    Args:
        routes: to what reads the subtask's rows.
        writers: of its sinks, by uid.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        writers: Mapping[str, SinkWriter],
        system: System = SYSTEM,
    ) -> None:
        self._system = system
        self._routes, self._writers = tuple(routes), dict(writers)
        self._outboxes = tuple(route.outbox for route in routes)
        self._prepared = {uid: Prepared() for uid in writers}
        self._ended = False
        self.rows = 0
        """Emitted so far."""

    def emit(self, batch: pa.RecordBatch) -> None:
        """Rows; waits while there is no room for those before them (see `Outbox.emit`).

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
        """An event, behind all rows; nothing goes behind the end. Never waits. Raises as `emit`."""
        if self._ended:
            return
        self._ended = isinstance(event, EndOfInput)
        for outbox in self._outboxes:
            outbox.send(event)

    def forward(self, event: Barrier | Cancel) -> None:
        """As `send`."""
        self.send(event)

    def overtake(self, barrier: Barrier) -> list[tuple[ChannelQueue, list[pa.RecordBatch]]]:
        """Send a barrier ahead of all rows that lie here: those, by channel, where there are any.

        Raises as `emit`. Never waits.
        """
        found: list[tuple[ChannelQueue, list[pa.RecordBatch]]] = []
        if self._ended:
            return found
        for route in self._routes:
            if route.in_order:
                route.outbox.send(barrier)
                continue
            found += zip(route.lanes(), route.outbox.overtake(barrier), strict=True)
        return [(lane, rows) for lane, rows in found if rows]

    def put_back(self, rows: Iterable[tuple[ChannelQueue, Sequence[pa.RecordBatch]]]) -> None:
        """What lay here when a snapshot was taken; before anything else. Raises as `emit`."""
        outboxes = {(route.vertex, route.edge): route.outbox for route in self._routes}
        for lane, batches in rows:
            outboxes[lane.vertex, lane.edge].put_back(lane.other, batches)

    def lanes(self) -> list[ChannelQueue]:
        """All channels."""
        return [lane for route in self._routes for lane in route.lanes()]

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Whether every receiver has room, now or within ``timeout_s``. Raises as `emit`."""
        stuck = [outbox for outbox in self._outboxes if not outbox.ready()]
        if not stuck or not timeout_s:
            return not stuck
        until_s = self._system.monotonic_s() + timeout_s
        return all(outbox.ready(max(0.0, until_s - self._system.monotonic_s())) for outbox in stuck)

    def try_flush(self) -> bool:
        """Send what lies here as far as there is room, all of it; whether nothing is left.

        Of what a barrier may overtake. Raises as `emit`.
        """
        left = [r for r in self._routes if not r.in_order and not r.outbox.try_flush()]
        return not left

    @property
    def pending_bytes(self) -> int:
        """Rows that a barrier would overtake."""
        return sum(route.outbox.pending_bytes for route in self._routes if not route.in_order)

    @property
    def unsent_bytes(self) -> int:
        """Rows that lie here, whether a barrier would overtake them or not."""
        return sum(outbox.pending_bytes for outbox in self._outboxes)

    def call_back(self, urgent: Callable[[], bool]) -> None:
        """Have this asked while `emit` waits: whether it is to return at once."""
        for outbox in self._outboxes:
            outbox.urgent = urgent

    @property
    def next_flush_s(self) -> float | None:
        """When `flush_if_due` will have something to do."""
        due = [s for s in (outbox.next_flush_s for outbox in self._outboxes) if s is not None]
        return min(due, default=None)

    def flush_if_due(self, now_s: float) -> None:
        """Send what has waited for long enough. Never waits. Raises as `emit`."""
        for outbox in self._outboxes:
            outbox.flush_if_due(now_s)

    def prepare(self, checkpoint: int) -> dict[str, list[bytes]]:
        """What the sinks have to be committed with a checkpoint; at its barrier.

        The checkpoint may be acked when `await_prepared` has returned as well.

        Raises:
            ConnectorError: a sink cannot make its rows safe.
        """
        return {
            uid: self._prepared[uid].prepared(checkpoint, writer.prepare(checkpoint))
            for uid, writer in self._writers.items()
        }

    def await_prepared(self, checkpoint: int) -> None:
        """Wait until the sinks' rows before its barrier are safe; in another thread.

        Raises:
            ConnectorError: a sink cannot make its rows safe, or is closed.
        """
        for writer in self._writers.values():
            writer.await_prepared(checkpoint)

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
        """Let go of everything; what is not prepared is thrown away.

        One that fails keeps no other from it: somebody may wait for what another's writer sends.
        """
        with contextlib.ExitStack() as all_of_it:
            for outbox in self._outboxes:
                all_of_it.callback(outbox.close)
            for writer in self._writers.values():
                all_of_it.callback(writer.close)
