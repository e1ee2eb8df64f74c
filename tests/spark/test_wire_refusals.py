"""The driver's service refuses strangers by their headers, and too much before it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from snapshot.protocol.messages import PROTOCOL
from statebackend.errors import ProtocolError, StaleRequestError
from statebackend.rpc import driver_server as wire
from statebackend.rpc.driver_client import Client
from statebackend.rpc.driver_server import Server
from statebackend.rpc.envelope import Call, Decoder
from statebackend.rpc.session_endpoint import Endpoint

TOKEN, OTHER = "the token of this session", "the token of another session"


class Deaf:
    """A session that notes what reaches it."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def call(self, kind: str, body: bytes) -> bytes:
        self.heard.append(body)
        return b"yes"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(bind="127.0.0.1", advertised="127.0.0.1")
    try:
        yield server
    finally:
        server.shutdown()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """What of requests was decoded."""
    kinds: list[type] = []
    real = Decoder._decode

    def decode(self: Decoder[Any], view: memoryview) -> Any:
        if self in wire._REQUESTS.values():
            kinds.append(self.kind)
        return real(self, view)

    monkeypatch.setattr(Decoder, "_decode", decode)
    return kinds


def ask(endpoint: Endpoint, body: bytes = b"question", session: str = "") -> bytes:
    session = session or endpoint.session
    request = Call(protocol=PROTOCOL, job="clicks", session=session, kind="say", body=body)
    return Client(endpoint.location).call(endpoint, request, timeout_s=60)


def stranger(endpoint: Endpoint, token: str) -> Endpoint:
    return Endpoint(location=endpoint.location, session=endpoint.session, token=token)


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_a_wrong_token_is_refused_before_anything_is_decoded(
    server: Server, decoded: list[type], token: str
) -> None:
    session = Deaf()
    endpoint = server.add("session", TOKEN, session)  # type: ignore[arg-type]
    with pytest.raises(StaleRequestError, match="session of job 'clicks' that is not running here"):
        ask(stranger(endpoint, token))
    assert not decoded
    assert not session.heard
    assert ask(endpoint) == b"yes"
    assert decoded == [Call]


CALLS: dict[str, Callable[[Any], Any]] = {
    "an action": lambda client: list(client.do_action(flight.Action("say", b"\xc1"))),
    "the list of actions": lambda client: client.list_actions(),
    "the list of flights": lambda client: list(client.list_flights()),
    "an upload": lambda client: client.do_put(
        flight.FlightDescriptor.for_command(b"x"), pa.schema([])
    )[0].close(),
    "a download": lambda client: client.do_get(flight.Ticket(b"x")).read_all(),
}


@pytest.mark.parametrize("what", list(CALLS))
def test_a_call_of_any_kind_without_a_token_is_refused(server: Server, what: str) -> None:
    endpoint = server.add("session", TOKEN, Deaf())  # type: ignore[arg-type]
    with (
        flight.connect(endpoint.location) as client,
        pytest.raises(flight.FlightUnauthenticatedError),
    ):
        CALLS[what](client)


def test_the_token_of_one_session_does_not_open_another(server: Server) -> None:
    own, session = Deaf(), Deaf()
    endpoint = server.add("own", OTHER, own)  # type: ignore[arg-type]
    server.add("session", TOKEN, session)  # type: ignore[arg-type]
    with pytest.raises(StaleRequestError):
        ask(endpoint, session="session")
    assert not session.heard
    assert ask(endpoint) == b"yes"


def test_after_its_session_a_token_opens_nothing(server: Server, decoded: list[type]) -> None:
    endpoint = server.add("session", TOKEN, Deaf())  # type: ignore[arg-type]
    server.remove("session")
    with pytest.raises(StaleRequestError):
        ask(endpoint)
    assert not decoded


def test_a_request_over_the_limit_is_refused_before_it_is_decoded(
    server: Server, decoded: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire._REQUESTS["call"], "limit_bytes", 1000)
    session = Deaf()
    endpoint = server.add("session", TOKEN, session)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="over the limit"):
        ask(endpoint, b"x" * 1000)
    assert not decoded
    assert not session.heard
