"""Jobs in the background, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from statebackend.threads import THREADS, Future, Threads

__all__ = ["WorkQueue"]

_IDLE_S: Final = 5.0


class WorkQueue:
    """Runs jobs one after the other in a thread that does not keep the process alive.

    The thread ends when there was nothing to do for a while. At the process's exit what is queued
    is waited for, for a bounded time: a store that is down must not keep a driver from ending.
    """

    def __init__(self, name: str, threads: Threads = THREADS) -> None:
        self._name, self._threads = name, threads
        self._queue: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._last: Future[None] | None = None
        self._working = False
        self._changed = threads.condition()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Have it run after those before it."""
        future: Future[None] = self._threads.future()
        with self._changed:
            if not self._working:
                self._threads.start(self._work, self._name)
                self._working = True
                self._threads.drain_at_exit(self)
            self._queue.append((future, job))
            self._last = future
            self._changed.notify()
        return future

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was submitted so far has ended, well or not; whether it has."""
        last = self._last
        return last is None or self._threads.wait([last], timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._changed.wait(_IDLE_S)
                if not self._queue:
                    self._working = False
                    return
                future, job = self._queue.popleft()
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del future, job  # a run must not be kept alive by its last commit
