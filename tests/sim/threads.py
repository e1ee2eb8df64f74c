"""A process of the simulation, as what real code stands on: `statebackend.system.System`.

Threads are actors, waits are the scheduler's, time is virtual, ids are drawn in order. A lock is
free at once or the actor parks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from queue import Empty
from types import TracebackType
from typing import Any
from uuid import UUID

from greenlet import getcurrent

from statebackend.errors import StateBackendError
from tests.sim.clocks import WallClock
from tests.sim.kernel import Actor, Process, Scheduler, TimedOutError, current

__all__ = ["Event", "Future", "SimSystem", "SimThreads"]

_JOIN_S = 0.05


class _Waiters:
    """Actors that wait for one thing, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Actor, int]] = []

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken; False where that took too long."""
        actor = current()
        self._waiting.append((actor, actor.wait))
        try:
            actor.sched.park(timeout_s)
        except TimedOutError:
            return False
        return True

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for actor, number in waiting:
            actor.sched.wake(actor, number)


class Lock:
    """As ``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._held:
            if not blocking or not self._waiters.park(None if timeout < 0 else timeout):
                return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiters._waiting:
            self._waiters.wake()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        if self._held:
            self.acquire()
        self._held = True
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Event:
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._waiters = _Waiters()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.park(timeout)
        return self._set


class Condition:
    """As ``threading.Condition``, with a lock of its own."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiters = _Waiters()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()

    def acquire(self) -> bool:
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        try:
            return self._waiters.park(timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Each wait has the whole of the time: nobody here is woken in vain."""
        while not (found := predicate()):
            if not self.wait(timeout):
                return predicate()
        return found

    def notify(self) -> None:
        self._waiters.wake()

    notify_all = notify


class Semaphore:
    """As ``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        while not self._value:
            if not blocking:
                return False
            if not self._waiters.park(timeout):
                return False
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        self._waiters.wake()


class Future:
    """As ``concurrent.futures.Future``, as far as it is used."""

    def __init__(self) -> None:
        self._done = False
        self._error: BaseException | None = None
        self._value: Any = None
        self._calls: list[Callable[[Future], object]] = []
        self._waiters = _Waiters()

    def done(self) -> bool:
        return self._done

    def cancel(self) -> bool:
        return False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except BaseException:
            if not self._done:
                raise
        return self._error

    def add_done_callback(self, call: Callable[[Future], object]) -> None:
        if self._done:
            call(self)
        else:
            self._calls.append(call)

    def set_result(self, value: Any) -> None:
        self._done, self._value = True, value
        self._ended()

    def set_exception(self, error: BaseException) -> None:
        self._done, self._error = True, error
        self._ended()

    def _ended(self) -> None:
        self._waiters.wake()
        calls, self._calls = self._calls, []
        for call in calls:
            call(self)

    def result(self, timeout: float | None = None) -> Any:
        while not self._done:
            if not self._waiters.park(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


def _all_done(futures: Iterable[Future], timeout_s: float | None) -> bool:
    """As ``concurrent.futures.wait``: whether all came to their end in time."""
    known = list(futures)
    for future in known:
        if not future.done():
            now_s = current().sched.now_s
            if not future._waiters.park(timeout_s):
                break
            if timeout_s is not None:
                timeout_s = max(0.0, timeout_s - (current().sched.now_s - now_s))
    return all(future.done() for future in known)


class Queue:
    """As ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters = _Waiters()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiters.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items:
            if not block or not self._waiters.park(timeout):
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)


class Pool:
    """As ``ThreadPoolExecutor``: one after the other, each of them may wait."""

    def __init__(self, workers: int = 1, name: str = "") -> None:
        assert getcurrent() is not None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        future = Future()
        try:
            future.set_result(call(*arguments))
        except StateBackendError as error:
            future.set_exception(error)
        return future

    def map(self, call: Callable[[Any], Any], wanted: Collection[Any]) -> Iterator[Any]:
        return iter([call(one) for one in wanted])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        return None


class Thread:
    """An actor of the process that started it."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._sched = actor.sched

    def is_alive(self) -> bool:
        return not self._actor.ended

    def join(self, timeout: float | None = None) -> None:
        until_s = None if timeout is None else self._sched.now_s + timeout
        while self.is_alive() and (until_s is None or self._sched.now_s < until_s):
            self._sched.pause(_JOIN_S)


class SimThreads:
    """The threads of one process: `statebackend.threads.Threads`."""

    lock, event, condition, semaphore = Lock, Event, Condition, Semaphore
    future, queue, pool = Future, Queue, Pool

    def __init__(self, sched: Scheduler, process: Process) -> None:
        self._sched, self._process = sched, process

    def start(self, run: Callable[[], Any], name: str) -> Thread:
        return Thread(self._sched.spawn(self._process, run))

    def wait(self, futures: Iterable[Future], timeout_s: float | None = None) -> bool:
        return _all_done(futures, timeout_s)

    def drain_at_exit(self, one: Any) -> None:
        """Processes of the simulation end as by SIGKILL."""


class SimSystem:
    """One process: `statebackend.system.System`. Its host's clock may be wrong."""

    def __init__(self, sched: Scheduler, process: Process, clock: WallClock | None = None) -> None:
        self._sched, self._process = sched, process
        self._clock = clock or WallClock()
        self.threads = SimThreads(sched, process)
        self.new_id = sched.new_id
        self.sleep_s = sched.pause

    def monotonic_s(self) -> float:
        return self._sched.now_s

    def wall_ms(self) -> int:
        return self._clock.wall_ms(self._sched.now_s)

    def new_uuid(self) -> str:
        return str(UUID(self._sched.new_id().rjust(32, "0")))

    def new_secret(self) -> str:
        return f"secret {self._sched.new_id()}"

    def draw(self) -> float:
        return self._sched.random.random()

    def process_name(self) -> str:
        return self._process.name

    def host_name(self) -> str:
        return self._process.name.partition(".")[0]

    executor_name = process_name

    def unhurried_collector(self) -> AbstractContextManager[None]:
        return nullcontext()
