"""Redis streams into a continuous job, while workers are killed and the server is started again."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sources.redis_source import RedisStreamSource
from tests.continuous.runtime.jobs import OUTPUT, Counting, check_counts
from tests.continuous.runtime.redisjob import (
    ENTRIES,
    NAMES,
    STREAMS,
    Feeder,
    counted,
    rows_of,
    wanted,
)
from tests.continuous.runtime.world import soon
from tests.support.redisserver import RedisServer, start_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from statebackend.backend import StateBackend
    from statebackend.continuous.driver.continuous_query import ContinuousQuery


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = start_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    yield found
    found.stop()


def kill(query: ContinuousQuery, slot: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(query.slots()[slot].pid, signal.SIGKILL)


def goes_on(query: ContinuousQuery) -> None:
    """Until there is another checkpoint of a run that runs."""
    before = query.epoch
    soon(lambda: query.is_running and query.epoch != before, 120.0)


@pytest.mark.redis
@pytest.mark.timeout(600)
def test_entries_count_once_through_kills_and_a_restart_of_the_server(
    backend: Callable[[], StateBackend], tmp_path: Path, server: RedisServer
) -> None:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    source = RedisStreamSource(server.url, NAMES, schema="key BIGINT, value BIGINT")
    keyed = backend().continuous(source, name="entries").key_by("key")
    stream = keyed.process(Counting(), uid="count", output_schema=OUTPUT)
    query = stream.sink(FileSink(tmp_path / "out")).start(
        parallelism=2, checkpoint_interval=0.3, restart=FixedDelay(30, 0.5)
    )
    feeder = Feeder(server.url)
    try:
        soon(lambda: query.is_running, 180.0)
        feeder.start()
        goes_on(query)
        kill(query, 0)
        soon(lambda: query.restarts >= 1, 60.0)
        goes_on(query)
        server.restart(away_s=1.0)  # its client tries again by itself for a while, or the job does
        goes_on(query)
        kill(query, 1)
        feeder.join(120.0)
        assert feeder.error is None
        assert feeder.added == STREAMS * ENTRIES
        soon(lambda: counted(tmp_path / "out") >= STREAMS * ENTRIES, 120.0)
    finally:
        query.stop()
    check_counts(rows_of(tmp_path / "out"), wanted())
