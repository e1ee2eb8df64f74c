"""OpenTelemetry is given the metrics, and a span for each epoch with its phases as children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from snapshot.log.progress_events import ContinuousCheckpoint
from statebackend.monitoring.observed_job import ObservedJob
from statebackend.monitoring.opentelemetry_export import Telemetry
from tests.monitoring.watched import acked, durable, watched_job


def shown(job: ObservedJob) -> tuple[InMemoryMetricReader, InMemorySpanExporter]:
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meter = MeterProvider([reader]).get_meter("statebackend")
    Telemetry(meter, tracers.get_tracer("statebackend")).add(job)
    return reader, spans


def points(reader: InMemoryMetricReader, name: str) -> list[Any]:
    data: Any = reader.get_metrics_data()
    metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
    return [point for one in metrics if one.name == name for point in one.data.data_points]


def test_an_epoch_is_a_span_whose_children_are_its_phases(tmp_path: Path) -> None:
    job = watched_job(tmp_path)
    _, exporter = shown(job)
    for subtask in range(3):
        job.progress.publish(acked(subtask))
    job.progress.publish(durable(subtasks=3))
    *children, epoch = exporter.get_finished_spans()
    assert epoch.name == "statebackend.epoch"
    assert epoch.attributes is not None
    assert epoch.attributes["operator"] == "count"
    assert epoch.attributes["epoch"] == 3
    took = {
        one.name: round((one.end_time - one.start_time) / 1e6, 1)  # type: ignore[operator]
        for one in (*children, epoch)
    }
    assert took == {
        "read": 10.0,
        "process": 30.0,
        "snapshot": 5.0,
        "commit": 5.0,
        "statebackend.epoch": 50.0,
    }
    assert epoch.context is not None
    assert {one.parent.span_id for one in children if one.parent} == {epoch.context.span_id}


def test_a_checkpoint_is_a_span_and_says_how_it_ended(tmp_path: Path) -> None:
    job = watched_job(tmp_path)
    _, exporter = shown(job)
    figures = {"start_delay_ms": 1.0, "alignment_ms": 20.0, "sync_ms": 2.0, "async_ms": 30.0}
    for number, aborted in enumerate(("", "expired")):
        job.progress.publish(
            ContinuousCheckpoint(
                job="j",
                checkpoint=number,
                epoch=number,
                aborted=aborted,
                took_ms=100.0,
                subtasks={} if aborted else {"count/0": figures, "count/1": figures},
            )
        )
    names = [one.name for one in exporter.get_finished_spans()]
    whole = "statebackend.checkpoint"
    assert names == ["start_delay", "alignment", "sync", "async", whole, whole]
    last = exporter.get_finished_spans()[-1].attributes
    assert last is not None
    assert last["outcome"] == "expired"


def test_the_metrics_are_those_of_prometheus(tmp_path: Path) -> None:
    job = watched_job(tmp_path)
    reader, _ = shown(job)
    job.progress.publish(acked(0, rows=10))
    job.progress.publish(durable(subtasks=1))
    (rows,) = points(reader, "statebackend.rows")
    assert (rows.value, dict(rows.attributes)) == (10, {"job_name": "j", "operator": "count"})
    (running,) = points(reader, "statebackend.job_running")
    assert (running.value, dict(running.attributes)) == (1, {"job_name": "j"})
    (took,) = points(reader, "statebackend.epoch_duration_seconds")
    assert (took.count, round(took.sum, 3)) == (1, 0.05)
