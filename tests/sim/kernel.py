"""The scheduler: actors as greenlets on one virtual clock, in one thread.

An *actor* is code that runs for a while and then waits; a *process* is what dies as a whole. One
entry of the heap that is carried out is one *event*. Nothing here knows what is simulated.

Everything that decides an order is a number: time, and the number of the entry. So a run is a
function of its seed, and `Scheduler.digest` is a fingerprint of all that happened.
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Actor", "Process", "Scheduler", "TimedOutError", "current"]

_MASK = (1 << 64) - 1
_STEP = 6364136223846793005
_TIMED_OUT = object()


class TimedOutError(Exception):
    """Nothing came within the time that was waited."""


class Process:
    """What is killed or frozen as a whole. ``frozen_until``: its actors do not run before."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.frozen_until = 0.0
        self.actors: dict[int, Actor] = {}
        self.at_death: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return self.name


class Actor(greenlet):
    """One thread of a process."""

    sched: Scheduler
    process: Process
    number: int
    wait: int  # which waiting this is: an entry of an earlier one wakes nobody
    ended: bool
    phase: Any = None  # of whom its calls are counted


def current() -> Actor:
    """The actor that runs."""
    actor = getcurrent()
    assert isinstance(actor, Actor), "this may only be called in an actor"
    return actor


class Scheduler:
    """Runs actors.

    Attributes:
        now_s: the virtual time. random: the only source of chance.
        events: entries carried out. counts: what was noted, by kind.
        digest: of every event and note so far.
        trace: the last notes, as lines; kept where ``keep_trace``.
    """

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.now_s = 0.0
        self.random = Random(seed)
        self.events = 0
        self.digest = seed & _MASK
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if keep_trace else None
        self.failed: BaseException | None = None
        self._heap: list[tuple[float, int, Any, int, Any]] = []
        self._entries = 0
        self._actors = 0
        self._ids = 0
        self._limit, self._end_s = 0, 0.0
        self._hub = getcurrent()
        self._processes: list[Process] = []

    # --- what actors do ------------------------------------------------------------------------

    def park(self, timeout_s: float | None = None) -> Any:
        """Wait until somebody wakes this actor.

        Raises:
            TimedOutError: nobody did in time.
        """
        actor = current()
        if actor.process.dead:
            raise GreenletExit
        if timeout_s is not None:
            self._push(self.now_s + timeout_s, actor, actor.wait, _TIMED_OUT)
        value = self._hub.switch()
        if value is _TIMED_OUT:
            raise TimedOutError
        return value

    def pause(self, seconds: float) -> None:
        """Let time go by."""
        actor = getcurrent()
        process = actor.process
        if process.dead:
            raise GreenletExit
        at_s, heap = self.now_s + seconds, self._heap
        if (
            heap
            and at_s < heap[0][0]
            and at_s <= self._end_s
            and self.events < self._limit
            and process.frozen_until <= at_s
        ):
            # Nobody has anything to do before: the same event, without leaving.
            self.now_s = at_s
            self.events += 1
            actor.wait += 1
            self.digest = (self.digest * _STEP + actor.number + int(at_s * 1e6)) & _MASK
            return
        self._entries += 1
        heapq.heappush(heap, (at_s, self._entries, actor, actor.wait, None))
        self._hub.switch()

    def wake(self, actor: Actor, wait: int, value: Any = None, delay_s: float = 0.0) -> None:
        """End another actor's waiting, if it is still that one (``actor.wait`` as it was then)."""
        self._push(self.now_s + delay_s, actor, wait, value)

    def spawn(self, process: Process, run: Callable[[], Any], delay_s: float = 0.0) -> Actor:
        """A new actor; nothing where the process is dead."""
        actor = Actor(self._guarded(run), self._hub)
        self._actors += 1
        actor.sched, actor.process, actor.number = self, process, self._actors
        actor.wait, actor.ended = 0, False
        if not process.dead:
            if not process.actors:
                self._processes.append(process)
            process.actors[actor.number] = actor
            self._push(self.now_s + delay_s, actor, 0, None)
        return actor

    def call(self, what: Callable[[], None], delay_s: float = 0.0) -> None:
        """Have something done that does not wait, by nobody in particular."""
        self._push(self.now_s + delay_s, None, 0, what)

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does. May be called by an actor, also by one that it ends."""
        if not process.dead:
            process.dead = True
            self.call(lambda: self._bury(process))

    def _bury(self, process: Process) -> None:
        for actor in list(process.actors.values()):
            while not actor.dead:
                actor.throw(GreenletExit)  # what it does in its last moments does nothing
        process.actors.clear()
        self._processes = [one for one in self._processes if one is not process]
        for what in process.at_death:
            what()
        process.at_death.clear()

    def _guarded(self, run: Callable[[], Any]) -> Callable[[Any], None]:
        def guarded(_: Any) -> None:
            actor = current()
            try:
                run()
            except GreenletExit:
                pass
            except BaseException as error:
                if not actor.process.dead:
                    self.failed = self.failed or error
            finally:
                actor.ended = True
                actor.process.actors.pop(actor.number, None)

        return guarded

    # --- the loop ------------------------------------------------------------------------------

    def _push(self, at_s: float, actor: Actor | None, wait: int, value: Any) -> None:
        self._entries += 1
        heapq.heappush(self._heap, (at_s, self._entries, actor, wait, value))

    def run(self, *, until_s: float | None = None, events: int | None = None) -> None:
        """Carry entries out until a time, or a number of events, or there are none."""
        heap, pop, push = self._heap, heapq.heappop, heapq.heappush
        limit = self._limit = events if events is not None else 1 << 62
        end_s = self._end_s = until_s if until_s is not None else float("inf")
        while heap and self.events < limit and self.failed is None:
            at_s, number, actor, wait, value = heap[0]
            if at_s > end_s:
                self.now_s = end_s
                return
            pop(heap)
            if actor is None:
                self.now_s = at_s
                self.events += 1
                value()
                continue
            if actor.wait != wait or actor.ended or actor.process.dead:
                continue
            if actor.process.frozen_until > at_s:
                push(heap, (actor.process.frozen_until, number, actor, wait, value))
                continue
            self.now_s = at_s
            self.events += 1
            actor.wait = wait + 1
            self.digest = (self.digest * _STEP + actor.number + int(at_s * 1e6)) & _MASK
            actor.switch(value)

    def end(self) -> None:
        """Bury whatever still runs."""
        for process in self._processes:
            process.dead = True
            self._bury(process)
        self._heap.clear()

    # --- what happened -------------------------------------------------------------------------

    def note(self, kind: str, detail: str = "") -> None:
        """Something worth counting happened; it is part of the digest."""
        self.counts[kind] += 1
        mixed = zlib.crc32(f"{kind} {detail}".encode())
        self.digest = (self.digest * _STEP + mixed) & _MASK
        if self.trace is not None:
            self.trace.append(f"{self.now_s:10.4f} {kind} {detail}")
            if len(self.trace) > 20_000:
                del self.trace[:10_000]

    def new_id(self) -> str:
        """An id that nobody else has."""
        self._ids += 1
        return f"{self._ids:08x}"

    def chance(self, rate: float) -> bool:
        """True so often. Draws only where it may be either."""
        return rate > 0.0 and self.random.random() < rate
