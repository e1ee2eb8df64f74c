"""What a subtask reads: all its input channels, one element at a time, in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import pyarrow as pa

from snapshot.barriers.barrier import Barrier, EndOfInput
from statebackend.continuous.exchange.credits import again
from statebackend.continuous.exchange.elements import (
    FREE_EVENTS_MAX,
    Element,
    check_capacity,
)
from statebackend.errors import PeerLostError, ProtocolError, StateBackendError, UsageError
from statebackend.threads import THREADS, Threads

__all__ = ["Inbox", "OnArrival", "Upstream"]

OnArrival = Callable[[int, Barrier | EndOfInput, int, int], None]
"""Channel, the barrier or end that arrived in it, batches ahead of it there, and their bytes."""


class Upstream(Protocol):
    """The sending end of a channel, as its receiver sees it. Neither call may wait."""

    def grant(self, freed_bytes: int) -> None:
        """There is room for so much more."""

    def hang_up(self, error: StateBackendError) -> None:
        """Nobody reads any more."""


class _Channel:
    __slots__ = ("blocked", "ended", "free", "freed_bytes", "queue", "queued_bytes", "up", "waits")

    def __init__(self) -> None:
        self.queue: deque[tuple[Element, int]] = deque()
        self.queued_bytes = 0  # by what the elements cost
        self.free = 0  # elements that cost nothing
        self.freed_bytes = 0  # taken, and not granted yet
        self.blocked = False
        self.waits = False  # for its turn, in the inbox's `_turns`
        self.ended = False  # its last element has arrived
        self.up: Upstream | None = None


class Inbox:
    """The queues of a subtask's input channels; as many as it has, over all its inputs.

    One thread reads: it polls, blocks and unblocks. Any thread puts, fails and closes. A channel
    holds at most ``capacity_bytes`` (and so at most ``capacity_bytes / ELEMENT_BYTES`` elements),
    but for a row that is larger than half of that: see `elements.cost_of`. Its sender is granted
    again what the reader takes, by the quarter of the capacity.

    Args:
        channels: how many.
        capacity_bytes: of each.
        on_arrival: called for each barrier and end that is in a queue and was not there before;
            in the thread that polls, before the next element is taken, so never for what was
            taken already. It may block and unblock, not poll.
        threads: by which its reader waits, and the senders of this process.

    Raises:
        SettingError: the capacity is too small.
    """

    def __init__(
        self,
        channels: int,
        *,
        capacity_bytes: int,
        on_arrival: OnArrival | None = None,
        threads: Threads = THREADS,
    ) -> None:
        self.threads = threads
        self.capacity_bytes = check_capacity(capacity_bytes)
        self.on_arrival = on_arrival
        self._channels = [_Channel() for _ in range(channels)]
        self._turns: deque[int] = deque()
        self._arrivals: deque[tuple[int, Barrier | EndOfInput]] = deque()
        self._grant_bytes = capacity_bytes // 4
        self._failure: StateBackendError | None = None
        self._closed = False
        self._read = False  # something was taken
        self._changed = threads.condition()

    # --- the sending side

    def attach(self, channel: int, upstream: Upstream) -> None:
        """Say who sends into a channel; once.

        Raises:
            UsageError: somebody else does.
            PeerLostError: the inbox is closed.
        """
        with self._changed:
            if self._closed:
                raise _hung_up()
            one = self._channels[channel]
            if one.up is not None:
                raise UsageError(
                    f"Channel {channel} has a sender.", todo="Give each sender one of its own."
                )
            one.up = upstream

    def preload(self, channel: int, rows: Sequence[pa.RecordBatch]) -> None:
        """Put rows that were in a channel when its snapshot was taken ahead of all that comes.

        They cost no credit. Senders may be there already, and what they have sent.

        Raises:
            UsageError: something was taken out of the inbox before.
        """
        with self._changed:
            one = self._channels[channel]
            if self._read or self._closed:
                raise UsageError(
                    f"Rows for channel {channel} of an inbox that is being read.",
                    todo="Put back what was under way before the inbox is polled.",
                )
            one.queue.extendleft((batch, 0) for batch in reversed(rows))
            if one.queue and not one.waits and not one.blocked:
                one.waits = True
                self._turns.append(channel)

    def put(self, channel: int, element: Element, cost: int) -> None:
        """Add to the end of a channel; never waits.

        Args:
            cost: the credit that was taken for it.

        Raises:
            ProtocolError: it came without credit.
            PeerLostError: the inbox is closed.
        """
        with self._changed:
            if self._closed:
                raise _hung_up()
            one = self._channels[channel]
            if one.ended:
                raise ProtocolError("An element after its channel's end.")
            # What is taken, but not granted yet, is not the sender's to use.
            in_use_bytes = one.queued_bytes + one.freed_bytes + cost
            # Rows that cost nothing were there before: see `preload`.
            free = one.free + (not cost and not isinstance(element, pa.RecordBatch))
            if in_use_bytes > self.capacity_bytes or free > FREE_EVENTS_MAX:
                raise ProtocolError(
                    f"{in_use_bytes} bytes and {free} events would be in a channel of "
                    f"{self.capacity_bytes} bytes: its sender goes beyond its credit.",
                    todo="Install the same statebackend release on driver and executors.",
                )
            one.queue.append((element, cost))
            one.queued_bytes += cost
            one.free = free
            one.ended = isinstance(element, EndOfInput)
            if self.on_arrival is not None and isinstance(element, Barrier | EndOfInput):
                self._arrivals.append((channel, element))
            if not one.blocked and not one.waits:
                one.waits = True
                self._turns.append(channel)
            self._changed.notify()

    def lost(self, channel: int, error: StateBackendError) -> None:
        """The channel's sender is gone; a failure unless its end has arrived."""
        with self._changed:
            ended = self._channels[channel].ended
        if not ended:
            self.fail(error)

    def fail(self, error: StateBackendError) -> None:
        """Have every poll from now on raise `error`; the first one counts."""
        with self._changed:
            if self._failure is None and not self._closed:
                self._failure = error
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is there; whoever sends more is told that nobody reads."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            ups = [one.up for one in self._channels if one.up is not None]
            for one in self._channels:
                one.queue.clear()
                one.queued_bytes = one.free = 0
            self._turns.clear()
            self._arrivals.clear()
            self._changed.notify_all()
        for up in ups:
            up.hang_up(_hung_up())

    # --- the reader's side

    def poll(self, timeout_s: float | None) -> tuple[int, Element] | None:
        """The next element, and its channel; channels that are not blocked take turns.

        Args:
            timeout_s: how long to wait for one; None: until there is one.

        Returns:
            None after `timeout_s`; also after calls of `on_arrival` when there is no element
            then, as the caller may have other deadlines now.

        Raises:
            StateBackendError: the inbox has failed. What had arrived before is not given out.
            UsageError: it is closed.
        """
        announced = False
        while True:
            announced |= self._announce()
            with self._changed:
                if not announced and timeout_s != 0 and not self._stirred():
                    self._changed.wait_for(self._stirred, timeout_s)
                if self._failure is not None:
                    raise again(self._failure)
                if self._closed:
                    raise UsageError("The inbox is closed.", todo="Poll it before it is closed.")
                if not self._arrivals:
                    return self._taken()

    def announce(self) -> bool:
        """Call `on_arrival` as `poll` does, and take nothing; whether there was something new.

        Raises:
            StateBackendError: the inbox has failed.
        """
        announced = self._announce()
        if self._failure is not None:
            raise again(self._failure)
        return announced

    @property
    def unannounced(self) -> Barrier | None:
        """The first barrier that has arrived and is not announced; in the thread that polls."""
        with self._changed:
            found = (event for _, event in self._arrivals if isinstance(event, Barrier))
            return next(found, None)

    def _stirred(self) -> bool:
        return bool(self._turns or self._arrivals or self._failure is not None or self._closed)

    def _announce(self) -> bool:
        """Whether there was something to announce."""
        if self.on_arrival is None or not self._arrivals:
            return False
        while True:
            with self._changed:
                if not self._arrivals or self._failure is not None:
                    return True
                channel, event = self._arrivals.popleft()
                number = event.checkpoint if isinstance(event, Barrier) else None
                ahead = self._batches_before(channel, number)
            self.on_arrival(channel, event, len(ahead), sum(rows.nbytes for rows in ahead))

    def _taken(self) -> tuple[int, Element] | None:
        """With the lock held, which is let go for a grant."""
        if not self._turns:
            return None
        self._read = True
        channel = self._turns.popleft()
        return channel, self._take(channel)

    def _take(self, channel: int) -> Element:
        one = self._channels[channel]
        element, cost = one.queue.popleft()
        one.queued_bytes -= cost
        one.free -= not cost and not isinstance(element, pa.RecordBatch)
        one.waits = bool(one.queue)
        if one.waits:
            self._turns.append(channel)
        one.freed_bytes += cost
        if one.freed_bytes >= self._grant_bytes and one.up is not None:
            freed, one.freed_bytes = one.freed_bytes, 0
            self._changed.release()
            try:
                one.up.grant(freed)
            finally:
                self._changed.acquire()
        return element

    def more(self, channels: Container[int], size_bytes: int) -> list[tuple[int, pa.RecordBatch]]:
        """Rows that are next in some channels, of so many bytes together at most; never waits.

        Channels take turns. Events stay where they are, and nothing is announced: this is for who
        has just been given rows by `poll`, and takes those that wait in one go.
        """
        found: list[tuple[int, pa.RecordBatch]] = []
        with self._changed:
            while self._failure is None and (channel := self._next(channels, size_bytes)) >= 0:
                self._turns.remove(channel)
                rows = self._take(channel)
                assert isinstance(rows, pa.RecordBatch)
                found.append((channel, rows))
                size_bytes -= rows.nbytes
        return found

    def _next(self, channels: Container[int], size_bytes: int) -> int:
        """Whose turn it is of those that have rows next, -1 if nobody's, or they are too large."""
        for channel in self._turns:
            rows = self._channels[channel].queue[0][0]
            if channel in channels and isinstance(rows, pa.RecordBatch):
                return channel if rows.nbytes <= size_bytes else -1
        return -1

    def block(self, channel: int) -> None:
        """Give nothing more out of a channel. It still fills, and then blocks its sender."""
        with self._changed:
            one = self._channels[channel]
            one.blocked = True
            if one.waits:
                one.waits = False
                self._turns.remove(channel)

    def unblock(self, channel: int) -> None:
        """Give out of a channel again."""
        with self._changed:
            one = self._channels[channel]
            one.blocked = False
            if one.queue and not one.waits:
                one.waits = True
                self._turns.append(channel)

    def ahead_of(self, channel: int, checkpoint: int) -> list[pa.RecordBatch]:
        """The rows that are in a channel before an attempt's barrier; they stay there.

        All that are in it, if that barrier is not (yet).
        """
        with self._changed:
            return self._batches_before(channel, checkpoint)

    def _batches_before(self, channel: int, checkpoint: int | None) -> list[pa.RecordBatch]:
        found: list[pa.RecordBatch] = []
        for element, _ in self._channels[channel].queue:
            if isinstance(element, pa.RecordBatch):
                found.append(element)
            elif isinstance(element, Barrier) and element.checkpoint == checkpoint:
                break
        return found

    # --- figures

    def queued_bytes(self, channel: int | None = None) -> int:
        """What waits, by what it costs: in a channel, or in all."""
        with self._changed:
            ones = self._channels if channel is None else [self._channels[channel]]
            return sum(one.queued_bytes for one in ones)

    def queued(self, channel: int | None = None) -> int:
        """Elements that wait: in a channel, or in all."""
        with self._changed:
            ones = self._channels if channel is None else [self._channels[channel]]
            return sum(len(one.queue) for one in ones)


def _hung_up() -> PeerLostError:
    return PeerLostError(
        "The receiver of a channel has closed it.",
        todo="The job goes on from its last complete checkpoint; see the error that came first.",
    )
