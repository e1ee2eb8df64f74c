"""A continuous job is shown by its driver's page: its checkpoints, and whom one waits for."""

from __future__ import annotations

import re
import socket
import urllib.request
from typing import TYPE_CHECKING

import pytest

from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers
from tests.continuous.runtime.world import World, soon

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.full


def text(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/jobs/job/{path}", timeout=20) as answer:
        return " ".join(re.sub(r"<[^>]*>", " ", answer.read().decode()).split())


def test_a_continuous_job_shows_its_checkpoints(world: World, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world.renew(ui_port=port)
    source = world.source(Numbers(1_000_000, rows_per_s=2000))
    source.key_by("key").process(Counting(), uid="count", output_schema=OUTPUT).sink(CollectSink())
    query = world.start(2)
    soon(lambda: re.search(r"Running\. Checkpoint \d+ was complete", text(port, "")))
    assert query.run is not None
    done, total = query.run.restored
    assert done == total > 0
    assert "kind continuous" in text(port, "")
    assert "and reads again what came after it" in text(port, "")
    assert query.checkpoint() is not None
    number = query.epoch
    one = text(port, f"checkpoints/{number}")
    assert f"Checkpoint {number} complete" in one
    assert "alignment" in one
    assert query.stop()
    assert "Stopped after checkpoint" in text(port, "")
