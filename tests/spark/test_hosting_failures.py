"""An epoch in another worker fails, or one of the two is gone; workers are threads here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from recovery.local import local_sockets
from statebackend.errors import PeerLostError, ProcessorError
from statebackend.spark.worker import worker_delegation as hosting
from statebackend.spark.worker.delegation_messages import ConnectionClosed, Frames, Request
from statebackend.spark.worker.worker_delegation import pass_on
from tests.spark.hosts import *  # noqa: F403
from tests.spark.hosts import ENDPOINT, TIMEOUT_S, Worker, knows, numbers, rows, until_free

pytestmark = pytest.mark.full  # waits for workers that are silent


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
