"""Workers that are threads here: each has stores open and runs epochs of others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import StorePool, StorePoolSettings
from snapshot.protocol.messages import Use
from statebackend import system
from statebackend.rpc.session_endpoint import Endpoint
from statebackend.spark.worker import worker_delegation as hosting
from statebackend.spark.worker.batch_context import EpochContext
from statebackend.spark.worker.delegation_messages import Request
from statebackend.spark.worker.worker_delegation import DelegatedEpochs, Run, pass_on
from tests.recovery.local.open_stores import REAL, subtask
from tests.recovery.local.small_copies import SMALL

__all__ = ["asker", "away", "make", "patient"]

DELEGATED = "statebackend-delegated"
USE = Use(stage=12, partition=3, execution=4)
ENDPOINT = Endpoint(location="grpc://127.0.0.1:1", session="session", token="secret")
TIMEOUT_S = 30.0


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": list(numbers)})


def numbers(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [n for batch in batches for n in batch.column("n").to_pylist()]


class Worker:
    """What a process of Spark has."""

    def __init__(self, name: str, local_dir: Path) -> None:
        self.name = name
        self.store_pool = StorePool(REAL, StorePoolSettings())
        self.hosting = DelegatedEpochs(self.store_pool)
        self._local_dir = local_dir
        self.guests: list[Request] = []
        self.closed = threading.Event()

    def copies(self, number: int) -> LocalSubtask:
        return subtask(self._local_dir, self.store_pool, number)

    def opens(self, number: int) -> None:
        """Has the store of a subtask open."""
        copies = self.copies(number)
        held, _ = copies.acquire(0.0)
        held.open_store(SMALL)
        copies.give_back(held)

    def has(self, number: int) -> bool:
        path = self.copies(number).path
        return self.store_pool.keeps(path / (path / "current").read_text())

    def run(self, request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The operator: multiplies by ten."""
        self.guests.append(request)
        assert threading.current_thread().name == DELEGATED
        try:
            for batch in list(batches):
                yield rows(*[10 * n for n in batch.column("n").to_pylist()])
        finally:
            self.closed.set()

    def host_of(self, number: int, at_least_bytes: int = 0) -> Any:
        context = EpochContext(
            epoch=3, query_id="query", attempt=7 + number, endpoint=ENDPOINT, use=USE
        )
        kept = self.copies(number).kept_elsewhere()
        return self.hosting.host_of(kept, "op", context, at_least_bytes=at_least_bytes)

    def task(
        self,
        number: int,
        *given: pa.RecordBatch,
        meet: Callable[[], object] = lambda: None,
    ) -> list[int] | None:
        """A task of a subtask; None: it is run here."""

        def run(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            meet()  # no task is over before each has its host
            return self.run(request, batches)

        with self.hosting.task(ENDPOINT, "op", run):
            meet()
            host = self.host_of(number)
            if host is None:
                return None
            return numbers(pass_on(iter(given or [rows(number), rows(number + 1)]), host))


Make = Callable[[str], Worker]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is about to answer is waited for on a slow machine, too; here nobody waits in vain."""
    monkeypatch.setattr(hosting, "_ANSWER_S", 30.0)
    monkeypatch.setattr(hosting, "_MEET_S", 10.0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(name: str) -> Worker:
            worker = Worker(name, tmp_path / "local")
            stack.callback(worker.store_pool.close)
            stack.callback(worker.hosting.close)
            return worker

        yield made


@pytest.fixture
def away(make: Make) -> Worker:
    """A worker with store 0, whose own task is elsewhere."""
    worker = make("away")
    worker.opens(0)
    worker.hosting._goes(hosting._Own.AWAY)
    return worker


@pytest.fixture
def asker(make: Make) -> Worker:
    return make("asker")


def knows(worker: Worker, run: Run | None = None) -> None:
    worker.hosting._runs[ENDPOINT.to_property(), "op"] = run or worker.run


def until_free(worker: Worker) -> None:
    deadline_s = system.monotonic_s() + TIMEOUT_S
    while worker.hosting._delegated is not None:
        assert system.monotonic_s() < deadline_s
        system.sleep_s(0.005)
