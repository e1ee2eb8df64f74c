"""When a continuous job begins a checkpoint.

Periodic checkpoints come by an interval, or as often as a share of the time allows. Users ask for
checkpoints and savepoints as well. What cannot begin yet waits in a queue: savepoints first, then
checkpoints that a user asked for, then the periodic one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from statebackend.errors import SettingError

__all__ = ["Kind", "Request", "Trigger", "TriggerPolicy"]

Kind: TypeAlias = Literal["checkpoint", "savepoint", "last"]


@dataclass(frozen=True, kw_only=True)
class TriggerPolicy:
    """When checkpoints are due.

    Attributes:
        interval_s: from one periodic checkpoint to the next; None: only as `max_share` says, or
            only when somebody asks.
        min_pause_s: from the end of one, however it ended, to the next periodic one.
        max_share: checkpoints may take at most this share of the time (over 0, at most 1): after
            one that took d seconds there is a pause of d * (1 - share) / share at least.
        max_concurrent: at the same time. With a pause of either sort it is 1.
        queue_limit: requests that wait.

    Raises:
        SettingError: a value is out of its range.
    """

    interval_s: float | None = None
    min_pause_s: float = 0.0
    max_share: float | None = None
    max_concurrent: int = 1
    queue_limit: int = 10

    def __post_init__(self) -> None:
        if self.interval_s is not None and self.interval_s <= 0:
            raise SettingError(f"A checkpoint interval of {self.interval_s} s.", todo="Over 0.")
        if self.min_pause_s < 0 or self.max_concurrent < 1 or self.queue_limit < 1:
            raise SettingError(
                f"A minimum pause of {self.min_pause_s} s, {self.max_concurrent} checkpoints at "
                f"the same time, {self.queue_limit} in the queue.",
                todo="The pause is 0 or more, the others are 1 or more.",
            )
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise SettingError(
                f"Checkpoints may take {self.max_share} of the time.",
                todo="Give a share over 0, at most 1: 0.1 for ten percent.",
            )
        if self.max_share is not None and self.interval_s is None and self.min_pause_s == 0:
            raise SettingError(
                "A share of the time alone says nothing of checkpoints that take no time.",
                todo="Give an interval or a minimum pause with it.",
            )

    @property
    def limit(self) -> int:
        """How many may be under way."""
        return 1 if self.min_pause_s > 0 or self.max_share is not None else self.max_concurrent

    @property
    def is_periodic(self) -> bool:
        """Whether checkpoints come without being asked for."""
        return self.interval_s is not None or self.max_share is not None

    def pause_s(self, took_s: float) -> float:
        """How long there is no periodic checkpoint after one that took so long."""
        share = self.max_share
        return max(self.min_pause_s, took_s * (1 - share) / share if share is not None else 0.0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checkpoint that is wanted. ``id`` rises with every request."""

    id: int
    kind: Kind
    periodic: bool
    asked_s: float

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """The smaller one goes first."""
        return self.kind != "savepoint", self.periodic, self.id


class Trigger:
    """Decides what begins now. Whoever asks it begins what it gives, and says when it is over.

    Args:
        now_s (also of every method): a clock that does not go back.
    """

    def __init__(self, policy: TriggerPolicy, now_s: float) -> None:
        self.policy = policy
        self._queue: list[Request] = []
        self._running: dict[int, float] = {}  # request -> when it began
        self._ids = 0
        self._pause_until_s = -math.inf
        self._due_s = now_s + (policy.interval_s or policy.min_pause_s)

    @property
    def queued(self) -> list[Request]:
        """What waits, the next one first."""
        return list(self._queue)

    @property
    def running(self) -> int:
        """How many have begun and are not over."""
        return len(self._running)

    @property
    def next_s(self) -> float | None:
        """When `poll` will have something to do, if nothing else happens before."""
        return self._due_s if self.policy.is_periodic else None

    def request(self, kind: Kind, now_s: float) -> Request | None:
        """A user wants one. It runs at the next `poll` that has room, whatever the pause.

        Returns:
            None: refused, for too many wait already.
        """
        return self._enqueue(kind, now_s, periodic=False)

    def poll(self, now_s: float, most: int | None = None) -> list[Request]:
        """What begins now; ``most``: not more than so many of it, and the others wait on."""
        if self.policy.is_periodic and now_s >= self._due_s:
            self._due(now_s)
        begun: list[Request] = []
        while self._queue and len(self._running) < self.policy.limit and len(begun) != most:
            first = self._queue.pop(0)
            if first.periodic and now_s < self._pause_until_s:
                self._due_s = self._pause_until_s  # dropped; the next one is due after the pause
                continue
            self._running[first.id] = now_s
            begun.append(first)
        return begun

    def ended(self, request: Request, now_s: float) -> None:
        """What had begun is over, however it ended. Said twice it counts once."""
        began_s = self._running.pop(request.id, None)
        if began_s is None:
            return
        pause_s = self.policy.pause_s(now_s - began_s)
        self._pause_until_s = max(self._pause_until_s, now_s + pause_s)
        if self.policy.interval_s is None:
            self._due_s = self._pause_until_s

    def reset(self, now_s: float) -> None:
        """The job was restarted: nothing is under way any more; who waits goes on waiting."""
        self._running.clear()
        self._queue = [request for request in self._queue if not request.periodic]
        self._due_s = now_s + (self.policy.interval_s or self.policy.min_pause_s)

    def _due(self, now_s: float) -> None:
        if self.policy.interval_s is None:
            self._due_s = math.inf  # until this one is over
        else:  # times that were missed are not made up for
            missed = math.floor((now_s - self._due_s) / self.policy.interval_s)
            self._due_s += (missed + 1) * self.policy.interval_s
        if not any(request.periodic for request in self._queue):
            self._enqueue("checkpoint", now_s, periodic=True)

    def _enqueue(self, kind: Kind, now_s: float, *, periodic: bool) -> Request | None:
        if len(self._queue) >= self.policy.queue_limit:
            if periodic or not self._queue[-1].periodic:
                return None
            self._queue.pop()  # the periodic one makes room; it will be due again
        self._ids += 1
        wanted = Request(id=self._ids, kind=kind, periodic=periodic, asked_s=now_s)
        self._queue.append(wanted)
        self._queue.sort(key=lambda request: request.rank)
        return wanted
