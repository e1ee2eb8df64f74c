"""What workers and driver say to each other: requests at the driver's door, and its replies."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pyarrow as pa

from snapshot.protocol.messages import (
    AckReply,
    BaseDone,
    BaseReply,
    BeginReply,
    LocalCopy,
    RestoreReport,
    SlicePart,
)
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import ProtocolError, error_for_code
from statebackend.rpc.driver_server import Server
from statebackend.rpc.envelope import Decoder, ErrorReply
from statebackend.rpc.flight_base import read_reply
from statebackend.rpc.session_endpoint import Credentials, Endpoint
from tests.fuzz.mutate import damaged_bytes, damaged_text, damaged_value
from tests.fuzz.target import REFUSED, SAME, TAKEN, Target, refused_or
from tests.recovery.driver import (
    Started,
    ack_of,
    begin_of,
    manifests_of,
    part_of,
    renewal_of,
)

__all__ = ["targets"]

_TOKEN: Final = "the token"
_FRESH_EVERY: Final = 400  # requests, then the driver must still work, and another one starts
_KINDS: Final = ("begin", "ack", "base_done", "base_renewed")


class Driver:
    """A real session behind a real door, which is not asked over a network."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._asked = 0
        self._started: Started | None = None
        self._chain = ""
        self.honest: dict[str, Any] = {}  # what would be taken, as plain data, by kind

    def _renew(self) -> None:
        if self._server is None:
            self._server = Server(bind="127.0.0.1", advertised="127.0.0.1")
        self._started = Started(MemoryStore(), {"op": 2})
        self._server.add("session", _TOKEN, self._started.session)
        self._chain = self._finish(0)
        self.honest = {
            kind: msgspec.to_builtins(self._honest(kind), builtin_types=(bytes,)) for kind in _KINDS
        }

    def _finish(self, epoch: int, attempt: int = 0) -> str:
        """An epoch of honest workers; the chain of subtask 0."""
        assert self._started is not None
        chains = []
        for subtask in range(2):
            reply, _ = self._started.session.begin(begin_of(epoch, subtask, attempt=attempt))
            part = part_of({b"k": b"%d" % epoch})
            ack = ack_of(reply.chain, part, epoch, subtask, attempt=attempt)
            self._started.session.ack(ack)
            chains.append(ack.chain)
        last = manifests_of(self._started.store)[-1]
        assert last.epoch == epoch, "an honest epoch is not durable"
        return chains[0]

    def begin(self) -> None:
        """Now and then: see that the driver still works, and start another one."""
        if self._asked % _FRESH_EVERY == 0:
            if self._started is not None:
                self._finish_honestly()
            self._renew()
        self._asked += 1

    def _finish_honestly(self) -> None:
        """Whatever was said by others: the run goes on, or says typed why not."""
        assert self._started is not None
        failure = self._started.session.failure
        if failure is None:
            refused_or(lambda: self._finish(1, attempt=1 << 20))
        again = Started(self._started.store, {"op": 2}, first_epoch=1)
        self._started = again
        self._finish(1)

    def _honest(self, kind: str) -> Any:
        if kind == "begin":
            copy = LocalCopy(job_id="j", epoch=0, chain=self._chain, deltas=[(0, "a" * 64)])
            return begin_of(1, copy=copy)
        if kind == "ack":
            report = RestoreReport(
                operator="op",
                subtask=0,
                epoch=0,
                source="local",
                local_bytes=1,
                durable_bytes=0,
                durable_reads=0,
                seconds=0.1,
                host="h",
                executor="e",
            )
            ack = ack_of(self._chain, part_of({b"a": b"b"}), 1, base=part_of({b"a": b"b"}))
            more = {
                "timings_ms": {"read": 1.5},
                "figures": {"rows": 3},
                "requests": {"put": (1, 2)},
            }
            return msgspec.structs.replace(ack, restore=report, max_event_ms=5, **more)
        if kind == "base_done":
            part = part_of({b"k": b"1"})
            return BaseDone(
                protocol=3,
                job="clicks",
                session="session",
                operator="op",
                subtask=0,
                grant="g",
                epoch=0,
                chain=self._chain,
                kind="base",
                part=part,
                state_bytes=1,
                uploaded_bytes=1,
                seconds=1.0,
            )
        return renewal_of(SimpleNamespace(id="g"))  # type: ignore[arg-type]

    def answer(self, kind: str, body: bytes, token: str) -> str:
        """Ask, as Flight would; what was answered."""
        assert self._server is not None
        middleware = SimpleNamespace(token=token)
        context = SimpleNamespace(get_middleware=lambda name: middleware)
        action = SimpleNamespace(type=kind, body=pa.py_buffer(body))
        first, *_ = self._server.do_action(context, action)
        ok, reply = msgspec.msgpack.decode(first, type=tuple[bool, msgspec.Raw])
        if ok:
            assert token == _TOKEN, "a stranger was answered"
            return TAKEN
        error = msgspec.msgpack.decode(reply, type=ErrorReply)
        found = error_for_code(error.code, error.what, error.todo)
        assert type(found).code == error.code, error.code
        unexpected = f"The request {kind!r} failed" in error.what
        assert not unexpected, error.what  # what it fell over, and did not refuse
        return REFUSED


