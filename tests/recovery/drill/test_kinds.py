"""Kinds of jobs: what a drill must know of each, and refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recovery.drill.driver.continuous_driver import EndingSource
from recovery.drill.jobs import continuous_output as files
from recovery.drill.jobs.bundled_jobs import BUNDLED, kind_of, running_totals_truth
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.job_kinds import BATCHES, CONTINUOUS, slots_of
from recovery.drill.run.drill_options import impossible
from recovery.drill.run.runner import run_drill
from statebackend.continuous.sources.file_source import FileSource
from statebackend.errors import SettingError


@pytest.mark.parametrize(
    ("cluster", "slots"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[4,2]", 4),
        ("local-cluster[2,1,1024]", 2),
        ("local-cluster[1,1,1024]", 1),
        ("local-cluster[4,2,512]", 2),
        ("two-hosts", 2),
    ],
)
def test_a_continuous_job_has_a_subtask_for_each_slot_and_another_has_four(
    cluster: str, slots: int
) -> None:
    assert slots_of(cluster) == slots
    assert CONTINUOUS.subtasks(cluster) == slots == CONTINUOUS.subtasks_max(cluster)
    assert (BATCHES.subtasks(cluster), BATCHES.subtasks_max(cluster)) == (4, 9)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"commit": "async"}, "no commit='async'"),
        ({"parallelism": 3}, "2 task slots"),
        ({"parallelism": 0}, "2 task slots"),
        ({"job": {"kind": "endless"}}, "'endless'"),
    ],
)
def test_what_means_nothing_for_a_continuous_job_is_refused_before_it_starts(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    given = {"name": "mine", "build": test_kinds_are_known_by_their_job, "kind": "continuous"}
    job = DrillJob(**{**given, "truth": running_totals_truth, **options.pop("job", {})})
    with pytest.raises(SettingError, match=why):
        run_drill(job, folder=tmp_path, **options)


def test_kinds_are_known_by_their_job() -> None:
    assert kind_of("continuous-windows") == kind_of(BUNDLED["continuous-windows"]) == "continuous"
    assert kind_of("timers") == kind_of(running_totals_truth) == kind_of("no such job") == "batches"


def test_a_fault_of_micro_batches_cannot_strike_a_continuous_job() -> None:
    faults = ["rebalanced", "savepoint-taken", "executor-killed", "worker-frozen"]
    assert impossible(faults) == {}
    assert set(impossible(faults, kind="continuous")) == {"rebalanced", "savepoint-taken"}


def test_an_endless_source_ends_with_what_is_there_when_it_is_to_stop(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    stop = tmp_path / "stop"
    endless = FileSource(
        tmp_path / "in",
        schema="n BIGINT, at TIMESTAMP",
        format="json",
        follow=True,
        event_time="at",
        watermark_delay="3 seconds",
        idle_after_s=2.0,
    )
    source = EndingSource(endless, stop)
    for name in ("schema", "event_time", "watermark_delay_ms", "idle_after_s", "splits_end"):
        assert getattr(source, name) == getattr(endless, name)
    found = source.discover(None)
    assert (found.splits, found.done) == ((), False)
    (tmp_path / "in" / "a.json").write_text('{"n": 1}\n')
    found = source.discover(found.state)
    assert (len(found.splits), found.done) == (1, False)
    reader = source.open(found.splits[0], None)
    batch = reader.read(10)
    assert batch is not None
    assert batch.column(0).to_pylist() == [1]
    reader.close()
    (tmp_path / "in" / "b.json").write_text('{"n": 2}\n')
    stop.touch()
    found = source.discover(found.state)
    assert ([split.id for split in found.splits], found.done) == (["b.json@000000000000000"], True)


def test_the_rows_of_a_key_come_in_the_order_in_which_their_files_were_written(
    tmp_path: Path,
) -> None:
    for age, name in ((3, "part-b"), (1, "part-a"), (2, "part-c"), (0, "other")):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"k": [1], "name": [name]}), path)
        os.utime(path, ns=(age, age))
    (tmp_path / "_statebackend").mkdir()
    assert [row["name"] for _, row in files.rows_in(tmp_path, -1)] == ["part-a", "part-c", "part-b"]
