"""Prometheus scrapes a query and a continuous job: each panel has lines, and no rule fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.monitoring.shipped_files import DASHBOARD
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers
from tests.continuous.runtime.world import World as ContinuousWorld
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger
from tests.spark.local.world import until
from tests.support.prometheus import Prometheus, start_prometheus
from tests.support.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.spark.local.world import World

pytestmark = pytest.mark.prometheus

BATCHES = 8


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def prometheus(tmp_path: Path, port: int) -> Iterator[Prometheus]:
    server = start_prometheus(tmp_path, port)
    yield server
    server.stop()


@pytest.fixture
def continuous(tmp_path: Path, port: int) -> Iterator[ContinuousWorld]:
    made = ContinuousWorld(tmp_path / "continuous")
    made.renew(metrics_port=port, job="continuous")
    yield made
    made.close()


def panels() -> list[tuple[str, str]]:
    found = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [(one["title"], target["expr"]) for one in found for target in one.get("targets", ())]


def test_each_panel_has_lines_and_no_rule_fails(
    world: World, continuous: ContinuousWorld, prometheus: Prometheus, port: int
) -> None:
    source = continuous.source(Numbers(None, rows_per_s=500))
    source.key_by("key").process(Counting(), uid="count", output_schema=OUTPUT).sink(CollectSink())
    query = continuous.start(2, checkpoint_interval_s=1.0)
    backend = world.backend(settings={"metrics_port": port})
    rows = (
        world.spark.readStream.format("rate")
        .option("rowsPerSecond", 50)
        .load()
        .selectExpr("cast(value % 7 as string) k", "value id", "timestamp at")
    )
    frame = backend.transform_with_state(
        rows,
        keys="k",
        processor=Ledger(),
        output_schema=LEDGER_OUTPUT,
        uid="ledger",
        time_mode="event",
        event_time="at",
        watermark_delay="1 second",
    )
    ran = backend.start(world.writer(frame).trigger(processingTime="1 second"))
    until(lambda: ran.exception() or (ran.lastProgress or {}).get("batchId", 0) >= BATCHES, "time")
    assert ran.isActive, ran.exception()
    assert query.is_active, query.exception()

    def lacking() -> list[str]:
        return [
            f"{title}: {expression}"
            for title, expression in panels()
            if not prometheus.series(expression.replace("$job_name", ".+"))
        ]

    until(lambda: not lacking(), f"lines in {lacking()}")
    names = {one["metric"]["job_name"] for one in prometheus.series("statebackend_job_running")}
    assert names == {"default", "continuous"}
    rules = [one for group in prometheus.asked("rules")["groups"] for one in group["rules"]]
    assert rules
    assert {one["name"]: one["lastError"] for one in rules if one["health"] != "ok"} == {}
    assert [one["name"] for one in rules if one["state"] == "firing"] == []
    assert prometheus.series("scrape_samples_scraped > 100")
    ran.stop()
    until(
        lambda: prometheus.series('ALERTS{alertname="StatebackendJobDown"}'),
        "Prometheus sees that the query has been stopped",
    )
