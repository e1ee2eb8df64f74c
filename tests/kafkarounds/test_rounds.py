"""A round each: the driver gets SIGKILL between Kafka and a sink, and every row is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kafkarounds.rounds import Rounds

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.kafka
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("mode", "sink"),
    [
        ("continuous", "exactly-once"),
        ("continuous", "delta"),
        ("continuous", "iceberg"),
        ("sync", "at-least-once"),
        ("async", "exactly-once"),
        ("async", "foreach-batch"),
    ],
)
def test_every_row_comes_out_though_the_driver_is_killed(
    tmp_path: Path, mode: str, sink: str
) -> None:
    rounds = Rounds(tmp_path, mode, sink, cluster="local[2]", brokers=1)
    assert rounds.run(1, ["driver"])
