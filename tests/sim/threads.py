"""What real code takes for threads, locks and futures: actors, and waits of the scheduler.

`Threading` stands in for the module ``threading`` and `Future` and `wait` for those of
``concurrent.futures`` in the modules that `seams` names. A lock is free at once or the actor parks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

from greenlet import getcurrent

from statebackend.errors import StateBackendError
from tests.sim.kernel import Actor, TimedOutError, current

__all__ = ["Future", "Pool", "Threading", "wait"]


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

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        try:
            return self._waiters.park(timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        """Each wait has the whole of the time: nobody here is woken in vain."""
        while not is_so():
            if not self.wait(timeout):
                return is_so()
        return True

    def notify(self) -> None:
        self._waiters.wake()

    notify_all = notify


class Semaphore:
    """As ``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiters = _Waiters()

    def acquire(self, timeout: float | None = None) -> bool:
        while not self._value:
            if not self._waiters.park(timeout):
                return False
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        self._waiters.wake()


class Thread:
    """As ``threading.Thread``: an actor of the process that starts it."""

    def __init__(self, target: Callable[[], Any], name: str = "", daemon: bool = True) -> None:
        self._target = target

    def start(self) -> None:
        actor = current()
        actor.sched.spawn(actor.process, self._target)


class Threading:
    """In the place of the module ``threading``."""

    Lock = RLock = Lock
    Event = Event
    Condition = Condition
    Semaphore = Semaphore
    Thread = Thread


class Future:
    """As ``concurrent.futures.Future``, as far as it is used."""

    def __init__(self) -> None:
        self._done = False
        self._error: BaseException | None = None
        self._value: Any = None
        self._waiters = _Waiters()

    def done(self) -> bool:
        return self._done

    def cancel(self) -> bool:
        return False

    def set_result(self, value: Any) -> None:
        self._done, self._value = True, value
        self._waiters.wake()

    def set_exception(self, error: BaseException) -> None:
        self._done, self._error = True, error
        self._waiters.wake()

    def result(self, timeout: float | None = None) -> Any:
        while not self._done:
            if not self._waiters.park(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class _Waited(NamedTuple):
    done: set[Future]
    not_done: set[Future]


def wait(futures: Iterable[Future], timeout: float | None = None) -> _Waited:
    """As ``concurrent.futures.wait``."""
    known = list(futures)
    for future in known:
        if not future.done():
            now_s = current().sched.now_s
            if not future._waiters.park(timeout):
                break
            if timeout is not None:
                timeout = max(0.0, timeout - (current().sched.now_s - now_s))
    return _Waited({f for f in known if f.done()}, {f for f in known if not f.done()})


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
