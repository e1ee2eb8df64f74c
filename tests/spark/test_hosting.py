"""Epochs that run in the worker which has their store open; workers are threads here."""

from __future__ import annotations

import contextvars
import decimal
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from recovery.local import local_sockets
from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import StorePool, StorePoolSettings
from snapshot.protocol.messages import Use
from statebackend import system
from statebackend.errors import PeerLostError, ProcessorError
from statebackend.rpc.service import Endpoint
from statebackend.spark.worker import delegated_epochs as hosting
from statebackend.spark.worker.batch_context import EpochContext
from statebackend.spark.worker.delegated_calls import ConnectionClosed, Frames
from statebackend.spark.worker.delegated_epochs import DelegatedEpochs, Request, Run, pass_on
from tests.recovery.local.open_stores import REAL, subtask
from tests.recovery.local.small_copies import SMALL, marker

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


def until_free(worker: Worker) -> None:
    deadline_s = system.monotonic_s() + TIMEOUT_S
    while worker.hosting._delegated is not None:
        assert system.monotonic_s() < deadline_s
        system.sleep_s(0.005)


@pytest.mark.parametrize("words", [1, 1_000_000], ids=["in a word", "at length"])
@pytest.mark.parametrize("size", [1, 1_000_000], ids=["small input", "input it never reads"])
def test_what_the_epoch_raises_is_raised_in_the_askers_task(
    away: Worker, asker: Worker, size: int, words: int
) -> None:
    def fails(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from ()
        next(batches)
        try:
            raise ZeroDivisionError("the user's own line")
        except ZeroDivisionError as error:
            raise ProcessorError("It raised." + words * " \udcff", todo="Look.") from error

    knows(away, fails)
    big = pa.record_batch({"n": pa.array(range(size))})
    with pytest.raises(ProcessorError, match=r"^\[SB1014\] It raised. [^$]*Look.$") as raised:
        asker.task(0, *[big] * 8)
    (note,) = raised.value.__notes__
    assert "the user's own line" in note
    assert "in fails" in note
    assert len(note) < 20_000


def test_an_error_that_is_not_ours_is_raised_too(away: Worker, asker: Worker) -> None:
    def fails(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from ()
        raise SystemExit(3)

    knows(away, fails)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        asker.task(0)


def test_a_batch_of_output_is_taken_before_the_epoch_goes_on(away: Worker, asker: Worker) -> None:
    went_on = threading.Event()

    def slow(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from list(batches)
        went_on.set()  # it acks

    knows(away, slow)
    host = asker.host_of(0)
    output = pass_on(iter([rows(1)]), host)
    assert next(output).column("n").to_pylist() == [1]
    assert not went_on.wait(0.2), "Spark has not taken it yet"
    assert next(output, None) is None
    assert went_on.is_set()


def test_an_asker_that_ends_early_ends_the_guest(away: Worker, asker: Worker) -> None:
    knows(away)
    output = pass_on(iter([rows(1), rows(2)]), asker.host_of(0))
    next(output)
    output.close()  # type: ignore[attr-defined]
    assert away.closed.wait(TIMEOUT_S)
    until_free(away)
    assert away.has(0)


def test_an_input_that_fails_ends_the_guest_without_an_end_of_input(
    away: Worker, asker: Worker
) -> None:
    read = threading.Event()

    def reads(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        taken = list(batches)
        read.set()
        yield from taken

    def broken() -> Iterator[pa.RecordBatch]:
        yield rows(1)
        raise EOFError("Spark's side is gone")

    knows(away, reads)
    with pytest.raises(EOFError):
        list(pass_on(broken(), asker.host_of(0)))
    until_free(away)
    assert not read.is_set()


def test_a_host_that_ends_is_said_to_be_lost(away: Worker, asker: Worker) -> None:
    knows(away)
    output = pass_on(iter([rows(1), rows(2)]), asker.host_of(0))
    next(output)
    away.hosting.close()
    with pytest.raises(PeerLostError, match="has ended"):
        next(output)
    assert away.closed.wait(TIMEOUT_S)


def test_a_worker_of_another_user_is_no_host_and_gets_none(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows(away)
    monkeypatch.setattr(local_sockets, "peer_uid", lambda _: os.geteuid() + 1)
    assert asker.host_of(0) is None, "nothing is said to it"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = Path(away.store_pool.address).with_name("guests")
    with Frames(connection, timeout_s=TIMEOUT_S) as frames:
        with local_sockets.socket_address(path) as address:
            connection.connect(address)
        with pytest.raises(ConnectionClosed):
            frames.receive_flag()
    assert not away.guests


def test_a_host_that_gives_no_sign_of_life_is_given_up_and_the_task_is_tried_again(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    thawed = threading.Event()

    def frozen(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        taken = list(batches)
        assert thawed.wait(TIMEOUT_S)
        yield from taken

    knows(away, frozen)
    monkeypatch.setattr(away.hosting, "say_alive", lambda: None)
    monkeypatch.setattr(hosting, "_SILENCE_S", 0.2)
    host = asker.host_of(0)
    with pytest.raises(PeerLostError, match=r"was silent for 0\.2 s"):
        numbers(pass_on(iter([rows(1)]), host))
    thawed.set()
    until_free(away)
    assert away.has(0), "its attempt came to nothing, and the store is good"


def test_a_host_that_takes_no_input_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "_SILENCE_S", 0.2)
    mine, its = socket.socketpair()
    with its:
        big = pa.record_batch({"n": pa.array(range(1_000_000))})
        with pytest.raises(PeerLostError):
            numbers(pass_on(iter([big]), Frames(mine, timeout_s=0.2)))


def test_a_host_that_computes_says_that_it_is_alive_and_is_waited_for(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Semaphore(0)
    real = Frames.alive

    def alive(frames: Frames) -> None:
        real(frames)
        said.release()

    def slow(request: Request, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        taken = list(batches)
        for _ in range(3):
            assert said.acquire(timeout=TIMEOUT_S)
        yield from taken

    monkeypatch.setattr(Frames, "alive", alive)
    monkeypatch.setattr(hosting, "_ALIVE_S", 0.0)
    knows(away, slow)
    assert numbers(pass_on(iter([rows(1)]), asker.host_of(0))) == [1]


def test_an_asker_that_gives_no_sign_of_life_is_given_up_and_its_hosts_own_task_ends(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows have come in part, and it holds up a task that is done."""
    knows(away)
    monkeypatch.setattr(asker.hosting, "say_alive", lambda: None)
    monkeypatch.setattr(hosting, "_SILENCE_S", 0.2)
    host = asker.host_of(0)
    host.send_batch(rows(1))
    with ThreadPoolExecutor(1) as pool:

        def own_task() -> None:
            with away.hosting.task(ENDPOINT, "op", away.run):
                away.hosting._goes(hosting._Own.AWAY)

        own = pool.submit(own_task)
        try:
            own.result(TIMEOUT_S)
        finally:
            host.hang_up()  # or the pool waits for ever
    assert away.has(0), "its attempt came to nothing, and the store is good"


def test_an_asker_that_thaws_when_it_was_given_up_is_tried_again(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows(away)
    monkeypatch.setattr(asker.hosting, "say_alive", lambda: None)
    monkeypatch.setattr(hosting, "_SILENCE_S", 0.2)

    def thaws() -> Iterator[pa.RecordBatch]:
        yield rows(1)
        until_free(away)
        yield rows(2)

    with pytest.raises(PeerLostError, match="Spark tries the task again"):
        numbers(pass_on(thaws(), asker.host_of(0)))


def test_an_asker_tells_its_host_that_it_lives_for_as_long_as_its_task_is_there(
    away: Worker, asker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Frames] = []
    real = Frames.alive

    def alive(frames: Frames) -> None:
        told.append(frames)
        real(frames)

    def given() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            asker.hosting.say_alive()
            yield rows(number)
            asker.hosting.say_alive()

    monkeypatch.setattr(hosting, "_ALIVE_S", 1e9)  # only this test says it
    monkeypatch.setattr(Frames, "alive", alive)
    knows(away)
    with asker.hosting.task(ENDPOINT, "op", asker.run):
        host = asker.host_of(0)
        found = []
        for batch in pass_on(given(), host):
            asker.hosting.say_alive()
            found += numbers(iter([batch]))
        assert found == [0, 10, 20]
        assert told == [host] * 9
    asker.hosting.say_alive()
    assert len(told) == 9


@pytest.mark.parametrize("timeout_s", [None, 2 * TIMEOUT_S])
def test_signs_of_life_are_no_answers_and_never_wait(timeout_s: float | None) -> None:
    one, other = socket.socketpair()
    with (
        Frames(one, timeout_s=timeout_s) as host,
        Frames(other, timeout_s=TIMEOUT_S) as asking,
        ThreadPoolExecutor(1) as pool,
    ):
        # More than anybody takes unread.
        said = pool.submit(lambda: [host.alive() for _ in range(100_000)])
        said.result(TIMEOUT_S)
        sent = pool.submit(host.send_batch, rows(1))
        assert numbers(iter([asking.batch() or rows()])) == [1]
        sent.result(TIMEOUT_S)
