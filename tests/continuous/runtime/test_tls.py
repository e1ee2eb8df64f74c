"""A whole job in one process whose driver and slots speak TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.flight as flight
import pytest

from recovery.decide.restart_strategy import FixedDelay, NoRestart
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.worker import slot as slot_module
from statebackend.errors import EnvironmentMissingError
from statebackend.rpc.tls import Tls, self_signed
from tests.continuous.runtime.jobs import (
    OUTPUT,
    ArrowCounting,
    Numbers,
    check_counts,
    truth,
)
from tests.continuous.runtime.world import World, soon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from statebackend.continuous.driver.continuous_query import ContinuousQuery


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, self_signed())
    yield made
    made.close()


def spoken_to(location: str) -> bool:
    """Whether a client without TLS gets an answer of a kind."""
    with flight.connect(location.replace("grpc+tls://", "grpc://")) as bare:
        try:
            list(bare.do_action(flight.Action("hello", b""), flight.FlightCallOptions(timeout=60)))
        except flight.FlightUnavailableError:
            return False
        except flight.FlightError:
            return True
    return True


def test_driver_and_slots_speak_tls_and_nothing_else(world: World) -> None:
    sink = CollectSink()
    keyed = world.source(Numbers(4000, rows_per_s=2000, clock=world.held(1.0))).key_by("key")
    keyed.process(ArrowCounting(), uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(3)
    soon(lambda: query.is_running and len(query.slots()) == 3)
    locations = [world.cluster.server().location, *(one.peer.location for one in query.slots())]
    for location in locations:
        assert location.startswith("grpc+tls://")
        assert not spoken_to(location)
    certificates = {one.peer.certificate for one in query.slots()}
    assert len(certificates) == 3
    assert world.cluster.server().certificate not in certificates
    world.go_on()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(4000))
    assert query.restarts == 0


def test_restarts_and_other_parallelisms_have_certificates_of_their_own(world: World) -> None:
    sink, seen = CollectSink(), set[bytes]()

    def started(parallelism: int) -> ContinuousQuery:
        source = Numbers(6000, rows_per_s=2000, splits=3, clock=world.held(1.0))
        keyed = world.source(source).key_by("key")
        keyed.process(ArrowCounting(), uid="count", output_schema=OUTPUT).sink(sink)
        return world.start(parallelism, restart=FixedDelay(2, 0.0))

    def new_certificates(query: ContinuousQuery, count: int) -> None:
        soon(lambda: len({one.peer.certificate for one in query.slots()} - seen) == count)
        seen.update(one.peer.certificate for one in query.slots())

    query = started(2)
    new_certificates(query, 2)
    soon(lambda: query.is_running and (query.epoch or 0) > 0)
    world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))
    soon(lambda: query.restarts == 1)
    new_certificates(query, 2)
    soon(lambda: query.is_running and (query.epoch or 0) > 3)
    query.stop()
    world.renew()
    query = started(3)
    new_certificates(query, 3)
    world.go_on()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(6000))


def test_a_slot_that_cannot_speak_tls_says_so_to_the_driver(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Tls:
        raise EnvironmentMissingError("It is not here.", todo="Install it.")

    monkeypatch.setattr(slot_module, "self_signed", missing)
    keyed = world.source(Numbers(100)).key_by("key")
    keyed.process(ArrowCounting(), uid="count", output_schema=OUTPUT).sink(CollectSink())
    query = world.start(2, restart=NoRestart())
    with pytest.raises(EnvironmentMissingError, match="Install it"):
        query.await_termination(60.0)
