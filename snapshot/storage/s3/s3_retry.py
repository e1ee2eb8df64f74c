"""Trying again for what botocore gives up on, until a deadline."""

from __future__ import annotations

import contextlib
import enum
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from botocore import exceptions as boto

from snapshot.storage.call_texts import call_text
from snapshot.storage.s3.s3_client import Clients, is_amazons
from snapshot.storage.s3.s3_errors import (
    CALL_ERRORS,
    CODED,
    EXPIRED,
    GIVE_ENDPOINT,
    PASSING,
    DeadlinePassedError,
    error_code,
    http_status,
    no_tls,
    own_error,
    typed_error,
)

__all__ = ["Retries", "Step", "Trying", "next_step"]

_EXPIRED_HEAD = "400"  # all that an answer without a body says of it
# A failure of the transport, whatever its cause; HTTPClientError also wraps what a body raised.
_TRANSPORT = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError)

_log = logging.getLogger("statebackend.storage")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LOG_AFTER_S = 2.0  # a call that has failed for so long is worth a line in the log

Result = TypeVar("Result")


class Step(enum.Enum):
    """What comes after a failure."""

    RETRY = "retry"  # it may pass
    RENEW = "renew"  # the credentials ran out: take new ones, once
    STOP = "stop"


def next_step(error: BaseException) -> Step:
    """Whether trying again may help."""
    if isinstance(error, boto.ClientError):
        code = error_code(error)
        head = error.operation_name == "HeadObject"
        if code in EXPIRED or (head and code == _EXPIRED_HEAD):
            return Step.RENEW
        status = http_status(error)
        if not head and status in CODED and code in ("", str(status)):
            return Step.RETRY  # its body did not read, so nothing is known
        passing = code in PASSING or status in (429, 500, 502, 503, 504)
        return Step.RETRY if passing else Step.STOP
    if isinstance(error, boto.ProxyConnectionError | boto.ConnectTimeoutError):
        return Step.RETRY
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Step.STOP
    if no_tls(error):
        return Step.STOP
    if isinstance(error, _TRANSPORT):
        return Step.STOP if own_error(error) else Step.RETRY
    if isinstance(error, boto.BotoCoreError):
        return Step.STOP
    return Step.RETRY if isinstance(error, CALL_ERRORS) else Step.STOP


class Retries:
    """Calls with a deadline, exponential backoff and full jitter."""

    def __init__(
        self,
        clients: Clients,
        *,
        uri: str,
        deadline_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        sleep_s: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Retries for one store.

        Args:
            clients: where each try takes its client.
            uri: of the store, for errors.
            deadline_s: seconds after which no further try is begun.
            clock_s: seconds that never go backwards.
            sleep_s: waits.
            draw: a number from 0 to 1.
        """
        self._clients = clients
        self.uri = uri
        self._deadline_s = deadline_s
        self._clock_s = clock_s
        self._sleep_s = sleep_s
        self._draw = draw
        self._thread = threading.local()
        self._lock, self._counted = threading.Lock(), 0
        self.answered = False  # once; then the endpoint is no wrong one

    @property
    def deadline_s(self) -> float:
        """What this thread's calls may take now."""
        found: float = getattr(self._thread, "deadline_s", self._deadline_s)
        return found

    def count(self) -> None:
        """A call is tried again."""
        with self._lock:
            self._counted += 1

    def take(self) -> int:
        """How many tries after the first there were since this was asked last."""
        with self._lock:
            counted, self._counted = self._counted, 0
        return counted

    @contextlib.contextmanager
    def limited(self, deadline_s: float) -> Iterator[None]:
        """Calls of this thread inside have this deadline, if it is shorter than their own."""
        before_s = self.deadline_s
        self._thread.deadline_s = min(deadline_s, before_s)
        try:
            yield
        finally:
            self._thread.deadline_s = before_s

    def call(self, verb: str, name: str, operation: Callable[[Any], Result]) -> Result:
        """What `operation(client)` returns, at last.

        Raises:
            StorageError: as `typed_error` sorts the last failure.
        """
        trying = Trying(self, verb, name)
        while True:
            client = trying.client()
            try:
                result = operation(client)
            except CALL_ERRORS as error:
                trying.failed(error)
            else:
                self.answered = True
                return result


class Trying:
    """One call's tries: how many there were and whether there may be another."""

    def __init__(self, retries: Retries, verb: str, name: str) -> None:
        self._retries = retries
        self._verb, self._name = verb, name
        self._deadline_s = retries.deadline_s
        self._started_s = retries._clock_s()
        self._failures = 0
        self._logged = False
        self._renewed = False
        self._client: Any = None

    def client(self) -> Any:
        """The client for the next try."""
        clients = self._retries._clients
        clients.begin(self._started_s + self._deadline_s, self._tell)
        try:
            self._client = clients.client()
        except CALL_ERRORS as error:  # a missing profile, a file of certificates that is not there
            raise typed_error(error, self._verb, self._name, self._retries.uri) from None
        return self._client

    def failed(self, error: BaseException) -> None:
        """Wait before the next try, or raise what the failure means."""
        if isinstance(error, DeadlinePassedError):
            raise self._final(error.last) from None
        self._failures += 1
        self._retries.answered |= isinstance(error, boto.ClientError)
        step = self._next_step(error)
        if step is Step.RENEW and not self._renewed:
            self._renewed = True
            self._retries._clients.renew(self._client)
            return
        if step is not Step.RETRY:
            raise self._final(error) from None  # its text is in there
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1))
        pause_s = longest_s * self._retries._draw()
        if self._spent_s() + pause_s > self._deadline_s:
            raise self._final(error) from None
        self._tell(error)
        self._retries.count()
        self._retries._sleep_s(pause_s)

    def progressed(self) -> None:
        """Bytes came: what is left to do has the whole deadline again."""
        self._retries.answered = True
        self._started_s = self._retries._clock_s()
        self._failures = 0

    def _tell(self, error: BaseException) -> None:
        """A line in the log, once, when it takes long: a wrong endpoint is refused for ever."""
        if self._logged or self._spent_s() < LOG_AFTER_S:
            return
        if self._next_step(error) is not Step.RETRY:
            return
        self._logged = True
        endpoint = self._client.meta.endpoint_url
        _log.warning(
            "no answer yet from %s: could not %s (%s); trying for up to %g s%s",
            *(endpoint, call_text(self._verb, self._name, self._retries.uri)),
            *(error_code(error) or type(error).__name__, self._deadline_s),
            f"; {GIVE_ENDPOINT}" if is_amazons(endpoint) else "",
        )

    def _next_step(self, error: BaseException) -> Step:
        """As `next_step`. A server that has answered speaks TLS, and will again after a restart."""
        return Step.RETRY if no_tls(error) and self._retries.answered else next_step(error)

    def _spent_s(self) -> float:
        return self._retries._clock_s() - self._started_s

    def _final(self, error: BaseException) -> Exception:
        tries = ""
        if self._next_step(error) is Step.RETRY:
            tries = f" (tried for {self._spent_s():.1f} s of {self._deadline_s:g})"
        return typed_error(error, self._verb, self._name, self._retries.uri, tries)
