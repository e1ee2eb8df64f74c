"""A process of a continuous job: its pools do what they are given beside the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit

from tests.sim.kernel import Process, Scheduler
from tests.sim.threads import Future, Pool, Semaphore, SimSystem, SimThreads

__all__ = ["JobSystem"]

_BEGAN_MS = 1_700_000_000_000


class _Beside(Pool):
    """So many threads for calls that may wait."""

    def __init__(self, sched: Scheduler, process: Process, workers: int) -> None:
        super().__init__()
        self._sched, self._process, self._free = sched, process, Semaphore(workers)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        future = Future()

        def run() -> None:
            self._free.acquire()
            try:
                future.set_result(call(*arguments))
            except GreenletExit:
                raise
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._free.release()

        self._sched.spawn(self._process, run)
        return future


class _Threads(SimThreads):
    def pool(self, workers: int = 1, name: str = "") -> Pool:  # type: ignore[override]
        return _Beside(self._sched, self._process, workers)


class JobSystem(SimSystem):
    """One process. ``ahead_ms``: how far its wall clock is from the others'."""

    def __init__(self, sched: Scheduler, process: Process) -> None:
        super().__init__(sched, process)
        self.threads = _Threads(sched, process)
        self.ahead_ms = 0

    def wall_ms(self) -> int:
        return _BEGAN_MS + int(self._sched.now_s * 1000) + self.ahead_ms
