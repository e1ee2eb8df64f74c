"""A query shows how it fares: by metrics on a port, and in Spark's own words."""

from __future__ import annotations

import socket
import urllib.request
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import functions as F

import statebackend
from statebackend.errors import SettingError
from tests.spark.local.world import until

if TYPE_CHECKING:
    from tests.spark.local.world import World

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number


def scraped(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    wanted = frozenset({"job_name": "default", **labels}.items())
    return samples[f"statebackend_{name}", wanted]


def test_a_query_shows_its_metrics_and_its_operators_to_sparks_listener(
    world: World, port: int
) -> None:
    heard: list[Any] = []
    listener = statebackend.ProgressListener(heard.append)
    world.spark.streams.addListener(listener)
    world.input.add_batches(3)
    backend = world.backend(settings={"metrics_port": port})
    try:
        world.run(backend, world.ledger(backend))
        events = until(lambda: heard[2:] and list(heard), "Spark tells of three batches")
    finally:
        world.spark.streams.removeListener(listener)

    samples = scraped(port)
    assert value(samples, "job_running") == 0  # it has come to its end
    assert value(samples, "job_fenced") == value(samples, "job_failed") == 0
    assert value(samples, "generation") == 1
    assert value(samples, "durable_epoch", operator="ledger") == 2
    assert value(samples, "rows_total", operator="ledger") == len(world.input.rows)
    assert value(samples, "epoch_duration_seconds_count", operator="ledger") == 3
    assert value(samples, "store_requests_total", place="driver", verb="create") >= 4
    assert value(samples, "store_unreachable_seconds") == 0
    assert value(samples, "restores_total", operator="ledger", source="empty") == 2
    phase = {"operator": "ledger", "phase": "process"}
    assert value(samples, "subtask_phase_duration_seconds_count", **phase) == 6
    assert value(samples, "state_rows", operator="ledger") >= 1
    assert value(samples, "level0_files", operator="ledger") >= 0
    labels = {label for _, pairs in samples for label, _ in pairs}
    assert "subtask" not in labels

    for batch, progress in enumerate(events[:3]):
        (operator,) = progress.stateOperators
        assert progress.batchId == batch
        assert operator.operatorName == "ledger"
        assert operator.numShufflePartitions == 2
        assert operator.customMetrics["inputRows"] == progress.numInputRows
        assert operator.numRowsTotal >= operator.numRowsUpdated > 0  # with those of this batch
        assert '"operatorName":"ledger"' in progress.json.replace(" ", "")
    (last,) = backend.progress().state_operators()
    assert last["numRowsUpdated"] == events[2].stateOperators[0].numRowsUpdated > 0
    assert set(last) == set(events[2].stateOperators[0])  # the names are Spark's

    world.check(backend)


def test_a_port_that_is_in_use_is_refused_before_the_job_is_claimed(
    world: World, port: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        backend = world.backend(settings={"metrics_port": port})
        world.input.add_batches(1)
        with pytest.raises(SettingError, match=f"cannot be served at 127.0.0.1:{port}"):
            world.run(backend, world.ledger(backend))
    assert backend.lineages() == {}


def test_observed_metrics_keep_their_types(world: World) -> None:
    heard: list[Any] = []
    listener = statebackend.ProgressListener(heard.append)
    world.spark.streams.addListener(listener)
    world.input.add_batches(1)
    stream = world.input.stream(world.spark).observe(
        "seen",
        F.max(F.lit("2026-01-02 03:04:05.678901").cast("timestamp")).alias("at"),
        F.max(F.col("id").cast("decimal(20,3)")).alias("most"),
        F.max(F.expr("INTERVAL '1 02:03:04' DAY TO SECOND")).alias("took"),
    )
    try:
        backend = world.backend()
        world.run(backend, world.ledger(backend, stream))
        seen = until(lambda: [e.observedMetrics for e in heard if e.observedMetrics], "metrics")
    finally:
        world.spark.streams.removeListener(listener)
    assert seen[0]["seen"].at.microsecond == 678901
    assert seen[0]["seen"].most == Decimal(20)
    assert seen[0]["seen"].took == timedelta(days=1, hours=2, minutes=3, seconds=4)
