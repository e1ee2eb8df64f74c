"""Continuous jobs in a barrier stage of Spark's: real processes, which are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

from recovery.decide.restart_strategy import FixedDelay, NoRestart
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.errors import PeerLostError, ProcessorError
from statebackend.runtime.driver.services import Services
from tests.continuous.runtime.jobs import (
    OUTPUT,
    ArrowCounting,
    Counting,
    FailingOnce,
    HeldClock,
    Numbers,
    PandasCounting,
    Unclosed,
    Windows,
    check_counts,
    truth,
    windows_truth,
)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from statebackend.backend import StateBackend
    from statebackend.continuous.driver.continuous_query import ContinuousQuery

WINDOWS = "key BIGINT, start BIGINT, n BIGINT, total BIGINT"


@pytest.fixture
def queries() -> Iterator[list[ContinuousQuery]]:
    made: list[ContinuousQuery] = []
    yield made
    for query in made:
        query.stop()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def running_at(query: ContinuousQuery, epoch: int) -> None:
    soon(lambda: query.is_running and (query.epoch or 0) >= epoch, 120.0)


def kill(query: ContinuousQuery, slot: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(query.slots()[slot].pid, signal.SIGKILL)


def test_the_smallest_job_from_source_to_files(
    backend: Callable[[], StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    keyed = backend().continuous(Numbers(20_000), name="numbers").key_by("key")
    counted = keyed.process(ArrowCounting(), uid="count", output_schema=OUTPUT)
    query = counted.sink(FileSink(tmp_path / "out")).start(parallelism=2, checkpoint_interval=0.2)
    queries.append(query)
    assert query.await_termination(120.0)
    check_counts(rows_of(tmp_path / "out"), truth(20_000))
    assert {one.operator for one in query.progress().epochs} >= {"numbers", "count"}


def test_a_processor_of_dataframes_gives_what_it_gives_in_micro_batches(
    backend: Callable[[], StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    keyed = backend().continuous(Numbers(4000), name="numbers").key_by("key")
    counted = keyed.process(PandasCounting(), uid="count", output_schema=OUTPUT, flavour="pandas")
    query = counted.sink(FileSink(tmp_path / "out")).start(parallelism=2)
    queries.append(query)
    assert query.await_termination(120.0)
    check_counts(rows_of(tmp_path / "out"), truth(4000))


# Some 20 s: two workers die at checkpoints that the source paces, and Spark starts others.
@pytest.mark.promise
def test_killed_workers_change_nothing_of_windows_and_counts(
    backend: Callable[[], StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    rows = 8000
    clock = HeldClock(tmp_path / "goes-on", 2.0)
    source = Numbers(rows, rows_per_s=800, clock=clock, event_time="at", watermark_delay="5 ms")
    keyed = backend().continuous(source, name="numbers").key_by("key")
    keyed.process(
        Windows(500), uid="windows", output_schema=WINDOWS, time_mode="event", event_time="at"
    ).sink(FileSink(tmp_path / "windows"))
    counted = keyed.process(Counting(), uid="count", output_schema=OUTPUT)
    counted.sink(FileSink(tmp_path / "counts"))
    query = counted.start(parallelism=2, checkpoint_interval=0.3, restart=FixedDelay(5, 0.0))
    queries.append(query)
    for kills, (slot, after) in enumerate(((1, 1), (0, 4)), 1):
        running_at(query, after)
        kill(query, slot)
        soon(lambda kills=kills: query.restarts == kills)
    (tmp_path / "goes-on").touch()
    assert query.await_termination(120.0)
    assert query.restarts == 2
    check_counts(rows_of(tmp_path / "counts"), truth(rows))
    found = [tuple(row.values()) for row in rows_of(tmp_path / "windows")]
    assert len(found) == len(set(found))
    assert set(found) == windows_truth(rows, 500)
    assert "local" in {restore.source for restore in query.restores()}


def test_slots_and_driver_speak_tls_also_after_a_kill(
    backend: Callable[..., StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    source = Numbers(8000, rows_per_s=1500, clock=HeldClock(tmp_path / "goes-on", 1.5))
    keyed = backend(tls=1).continuous(source, name="numbers").key_by("key")
    counted = keyed.process(ArrowCounting(), uid="count", output_schema=OUTPUT)
    query = counted.sink(FileSink(tmp_path / "out")).start(
        parallelism=2, checkpoint_interval=0.3, restart=FixedDelay(5, 0.0)
    )
    queries.append(query)
    running_at(query, 1)
    before = {slot.peer.certificate for slot in query.slots()}
    kill(query, 0)
    soon(lambda: query.restarts == 1)
    running_at(query, 3)
    soon(lambda: len({slot.peer.certificate for slot in query.slots()} | before) == 4)
    locations = [slot.peer.location for slot in query.slots()]
    for location in (*locations, Services.servers[True].location):
        assert location.startswith("grpc+tls://")
        bare = flight.connect(location.replace("grpc+tls", "grpc"))
        with bare, pytest.raises(flight.FlightUnavailableError):
            list(bare.do_action("hello", flight.FlightCallOptions(timeout=60)))
    (tmp_path / "goes-on").touch()
    assert query.await_termination(120.0)
    assert query.restarts == 1
    check_counts(rows_of(tmp_path / "out"), truth(8000))


def test_a_close_that_fails_at_the_end_comes_back_and_the_output_stays(
    backend: Callable[[], StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    keyed = backend().continuous(Numbers(5_000), name="numbers").key_by("key")
    counted = keyed.process(Unclosed(), uid="count", output_schema=OUTPUT)
    query = counted.sink(FileSink(tmp_path / "out")).start(parallelism=2, checkpoint_interval=0.2)
    queries.append(query)
    with pytest.raises(ProcessorError, match=r"'count' was not closed.*the connection is gone"):
        query.await_termination(120.0)
    assert query.restarts == 0
    check_counts(rows_of(tmp_path / "out"), truth(5_000))


def test_the_users_error_comes_back_from_the_worker(
    backend: Callable[[], StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    keyed = backend().continuous(Numbers(1000), name="numbers").key_by("key")
    processor = FailingOnce(str(tmp_path / "failed"), 100)
    counted = keyed.process(processor, uid="count", output_schema=OUTPUT)
    query = counted.sink(FileSink(tmp_path / "out")).start(parallelism=2, restart=NoRestart())
    queries.append(query)
    with pytest.raises(ProcessorError, match="the row that fails"):
        query.await_termination(120.0)


def test_a_stage_that_does_not_fit_is_given_up_with_what_to_do(
    backend: Callable[[], StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    keyed = backend().continuous(Numbers(1000), name="numbers").key_by("key")
    counted = keyed.process(Counting(), uid="count", output_schema=OUTPUT)
    query = counted.sink(FileSink(tmp_path / "out")).start(
        parallelism=3, restart=NoRestart(), start_timeout_s=4.0
    )
    queries.append(query)
    with pytest.raises(PeerLostError, match="slots"):
        query.await_termination(120.0)


def test_a_stopped_job_goes_on_at_another_parallelism(
    backend: Callable[[], StateBackend], tmp_path: Path, queries: list[ContinuousQuery]
) -> None:
    rows = 6000
    for parallelism in (2, 1):
        source, made = Numbers(rows, splits=3, rows_per_s=500), backend()
        keyed = made.continuous(source, name="numbers").key_by("key")
        counted = keyed.process(Counting(), uid="count", output_schema=OUTPUT)
        query = counted.sink(FileSink(tmp_path / "out")).start(
            parallelism=parallelism, checkpoint_interval=0.3
        )
        queries.append(query)
        assert made.wait_restored(60.0)
        if parallelism == 2:
            running_at(query, 1)
            assert query.stop()
    assert query.await_termination(120.0)
    check_counts(rows_of(tmp_path / "out"), truth(rows))
