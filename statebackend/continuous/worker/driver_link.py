"""How the subtasks of a slot reach their driver; a connection that is lost costs nothing.

What is said is numbered, and asked is what may be asked twice: so either is repeated until the
driver has not been reached for as long as it takes for it to be given up.
"""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from snapshot.protocol.messages import PROTOCOL, BeginReply, BeginRequest
from statebackend.continuous.job.slot_messages import Event, Failed, Report
from statebackend.errors import (
    CoordinatorUnreachableError,
    ProcessorError,
    StaleRequestError,
    StateBackendError,
)
from statebackend.rpc.driver_client import Client
from statebackend.rpc.envelope import Call, ErrorReply, encode
from statebackend.rpc.session_endpoint import Endpoint
from statebackend.runtime.worker.participant import RemoteSession
from statebackend.system import SYSTEM, System

__all__ = ["RETRY_S", "SLOT", "DriverLink"]

T = TypeVar("T")
_log = logging.getLogger("statebackend.continuous")
RETRY_S: Final = 0.2
"""Between two tries."""
SLOT: Final = "slot"
"""Stands for an operator where the slot itself has failed, outside of its subtasks."""
_REPORT_WAIT_S: Final = 1.0  # how long a second failure waits to hear what came of the first


class DriverLink:
    """One slot's.

    Args:
        silence_s: after so long the driver is taken for gone.

    Attributes:
        broke: the slot cannot go on. failure: the slot's first; None if
            the run was over by then. is_known: the driver has it, with its traceback.
        over: the slot ends, and nothing is repeated any more.
    """

    def __init__(
        self,
        client: Client,
        endpoint: Endpoint,
        *,
        job: str,
        slot: int,
        silence_s: float,
        system: System = SYSTEM,
    ) -> None:
        self._system, threads = system, system.threads
        self._client, self._endpoint = client, endpoint
        self._job, self._slot, self._silence_s = job, slot, silence_s
        self._lock = threads.lock()
        self._reports = itertools.count()
        self._reporting = False
        self._reported = threads.event()  # the first failure was reported, or could not be
        self.failure: BaseException | None = None
        self.is_known = False
        self.broke = threads.event()
        self.over = threads.event()

    def session(self, *, timeout_s: float, ack_timeout_s: float) -> PatientSession:
        """What states ask."""
        return PatientSession(self._client, self._endpoint, timeout_s, ack_timeout_s, self)

    def call(self, kind: str, message: Any, timeout_s: float) -> bytes:
        """Ask once."""
        request = Call(
            protocol=PROTOCOL,
            job=self._job,
            session=self._endpoint.session,
            kind=kind,
            body=encode(message),
        )
        return self._client.call(self._endpoint, request, timeout_s=timeout_s)

    def repeated(self, kind: str, message: Any, timeout_s: float) -> bytes:
        """As `call`, again and again where the driver is not reached."""
        return self.again(lambda try_s: self.call(kind, message, min(try_s, self.try_s)), timeout_s)

    def again(self, call: Callable[[float], T], timeout_s: float) -> T:
        """Call until the driver is reached; the call is given how long it may take.

        Raises:
            CoordinatorUnreachableError: it was not in time. StateBackendError: as it answered.
        """
        until_s = self._system.monotonic_s() + timeout_s
        while True:
            left_s = until_s - self._system.monotonic_s()
            try:
                return call(max(left_s, RETRY_S))
            except CoordinatorUnreachableError:
                if left_s <= RETRY_S or self.over.wait(RETRY_S):
                    raise

    @property
    def try_s(self) -> float:
        """How long the driver may take to answer before it is asked again."""
        return self._silence_s / 3

    def report(self, *events: Event) -> None:
        """Say what happened; numbered, so that the driver takes it once if it comes twice."""
        report = Report(slot=self._slot, number=next(self._reports), events=list(events))
        self.repeated("report", report, self._silence_s)

    def broken(
        self, vertex: str, subtask: int, error: BaseException, *, closing: bool = False
    ) -> bool:
        """Report the first failure, which ends the slot.

        Args:
            closing: see `Failed`.

        Returns:
            whether the run was over. Then it is no failure: some slots hear of the end sooner, and
            the others miss them.
        """
        with self._lock:
            first, self._reporting = not self._reporting, True
        if not first:
            return self._reported.wait(_REPORT_WAIT_S) and self.failure is None
        over = False
        try:
            over = self._was_over(_failed(vertex, subtask, error, closing))
        except Exception:  # the slot ends whatever happens here
            _log.exception("The failure of %s/%d was not reported.", vertex, subtask)
        finally:
            if not over:  # otherwise the driver says how the run has ended
                self.failure = error
                self.broke.set()
            self._reported.set()
        return over

    def _was_over(self, failed: Failed) -> bool:
        """Tell of a failure; whether the run had ended without it."""
        try:
            self.report(failed)
            self.is_known = True
        except StaleRequestError:
            _log.debug("%s/%d failed when the run was over.", failed.vertex, failed.subtask)
            return True
        except CoordinatorUnreachableError as error:
            if not self.over.is_set():
                _log.warning("%s", error)
            return self.over.is_set()
        return False


@dataclass(frozen=True)
class PatientSession(RemoteSession):
    """A session that is asked again where the answer to a begin does not come.

    The driver gives the same answer to the same request. An answer may hold slices and take long,
    so the second try has twice the time of the first, and the third has all that is left.
    """

    link: DriverLink

    def begin(self, request: BeginRequest) -> tuple[BeginReply, list[bytes]]:
        tries_s = iter((self.link.try_s, 2.0 * self.link.try_s))
        return self.link.again(
            lambda left_s: self.client.begin(
                self.endpoint, request, timeout_s=min(left_s, next(tries_s, left_s))
            ),
            self.timeout_s,
        )


def _failed(vertex: str, subtask: int, error: BaseException, closing: bool) -> Failed:
    known = error
    if not isinstance(known, StateBackendError):
        said = "".join(traceback.format_exception_only(error)).strip()
        who = f"Slot {subtask}" if vertex == SLOT else f"A subtask of {vertex!r}"
        known = ProcessorError(f"{who} failed: {said}.", todo="See the traceback.")
    reply = ErrorReply.of(known, traced=error)
    return Failed(vertex=vertex, subtask=subtask, reply=reply, closing=closing)
