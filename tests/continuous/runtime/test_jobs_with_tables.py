"""Jobs that write to lake tables, failed again and again: a reader finds each row once."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay
from recovery.drill.driver.continuous_driver import let_end
from recovery.drill.jobs.bundled_jobs import BUNDLED
from recovery.drill.report.output_check import check
from statebackend import system
from statebackend.continuous.job.streams import continuous
from tests.continuous.runtime.world import soon
from tests.continuous.sinks.lake_tables import LakeTable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # feeds a job for some seconds
FILES = 20


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_windows_in_a_table_are_exact_whatever_fails(
    world: World, tmp_path: Path, kind: str
) -> None:
    job, drawn = BUNDLED["continuous-windows"], random.Random(kind)
    assert job.feed is not None
    backend: Any = SimpleNamespace(continuous=functools.partial(continuous, world.flow))
    table = LakeTable(kind, tmp_path / "table")
    stream: Any = job.build(None, backend, tmp_path)  # type: ignore[arg-type] # no Spark here
    let_end(stream.flow, tmp_path / "stop")
    stream.sink(table.sink())
    query = world.start(2, restart=FixedDelay(50, 0.0), discover_every_s=0.05)
    failures = set(drawn.sample(range(2, FILES - 2), 3))
    for number in range(FILES):
        job.feed(tmp_path, number, 0)
        system.sleep_s(0.05)
        if number in failures:
            soon(lambda: query.is_running)
            drawn.choice(world.cluster.slots[-2:])._link.broken("drawn", 0, RuntimeError("drawn"))
    soon(lambda: table.read().num_rows)  # so that the end is not its only commit
    (tmp_path / "stop").touch()
    assert query.await_termination(100.0)
    assert query.restarts >= 1
    verdict = check(job.truth(tmp_path), iter(table.read().to_pylist()))
    assert verdict.exact, verdict
    assert table.commits() >= 2
