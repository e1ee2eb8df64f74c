"""Work of a driver that may never come to an end, such as a sink's commit: in daemon threads.

Whoever waits for it does so with a limit. A thread that hangs is left behind: nobody waits for it,
not even the interpreter's end, and what it comes to after all is dropped with the run it was for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from statebackend.continuous.sources.source import Discovery, Source
from statebackend.continuous.sources.split_assigner import SplitAssigner
from statebackend.errors import OverdueError, StateBackendError
from statebackend.system import SYSTEM, System
from statebackend.threads import Event, Future, Queue, Threads

__all__ = [
    "Failure",
    "Found",
    "SerialExecutor",
    "SplitDiscovery",
    "Stopped",
    "awaited",
    "failure_of",
    "started",
]

T = TypeVar("T")
_log = logging.getLogger("statebackend.continuous")
_LOOK_S: Final = 0.1  # between two looks at whether the user has ended the job


class Stopped(Exception):
    """The user ended the job."""


@dataclass(frozen=True)
class Failure:
    """Something of the driver's failed."""

    error: StateBackendError


@dataclass(frozen=True)
class Found:
    """A source has looked for splits."""

    vertex: str
    found: Discovery


def failure_of(error: BaseException, what: str) -> StateBackendError:
    """An error as the restart strategy knows it; what was not raised on purpose is logged."""
    if isinstance(error, StateBackendError):
        return error
    _log.error("%s", what, exc_info=error)
    known = StateBackendError(f"{what}: {type(error).__name__}: {error}.", todo="See the log.")
    known.__cause__ = error
    return known


def started(name: str, work: Callable[[], T], threads: Threads) -> Future[T]:
    """Have it done in a thread of its own."""
    future: Future[T] = threads.future()
    threads.start(lambda: _do(future, work), name)
    return future


def awaited(
    future: Future[T], what: str, timeout_s: float, over: Event, system: System = SYSTEM
) -> T:
    """What it came to. Raises what it raised.

    Raises:
        OverdueError: it takes longer than that. Stopped: ``over`` was set meanwhile.
        RuntimeError: it raised what is meant to end a thread, such as SystemExit; but not this one.
    """
    until_s = system.monotonic_s() + timeout_s
    while True:
        left_s = until_s - system.monotonic_s()
        system.threads.wait([future], min(max(left_s, 0.0), _LOOK_S))
        if future.done():
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
            return future.result()
        if over.is_set():
            raise Stopped()
        if left_s <= 0:
            raise overdue(what, timeout_s)


def overdue(what: str, timeout_s: float) -> OverdueError:
    """The typed error for what takes too long."""
    return OverdueError(
        f"{what} had not come to its end after {timeout_s:g} s.",
        todo="Find out why it does not answer; raise timeout_s if it is only slow.",
    )


def _do(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


class SerialExecutor:
    """Pieces of work, done one after the other in a thread of its own."""

    def __init__(self, name: str, system: System = SYSTEM) -> None:
        self._system = system
        self._work: Queue[tuple[str, Future[Any], Callable[[], Any]] | None]
        self._work = system.threads.queue()
        self._doing: tuple[str, float] | None = None
        self._closed = False
        self._thread = system.threads.start(self._go, name)

    def put(self, what: str, work: Callable[[], T]) -> Future[T]:
        """Have it done when everything before it is. ``what``: for people."""
        future: Future[T] = self._system.threads.future()
        self._work.put((what, future, work))
        return future

    def goes_on(self, what: str) -> None:
        """The work that is being done comes to another part: its time begins anew.

        Raises:
            Stopped: nobody waits for it any more.
        """
        if self._closed:
            raise Stopped()
        self._doing = what, self._system.monotonic_s()

    def overdue(self, timeout_s: float, now_s: float) -> OverdueError | None:
        """What is being done, if it takes longer than that."""
        doing = self._doing
        if doing is None or now_s - doing[1] <= timeout_s:
            return None
        return overdue(doing[0], timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Do nothing more; what is being done may take so long.

        Returns:
            whether the thread has ended: else it is left behind.
        """
        self._closed = True
        self._work.put(None)
        self._thread.join(timeout_s)
        doing = self._doing
        if self._thread.is_alive():
            _log.warning("%s does not come to an end and is left behind", doing and doing[0])
        return not self._thread.is_alive()

    def _go(self) -> None:
        while (piece := self._work.get()) is not None and not self._closed:
            what, future, work = piece
            self._doing = what, self._system.monotonic_s()
            _do(future, work)
            self._doing = None


class SplitDiscovery:
    """Sources that may have more splits are looked at, each in threads of its own.

    Args:
        sources: by vertex. every_s: how often each. warn_s: one that takes longer is named.
        said: is given what was found, and what failed.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        every_s: float,
        warn_s: float,
        said: Callable[[Found | Failure], None],
        system: System = SYSTEM,
    ) -> None:
        self._system = system
        self._sources, self._said = sources, said
        self._every_s, self._warn_s = every_s, warn_s
        self._looked_s: dict[str, float] = {}
        self._looking: dict[str, float] = {}  # since when
        self._warned: set[str] = set()

    def first(self, vertex: str, assigner: SplitAssigner, timeout_s: float, over: Event) -> None:
        """Look before the run begins, and wait for it.

        Raises:
            OverdueError, Stopped: see `awaited`. Exception: what the source raised.
        """
        what = f"Looking for splits of source {vertex!r}"
        found = self._begin(vertex, assigner)
        assigner.add(awaited(found, what, timeout_s, over, self._system))
        self._looked_s[vertex] = self._system.monotonic_s()

    def go_on(self, assigners: Mapping[str, SplitAssigner], now_s: float) -> None:
        """Look at those that are due; one at which somebody looks is not."""
        for vertex, looked_s in self._looked_s.items():
            since_s = self._looking.get(vertex)
            if since_s is not None:
                if now_s - since_s > self._warn_s and vertex not in self._warned:
                    self._warned.add(vertex)
                    _log.warning("looking for splits of %r does not come to an end", vertex)
            elif not assigners[vertex].done and now_s - looked_s >= self._every_s:
                self._looking[vertex] = now_s
                future = self._begin(vertex, assigners[vertex])
                future.add_done_callback(functools.partial(self._report, vertex))

    def found(self, vertex: str, now_s: float) -> None:
        """What was found has been taken in."""
        self._looked_s[vertex] = now_s
        self._looking.pop(vertex, None)
        self._warned.discard(vertex)

    def _begin(self, vertex: str, assigner: SplitAssigner) -> Future[Discovery]:
        source, state = self._sources[vertex], assigner.discovery_state
        return started(
            f"statebackend-look-{vertex}",
            lambda: source.discover(state),
            self._system.threads,
        )

    def _report(self, vertex: str, found: Future[Discovery]) -> None:
        try:
            self._said(Found(vertex, found.result()))
        except BaseException as error:  # whatever it is: else nobody hears of it
            self._said(Failure(failure_of(error, f"Looking for splits of source {vertex!r}")))
