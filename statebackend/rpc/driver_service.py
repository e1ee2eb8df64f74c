"""The driver's RPC service: begins and acks of its sessions, with a token for each.

``begin`` and ``ack`` are requests of :mod:`snapshot.protocol.messages`.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final, Protocol, TypeVar

import msgspec
import pyarrow.flight as flight

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
from statebackend.errors import CoordinatorUnreachableError, ProtocolError, StaleRequestError
from statebackend.rpc.envelope import Decoder
from statebackend.rpc.flight_service import (
    BROKEN,
    FlightService,
    ask,
    call_options,
    read_reply,
    same_token,
)
from statebackend.rpc.tls import Tls, connect

__all__ = ["Call", "Client", "Credentials", "Endpoint", "Handler", "Server", "client_for"]

T = TypeVar("T")
# What an honest worker may send: its inline budget and some room, never gigabytes.
_MAX_REQUEST_BYTES: Final = 64 << 20


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """By what a session knows its tasks, and they their driver; by broadcast, in no closure or log.

    Attributes:
        certificate: the driver's, PEM, the only one that tasks trust; b"": they speak no TLS.
    """

    token: str
    certificate: bytes = b""

    def __repr__(self) -> str:
        return "Credentials(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # else rich shows all fields of a Struct
        return []


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session's coordinator answers.

    Location and session travel as a Spark local property, which Spark writes to event logs; the
    credentials come apart from them.
    """

    location: str
    session: str
    token: str
    certificate: bytes = b""

    def to_property(self) -> str:
        """As one local property, without the credentials."""
        return msgspec.json.encode([self.location, self.session]).decode()

    @classmethod
    def from_property(cls, text: str, credentials: Credentials) -> Endpoint:
        """Back from :meth:`to_property`.

        Raises:
            msgspec.MsgspecError: it is none.
        """
        location, session = msgspec.json.decode(text, type=tuple[str, str])
        return cls.of(location, session, credentials)

    @classmethod
    def of(cls, location: str, session: str, credentials: Credentials) -> Endpoint:
        """Of its parts."""
        token, certificate = credentials.token, credentials.certificate
        return cls(location=location, session=session, token=token, certificate=certificate)

    @property
    def credentials(self) -> Credentials:
        """What is needed to be let in."""
        return Credentials(token=self.token, certificate=self.certificate)

    def __repr__(self) -> str:  # logs and tracebacks are without credentials
        return f"Endpoint(location={self.location!r}, session={self.session!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("location", self.location), ("session", self.session)]


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


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request of whoever drives the operators, beside those above; ``body`` is its own matter."""

    protocol: int
    job: str
    session: str
    kind: str
    body: bytes


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
_BEGUN: Final = Decoder[BeginReply](BeginReply)
_ACKED: Final = Decoder[AckReply](AckReply)
_BASE: Final = Decoder[BaseReply](BaseReply)
_CALLED: Final = Decoder[bytes](bytes)


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
            raise _not_running(request.job)
        return handler


def _not_running(job: str) -> StaleRequestError:
    return StaleRequestError(
        f"A request for a session of job {job!r} that is not running here.",
        todo="Nothing to do if its query was stopped; else start the query again.",
    )


_UNREACHED: Final = (
    "Check that executors reach the driver (spark.statebackend.driver.host and .port, firewalls); "
    "the task is tried again."
)
_STRANGER: Final = (
    "Who answers there has not the certificate of this task's driver, or speaks no TLS. Nothing to "
    "do if that driver is gone; else see what stands between executors and driver."
)


class Client:
    """A worker's connection to the coordinator; kept for the life of the process.

    Args:
        certificate: the coordinator's; b"": without TLS.

    Raises:
        CoordinatorUnreachableError: the location is of a coordinator without TLS, or of one with.
    """

    def __init__(self, location: str, certificate: bytes = b"") -> None:
        self._location = location
        try:
            self._client = connect(location, certificate)
        except ConnectionError as error:
            raise CoordinatorUnreachableError(
                f"The coordinator at {location} was not asked: {error}.",
                todo="Give the whole job, driver and executors, the same spark.statebackend.tls.",
            ) from None

    def begin(
        self, endpoint: Endpoint, request: BeginRequest, *, timeout_s: float
    ) -> tuple[BeginReply, list[bytes]]:
        """Ask to begin an epoch; the reply and the slices that come with it."""
        return self._call(endpoint, "begin", request, _BEGUN, timeout_s)

    def ack(self, endpoint: Endpoint, request: AckRequest, *, timeout_s: float) -> AckReply:
        """Report a snapshot; may take as long as a commit takes."""
        return self._call(endpoint, "ack", request, _ACKED, timeout_s)[0]

    def base_done(self, endpoint: Endpoint, request: BaseDone, *, timeout_s: float) -> BaseReply:
        """Report a base that is durable."""
        return self._call(endpoint, "base_done", request, _BASE, timeout_s)[0]

    def base_renewed(
        self, endpoint: Endpoint, request: BaseRenewal, *, timeout_s: float
    ) -> BaseReply:
        """Say that an upload goes on."""
        return self._call(endpoint, "base_renewed", request, _BASE, timeout_s)[0]

    def call(self, endpoint: Endpoint, request: Call, *, timeout_s: float) -> bytes:
        """Ask whoever drives the operators (see :class:`Call`)."""
        return self._call(endpoint, "call", request, _CALLED, timeout_s)[0]

    def _call(
        self, endpoint: Endpoint, kind: str, request: Any, reply: Decoder[T], timeout_s: float
    ) -> tuple[T, list[bytes]]:
        options = call_options(endpoint.token, timeout_s)
        try:
            bodies = ask(self._client, kind, request, options)
        except flight.FlightUnauthenticatedError as error:
            raise _not_running(request.job) from error
        except BROKEN as error:
            strange = endpoint.certificate and "handshake" in str(error).lower()
            raise CoordinatorUnreachableError(
                f"The coordinator at {self._location} did not answer {kind!r} ({error}).",
                todo=_STRANGER if strange else _UNREACHED,
            ) from error
        return read_reply(bodies, reply)


_clients: dict[tuple[int, str, bytes], Client] = {}


def client_for(endpoint: Endpoint) -> Client:
    """This process's connection to an endpoint's coordinator; never one inherited over a fork.

    Raises:
        CoordinatorUnreachableError: one of both is without TLS, and the other is not.
    """
    # A driver that takes the place of another, at its port, has another certificate.
    key = (os.getpid(), endpoint.location, endpoint.certificate)
    client = _clients.get(key)
    if client is None:
        _clients.clear()
        client = _clients[key] = Client(endpoint.location, endpoint.certificate)
    return client
