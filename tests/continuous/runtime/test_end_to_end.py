"""Whole jobs in one process: source, keys, state, sinks, checkpoints, failures, restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from recovery.decide.restart_strategy import FixedDelay, NoRestart
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from statebackend import system
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.errors import FencedError, JobRunningError, ProcessorError, SettingError
from tests.continuous.runtime.jobs import (
    OUTPUT,
    ArrowCounting,
    Counting,
    FailingOnce,
    Numbers,
    PandasCounting,
    PerClass,
    Windows,
    WithClass,
    check_counts,
    truth,
    windows_truth,
)
from tests.continuous.runtime.world import World, soon

if TYPE_CHECKING:
    from pathlib import Path

    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from statebackend.continuous.sources.source import Source


def counting(world: World, source: Source, processor: Any = None) -> CollectSink:
    sink = CollectSink()
    counted = world.source(source).key_by("key")
    counted.process(processor or Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    return sink


def complete(query: ContinuousQuery, count: int) -> None:
    soon(lambda: sum(not one.aborted for one in query.checkpoints()) >= count)


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_finite_input_comes_out_exactly_once_and_ends_the_job(
    world: World, parallelism: int
) -> None:
    sink = counting(world, Numbers(5000))
    query = world.start(parallelism)
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(5000))
    assert query.restarts == 0


def test_a_source_may_go_straight_to_a_sink(world: World) -> None:
    sink = CollectSink()
    world.source(Numbers(3000, splits=3)).sink(sink)
    assert world.start(2).await_termination(60.0)
    assert sorted(row["value"] for row in sink.rows()) == list(range(3000))


def test_the_query_has_the_names_of_sparks_streaming_query(world: World) -> None:
    counting(world, Numbers(3000, rows_per_s=2000, clock=world.held(0.5)))
    query = world.start(2)
    assert query.isActive
    assert query.awaitTermination(0.01) is False
    with pytest.raises(SettingError):
        query.awaitTermination(0)
    complete(query, 1)
    assert query.status["message"] == "Processing rows"
    assert query.status["isTriggerActive"]
    world.go_on()
    assert query.awaitTermination() is None
    assert not query.isActive
    assert query.exception() is None
    assert query.status == {
        "message": "Stopped",
        "isDataAvailable": False,
        "isTriggerActive": False,
    }
    assert query.lastProgress == query.recentProgress[-1]
    assert query.lastProgress.epoch == query.epoch
    assert query.name == query.job
    assert query.id.endswith(f"/{query.job}")


def test_a_job_that_has_ended_gives_nothing_more_when_it_is_started_again(world: World) -> None:
    rows = []
    for _ in range(2):
        sink = counting(world, Numbers(1000))
        assert world.start(2).await_termination(60.0)
        rows.append({tuple(row.values()) for row in sink.rows()})
        world.renew()
    assert {key: n for key, n, _ in sorted(rows[0])} == {k: n for k, (n, _) in truth(1000).items()}
    # The last checkpoint's output is committed once more, here to an object that is a new one.
    assert rows[1] <= rows[0]


def test_a_vectorised_processor_counts_the_same(world: World) -> None:
    sink = counting(world, Numbers(5000), ArrowCounting())
    assert world.start(2).await_termination(60.0)
    check_counts(sink.rows(), truth(5000))


def test_a_processor_of_dataframes_counts_the_same(world: World) -> None:
    sink = CollectSink()
    keyed = world.source(Numbers(3000)).key_by("key")
    keyed.process(PandasCounting(), uid="count", output_schema=OUTPUT, flavour="pandas").sink(sink)
    assert world.start(2).await_termination(60.0)
    check_counts(sink.rows(), truth(3000))


def test_channels_that_do_not_wait_count_the_same_while_nothing_fails(world: World) -> None:
    sink = counting(world, Numbers(2000, rows_per_s=2000))
    assert world.start(2, mode="at_least_once").await_termination(60.0)
    check_counts(sink.rows(), truth(2000))


def test_a_processor_that_fails_once_changes_nothing_of_the_result(
    world: World, tmp_path: Path
) -> None:
    processor = FailingOnce(str(tmp_path / "failed"), 1500)
    sink = counting(world, Numbers(3000, rows_per_s=2000, clock=world.held(0.5)), processor)
    query = world.start(2, restart=FixedDelay(1, 0.0))
    complete(query, 1)
    world.go_on()
    assert query.await_termination(60.0)
    assert query.restarts == 1
    check_counts(sink.rows(), truth(3000))
    done = [one.epoch for one in query.checkpoints() if not one.aborted]
    assert done == sorted(set(done))  # one that failed once it was durable is not told
    assert all(restore.epoch >= 0 for restore in query.restores()[2:4])  # not from the start


def test_the_users_own_error_ends_a_job_that_is_not_to_be_restarted(
    world: World, tmp_path: Path
) -> None:
    counting(world, Numbers(3000), FailingOnce(str(tmp_path / "failed"), 100))
    query = world.start(2, restart=NoRestart())
    with pytest.raises(ProcessorError, match="the row that fails"):
        query.await_termination(60.0)
    assert not query.is_active
    assert query.exception() is not None
    assert query.status["message"].startswith("Terminated with exception: [SB1014]")


def test_a_job_that_was_stopped_goes_on_at_another_parallelism(world: World) -> None:
    wanted, rows = 3000, []
    for parallelism in (2, 3, 1):
        clock = world.held(0.5)
        sink = counting(world, Numbers(wanted, splits=4, rows_per_s=1500, clock=clock))
        query = world.start(parallelism)
        if parallelism == 1:
            world.go_on()
            assert query.await_termination(60.0)
        else:
            complete(query, 3)
            assert query.stop()
        # What a checkpoint prepared that was complete when it was stopped is committed once more
        # by the next start, into a sink that is not the same object.
        rows += sink.rows()
        world.renew(max_parallelism=128)
    distinct = {(row["key"], row["n"]): row for row in rows}
    check_counts(list(distinct.values()), truth(wanted))


def test_files_are_visible_only_with_a_complete_checkpoint(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stream = world.source(Numbers(None, rows_per_s=1000)).key_by("key")
    stream.process(Counting(), uid="count", output_schema=OUTPUT).sink(FileSink(out))
    query = world.start(2, checkpoint_interval_s=None)
    soon(lambda: any(out.rglob("*-*")))
    assert not list(out.glob("*.parquet"))
    assert query.checkpoint() == 0
    assert list(out.glob("*.parquet"))
    assert query.stop()
    rows = [row for file in out.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    seen = [(row["key"], row["n"]) for row in rows]
    assert len(seen) == len(set(seen))


def test_several_operators_and_sinks_share_the_slots(world: World) -> None:
    first, second = CollectSink(), CollectSink()
    counted = (
        world.source(Numbers(4000))
        .key_by("key")
        .process(WithClass(), uid="count", output_schema=f"class BIGINT, {OUTPUT}")
        .sink(first, uid="counts")
    )
    classes = counted.key_by("class")
    classes.process(PerClass(), uid="classes", output_schema="class BIGINT, n BIGINT").sink(second)
    assert world.start(2).await_termination(60.0)
    check_counts(first.rows(), truth(4000))
    wanted = {c: sum(n for k, (n, _) in truth(4000).items() if k % 5 == c) for c in range(5)}
    last: dict[int, int] = {}
    for row in second.rows():
        last[row["class"]] = max(last.get(row["class"], 0), row["n"])
    assert last == wanted


@pytest.mark.parametrize("fails", [False, True])
def test_windows_of_event_time_come_out_once_and_whole(
    world: World, tmp_path: Path, fails: bool
) -> None:
    sink = CollectSink()
    source = Numbers(3000, rows_per_s=2000, event_time="at", watermark_delay="5 ms")
    if not fails:
        (tmp_path / "failed").touch()
    stream = world.source(source).key_by("key")
    checked = stream.process(
        FailingOnce(str(tmp_path / "failed"), 1500), uid="count", output_schema=OUTPUT
    )
    checked.sink(CollectSink())
    stream.process(
        Windows(100),
        uid="windows",
        output_schema="key BIGINT, start BIGINT, n BIGINT, total BIGINT",
        time_mode="event",
        event_time="at",
    ).sink(sink)
    query = world.start(2, restart=FixedDelay(1, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == int(fails)
    found = [tuple(row.values()) for row in sink.rows()]
    assert len(found) == len(set(found))
    assert set(found) == windows_truth(3000, 100)


def test_a_streaming_querys_job_is_refused(world: World) -> None:
    """Its state would go on, and the sources begin anew: all would count twice."""
    job = world.flow.setup.job
    log = CommitLog(job.store, job=job.name, writer="query", new_id=system.new_id)
    tenure = log.claim(query_id="of a query", run="run")
    manifest = Manifest(
        kind="checkpoint",
        job=job.name,
        job_id=tenure.job_id,
        generation=tenure.generation,
        sequence=0,
        writer="query",
        write_id="",
        oldest_needed=tenure.sequence,
        operator="count",
        epoch=0,
        parallelism=1,
        max_parallelism=128,
        first_epoch=0,
        query_id="of a query",
        run="run",
    )
    log.append(tenure, manifest)
    counting(world, Numbers(100))
    with pytest.raises(SettingError, match="streaming query"):
        world.start(2).await_termination(60.0)
    assert [one.query_id for one in log.manifests()] == ["of a query"] * 2


def test_a_second_driver_fences_the_first(world: World) -> None:
    counting(world, Numbers(None, rows_per_s=500))
    first = world.start(2)
    soon(lambda: (first.epoch or 0) >= 1)
    with pytest.raises(JobRunningError):
        world.start(2)
    other = World(world.folder)
    type(first).running_jobs.clear()  # as in another process
    counting(other, Numbers(None, rows_per_s=500))
    second = other.start(2)
    with pytest.raises(FencedError):
        first.await_termination(60.0)
    soon(lambda: second.epoch is not None)
    other.close()
