"""The wire with TLS: who is spoken to, and what a listener has of it."""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from cryptography import x509
from pyspark import cloudpickle
from rich.pretty import pretty_repr

from snapshot.protocol.messages import PROTOCOL
from statebackend.continuous.exchange.channel_messages import Identity
from statebackend.errors import (
    CoordinatorUnreachableError,
    EnvironmentMissingError,
    SettingError,
    StateBackendError,
)
from statebackend.rpc import tls as tls_module
from statebackend.rpc.driver_client import Client, client_for
from statebackend.rpc.driver_server import Server
from statebackend.rpc.envelope import Call
from statebackend.rpc.session_endpoint import Credentials, Endpoint
from statebackend.rpc.tls import Tls, driver_tls, self_signed
from statebackend.runtime.driver.services import Services, driver_server
from statebackend.settings import Settings
from tests.support.wiretap import tapped

TOKEN = "the token of this session"
ASKED, ANSWERED = b"rows of state, going out " * 20, b"rows of state, coming in " * 20


class Parrot:
    """A session that answers calls."""

    def call(self, kind: str, body: bytes) -> bytes:
        assert body == ASKED
        return ANSWERED


@contextlib.contextmanager
def served(tls: Tls | None, port: int = 0) -> Iterator[tuple[Server, Endpoint]]:
    server = Server(bind="127.0.0.1", advertised="127.0.0.1", port=port, tls=tls)
    try:
        yield server, server.add("session", TOKEN, Parrot())  # type: ignore[arg-type]
    finally:
        server.shutdown()


def ask(endpoint: Endpoint, client: Client | None = None) -> bytes:
    request = Call(
        protocol=PROTOCOL, job="clicks", session=endpoint.session, kind="say", body=ASKED
    )
    client = client or Client(endpoint.location, endpoint.certificate)
    return client.call(endpoint, request, timeout_s=60)


def unreachable(endpoint: Endpoint) -> CoordinatorUnreachableError:
    """What asking there comes to, at once."""
    began_s = time.monotonic()
    with pytest.raises(CoordinatorUnreachableError) as caught:
        ask(endpoint)
    assert time.monotonic() - began_s < 20
    assert TOKEN not in str(caught.value)
    return caught.value


def own() -> Tls:
    return self_signed()


def resolved(**arguments: Any) -> Settings:
    return Settings.resolve(arguments, lambda key: None)


# --- who is spoken to


def test_a_request_is_answered_over_tls() -> None:
    with served(own()) as (server, endpoint):
        assert server.location.startswith("grpc+tls://127.0.0.1:")
        assert ask(endpoint) == ANSWERED
        text = endpoint.to_property()
        assert ask(Endpoint.from_property(text, endpoint.credentials)) == ANSWERED


@pytest.mark.parametrize("tls", [False, True])
def test_only_the_one_without_tls_can_be_read_on_the_network(tls: bool) -> None:
    with served(own() if tls else None) as (server, endpoint), tapped(server.location) as tap:
        through = msgspec.structs.replace(endpoint, location=tap.location)
        assert ask(through) == ANSWERED
        heard = tap.heard()
    assert len(heard) > len(ASKED + ANSWERED)
    for secret in (ASKED, ANSWERED, TOKEN.encode(), b"clicks", b"x-statebackend-token"):
        assert (secret in heard) is not tls, secret


def test_a_client_without_tls_is_refused_by_a_server_with_it() -> None:
    with served(own()) as (server, endpoint):
        plain = msgspec.structs.replace(endpoint, certificate=b"")
        assert "spark.statebackend.tls" in str(unreachable(plain))
        misled = msgspec.structs.replace(plain, location=f"grpc://127.0.0.1:{server.port}")
        unreachable(misled)
        action = flight.Action("call", pa.py_buffer(b""))
        with flight.connect(misled.location) as bare, pytest.raises(flight.FlightError):
            list(bare.do_action(action, flight.FlightCallOptions(timeout=60)))


def test_a_client_with_tls_says_nothing_to_a_server_without_it() -> None:
    certificate = own().certificate
    with served(None) as (server, endpoint), tapped(server.location) as tap:
        through = msgspec.structs.replace(endpoint, location=tap.location, certificate=certificate)
        assert "spark.statebackend.tls" in str(unreachable(through))
        assert tap.heard() == b""
        misled = msgspec.structs.replace(
            through, location=tap.location.replace("grpc://", "grpc+tls://")
        )
        assert "certificate" in unreachable(misled).todo
        assert TOKEN.encode() not in tap.heard()


