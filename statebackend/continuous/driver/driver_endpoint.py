"""Where the slots of a run reach its driver: a handler of the driver's service.

Requests come in gRPC's threads. What slots say goes into the loop's queue; what the loop says to
them waits in a row of commands for each, until they poll.
"""

from __future__ import annotations

from typing import Any, Final

from snapshot.protocol.messages import (
    AckReply,
    AckRequest,
    BaseDone,
    BaseRenewal,
    BaseReply,
    BeginReply,
    BeginRequest,
)
from statebackend.continuous.job.slot_messages import (
    Command,
    Commands,
    Failed,
    Poll,
    Register,
    Report,
    Stop,
    decode_poll,
    decode_register,
    decode_report,
)
from statebackend.errors import ProtocolError, StaleRequestError
from statebackend.rpc.envelope import encode
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.lookup_messages import LOOKUP
from statebackend.threads import THREADS, Queue, Threads

__all__ = ["DriverEndpoint"]

_WAIT_S: Final = 5.0


class _Taken:
    """The numbers of the reports that a slot's driver has."""

    def __init__(self) -> None:
        self._all_before = 0
        self._beyond: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self._all_before or number in self._beyond

    def take(self, number: int) -> bool:
        """Whether it is a new one."""
        if number in self:
            return False
        self._beyond.add(number)
        while self._all_before in self._beyond:
            self._beyond.remove(self._all_before)
            self._all_before += 1
        return True


class DriverEndpoint:
    """Of one run.

    Args:
        session: of the run. slots: how many there are.
        said: what slots say goes there: `Register`, `Poll` (they are there) and `Report`.
    """

    def __init__(
        self, session: RunSession, slots: int, said: Queue[Any], threads: Threads = THREADS
    ) -> None:
        self._session, self._said = session, said
        self._rows: list[list[Command]] = [[] for _ in range(slots)]
        self._first = [0] * slots  # the number of the first that is kept
        self._changed = threads.condition()
        self._closed = self._job_ended = False
        self._taken = [_Taken() for _ in range(slots)]
        self.slots: dict[int, Register] = {}

    # --- the loop's side -----------------------------------------------------------------------

    def send(self, slot: int | None, command: Command) -> None:
        """Say something to a slot; None: to all."""
        with self._changed:
            self._job_ended |= isinstance(command, Stop) and command.job_ended
            for row in self._rows if slot is None else [self._rows[slot]]:
                row.append(command)
            self._changed.notify_all()

    def close(self) -> None:
        """Have every slot end: whatever was said before does not matter any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- the service's side --------------------------------------------------------------------

    def begin(self, request: BeginRequest) -> tuple[BeginReply, list[bytes]]:
        """As the session."""
        return self._session.begin(request)

    def ack(self, request: AckRequest) -> AckReply:
        """Refused: acks come with a report, and are held until their checkpoint is complete."""
        raise ProtocolError(
            f"Operator {request.operator!r} acked past the checkpoint's own account.",
            todo="Install the same statebackend release on driver and executors.",
        )

    def base_done(self, request: BaseDone) -> BaseReply:
        """As the session."""
        return self._session.base_done(request)

    def base_renewed(self, request: BaseRenewal) -> BaseReply:
        """As the session."""
        return self._session.base_renewed(request)

    def call(self, kind: str, body: bytes) -> bytes:
        """A slot says or asks something.

        Raises:
            ProtocolError: it is nothing of the kind. StaleRequestError: the run is over.
        """
        if kind == "poll":
            return encode(self._poll(decode_poll(body)))
        if kind == "report":
            self._report(decode_report(body))
        elif kind == LOOKUP and not self._closed:
            return self._session.call(kind, body)
        elif self._closed:
            raise StaleRequestError("The run is over.")
        elif kind == "register":
            here = decode_register(body)
            self.slots[here.slot] = here
            self._said.put(here)
        else:
            raise ProtocolError(f"The driver knows no {kind!r}.")
        return b""

    def _report(self, report: Report) -> None:
        """Each once, however often it is sent.

        The reports of one thread come in order: it sends one when the one before was answered. A
        failure ends the run before it is answered. After the answer its slot ends, and the other
        slots would report that they miss it. When the job has ended, slots miss each other, too:
        then only a failure to close counts.
        """
        if not 0 <= report.slot < len(self._taken):
            raise ProtocolError(f"There is no slot {report.slot}.")
        with self._changed:
            taken = self._taken[report.slot]
            failures = [one for one in report.events if isinstance(one, Failed)]
            missed = self._job_ended and any(not one.closing for one in failures)
            if (self._closed or missed) and report.number not in taken:
                raise StaleRequestError("The run is over.")
            if not taken.take(report.number):
                return
            self._said.put(report)
            if failures and not self._job_ended:
                self._closed = True
                self._changed.notify_all()

    def _poll(self, poll: Poll) -> Commands:
        if not 0 <= poll.slot < len(self._rows):
            raise ProtocolError(f"There is no slot {poll.slot}.")
        self._said.put(poll)
        with self._changed:
            row = self._rows[poll.slot]
            # What it asks for next, it has had everything before of.
            had = max(0, poll.first - self._first[poll.slot])
            del row[:had]
            self._first[poll.slot] += had
            self._changed.wait_for(lambda: row or self._closed, min(poll.wait_s, _WAIT_S))
            if self._closed and not any(isinstance(one, Stop) for one in row):
                return Commands(first=self._first[poll.slot] + len(row), commands=[Stop()])
            return Commands(first=self._first[poll.slot], commands=list(row))
