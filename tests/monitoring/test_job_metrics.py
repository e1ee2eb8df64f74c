"""What a job's events come to as metrics, whatever the parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from snapshot.log.progress_events import ContinuousCheckpoint
from statebackend.errors import StoreUnreachableError
from statebackend.monitoring.job_metrics import JobMetrics
from statebackend.monitoring.metric_table import METRICS
from statebackend.monitoring.metric_values import Histogram
from tests.monitoring.watched import acked, durable, restored, watched_job


def test_an_epoch_counts_once_it_is_durable_and_a_restore_at_once(tmp_path: Path) -> None:
    job = watched_job(tmp_path)
    metrics = JobMetrics(job)
    for subtask, source in enumerate(("local", "durable", "local")):
        job.progress.publish(acked(subtask, rows=subtask, restore=restored(source)))
    before = metrics.values()
    counts = {"local": 2, "durable": 1, "mixed": 0, "empty": 0}
    assert before["restores_total"] == {("count", source): n for source, n in counts.items()}
    assert "rows_total" not in before
    job.progress.publish(acked(0, rows=100))  # its task was run twice: the newer one counts
    job.progress.publish(durable(subtasks=3))
    found = metrics.values()
    assert found["rows_total"] == {("count",): 103}
    assert found["changed_rows_total"] == {("count",): 15}
    assert found["removed_rows_total"] == {("count",): 3}
    assert found["state_rows"] == {("count",): 21}
    assert found["state_lookup_hits_total"] == {("count",): 18}
    assert found["subtask_rows"] == {
        ("count", "min"): 1,
        ("count", "p50"): 2,
        ("count", "max"): 100,
    }
    assert found["store_requests_total"]["workers", "get"] == 16
    assert found["store_request_errors_total"]["workers", "get"] == 4
    assert found["store_retries_total"]["workers",] == 8
    assert found["next_timer_timestamp_seconds"] == {("count",): 60}
    assert found["watermark_timestamp_seconds"] == {(): 5}
    assert found["restarts_total"] == {(): 2}
    assert found["job_running"] == {(): 1}


def test_there_are_as_many_series_for_a_thousand_subtasks_as_for_two(tmp_path: Path) -> None:
    counts = []
    for parallelism in (2, 1000):
        job = watched_job(tmp_path)
        metrics = JobMetrics(job)
        for subtask in range(parallelism):
            job.progress.publish(acked(subtask, restore=restored("local")))
        job.progress.publish(durable(subtasks=parallelism))
        values = metrics.values()
        counts.append({name: len(by_labels) for name, by_labels in values.items()})
        phases = values["subtask_phase_duration_seconds"]["count", "process"]
        assert isinstance(phases, Histogram)
        assert sum(phases.counts) == parallelism
        metrics.end()
    assert counts[0] == counts[1]


def test_checkpoints_count_by_their_outcome_from_0_on(tmp_path: Path) -> None:
    job = replace(watched_job(tmp_path), continuous=True)
    metrics = JobMetrics(job)
    assert set(metrics.values()["checkpoints_total"].values()) == {0}
    assert metrics.values()["rebalances_total"] == {(): 0}
    for number, aborted in enumerate(("", "expired", "")):
        one = {"alignment_ms": 20.0, "sync_ms": 1.0, "alignment_bytes": 64, "unaligned": 1}
        job.progress.publish(
            ContinuousCheckpoint(
                job="j",
                checkpoint=number,
                epoch=number,
                aborted=aborted,
                took_ms=500.0,
                subtasks={} if aborted else {"count/0": one, "count/1": one},
            )
        )
    found = metrics.values()
    counts = {outcome: n for (outcome,), n in found["checkpoints_total"].items() if n}
    assert counts == {"complete": 2, "expired": 1}
    assert found["alignment_bytes_total"] == {("count",): 256}
    assert found["unaligned_subtasks_total"] == {("count",): 4}
    aligned = found["checkpoint_phase_duration_seconds"]["count", "alignment"]
    assert isinstance(aligned, Histogram)
    assert (sum(aligned.counts), aligned.sum_s) == (4, pytest.approx(0.08))


def test_a_store_that_is_gone_is_unreachable_until_a_call_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = watched_job(tmp_path)
    metrics, store = JobMetrics(job), job.job.store
    assert metrics.values()["store_unreachable_seconds"] == {(): 0}

    def gone(prefix: str) -> None:
        raise StoreUnreachableError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(store._inner, "list", gone)
        with pytest.raises(StoreUnreachableError):
            store.list("log/")
        found = metrics.values()
    assert found["store_unreachable_seconds"][()] > 0
    assert found["store_request_errors_total"]["driver", "list"] == 1
    store.list("log/")
    assert metrics.values()["store_unreachable_seconds"] == {(): 0}


def test_every_value_is_in_the_table_with_its_labels(tmp_path: Path) -> None:
    job = watched_job(tmp_path)
    metrics = JobMetrics(job)
    job.progress.publish(acked(0, restore=restored("mixed")))
    job.progress.publish(durable(subtasks=1))
    for name, by_labels in metrics.values().items():
        assert {len(labels) for labels in by_labels} <= {len(METRICS[name].labels)}, name
