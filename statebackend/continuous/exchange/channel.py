"""The sending end of a channel; and the channel that stays within the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import pyarrow as pa

from snapshot.barriers.barrier import EndOfInput
from statebackend.continuous.exchange.credits import Credits
from statebackend.continuous.exchange.elements import Element, check_capacity, compact, cost_of
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.errors import PeerLostError, StateBackendError, UsageError
from statebackend.threads import THREADS, Threads

__all__ = ["ChannelSender", "LocalChannel"]


class ChannelSender(ABC):
    """What is sent arrives once and in order, or the receiver fails.

    One thread sends; any thread may `fail` it, which wakes that one.
    """

    def __init__(self, capacity_bytes: int, threads: Threads = THREADS) -> None:
        self.capacity_bytes = check_capacity(capacity_bytes)
        self.sent = 0
        """Elements sent so far."""
        self.sent_bytes = 0
        """What they cost."""
        self._credits = Credits(capacity_bytes, threads)
        self._watchers: list[Callable[[StateBackendError], None]] = []
        self._ended = False

    @property
    def available_bytes(self) -> int:
        """The credit there is; never below 0, never above the capacity."""
        return self._credits.available_bytes

    @property
    def failure(self) -> StateBackendError | None:
        """Why nothing can be sent any more."""
        return self._credits.failure

    def offer(self, element: Element) -> bool:
        """Send if there is credit for it; whether it was sent.

        Raises:
            StateBackendError: the channel has failed.
        """
        cost = self._cost(element)
        if not self._credits.try_take(cost):
            return False
        self._sent(element, cost)
        return True

    def send(self, element: Element) -> None:
        """Send; wait for credit.

        Raises:
            StateBackendError: the channel has failed, before or meanwhile.
        """
        cost = self._cost(element)
        self._credits.take(cost)
        self._sent(element, cost)

    def ready(self, cost: int, timeout_s: float = 0.0) -> bool:
        """Whether there is credit of so many bytes, now or within `timeout_s`.

        Raises:
            StateBackendError: the channel has failed, before or meanwhile.
        """
        return self._credits.wait(cost, timeout_s)

    def watch(self, on_failure: Callable[[StateBackendError], None]) -> None:
        """Have `on_failure` called, in any thread, when the channel fails, or now if it has."""
        self._watchers.append(on_failure)
        if self.failure is not None:
            on_failure(self.failure)

    def fail(self, error: StateBackendError) -> None:
        """Nothing can be sent any more; the first error counts.

        After the end was sent it means nothing: a receiver may well be done before others are.
        """
        if not self._ended and self._credits.fail(error):
            for on_failure in self._watchers:
                on_failure(error)

    @abstractmethod
    def begin_close(self) -> None:
        """Say that nothing more is sent; for many at once, before each is closed. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the channel. Before its `EndOfInput` was sent, its receiver fails."""

    @abstractmethod
    def _transmit(self, element: Element, cost: int) -> None:
        """Bring it to the receiver; the credit for it is taken."""

    def _cost(self, element: Element) -> int:
        if self._ended:
            raise UsageError("An element after the end of a channel.", todo="Send the end last.")
        return cost_of(element, self.capacity_bytes)

    def _sent(self, element: Element, cost: int) -> None:
        # Before it goes: the receiver may hang up as soon as it has it.
        self._ended = isinstance(element, EndOfInput)
        self._transmit(element, cost)
        self.sent += 1
        self.sent_bytes += cost


class LocalChannel(ChannelSender):
    """Hands elements over to an inbox of this process.

    Raises:
        UsageError: the inbox's channel has a sender.
        PeerLostError: the inbox is closed.
    """

    def __init__(self, inbox: Inbox, channel: int) -> None:
        super().__init__(inbox.capacity_bytes, inbox.threads)
        self._inbox = inbox
        self._channel = channel
        self._closed = False
        inbox.attach(channel, self)

    def grant(self, freed_bytes: int) -> None:
        """As the inbox frees it."""
        self._credits.grant(freed_bytes)

    def hang_up(self, error: StateBackendError) -> None:
        """The inbox is closed."""
        self.fail(error)

    def begin_close(self) -> None:
        """As in `ChannelSender`: nobody needs to be told."""

    def close(self) -> None:
        """As in `ChannelSender`."""
        if self._closed:
            return
        self._closed = True
        error = PeerLostError(
            "A sender of this process let go of its channel before the channel's end.",
            todo="The job goes on from its last complete checkpoint; see the sender's own error.",
        )
        self._inbox.lost(self._channel, error)
        self.fail(error)

    def _transmit(self, element: Element, cost: int) -> None:
        rows = compact(element) if isinstance(element, pa.RecordBatch) else element
        self._inbox.put(self._channel, rows, cost)
