"""A store on a real S3 server behind a proxy that loses, breaks and refuses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from recovery.drill import Facts, Fault, FaultProxy, Rule, Script, Verb
from snapshot.storage import ObjectStore, open_store
from tests.snapshot.fresh_ids import new_id

if TYPE_CHECKING:
    from tests.support.s3 import S3

__all__ = ["large_file", "proxy", "store"]


@pytest.fixture(params=["plain", "tls"])
def proxy(ministack: S3, request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    with ministack.faulty(tls=request.param == "tls") as found:
        yield found


@pytest.fixture
def store(ministack: S3, proxy: FaultProxy) -> ObjectStore:
    return through(ministack, proxy)


def through(s3: S3, proxy: FaultProxy, **given: Any) -> ObjectStore:
    options = replace(s3.through(proxy), **{"deadline_s": 30.0, "read_timeout_s": 5.0, **given})
    return open_store(s3.fresh_uri(), new_id=new_id, options=options)


def first(count: int, fault: Fault, *verbs: Verb) -> Script:
    """The first requests of each of these verbs (none given: of every one) meet the fault."""
    return Script(Rule(fault=fault, verbs=verbs or None, nth=range(1, count + 1)))


class Deciding:
    """A plan that asks a function, and remembers what it was told of every request."""

    def __init__(self, decide: Callable[[Facts], Fault | None] = lambda facts: None) -> None:
        self.seen: list[Facts] = []
        self._decide = decide

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        self.seen.append(facts)
        return self._decide(facts)


def verbs_of(proxy: FaultProxy) -> list[Verb]:
    return [entry.verb for entry in proxy.requests()]


@pytest.fixture(scope="session")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """70 MiB: four parts of 16 MiB and one of 6."""
    path = tmp_path_factory.mktemp("large") / "file"
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(70):
            file.write(number.to_bytes(4) + block[4:])
    yield path
    path.unlink()