def _request_target() -> Target:
    driver = Driver()

    def make(rng: random.Random) -> tuple[str, bytes, str]:
        driver.begin()
        kind = rng.choice(_KINDS)
        value = driver.honest[kind]
        token = _TOKEN if rng.random() < 0.9 else rng.choice(("", "other", "é", "\0"))
        asked = kind if rng.random() < 0.95 else damaged_text(rng, kind, _KINDS)
        pick = rng.random()
        if pick < 0.01:
            return asked, b"\x91" * rng.choice((100, 100_000)), token
        if pick < 0.75:
            value = damaged_value(rng, value)
        try:
            body = msgspec.msgpack.encode(value)
        except (ValueError, TypeError, OverflowError):
            body = b""
        return asked, damaged_bytes(rng, body, [body]) if pick > 0.7 else body, token

    return Target("request to the coordinator", make, lambda given: driver.answer(*given))


def _reply_target() -> Target:
    driver = Driver()
    driver.begin()
    started = driver._started
    assert started is not None
    begun, slices = started.session.begin(begin_of(1, 0, copy=LocalCopy()))
    part = SlicePart(digest="0" * 64, size_bytes=1, rows=1, name="data/1/1/x")
    begun = msgspec.structs.replace(begun, initial=[part], versions={"s": ["{}", "{}"]})
    refused = ErrorReply(ProtocolError.code, "No.", "")
    whole: list[tuple[Any, Any]] = [
        (BeginReply, [True, begun]),
        (AckReply, [True, AckReply(durable=True)]),
        (BaseReply, [True, BaseReply(lease_s=1.0)]),
        (AckReply, [False, refused]),
    ]

    def make(rng: random.Random) -> tuple[Any, list[bytes]]:
        kind, value = rng.choice(whole)
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        pick = rng.random()
        if pick < 0.7:
            plain = damaged_value(rng, plain)
        try:
            body = msgspec.msgpack.encode(plain)
        except (ValueError, TypeError, OverflowError):
            body = b"\x91" * 50_000
        body = damaged_bytes(rng, body, [body]) if pick > 0.6 else body
        bodies = [body, *slices]
        return kind, bodies if rng.random() < 0.98 else bodies[rng.randrange(2) :]

    def take(given: tuple[Any, list[bytes]]) -> str:
        kind, bodies = given

        def read() -> str:
            found, _ = read_reply([pa.py_buffer(body) for body in bodies], Decoder(kind))
            assert isinstance(found, kind)
            return TAKEN

        return refused_or(read)

    return Target("reply of the coordinator", make, take)


def _endpoint_target() -> Target:
    whole = Endpoint(location="grpc://h:1", session="s", token="t").to_property()

    def take(text: str) -> str:
        try:
            Endpoint.from_property(text, Credentials(token="t"))
        except msgspec.MsgspecError:  # as it says; its caller words it
            return REFUSED
        return SAME if text == whole else TAKEN

    return Target("endpoint of a session", lambda rng: damaged_text(rng, whole, [whole]), take)


def targets() -> list[Target]:
    """All of them."""
    return [_request_target(), _reply_target(), _endpoint_target()]
