"""The driver's RPC service: Arrow Flight actions with MessagePack bodies, and a token per session.

``begin`` and ``ack`` are requests of :mod:`snapshot.protocol.messages`. A call whose token is of no
session is refused by its headers, and nothing of it is decoded. How much gRPC has read of it by
then cannot be bounded through pyarrow. A refusal travels as a typed error inside a normal answer,
so that the worker raises what the coordinator raised.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
import pyarrow as pa
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
    ErrorReply,
)
from statebackend.errors import (
    CoordinatorUnreachableError,
    ProtocolError,
    StaleRequestError,
    StateBackendError,
    error_for_code,
)
from statebackend.rpc.tls import Tls, connect, location_of

__all__ = [
    "Call",
    "Client",
    "Credentials",
    "Endpoint",
    "Handler",
    "Server",
    "client_for",
    "read_reply",
]

T = TypeVar("T")
# What an honest worker may send: its inline budget and some room, never gigabytes.
_MAX_REQUEST_BYTES: Final = 64 << 20
# What msgspec raises for bytes that are not what they should be.
_MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_TOKEN_HEADER: Final = "x-statebackend-token"


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


class _TokenMiddleware(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self.token = token


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
        return sum(_same(of_session, token) for of_session, _ in known) > 0

    def handler(self, session: str, token: str) -> Handler | None:
        """The handler of a session's requests, if the token is the session's."""
        with self._lock:
            known = self._known.get(session)
        return known[1] if known is not None and _same(known[0], token) else None


def _same(token: str, given: str) -> bool:
    return hmac.compare_digest(token.encode(), given.encode(errors="replace"))


class _TokenFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses a stranger's call, of whatever kind, before anything of it is decoded."""

    def __init__(self, sessions: _Sessions) -> None:
        super().__init__()
        self._sessions = sessions

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> _TokenMiddleware:
        given = str((headers.get(_TOKEN_HEADER) or [""])[0])
        if not self._sessions.admits(given):
            raise flight.FlightUnauthenticatedError("the token is of no session here")
        return _TokenMiddleware(given)


class Server(flight.FlightServerBase):  # type: ignore[misc]
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
            location_of(bind, port, tls=tls is not None),
            tls_certificates=[(tls.certificate, tls.key)] if tls is not None else None,
            middleware={"token": _TokenFactory(self._sessions)},
        )
        self.location = location_of(advertised, self.port, tls=tls is not None)
        self.certificate = tls.certificate if tls is not None else b""

    def add(self, session: str, token: str, handler: Handler) -> Endpoint:
        """Answer a session's requests from now on."""
        self._sessions.add(session, token, handler)
        credentials = Credentials(token=token, certificate=self.certificate)
        return Endpoint.of(self.location, session, credentials)

    def remove(self, session: str) -> None:
        """Refuse a session's requests from now on."""
        self._sessions.remove(session)

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Flight's entry; answers (ok, body), then raw slices."""
        try:
            body = action.body
            if body is not None and body.size > _MAX_REQUEST_BYTES:
                raise ProtocolError(f"A request of {body.size} bytes is over the limit.")
            yield from self._answer(context, action.type, body)
        except StateBackendError as error:
            reply = ErrorReply(code=error.code, what=error.what, todo=error.todo)
            yield msgspec.msgpack.encode([False, reply])
        except Exception as error:  # never a hang, never a bare stack trace without a name
            reply = ErrorReply(
                code=ProtocolError.code,
                what=f"The coordinator failed on {action.type!r}: {type(error).__name__}: {error}.",
                todo="See the driver's log.",
            )
            yield msgspec.msgpack.encode([False, reply])

    def _answer(self, context: Any, kind: str, body: Any) -> Iterator[bytes]:
        if kind == "begin":
            request = _decode(body, BeginRequest)
            reply, slices = self._handler(context, request).begin(request)
            yield msgspec.msgpack.encode([True, reply])
            yield from slices
        elif kind == "ack":
            ack = _decode(body, AckRequest)
            yield msgspec.msgpack.encode([True, self._handler(context, ack).ack(ack)])
        elif kind == "base_done":
            done = _decode(body, BaseDone)
            yield msgspec.msgpack.encode([True, self._handler(context, done).base_done(done)])
        elif kind == "base_renewed":
            renewal = _decode(body, BaseRenewal)
            answer = self._handler(context, renewal).base_renewed(renewal)
            yield msgspec.msgpack.encode([True, answer])
        elif kind == "call":
            called = _decode(body, Call)
            handler: Any = self._handler(context, called)
            if not hasattr(handler, "call"):
                raise ProtocolError(f"The session of job {called.job!r} takes no {called.kind!r}.")
            yield msgspec.msgpack.encode([True, handler.call(called.kind, called.body)])
        else:
            raise ProtocolError(f"The coordinator knows no request {kind!r}.")

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
        todo="Nothing to do if its query was stopped; else start it with backend.start().",
    )