def test_a_server_that_shows_another_certificate_is_told_nothing() -> None:
    with served(own()) as (_, endpoint):
        # Also one that anybody trusts, or that a client was given beside: only the driver's own.
        stranger = msgspec.structs.replace(endpoint, certificate=own().certificate)
        refused = unreachable(stranger)
        assert "certificate" in refused.todo
        assert ask(endpoint) == ANSWERED


def test_a_driver_that_takes_anothers_place_at_its_port_is_asked_anew() -> None:
    with served(own()) as (server, before):
        port = server.port
        assert ask(before, client_for(before)) == ANSWERED
        assert client_for(before) is client_for(before)
    with served(own(), port) as (_, after):
        assert after.location == before.location
        with pytest.raises(CoordinatorUnreachableError):
            ask(before, client_for(before))
        assert ask(after, client_for(after)) == ANSWERED
        assert client_for(after) is client_for(after)


def test_a_wrong_token_is_refused_within_tls_too() -> None:
    with served(own()) as (_, endpoint):
        guessed = msgspec.structs.replace(endpoint, token="guessed")
        with pytest.raises(StateBackendError, match="not running here"):
            ask(guessed)


# --- the certificate and its key


def test_the_key_can_neither_be_shown_nor_sent() -> None:
    tls = own()
    assert b"PRIVATE KEY" in tls.key
    assert b"PRIVATE KEY" not in tls.certificate
    for text in (repr(tls), str(tls), f"{[tls]}"):
        assert text.strip("[]") == "Tls(...)"
    for dumps in (pickle.dumps, cloudpickle.dumps, msgspec.msgpack.encode, msgspec.json.encode):
        with pytest.raises(TypeError):
            dumps(tls)


def test_credentials_are_not_shown_and_survive_the_broadcast() -> None:
    given = Credentials(token=TOKEN, certificate=own().certificate)
    endpoint = Endpoint.of("grpc+tls://h:1", "s", given)
    identity = Identity(job="j", run="r", generation=1, token=TOKEN)
    shown = [pretty_repr(one) for one in (given, endpoint, identity)]
    assert "grpc+tls://h:1" in shown[1]
    for text in (repr(given), f"{[given]}", repr(endpoint), endpoint.to_property(), *shown):
        assert TOKEN not in text
        assert "CERTIFICATE" not in text
    assert pickle.loads(pickle.dumps(given)) == given == endpoint.credentials


def test_every_certificate_is_of_a_key_of_its_own_and_no_clock_has_a_say() -> None:
    one, other = (x509.load_pem_x509_certificate(self_signed().certificate) for _ in "12")
    assert one.public_key() != other.public_key()
    assert one.serial_number != other.serial_number
    assert one.not_valid_before_utc.timestamp() == 0
    assert one.not_valid_after_utc.year == 9999
    constraints = one.extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca  # it vouches for nobody else


def test_a_driver_has_one_certificate_and_without_the_setting_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls_module._Driver, "tls", None)
    assert driver_tls(resolved()) is None
    assert tls_module._Driver.tls is None
    made = driver_tls(resolved(tls=1))
    assert made is not None
    assert driver_tls(resolved(tls=1)) is made


def test_what_is_not_installed_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module._Driver, "tls", None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(EnvironmentMissingError) as caught:
        driver_tls(resolved(tls=1))
    assert "pip install '.[tls]'" in caught.value.todo
    assert driver_tls(resolved()) is None


# --- the driver's servers


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A driver process that serves nobody yet; its session."""
    servers: dict[bool, Server] = {}
    monkeypatch.setattr(Services, "servers", servers)
    conf = {"spark.driver.host": "127.0.0.1"}
    yield SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))
    for server in servers.values():
        server.shutdown()


def test_a_session_with_tls_is_at_no_server_without(services: Any) -> None:
    plain = driver_server(services, resolved())
    secure = driver_server(services, resolved(tls=1))
    assert driver_server(services, resolved(tls=1)) is secure
    assert driver_server(services, resolved()) is plain
    endpoint = secure.add("session", TOKEN, Parrot())  # type: ignore[arg-type]
    assert ask(endpoint) == ANSWERED
    astray = msgspec.structs.replace(endpoint, location=plain.location, certificate=b"")
    with pytest.raises(StateBackendError, match="not running here"):
        ask(astray)


def test_two_servers_at_one_port_are_refused(services: Any) -> None:
    port = driver_server(services, resolved()).port
    with pytest.raises(SettingError, match=r"spark\.statebackend\.tls"):
        driver_server(services, resolved(tls=1, driver_port=port))
    assert set(Services.servers) == {False}
