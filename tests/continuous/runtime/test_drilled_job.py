"""The bundled continuous job of drills, in one process: fed while it runs, failed, and ended."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from recovery.decide.restart_strategy import FixedDelay
from recovery.drill.driver.continuous_driver import let_end
from recovery.drill.jobs import continuous_output as files
from recovery.drill.jobs.bundled_jobs import BUNDLED
from recovery.drill.report.output_check import check
from statebackend import system
from statebackend.continuous.job.streams import ContinuousStream, continuous
from statebackend.continuous.sinks.file_sink import FileSink
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from pathlib import Path

    from tests.continuous.runtime.world import World

FILES = 20


@pytest.mark.parametrize("seed", range(2))
def test_windows_of_files_that_come_while_it_runs_are_exact(
    world: World, tmp_path: Path, seed: int
) -> None:
    job, drawn = BUNDLED["continuous-windows"], random.Random(seed)
    assert job.feed is not None
    backend = SimpleNamespace(continuous=functools.partial(continuous, world.flow))
    stream = job.build(None, backend, tmp_path)  # type: ignore[arg-type] # no Spark here
    assert isinstance(stream, ContinuousStream)
    let_end(stream.flow, tmp_path / "stop")
    stream.sink(FileSink(tmp_path / "out"))
    query = world.start(2, restart=FixedDelay(50, 0.0), discover_every_s=0.05)
    failures = set(drawn.sample(range(2, FILES - 2), 3))
    for number in range(FILES):
        job.feed(tmp_path, number, seed)
        system.sleep_s(0.05)
        if number in failures:
            soon(lambda: query.is_running)
            drawn.choice(world.cluster.slots[-2:])._link.broken("drawn", 0, RuntimeError("drawn"))
    (tmp_path / "stop").touch()
    assert query.await_termination(100.0)
    assert query.restarts >= 1
    rows = (row for _, row in files.rows_in(tmp_path / "out", -1))
    verdict = check(job.truth(tmp_path), rows)
    assert verdict.exact, verdict
