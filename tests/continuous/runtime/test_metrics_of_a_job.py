"""A continuous job shows its metrics, over its restarts."""

from __future__ import annotations

import socket
import urllib.request
from typing import TYPE_CHECKING, Any

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.jobs import OUTPUT, FailingOnce, Numbers, check_counts, truth
from tests.continuous.runtime.world import World, soon

if TYPE_CHECKING:
    from pathlib import Path


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith("statebackend_")]
    return {name: float(value) for name, _, value in found}


def test_a_continuous_job_shows_checkpoints_and_restarts(world: World, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world.renew(metrics_port=port)
    sink = CollectSink()
    source = world.source(Numbers(4000, rows_per_s=4000))
    failing: Any = FailingOnce(str(tmp_path / "failed"), 2000)
    source.key_by("key").process(failing, uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(2, restart=FixedDelay(3, 0.1))
    soon(lambda: scraped(port).get('statebackend_job_running{job_name="job"}') == 1)
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(4000))

    found = scraped(port)
    assert found['statebackend_job_running{job_name="job"}'] == 0
    assert found['statebackend_restarts_total{job_name="job"}'] == 1
    complete = [one for one in query.checkpoints() if not one.aborted]
    name = 'statebackend_checkpoints_total{job_name="job",outcome="complete"}'
    assert found[name] == len(complete) > 0
    aligned = 'job_name="job",operator="count",phase="alignment"'
    count = found[f"statebackend_checkpoint_phase_duration_seconds_count{{{aligned}}}"]
    assert count == 2 * len(complete)
    assert found['statebackend_rows_total{job_name="job",operator="count"}'] == 4000
    assert found['statebackend_state_lookups_total{job_name="job",operator="count"}'] > 0
    (operator,) = query.progress().state_operators()
    assert operator["operatorName"] == "count"
