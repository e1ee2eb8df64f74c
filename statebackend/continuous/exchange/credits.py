"""What a sender may still send, counted in bytes; granted by the receiver."""

from __future__ import annotations

from statebackend.errors import ProtocolError, StateBackendError
from statebackend.threads import THREADS, Threads

__all__ = ["Credits", "again"]


class Credits:
    """The credit of one channel at its sender: 0 to the channel's capacity.

    One thread takes; any thread grants, or fails it.
    """

    def __init__(self, capacity_bytes: int, threads: Threads = THREADS) -> None:
        self.capacity_bytes = capacity_bytes
        self._available_bytes = capacity_bytes
        self._failure: StateBackendError | None = None
        self._changed = threads.condition()

    @property
    def available_bytes(self) -> int:
        """What may be sent now."""
        return self._available_bytes

    @property
    def failure(self) -> StateBackendError | None:
        """Why nothing may be sent any more."""
        return self._failure

    def try_take(self, cost: int) -> bool:
        """Take `cost` if there is so much.

        Raises:
            StateBackendError: the channel has failed.
        """
        with self._changed:
            self._check()
            if self._available_bytes < cost:
                return False
            self._available_bytes -= cost
            return True

    def take(self, cost: int) -> None:
        """Take `cost`; wait until there is so much.

        Raises:
            StateBackendError: the channel has failed, before or meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._enough(cost))
            self._check()
            self._available_bytes -= cost

    def wait(self, cost: int, timeout_s: float) -> bool:
        """Whether `cost` can be taken, now or within `timeout_s`; nothing is taken.

        Raises:
            StateBackendError: as `take`.
        """
        with self._changed:
            enough = self._enough(cost)
            if not enough and timeout_s > 0:
                enough = self._changed.wait_for(lambda: self._enough(cost), timeout_s)
            self._check()
            return enough

    def grant(self, freed_bytes: int) -> None:
        """The receiver has room for so much more.

        Raises:
            ProtocolError: for more than was ever taken from it.
        """
        with self._changed:
            if not 0 <= freed_bytes <= self.capacity_bytes - self._available_bytes:
                raise ProtocolError(
                    f"A credit of {freed_bytes} bytes on top of {self._available_bytes} is more "
                    f"than the channel's {self.capacity_bytes}.",
                    todo="Install the same statebackend release on driver and executors.",
                )
            self._available_bytes += freed_bytes
            self._changed.notify_all()

    def fail(self, error: StateBackendError) -> bool:
        """Wake whoever waits, with `error`; whether it is the first."""
        with self._changed:
            if self._failure is not None:
                return False
            self._failure = error
            self._changed.notify_all()
            return True

    def _enough(self, cost: int) -> bool:
        return self._failure is not None or self._available_bytes >= cost

    def _check(self) -> None:
        if self._failure is not None:
            raise again(self._failure)


def again(error: StateBackendError) -> StateBackendError:
    """A new one of the same: what several threads raise must not share a traceback."""
    return type(error)(error.what, todo=error.todo)
