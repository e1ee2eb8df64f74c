"""Inbox and local channels, called in any order, against the simplest thing that could be right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snapshot.barriers.barrier import Barrier
from statebackend.continuous.exchange.channel import LocalChannel
from statebackend.continuous.exchange.elements import Element, cost_of
from statebackend.continuous.exchange.inbox import Inbox
from tests.continuous.exchange.peers import rows

CHANNELS, CAPACITY = 3, 16 << 10
CHANNEL = st.integers(0, CHANNELS - 1)


class Exchange(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[tuple[int, object]] = []
        self.inbox = Inbox(CHANNELS, capacity_bytes=CAPACITY, on_arrival=self.arrived)
        self.senders = [LocalChannel(self.inbox, i) for i in range(CHANNELS)]
        self.queues: list[list[Element]] = [[] for _ in range(CHANNELS)]
        self.blocked: set[int] = set()
        self.unannounced: list[tuple[int, object]] = []
        self.served_since: dict[int, set[int]] = {}
        self.number = 0

    def arrived(self, channel: int, event: object, ahead: int, ahead_bytes: int) -> None:
        assert self.unannounced.pop(0) == (channel, event)
        before = self.queues[channel][: self.queues[channel].index(event)]  # type: ignore[arg-type]
        batches = [element for element in before if not isinstance(element, Barrier)]
        assert (ahead, ahead_bytes) == (len(batches), sum(one.nbytes for one in batches))

    @rule(channel=CHANNEL, count=st.integers(1, 400))
    def send(self, channel: int, count: int) -> None:
        self.number += count
        batch = rows(self.number, count)
        room = self.senders[channel].available_bytes >= cost_of(batch, CAPACITY)
        assert self.senders[channel].offer(batch) == room
        if room:
            self.queues[channel].append(batch)

    @rule(channel=CHANNEL)
    def barrier(self, channel: int) -> None:
        self.number += 1
        event = Barrier(checkpoint=self.number, stamp_ms=0)
        assert self.senders[channel].offer(event)
        self.queues[channel].append(event)
        self.unannounced.append((channel, event))

    @rule()
    def poll(self) -> None:
        ready = {i for i, q in enumerate(self.queues) if q and i not in self.blocked}
        taken = self.inbox.poll(0)
        assert self.unannounced == []
        if not ready:
            assert taken is None
            return
        assert taken is not None
        channel, element = taken
        assert channel in ready
        assert self.queues[channel].pop(0) == element
        # Nobody is served twice while another, ready all the time, is not.
        for other in list(self.served_since):
            if other not in ready or other == channel:
                del self.served_since[other]
        for other in ready - {channel}:
            served = self.served_since.setdefault(other, set())
            assert channel not in served
            served.add(channel)

    @rule(channel=CHANNEL)
    def block(self, channel: int) -> None:
        self.inbox.block(channel)
        self.blocked.add(channel)
        self.served_since.pop(channel, None)

    @precondition(lambda self: self.blocked)
    @rule(channel=CHANNEL)
    def unblock(self, channel: int) -> None:
        self.inbox.unblock(channel)
        self.blocked.discard(channel)

    @invariant()
    def credits_add_up(self) -> None:
        for i, sender in enumerate(self.senders):
            costs = sum(cost_of(element, CAPACITY) for element in self.queues[i])
            assert self.inbox.queued_bytes(i) == costs
            withheld = CAPACITY - sender.available_bytes - costs
            assert 0 <= withheld < CAPACITY // 4
            assert self.inbox.queued(i) == len(self.queues[i])


Exchange.TestCase.settings = settings(deadline=None)
TestExchange = Exchange.TestCase
