"""The driver's server: answers begins and acks of its sessions, each with a token of its own.

``begin`` and ``ack`` are requests of :mod:`snapshot.protocol.messages`.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Protocol

from snapshot.protocol.messages import (
    PROTOCOL,
    AckReply,
    AckRequest,
    BaseDone,
    BaseRenewal,
    BaseReply,
    BeginReply,
    BeginRequest,
)
from statebackend.errors import ProtocolError
from statebackend.rpc.envelope import Call, Decoder
from statebackend.rpc.flight_base import FlightService, same_token
from statebackend.rpc.session_endpoint import Credentials, Endpoint, not_running
from statebackend.rpc.tls import Tls

__all__ = ["Handler", "Server"]

# What an honest worker may send: its inline budget and some room, never gigabytes.
_MAX_REQUEST_BYTES: Final = 64 << 20


class Handler(Protocol):
    """What answers the requests of one session."""

    def begin(self, request: BeginRequest) -> tuple[BeginReply, list[bytes]]:
        """Admit an attempt; the reply and the slices that come with it."""

    def ack(self, request: AckRequest) -> AckReply:
        """Take in a snapshot."""

    def base_done(self, request: BaseDone) -> BaseReply:
        """A base was uploaded."""

    def base_renewed(self, request: BaseRenewal) -> BaseReply:
        """An upload goes on."""


_Request = BeginRequest | AckRequest | BaseDone | BaseRenewal | Call
_REQUESTS: Final[dict[str, Decoder[Any]]] = {
    name: Decoder(kind, limit_bytes=_MAX_REQUEST_BYTES)
    for name, kind in (
        ("begin", BeginRequest),
        ("ack", AckRequest),
        ("base_done", BaseDone),
        ("base_renewed", BaseRenewal),
        ("call", Call),
    )
}


class _Sessions:
    """The sessions that are answered. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Handler]] = {}
        self._lock = threading.Lock()

    def add(self, session: str, token: str, handler: Handler) -> None:
        with self._lock:
            self._known[session] = (token, handler)

    def remove(self, session: str) -> None:
        with self._lock:
            self._known.pop(session, None)

    def admits(self, token: str) -> bool:
        """Whether it is a session's token; the time that this takes does not tell whose."""
        with self._lock:
            known = list(self._known.values())
        return sum(same_token(of_session, token) for of_session, _ in known) > 0

    def handler(self, session: str, token: str) -> Handler | None:
        """The handler of a session's requests, if the token is the session's."""
        with self._lock:
            known = self._known.get(session)
        return known[1] if known is not None and same_token(known[0], token) else None


class Server(FlightService):
    """One per driver process; sessions (one per started query) come and go.

    Args:
        bind: address to listen on. port: 0 for any free one.
        advertised: the name that executors use to reach it.
        tls: None: it speaks no TLS.
    """

    def __init__(
        self, *, bind: str, advertised: str, port: int = 0, tls: Tls | None = None
    ) -> None:
        self._sessions = _Sessions()  # asked from the first call on
        super().__init__(
            self._sessions.admits, bind=bind, advertised=advertised, port=port, tls=tls
        )

    def add(self, session: str, token: str, handler: Handler) -> Endpoint:
        """Answer a session's requests from now on."""
        self._sessions.add(session, token, handler)
        credentials = Credentials(token=token, certificate=self.certificate)
        return Endpoint.of(self.location, session, credentials)

    def remove(self, session: str) -> None:
        """Refuse a session's requests from now on."""
        self._sessions.remove(session)

    def answer(self, context: Any, kind: str, body: Any) -> tuple[Any, list[bytes]]:
        """As the session's handler."""
        decoder = _REQUESTS.get(kind)
        if decoder is None:
            raise ProtocolError(f"The coordinator knows no request {kind!r}.")
        request = decoder(body)
        handler = self._handler(context, request)
        if kind == "begin":
            return handler.begin(request)
        if kind != "call":
            return getattr(handler, kind)(request), []
        if not hasattr(handler, "call"):
            raise ProtocolError(f"The session of job {request.job!r} takes no {request.kind!r}.")
        return handler.call(request.kind, request.body), []

    def _handler(self, context: Any, request: _Request) -> Handler:
        if request.protocol != PROTOCOL:
            raise ProtocolError(
                f"The executor speaks protocol {request.protocol}, the driver {PROTOCOL}.",
                todo="Install the same statebackend release on driver and executors.",
            )
        token = context.get_middleware("token").token
        handler = self._sessions.handler(request.session, token)
        if handler is None:
            raise not_running(request.job)
        return handler
