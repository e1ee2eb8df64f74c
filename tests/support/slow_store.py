"""A store that is far away: every call takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from snapshot.storage.object_store import ObjectStore
from snapshot.storage.passing_store import PassingStore
from statebackend.errors import SettingError

__all__ = ["SlowStore"]

Result = TypeVar("Result")


class SlowStore(PassingStore):
    """Waits before and after each call to `inner`, as long as a network would take.

    Half of the latency and the way out before the call, the rest after it. Calls do not share the
    bandwidth: each has it for itself, as connections to S3 do.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        sleep_s: Callable[[float], None],
        latency_s: float = 0.0,
        bytes_per_s: float = 0.0,
    ) -> None:
        """Decorate a store.

        Args:
            inner: the store.
            sleep_s: waits that many seconds, of whatever clock; not called for none.
            latency_s: of each call, there and back.
            bytes_per_s: of each call; 0: unlimited.

        Raises:
            SettingError: a negative number.
        """
        super().__init__(inner)
        if latency_s < 0 or bytes_per_s < 0:
            raise SettingError(
                f"A latency of {latency_s} s at {bytes_per_s} bytes/s is refused.",
                todo="Give numbers that are not negative.",
            )
        self._sleep_s = sleep_s
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    def _around(
        self,
        verb: str,
        name: str,
        sent_bytes: int,
        call: Callable[[], Result],
        received_bytes: Callable[[Result], int],
    ) -> Result:
        self._wait(self._latency_s / 2, sent_bytes)
        found = call()
        self._wait(self._latency_s / 2, received_bytes(found))
        return found

    def _stream(self, name: str, start: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        self._wait(self._latency_s, 0)
        for chunk in start():
            self._wait(0, len(chunk))
            yield chunk

    def _wait(self, latency_s: float, size_bytes: int) -> None:
        way_s = size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        if latency_s + way_s > 0:
            self._sleep_s(latency_s + way_s)
