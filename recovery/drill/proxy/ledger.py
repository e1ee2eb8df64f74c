"""What went through the proxy: totals for ever, single requests as far back as there is room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from recovery.drill.proxy.fault_plan import Facts, Kind
from recovery.drill.proxy.s3_requests import Verb, group_of

__all__ = ["Count", "Ledger", "RequestEntry"]


@dataclass(frozen=True, kw_only=True)
class RequestEntry:
    """One request.

    Attributes:
        number: from 1, in the order in which the heads arrived.
        verb, key, group: what it asked for; the key without bucket and query.
        status: of the answer that the client was sent, or began to be sent; 0 if none was.
        in_bytes: of the request's body as read from the client, HTTP's own chunking taken off.
        out_bytes: of the response's body as sent to the client.
        deliveries: how often the server got the whole of it.
        fault: what was done to it; None if nothing was. A planned fault that found nothing to
            strike (the body of an answer that has none) is not one.
        duration_s: from head to end; None while it runs.
    """

    number: int
    verb: Verb
    key: str
    group: str
    status: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    deliveries: int = 0
    fault: Kind | None = None
    duration_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Count:
    """Totals of some requests; `faulted` are those that had a fault, `duration_s` of ended ones."""

    requests: int = 0
    faulted: int = 0
    deliveries: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    duration_s: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(
            requests=self.requests + other.requests,
            faulted=self.faulted + other.faulted,
            deliveries=self.deliveries + other.deliveries,
            in_bytes=self.in_bytes + other.in_bytes,
            out_bytes=self.out_bytes + other.out_bytes,
            duration_s=self.duration_s + other.duration_s,
        )


class Ticket:
    """The ledger's handle on one running request; only `Ledger` looks inside."""

    def __init__(self, entry: RequestEntry, started_s: float, totals: dict[str, Count]) -> None:
        self.entry = entry
        self.started_s = started_s
        self.totals = totals  # of the time when it began: a reset leaves it behind


class Ledger:
    """Counts requests from many threads.

    A request is counted when its head has arrived and bytes before they are passed on, so whoever
    has an answer finds it counted.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        entries_max: int,
        group: Callable[[str], str] = group_of,
    ) -> None:
        """Start empty.

        Args:
            clock: monotonic seconds.
            entries_max: how many single requests are remembered.
            group: from a key to what it is counted under.
        """
        self._clock = clock
        self._group = group
        self._changed = threading.Condition()
        self._tickets: deque[Ticket] = deque(maxlen=entries_max)
        self._totals: dict[str, Count] = {}
        self._names: dict[str, tuple[Verb, str]] = {}
        self._number = 0
        self._running = 0

    def begin(
        self, verb: Verb, key: str, headers: Mapping[str, str] | None = None
    ) -> tuple[Ticket, Facts]:
        """A request has arrived: its handle, and what a plan may know of it.

        The headers go to the plan and are not kept.
        """
        group = self._group(key)
        name = f"{verb.value} {group}"
        with self._changed:
            self._number += 1
            self._running += 1
            nth = self._totals.get(name, Count()).requests + 1
            self._names[name] = (verb, group)
            entry = RequestEntry(number=self._number, verb=verb, key=key, group=group)
            ticket = Ticket(entry, self._clock(), self._totals)
            self._tickets.append(ticket)
            self._add(ticket, Count(requests=1))
        facts = Facts(
            number=entry.number, verb=verb, key=key, group=group, nth=nth, headers=headers or {}
        )
        return ticket, facts

    def note(
        self,
        ticket: Ticket,
        *,
        status: int | None = None,
        fault: Kind | None = None,
        in_bytes: int = 0,
        out_bytes: int = 0,
        deliveries: int = 0,
    ) -> None:
        """Something has happened to a request: bytes and deliveries add up, the rest is set."""
        with self._changed:
            old = ticket.entry
            ticket.entry = replace(
                old,
                status=old.status if status is None else status,
                fault=old.fault if fault is None else fault,
                in_bytes=old.in_bytes + in_bytes,
                out_bytes=old.out_bytes + out_bytes,
                deliveries=old.deliveries + deliveries,
            )
            newly_faulted = int(old.fault is None and fault is not None)
            more = Count(
                faulted=newly_faulted,
                in_bytes=in_bytes,
                out_bytes=out_bytes,
                deliveries=deliveries,
            )
            self._add(ticket, more)

    def end(self, ticket: Ticket) -> None:
        """A request is over, one way or the other."""
        with self._changed:
            duration_s = self._clock() - ticket.started_s
            ticket.entry = replace(ticket.entry, duration_s=duration_s)
            self._add(ticket, Count(duration_s=duration_s))
            self._running -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is under way; False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)

    def counts(self) -> dict[tuple[Verb, str], Count]:
        """Totals by verb and group; what never came is absent."""
        with self._changed:
            return {self._names[name]: count for name, count in self._totals.items()}

    def count(self, verbs: Iterable[Verb] | None, group: str | None) -> Count:
        """The totals of these verbs and this group together; None is all."""
        wanted = None if verbs is None else frozenset(verbs)
        total = Count()
        for (verb, name), count in self.counts().items():
            if (wanted is None or verb in wanted) and (group is None or name == group):
                total += count
        return total

    def entries(self) -> list[RequestEntry]:
        """The single requests that are remembered, oldest first, running ones included."""
        with self._changed:
            return [ticket.entry for ticket in self._tickets]

    def reset(self) -> None:
        """Forget all, and number from 1 again. What is under way counts no more."""
        with self._changed:
            self._tickets.clear()
            self._totals = {}
            self._names = {}
            self._number = 0

    def _add(self, ticket: Ticket, more: Count) -> None:
        name = f"{ticket.entry.verb.value} {ticket.entry.group}"
        ticket.totals[name] = ticket.totals.get(name, Count()) + more
