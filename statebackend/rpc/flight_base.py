"""Arrow Flight under every server of a job: a token before all else, TLS, and typed answers.

A call whose token is not known is refused by its headers, and nothing of it is decoded. How much
gRPC has read of it by then cannot be bounded through pyarrow.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from statebackend.errors import ProtocolError, StateBackendError
from statebackend.rpc.envelope import Decoder, ErrorReply, encode
from statebackend.rpc.tls import Tls, location_of

__all__ = [
    "BROKEN",
    "TOKEN_HEADER",
    "FlightService",
    "ask",
    "call_options",
    "read_reply",
    "same_token",
]

T = TypeVar("T")
TOKEN_HEADER: Final = "x-statebackend-token"
BROKEN: Final = (pa.ArrowException, flight.FlightError, OSError)
"""What pyarrow raises when a call or a stream is no more."""

_ANSWER: Final = Decoder[tuple[bool, msgspec.Raw]](tuple[bool, msgspec.Raw])
_REFUSAL: Final = Decoder[ErrorReply](ErrorReply)


def same_token(token: str, given: str) -> bool:
    """Whether a token was given; the time that this takes does not tell how much of it."""
    return hmac.compare_digest(token.encode(), given.encode(errors="replace"))


class _TokenMiddleware(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self.token = token


class _TokenFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses a stranger's call, of whatever kind, before anything of it is decoded."""

    def __init__(self, admits: Callable[[str], bool]) -> None:
        super().__init__()
        self._admits = admits

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> _TokenMiddleware:
        given = str((headers.get(TOKEN_HEADER) or [""])[0])
        if not self._admits(given):
            raise flight.FlightUnauthenticatedError("the token is not known here")
        return _TokenMiddleware(given)


class FlightService(flight.FlightServerBase):  # type: ignore[misc]
    """A server of this process's; a subclass answers its calls.

    Args:
        admits: whether a token is known.
        bind: address to listen on. port: 0 for any free one.
        advertised: the name that others reach it by.
        tls: None: it speaks no TLS.

    Attributes:
        location: where it is reached. certificate: that it shows; b"": it speaks no TLS.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        admits: Callable[[str], bool],
        *,
        bind: str,
        advertised: str,
        port: int = 0,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(
            location_of(bind, port, tls=tls is not None),
            tls_certificates=[(tls.certificate, tls.key)] if tls is not None else None,
            middleware={"token": _TokenFactory(admits)},
        )
        self.location = location_of(advertised, self.port, tls=tls is not None)
        self.certificate = tls.certificate if tls is not None else b""

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Flight's entry; answers (ok, body), then raw slices."""
        try:
            reply, slices = self.answer(context, action.type, action.body)
            yield encode([True, reply])
            yield from slices
        except StateBackendError as error:
            yield encode([False, ErrorReply.of(error)])
        except Exception as error:  # never a hang, never a bare stack trace without a name
            failed = ProtocolError(
                f"The request {action.type!r} failed: {type(error).__name__}: {error}.",
                todo="See the log of the process that was asked.",
            )
            yield encode([False, ErrorReply.of(failed)])

    def answer(self, context: Any, kind: str, body: Any) -> tuple[Any, Sequence[bytes]]:
        """Answer one request: the reply, and slices that go along.

        Raises:
            StateBackendError: it is refused.
        """
        raise ProtocolError(f"No request {kind!r} is known here.")


def call_options(token: str, timeout_s: float | None = None) -> flight.FlightCallOptions:
    """Those of a call that shows a token."""
    return flight.FlightCallOptions(
        timeout=timeout_s, headers=[(TOKEN_HEADER.encode(), token.encode())]
    )


def ask(
    connection: Any, kind: str, message: Any, options: flight.FlightCallOptions
) -> list[pa.Buffer]:
    """The answer to one request, for `read_reply`.

    Raises:
        One of `BROKEN`: there is none.
    """
    action = flight.Action(kind, pa.py_buffer(encode(message)))
    return [result.body for result in connection.do_action(action, options)]


def read_reply(bodies: Sequence[pa.Buffer], decoder: Decoder[T]) -> tuple[T, list[bytes]]:
    """What was answered: a reply, and the slices that come with it.

    Raises:
        StateBackendError: the other side refused; or ProtocolError: that is no reply of its.
    """
    ok, answer = _ANSWER(bodies[0] if bodies else None)
    if not ok:
        raise _REFUSAL(answer).error()
    return decoder(answer), [body.to_pybytes() for body in bodies[1:]]
