"""A worker's connection to its driver: asks to begin, and reports what was saved."""

from __future__ import annotations

import os
from typing import Any, Final, TypeVar

import pyarrow.flight as flight

from snapshot.protocol.messages import (
    AckReply,
    AckRequest,
    BaseDone,
    BaseRenewal,
    BaseReply,
    BeginReply,
    BeginRequest,
)
from statebackend.errors import CoordinatorUnreachableError
from statebackend.rpc.envelope import Call, Decoder
from statebackend.rpc.flight_base import BROKEN, ask, call_options, read_reply
from statebackend.rpc.session_endpoint import Endpoint, not_running
from statebackend.rpc.tls import connect

__all__ = ["Client", "client_for"]

T = TypeVar("T")
_BEGUN: Final = Decoder[BeginReply](BeginReply)
_ACKED: Final = Decoder[AckReply](AckReply)
_BASE: Final = Decoder[BaseReply](BaseReply)
_CALLED: Final = Decoder[bytes](bytes)

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
            raise not_running(request.job) from error
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
