"""Heartbeats of a process's streams: who is not heard of for too long is taken for gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from statebackend import system
from statebackend.errors import SettingError

__all__ = ["HEARTBEAT_S", "SILENCE_S", "Pulse", "Stream"]

HEARTBEAT_S = 1.0
"""A stream is silent for no longer than about that."""

SILENCE_S = 10.0
"""A peer that is silent for so long is taken for gone. A killed one is noticed at once."""


class Stream(Protocol):
    """One end of a stream."""

    heard_s: float
    """When the other end was last heard, by the pulse's clock."""

    def beat(self) -> None:
        """Say that this end is there; may wait, if the other end stands still."""

    def silent(self, for_s: float) -> None:
        """The other end has not been heard of for so long. Must not wait."""


class Pulse:
    """Two threads for all streams of a server, or of a client: one listens, one beats.

    They are two, as a beat may wait for just the peer that must be found to stand still.

    Args:
        heartbeat_s: how often it looks, and says that it is there.
        silence_s: how long a peer may be silent.
        clock: seconds that never go backwards.

    Raises:
        SettingError: nobody could be heard in time.
    """

    def __init__(
        self,
        name: str,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = system.monotonic_s,
    ) -> None:
        if not 0 < 2 * heartbeat_s <= silence_s:
            raise SettingError(
                f"A silence of {silence_s} s is too short for a heartbeat of {heartbeat_s} s.",
                todo="Let it be at least two heartbeats.",
            )
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._clock = clock
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, name=name, daemon=True),
            threading.Thread(target=self._beat, name=f"{name}-beat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, stream: Stream) -> None:
        """See to a stream from now on."""
        stream.heard_s = self._clock()
        with self._lock:
            self._streams.add(stream)

    def remove(self, stream: Stream) -> None:
        """No longer."""
        with self._lock:
            self._streams.discard(stream)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the threads; one that waits for a peer that stands still is left to itself."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)

    def listen(self, now_s: float, *, late: bool = False) -> None:
        """One look at all streams.

        Args:
            late: this process itself stood still: what others said may only not have been read.
        """
        for stream in self._all():
            if late:
                stream.heard_s = now_s
            silent_s = now_s - stream.heard_s
            if silent_s > self._silence_s:
                self.remove(stream)
                stream.silent(silent_s)

    def _all(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)

    def _listen(self) -> None:
        last_s = self._clock()
        while not self._stop.wait(self._heartbeat_s):
            now_s = self._clock()
            self.listen(now_s, late=now_s - last_s > self._silence_s / 2 + self._heartbeat_s)
            last_s = now_s

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            for stream in self._all():
                stream.beat()
