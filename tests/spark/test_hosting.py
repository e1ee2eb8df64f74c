"""Epochs that run in the worker which has their store open; workers are threads here."""

from __future__ import annotations

import contextvars
import decimal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from statebackend import system
from statebackend.spark.worker import worker_delegation as hosting
from statebackend.spark.worker.delegation_messages import Request
from statebackend.spark.worker.worker_delegation import pass_on
from tests.recovery.local.small_copies import marker
from tests.spark.hosts import *  # noqa: F403
from tests.spark.hosts import (
    ENDPOINT,
    TIMEOUT_S,
    USE,
    Make,
    Worker,
    knows,
    numbers,
    rows,
    until_free,
)

pytestmark = pytest.mark.full  # waits for workers that are silent


@pytest.mark.parametrize("count", [2, 3])
def test_workers_that_have_each_others_stores_run_each_others_tasks(make: Make, count: int) -> None:
    workers = [make(str(number)) for number in range(count)]
    for number, worker in enumerate(workers):
        worker.opens(number)
    meet = threading.Barrier(count, timeout=TIMEOUT_S).wait
    with ThreadPoolExecutor(count) as pool:
        tasks = [
            pool.submit(worker.task, (number + 1) % count, meet=meet)
            for number, worker in enumerate(workers)
        ]
        found = [task.result(TIMEOUT_S) for task in tasks]
    places = [(number + 1) % count for number in range(count)]
    assert found == [[10 * place, 10 * place + 10] for place in places]
    for number, worker in enumerate(workers):
        assert worker.has(number), "no store has moved"
        (request,) = worker.guests
        assert (request.epoch, request.query_id, request.attempt) == (3, "query", 7 + number)
        assert request.context(ENDPOINT.credentials).endpoint == ENDPOINT
        assert request.context(ENDPOINT.credentials).use == USE
        assert "secret" not in repr(request)


def test_a_worker_whose_own_task_is_here_gives_the_store_away_instead(
    make: Make, asker: Worker
) -> None:
    host = make("host")
    host.opens(0)
    knows(host)
    host.hosting._goes(hosting._Own.HERE)
    assert asker.task(0) is None
    asker.opens(0)
    assert asker.has(0)
    assert not host.guests


def test_nobody_waits_for_a_worker_that_has_nothing_to_do(make: Make, asker: Worker) -> None:
    idle = make("idle")
    idle.opens(0)
    knows(idle)
    before_s = system.monotonic_s()
    assert asker.task(0) is None
    assert system.monotonic_s() - before_s < hosting._ANSWER_S, "it was answered"


def test_a_worker_of_another_executor_is_no_host(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows(away)
    name = threading.current_thread().name
    monkeypatch.setattr(
        system, "executor_name", lambda: "1" if threading.current_thread().name == name else "2"
    )
    assert asker.task(0) is None


def test_a_small_store_is_handed_over(away: Worker, asker: Worker) -> None:
    knows(away)
    copies = away.copies(0)
    held, _ = copies.acquire(0.0)
    assert held.store is not None
    held.store.apply([b"k" * 9], [b"v" * 9], marker(1))
    held.store.flush()
    size_bytes = held.store.live_bytes()
    assert size_bytes > 0
    copies.give_back(held)
    assert asker.host_of(0, size_bytes + 1) is None
    host = asker.host_of(0, size_bytes)
    assert numbers(pass_on(iter([rows(1)]), host)) == [10]


def test_a_worker_that_does_not_know_the_run_is_no_host(away: Worker, asker: Worker) -> None:
    assert asker.task(0) is None


def test_a_worker_that_is_gone_is_no_host(away: Worker, asker: Worker) -> None:
    knows(away)
    away.hosting.close()
    assert asker.task(0) is None


def test_a_worker_takes_one_guest_at_a_time(away: Worker, asker: Worker) -> None:
    knows(away)
    away.opens(1)
    first = asker.host_of(0)
    assert first is not None
    assert asker.host_of(1) is None
    assert numbers(pass_on(iter([rows(1)]), first)) == [10]
    until_free(away)
    assert asker.task(1) == [10, 20]


def test_a_task_ends_after_the_epoch_that_it_runs_for_another(away: Worker, asker: Worker) -> None:
    """Spark would end a worker that is idle for a minute, and the guest in it."""
    knows(away)
    ended = threading.Event()

    def own_task() -> None:
        with away.hosting.task(ENDPOINT, "op", away.run):
            away.hosting._goes(hosting._Own.AWAY)
            assert begun.wait(TIMEOUT_S)
        ended.set()

    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(own_task)
        output = pass_on(iter([rows(1)]), until_host(asker))
        next(output)
        begun.set()
        assert not ended.wait(0.2)
        assert next(output, None) is None
        task.result(TIMEOUT_S)


def test_a_task_that_stays_waits_for_a_guest_that_was_let_in(away: Worker, asker: Worker) -> None:
    knows(away)
    output = pass_on(iter([rows(1)]), asker.host_of(0))
    next(output)
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(away.host_of, 0)  # it has that store itself, and stays
        system.sleep_s(0.2)
        assert not own.done(), "two epochs at once"
        assert next(output, None) is None
        assert own.result(TIMEOUT_S) is None


def test_a_guest_computes_as_the_main_thread_does(away: Worker, asker: Worker) -> None:
    """Decimals have as many digits as the user's module has asked for when it was imported."""
    digits = []

    def reads(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        digits.append(decimal.getcontext().prec)
        yield from list(batches)

    with decimal.localcontext() as context:
        context.prec = 50
        away.hosting._context = contextvars.copy_context()
    knows(away, reads)
    assert asker.task(0) == [0, 1]
    assert digits == [50]


def test_an_asker_that_is_gone_at_once_leaves_room_for_the_next(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows(away)
    monkeypatch.setattr(hosting, "_ANSWER_S", 0.0001)
    for _ in range(20):
        if (host := asker.host_of(0)) is not None:
            host.hang_up()
    monkeypatch.undo()
    until_free(away)
    host = until_host(asker)
    assert numbers(pass_on(iter([rows(1)]), host)) == [10]


@pytest.mark.parametrize("door", ["", "/nowhere/door"])
def test_a_door_that_leads_nowhere_is_nobodys(away: Worker, asker: Worker, door: str) -> None:
    path = away.copies(0).path
    (path / (path / "current").read_text() / "holder").write_text(door)
    knows(away)
    with asker.hosting.task(ENDPOINT, "op", asker.run):
        assert asker.host_of(0) is None


def until_host(asker: Worker) -> Any:
    deadline_s = system.monotonic_s() + TIMEOUT_S
    while (host := asker.host_of(0)) is None:
        assert system.monotonic_s() < deadline_s
    return host
