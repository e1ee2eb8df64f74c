"""What a subtask writes: rows are dealt to channels, gathered, and sent by size or by age."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from snapshot.barriers.barrier import Barrier, Cancel, Event, Watermark
from statebackend import system
from statebackend.continuous.exchange.channel import ChannelSender
from statebackend.continuous.exchange.elements import (
    ELEMENT_BYTES,
    Element,
    cost_of,
    cost_of_bytes,
    row_bytes_max,
)
from statebackend.continuous.exchange.partitioner import Partitioner
from statebackend.errors import SchemaError, SettingError, StateBackendError

__all__ = ["Outbox"]

# A message may be so many buffers large before it is cut, and so many bytes in any case.
_PIECE_BUFFERS: Final = 2
_PIECE_BYTES: Final = 64 << 10
# A writer that waits looks so often whether it is wanted elsewhere.
_LOOK_S: Final = 0.01


class _Buffer:
    """What is on its way into one channel."""

    __slots__ = ("channel", "held_bytes", "piece_bytes", "rows", "since_s", "unsent", "watermark")

    def __init__(self, channel: ChannelSender, buffer_bytes: int) -> None:
        self.channel = channel
        piece_bytes = max(_PIECE_BYTES, _PIECE_BUFFERS * buffer_bytes)
        self.piece_bytes = min(piece_bytes, row_bytes_max(channel.capacity_bytes))
        self.rows: list[pa.RecordBatch] = []  # gathered
        self.held_bytes = 0
        self.watermark: Watermark | None = None  # goes after them
        self.since_s: float | None = None  # the first of them came
        self.unsent: deque[Element] = deque()  # to be sent, in this order, now

    def add(self, rows: pa.RecordBatch, now_s: float) -> None:
        self.rows.append(rows)
        self.held_bytes += rows.nbytes
        self.touch(now_s)

    def touch(self, now_s: float) -> None:
        if self.since_s is None:
            self.since_s = now_s

    def flush(self) -> None:
        """From gathered to unsent."""
        if self.rows:
            whole = self.rows[0] if len(self.rows) == 1 else pa.concat_batches(self.rows)
            self.unsent.extend(_cut(whole, self.held_bytes, self.piece_bytes))
            self.rows, self.held_bytes = [], 0
        if self.watermark is not None:
            self.unsent.append(self.watermark)
            self.watermark = None
        self.since_s = None

    def pump(self) -> bool:
        """Send what is unsent as far as there is credit; whether all was sent."""
        while self.unsent:
            if not self.channel.offer(self.unsent[0]):
                return False
            self.unsent.popleft()
        return True

    def await_next(self, timeout_s: float) -> bool:
        """Whether there is credit for what is to be sent next, now or within ``timeout_s``."""
        cost = cost_of(self.unsent[0], self.channel.capacity_bytes)
        return self.channel.ready(cost, timeout_s)

    @property
    def pending(self) -> list[pa.RecordBatch]:
        """The rows that were not sent."""
        unsent = [rows for rows in self.unsent if isinstance(rows, pa.RecordBatch)]
        return [*unsent, *self.rows]


class Outbox:
    """The channels from one subtask to all subtasks of one other vertex.

    One thread writes; any thread may `fail` it, or read its figures. When one channel fails, all
    do, so a writer that waits for another receiver wakes as well.

    What there is no credit for lies here until there is: who calls `emit`, `send` or `put_back`
    calls `ready` now and then, which sends it. Only `emit` and `flush` ever wait, `emit` until
    nothing is left of what was emitted before: one batch at most lies here, beside what is
    gathered.

    Args:
        channels: one for each receiver.
        partitioner: from rows to channels.
        buffer_bytes: rows are gathered for each channel until they are so large.
        buffer_timeout_s: or until they are so old; 0: they are not gathered; None: for ever. The
            caller sees to it, by `flush_if_due`.
        clock: seconds that never go backwards.

    Raises:
        SettingError: the sizes mean nothing.
    """

    def __init__(
        self,
        channels: Sequence[ChannelSender],
        partitioner: Partitioner,
        *,
        buffer_bytes: int,
        buffer_timeout_s: float | None,
        clock: Callable[[], float] = system.monotonic_s,
    ) -> None:
        if buffer_bytes < 1 or (buffer_timeout_s is not None and buffer_timeout_s < 0):
            raise SettingError(
                f"Buffers of {buffer_bytes} bytes and {buffer_timeout_s} seconds mean nothing.",
                todo="Give at least one byte, and no time below 0.",
            )
        self.channels = tuple(channels)
        self._partitioner = partitioner
        self._buffer_bytes = 1 if buffer_timeout_s == 0 else buffer_bytes
        self._buffer_timeout_s = buffer_timeout_s
        self._clock = clock
        self._buffers = [_Buffer(channel, buffer_bytes) for channel in channels]
        room = (cost_of_bytes(buffer_bytes, channel.capacity_bytes) for channel in channels)
        # For what is gathered, and a watermark behind it: then a barrier never lies behind rows.
        self._room_bytes = tuple(
            min(cost + ELEMENT_BYTES, channel.capacity_bytes // 2)
            for cost, channel in zip(room, channels, strict=True)
        )
        self.urgent: Callable[[], bool] | None = None
        """Asked while `emit` waits: whether the writer is to come back at once."""
        self._schema: pa.Schema | None = None
        self._blocked_s = 0.0
        self._blocked_since_s: float | None = None
        self._closing = False
        for channel in channels:
            channel.watch(self.fail)

    def emit(self, batch: pa.RecordBatch) -> None:
        """Send rows, now or later; waits while those before them have no room.

        Not if `urgent` says so: then they lie here, however many.

        Raises:
            StateBackendError: a channel has failed, before or meanwhile.
            SchemaError: rows of another schema than those before.
        """
        if not batch.num_rows:
            return
        if self._schema is None:
            self._schema = batch.schema
        elif not self._schema.equals(batch.schema):
            raise SchemaError(
                f"Rows of schema {batch.schema} in channels of {self._schema}.",
                todo="Emit rows of one schema.",
            )
        self._drain(self.urgent)
        now_s = self._clock()
        full: list[_Buffer] = []
        for index, rows in self._partitioner(batch):
            buffer = self._buffers[index]
            buffer.add(rows, now_s)
            if buffer.held_bytes >= self._buffer_bytes:
                full.append(buffer)
        self._flush(full)

    def send(self, event: Event) -> None:
        """Send an event to every channel, after all rows before it; never waits.

        A watermark does not make small messages of what is gathered: it goes after it, when that
        is sent. The newest counts.

        Raises:
            StateBackendError: a channel has failed, before or meanwhile.
        """
        if isinstance(event, Watermark):
            now_s = self._clock()
            for buffer in self._buffers:
                buffer.watermark = event
                buffer.touch(now_s)
            if self._buffer_timeout_s == 0:
                self._flush(self._buffers)
            return
        for buffer in self._buffers:
            buffer.flush()
            buffer.unsent.append(event)
            buffer.pump()

    def overtake(self, event: Barrier | Cancel) -> list[list[pa.RecordBatch]]:
        """Send a barrier or cancellation to every channel, ahead of what is gathered.

        Never waits: they cost no credit. What it overtook stays gathered, and goes after it.

        Returns:
            For each channel the rows that it overtook here.

        Raises:
            StateBackendError: a channel has failed.
        """
        overtaken = []
        for buffer in self._buffers:
            buffer.channel.send(event)
            overtaken.append(buffer.pending)
        return overtaken

    def put_back(self, channel: int, rows: Iterable[pa.RecordBatch]) -> None:
        """Rows that were here when a snapshot was taken: ahead of all that is emitted. Never waits.

        Raises:
            StateBackendError: a channel has failed.
        """
        buffer = self._buffers[channel]
        for batch in rows:
            self._schema = batch.schema
            buffer.unsent.append(batch)
        buffer.pump()

    def flush(self) -> None:
        """Send all that is gathered or lies here; waits until it is sent.

        Raises:
            StateBackendError: a channel has failed, before or meanwhile.
        """
        self._flush(self._buffers)
        self._drain(None)

    def try_flush(self) -> bool:
        """As `flush`, but never waits; whether nothing is left."""
        self._flush(self._buffers)
        return not self._stuck()

    def flush_if_due(self, now_s: float) -> None:
        """Send what has been gathered for ``buffer_timeout_s``; never waits.

        Raises:
            StateBackendError: a channel has failed.
        """
        timeout_s = self._buffer_timeout_s
        if timeout_s is not None:
            waiting = ((buffer, buffer.since_s) for buffer in self._buffers)
            self._flush([one for one, s in waiting if s is not None and s + timeout_s <= now_s])

    @property
    def next_flush_s(self) -> float | None:
        """When `flush_if_due` has something to do, by the clock; None: nothing is gathered."""
        since_s = [one.since_s for one in self._buffers if one.since_s is not None]
        if not since_s or self._buffer_timeout_s is None:
            return None
        return min(since_s) + self._buffer_timeout_s

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Whether all is sent and every receiver has room for a buffer, now or in ``timeout_s``.

        A caller that takes input only then seldom waits in `emit`, and so can see to a barrier
        that is to overtake.

        Raises:
            StateBackendError: a channel has failed, before or meanwhile.
        """
        if self._has_room():
            return True
        if not timeout_s:
            return False
        until_s = self._clock() + timeout_s
        with _Blocked(self):
            for buffer, room_bytes in zip(self._buffers, self._room_bytes, strict=True):
                while not buffer.pump():
                    if not buffer.await_next(max(0.0, until_s - self._clock())):
                        return False
                if not buffer.channel.ready(room_bytes, max(0.0, until_s - self._clock())):
                    return False
        return True

    def _has_room(self) -> bool:
        if self._stuck():
            return False
        return all(
            channel.ready(room_bytes)
            for channel, room_bytes in zip(self.channels, self._room_bytes, strict=True)
        )

    @property
    def blocked_s(self) -> float:
        """Seconds spent so far waiting for receivers, with those of a wait that goes on."""
        since_s = self._blocked_since_s
        return self._blocked_s + (0.0 if since_s is None else self._clock() - since_s)

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that are gathered and not sent."""
        return sum(buffer.held_bytes for buffer in self._buffers)

    @property
    def pending_bytes(self) -> int:
        """Bytes of rows that are not sent, gathered or not."""
        return sum(rows.nbytes for buffer in self._buffers for rows in buffer.pending)

    def fail(self, error: StateBackendError) -> None:
        """Nothing can be sent any more; who waits is woken with ``error``."""
        if not self._closing:
            for channel in self.channels:
                channel.fail(error)

    def close(self) -> None:
        """Let go of all channels; what is gathered is dropped.

        Before `EndOfInput` was sent, the receivers fail.
        """
        self._closing = True
        for channel in self.channels:
            channel.begin_close()
        for channel in self.channels:
            channel.close()

    def _flush(self, buffers: Sequence[_Buffer]) -> None:
        for buffer in buffers:
            buffer.flush()
            buffer.pump()

    def _stuck(self) -> list[_Buffer]:
        """Those of which not all could be sent; whoever has room is served."""
        return [buffer for buffer in self._buffers if not buffer.pump()]

    def _drain(self, urgent: Callable[[], bool] | None) -> None:
        stuck = self._stuck()
        if not stuck:
            return
        with _Blocked(self):
            while stuck and not (urgent is not None and urgent()):
                stuck[0].await_next(_LOOK_S)
                stuck = self._stuck()


class _Blocked:
    """Counts the time inside as blocked."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def __enter__(self) -> None:
        self._outbox._blocked_since_s = self._outbox._clock()

    def __exit__(self, *_: object) -> None:
        since_s, self._outbox._blocked_since_s = self._outbox._blocked_since_s, None
        assert since_s is not None
        self._outbox._blocked_s += self._outbox._clock() - since_s


def _cut(rows: pa.RecordBatch, size_bytes: int, piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """In pieces of about ``piece_bytes`` at most, of about the same number of rows."""
    pieces = min(-(-size_bytes // max(1, piece_bytes)), rows.num_rows)
    if pieces <= 1:
        yield rows
        return
    step = -(-rows.num_rows // pieces)
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)
