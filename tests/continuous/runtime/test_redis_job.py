"""Redis streams into a continuous job in one process: slots fail, and so does the server."""

from __future__ import annotations

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
    from collections.abc import Iterator
    from pathlib import Path

    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from tests.continuous.runtime.world import World


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = start_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    yield found
    found.stop()


def goes_on(query: ContinuousQuery) -> None:
    """Until there is another checkpoint of a run that runs."""
    before = query.epoch
    soon(lambda: query.is_running and query.epoch != before)


@pytest.mark.redis
def test_entries_count_once_whatever_fails(
    world: World, tmp_path: Path, server: RedisServer
) -> None:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    source = RedisStreamSource(server.url, NAMES, schema="key BIGINT, value BIGINT")
    counts = (
        world.source(source).key_by("key").process(Counting(), uid="count", output_schema=OUTPUT)
    )
    counts.sink(FileSink(tmp_path / "out"))
    query = world.start(2, restart=FixedDelay(100, 0.1))
    feeder = Feeder(server.url)
    feeder.start()
    for slot in (0, 1):
        goes_on(query)
        restarts = query.restarts
        world.cluster.slots[-2:][slot]._link.broken("drawn", 0, RuntimeError("drawn"))
        soon(lambda restarts=restarts: query.restarts > restarts)
        goes_on(query)
        server.restart(away_s=0.3)  # its client tries again by itself for a while, or the job does
    feeder.join(60.0)
    assert feeder.error is None
    assert feeder.added == STREAMS * ENTRIES
    soon(lambda: counted(tmp_path / "out") >= STREAMS * ENTRIES)
    assert query.stop()
    check_counts(rows_of(tmp_path / "out"), wanted())