# Looked at once, here: threads that decode a type for the first time at the same time were seen to
# end in a segmentation fault of msgspec.
_LOOKED_AT: Final = [
    msgspec.msgpack.Decoder(kind)
    for kind in (BeginRequest, AckRequest, BaseDone, BaseRenewal, Call)
] + [msgspec.msgpack.Decoder(kind) for kind in (BeginReply, AckReply, BaseReply, ErrorReply)]


def _decode(body: Any, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(memoryview(body) if body is not None else b"", type=kind)
    except _MALFORMED as error:
        raise ProtocolError(
            f"A malformed {kind.__name__} was refused ({error}).",
            todo="Install the same statebackend release on driver and executors.",
        ) from error


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
        return self._call(endpoint, "begin", request, BeginReply, timeout_s)

    def ack(self, endpoint: Endpoint, request: AckRequest, *, timeout_s: float) -> AckReply:
        """Report a snapshot; may take as long as a commit takes."""
        return self._call(endpoint, "ack", request, AckReply, timeout_s)[0]

    def base_done(self, endpoint: Endpoint, request: BaseDone, *, timeout_s: float) -> BaseReply:
        """Report a base that is durable."""
        return self._call(endpoint, "base_done", request, BaseReply, timeout_s)[0]

    def base_renewed(
        self, endpoint: Endpoint, request: BaseRenewal, *, timeout_s: float
    ) -> BaseReply:
        """Say that an upload goes on."""
        return self._call(endpoint, "base_renewed", request, BaseReply, timeout_s)[0]

    def call(self, endpoint: Endpoint, request: Call, *, timeout_s: float) -> bytes:
        """Ask whoever drives the operators (see :class:`Call`)."""
        return self._call(endpoint, "call", request, bytes, timeout_s)[0]

    def _call(
        self, endpoint: Endpoint, kind: str, request: Any, reply: type[T], timeout_s: float
    ) -> tuple[T, list[bytes]]:
        options = flight.FlightCallOptions(
            timeout=timeout_s, headers=[(_TOKEN_HEADER.encode(), endpoint.token.encode())]
        )
        try:
            action = flight.Action(kind, pa.py_buffer(msgspec.msgpack.encode(request)))
            bodies = [r.body for r in self._client.do_action(action, options)]
        except flight.FlightUnauthenticatedError as error:
            raise _not_running(request.job) from error
        except (pa.ArrowException, flight.FlightError, OSError) as error:
            strange = endpoint.certificate and "handshake" in str(error).lower()
            raise CoordinatorUnreachableError(
                f"The coordinator at {self._location} did not answer {kind!r} ({error}).",
                todo=_STRANGER if strange else _UNREACHED,
            ) from error
        return read_reply(bodies, reply)


def read_reply(bodies: Sequence[pa.Buffer], kind: type[T]) -> tuple[T, list[bytes]]:
    """What was answered: a reply, and the slices that come with it.

    Raises:
        StateBackendError: the coordinator refused; or ProtocolError: that is no reply of its.
    """
    try:
        ok, answer = msgspec.msgpack.decode(memoryview(bodies[0]), type=tuple[bool, msgspec.Raw])
        reply = msgspec.msgpack.decode(answer, type=kind) if ok else None
        refusal = None if ok else msgspec.msgpack.decode(answer, type=ErrorReply)
    except (*_MALFORMED, IndexError) as error:
        raise ProtocolError(
            f"The coordinator's answer is no {kind.__name__} ({error}).",
            todo="Install the same statebackend release on driver and executors.",
        ) from error
    if refusal is not None:
        raise error_for_code(refusal.code, refusal.what, refusal.todo)
    assert reply is not None
    return reply, [body.to_pybytes() for body in bodies[1:]]


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
