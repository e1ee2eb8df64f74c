"""Threads, and what they wait by, as arguments: the real ones, or another's that are like them.

A class that locks, waits or starts a thread takes `Threads` and never imports ``threading``. So a
simulation can run it on a clock of its own, where waiting takes no time and every order is drawn.
What is made here is the interpreter's own (a lock is a ``threading.Lock``): it is asked for once by
an object, and costs nothing afterwards.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

__all__ = [
    "THREADS",
    "Condition",
    "Drained",
    "Event",
    "Future",
    "Lock",
    "Pool",
    "Queue",
    "Semaphore",
    "Thread",
    "Threads",
]

_EXIT_S: Final = 20.0
T = TypeVar("T")
A = TypeVar("A")


class _Held(Protocol):
    """What is entered and left."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Lock(_Held, Protocol):
    """As ``threading.Lock``."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, perhaps only if it is free (in time); whether it was taken."""

    def release(self) -> None:
        """Let others have it."""


class Event(Protocol):
    """As ``threading.Event``."""

    def is_set(self) -> bool:
        """Whether it has happened."""

    def set(self) -> None:
        """It has happened."""

    def clear(self) -> None:
        """It has not happened any more."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, perhaps for so many seconds; whether it has happened."""


class Condition(_Held, Protocol):
    """As ``threading.Condition``, with a lock of its own."""

    def acquire(self) -> bool:
        """As entering it."""

    def release(self) -> None:
        """As leaving it."""

    def wait(self, timeout: float | None = None) -> bool:
        """Let go of it until it is notified, perhaps for so many seconds; whether it was."""

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until something is so; what it is then."""

    def notify(self) -> None:
        """Wake one that waits."""

    def notify_all(self) -> None:
        """Wake all that wait."""


class Semaphore(Protocol):
    """As ``threading.Semaphore``."""

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Take one, perhaps only within so many seconds; whether it was taken."""

    def release(self) -> None:
        """Give one back."""


class Thread(Protocol):
    """One that was started."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, perhaps for so many seconds."""


class Future(Protocol[T]):
    """As ``concurrent.futures.Future``, as far as it is used."""

    def done(self) -> bool:
        """Whether it has come to an end, well or not."""

    def cancel(self) -> bool:
        """Not to be begun any more; False where it is too late."""

    def result(self, timeout: float | None = None) -> T:
        """What came of it, or the error that did."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that came of it; None: it went well."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Have it called with this future when it has come to its end, or now."""

    def set_result(self, result: T, /) -> None:
        """It went well."""

    def set_exception(self, error: BaseException | None, /) -> None:
        """It failed."""


class Queue(Protocol[T]):
    """As ``queue.SimpleQueue``."""

    def put(self, item: T, /) -> None:
        """Append something."""

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the first, perhaps within so many seconds. Raises ``queue.Empty``."""

    def get_nowait(self) -> T:
        """Take the first, if there is one. Raises ``queue.Empty``."""

    def qsize(self) -> int:
        """How many are in it."""


class Pool(Protocol):
    """As ``ThreadPoolExecutor``: calls that are done beside the caller, a few at a time."""

    def __enter__(self) -> Pool: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None: ...

    def submit(self, call: Callable[..., T], /, *arguments: Any) -> Future[T]:
        """Have something called."""

    def map(self, call: Callable[[A], T], wanted: Iterable[A], /) -> Iterator[T]:
        """As ``map``, several at a time."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more."""


class Drained(Protocol):
    """What works in the background, and is waited for when the process ends."""

    def drain(self, timeout_s: float) -> bool:
        """Wait for what it has to do; whether that is done."""


class Threads(Protocol):
    """What a process has of threads."""

    def lock(self) -> Lock:
        """A new lock."""

    def event(self) -> Event:
        """A new event, which has not happened."""

    def condition(self) -> Condition:
        """A new condition."""

    def semaphore(self, count: int) -> Semaphore:
        """A new semaphore that so many may have at once."""

    def start(self, run: Callable[[], Any], name: str) -> Thread:
        """Run something in a thread that does not keep the process alive."""

    def future(self) -> Future[Any]:
        """A new future, which somebody else brings to its end."""

    def queue(self) -> Queue[Any]:
        """A new queue, empty."""

    def wait(self, futures: Iterable[Future[Any]], timeout_s: float | None = None) -> bool:
        """Wait for the end of all; whether it came in time."""

    def pool(self, workers: int, name: str) -> Pool:
        """So many threads for calls; waited for where it is left."""

    def drain_at_exit(self, one: Drained) -> None:
        """Wait for it when the process ends, for a bounded time, if it is still there then."""


class _RealThreads:
    """The interpreter's own."""

    def __init__(self) -> None:
        self._drained: weakref.WeakSet[Any] = weakref.WeakSet()

    def lock(self) -> Lock:
        return threading.Lock()

    def event(self) -> Event:
        return threading.Event()

    def condition(self) -> Condition:
        return threading.Condition()

    def semaphore(self, count: int) -> Semaphore:
        return threading.Semaphore(count)

    def start(self, run: Callable[[], Any], name: str) -> Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def future(self) -> Future[Any]:
        return concurrent.futures.Future()

    def queue(self) -> Queue[Any]:
        return queue.SimpleQueue()

    def wait(self, futures: Iterable[Future[Any]], timeout_s: float | None = None) -> bool:
        own = [one for one in futures if isinstance(one, concurrent.futures.Future)]
        return not concurrent.futures.wait(own, timeout_s).not_done

    def pool(self, workers: int, name: str) -> Pool:
        return concurrent.futures.ThreadPoolExecutor(workers, name)

    def drain_at_exit(self, one: Drained) -> None:
        self._drained.add(one)

    def drain(self) -> None:
        """At the process's exit: a store that is down must not keep a driver from ending."""
        for one in list(self._drained):
            one.drain(_EXIT_S)


_real = _RealThreads()
atexit.register(_real.drain)
THREADS: Final[Threads] = _real
