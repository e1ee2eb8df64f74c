"""Channels between slots, played: the real inboxes and credits, and a network between them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from statebackend.continuous.exchange.channel import ChannelSender
from statebackend.continuous.exchange.channel_messages import Address, Identity
from statebackend.continuous.exchange.elements import Element
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.errors import PeerLostError, StaleRequestError, StateBackendError
from tests.sim.kernel import Process, current

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.continuous.world import World

__all__ = ["PlayedClient", "PlayedServer"]

_LOOK_S = 0.02
_TRIES = 200


class PlayedServer:
    """A slot's end: who may send to it, and where that goes."""

    def __init__(self, world: World, process: Process, identity: Identity) -> None:
        self._world, self.process, self.identity = world, process, identity
        self.location = process.name
        self.expected: dict[Address, tuple[Inbox, int]] = {}
        self.closed = False
        world.exchanges[self.location] = self

    def expect(self, address: Address, inbox: Inbox, channel: int) -> None:
        """As the real one."""
        self.expected[address] = inbox, channel

    def close(self) -> bool:
        """As the real one."""
        self.closed = True
        self._world.exchanges.pop(self.location, None)
        return True


class PlayedClient:
    """A slot's connections to the others."""

    def __init__(self, world: World, process: Process, identity: Identity) -> None:
        self._world, self._process, self._identity = world, process, identity
        self._channels: list[_Played] = []

    def connect(self, location: str, address: Address, certificate: bytes = b"") -> _Played:
        """As the real one."""
        for _ in range(_TRIES):
            current().sched.pause(_LOOK_S)
            peer = self._world.exchanges.get(location)
            if peer is None or peer.closed or peer.process.dead:
                raise PeerLostError(f"Nobody is at {location}.")
            if peer.identity != self._identity:
                raise StaleRequestError(f"At {location} is another run.")
            found = peer.expected.pop(address, None)
            if found is not None:
                channel = _Played(self._world, self._process, peer.process, *found)
                self._channels.append(channel)
                return channel
        raise StaleRequestError(f"Nobody expects {address} at {location}.")

    def close(self) -> None:
        """As the real one."""
        for channel in self._channels:
            channel.close()


class _Played(ChannelSender):
    """One channel, in order; who sends and who receives learn of each other's end a while later."""

    def __init__(
        self, world: World, here: Process, there: Process, inbox: Inbox, channel: int
    ) -> None:
        super().__init__(inbox.capacity_bytes, world.system_of(here).threads)
        self._world, self._here, self._there = world, here, there
        self._inbox, self._channel = inbox, channel
        self._last_s = 0.0
        self._on_its_way: deque[Callable[[], Any]] = deque()  # on its way
        self._closed = False
        inbox.attach(channel, self)
        here.at_death.append(lambda: self._arrive(self._lost))
        there.at_death.append(lambda: self.hang_up(PeerLostError("The receiver is gone.")))

    def grant(self, freed_bytes: int) -> None:
        self._back(lambda: self._credits.grant(freed_bytes))

    def hang_up(self, error: StateBackendError) -> None:
        self._back(lambda: self.fail(error))

    def begin_close(self) -> None:
        """Nothing to be said."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._arrive(self._lost)
            self.fail(PeerLostError("The channel is closed."))

    def _lost(self) -> None:
        self._inbox.lost(self._channel, PeerLostError("The sender of a channel is gone."))

    def _transmit(self, element: Element, cost: int) -> None:
        def put() -> None:
            try:
                self._inbox.put(self._channel, element, cost)
            except StateBackendError as error:
                self.hang_up(error)

        self._arrive(put)

    def _arrive(self, what: Callable[[], Any]) -> None:
        """At the receiver, behind what was sent before, also if that one was frozen meanwhile."""
        sched = self._world.sched
        hop_s = self._world.config.hop_s * (0.5 + sched.random.random())
        self._last_s = max(self._last_s, sched.now_s + hop_s)
        self._on_its_way.append(what)
        sched.spawn(self._there, lambda: self._on_its_way.popleft()(), self._last_s - sched.now_s)

    def _back(self, what: Callable[[], Any]) -> None:
        self._world.sched.spawn(self._here, what, self._world.config.hop_s)
