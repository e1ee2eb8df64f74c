"""Whatever fails, and wherever: the query that is started again applies each row once."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.spark.local.processors import (
    DyingLedger,
    FailingLedger,
    ParsingLedger,
    StuckLedger,
    once,
)
from tests.spark.local.world import checkpoints, finish, sources, until, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from statebackend import StateBackend
    from tests.spark.local.world import World


def _flag(world: World) -> Path:
    flag = world.root / "flag"
    flag.touch()
    return flag


def test_a_processor_that_raises_once_costs_a_restart_and_nothing_else(world: World) -> None:
    world.input.add_keys("a", "b", "c", "d")
    world.input.add_keys("a", "a", "b", "bad", "c", "d")
    world.input.add_keys("a", "bad")
    processor = FailingLedger(str(_flag(world)), "bad")
    backend = world.backend()
    frame = world.ledger(backend, processor=processor)
    text = world.fail(backend, frame)
    assert "SB1014" in text
    assert "RuntimeError: the user's own mistake" in text
    assert "'bad'" in text, "the key is named"
    assert world.committed() == [0]
    assert backend.lineages()["ledger"].last_epoch == 0

    world.run(backend, frame)
    world.check(backend)
    assert set(sources(backend).values()) == {"local"}


def test_a_worker_that_is_killed_costs_a_restart_and_nothing_else(world: World) -> None:
    world.input.add_keys("a", "b", "c", "d")
    world.input.add_keys("a", "b", "bad", "c", "d")
    backend = world.backend()
    frame = world.ledger(backend, processor=DyingLedger(str(_flag(world)), "bad"))
    assert "worker exited unexpectedly" in world.fail(backend, frame)
    assert world.committed() == [0]
    world.run(backend, frame)
    world.check(backend)


@pytest.mark.promise
def test_the_error_of_a_processor_names_the_users_line(world: World) -> None:
    world.input.add_keys("bad")
    backend = world.backend(parallelism=1)
    frame = world.ledger(backend, processor=FailingLedger(str(_flag(world)), "bad"))
    line = user_line("the user's line")
    assert f"for key ('bad',) at {line}." in world.fail(backend, frame)


def test_the_error_of_a_processor_names_the_users_line_and_not_a_librarys(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend(parallelism=1)
    text = world.fail(backend, world.ledger(backend, processor=ParsingLedger()))
    assert "JSONDecodeError" in text
    assert user_line("the user's call") in text


def _breaking(flag: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Passes a few rows on, and raises in their midst while the flag file is there."""

    def some(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, 3)
            if batch.num_rows > 3 and once(flag):
                raise RuntimeError("the line broke")
            yield batch.slice(3)

    return some


def test_an_upstream_that_dies_in_mid_input_leaves_no_trace(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    flag = world.root / "flag"
    df = world.input.stream(world.spark).mapInArrow(_breaking(str(flag)), world.input.schema)
    frame = world.ledger(backend, df)
    world.run(backend, frame)
    flag.touch()
    world.input.add_batches(2)
    text = world.fail(backend, frame)
    assert "the line broke" in text
    assert backend.lineages()["ledger"].last_epoch == 0
    world.run(backend, frame)
    world.check(backend)


def test_a_downstream_that_dies_in_mid_output_costs_a_restart_and_nothing_else(
    world: World,
) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    flag = world.root / "flag"
    ledger = world.ledger(backend)
    frame = ledger.mapInArrow(_breaking(str(flag)), ledger.schema)
    world.run(backend, frame)
    flag.touch()
    world.input.add_batches(2)
    assert "the line broke" in world.fail(backend, frame)
    world.run(backend, frame)
    world.check(backend)


def test_a_query_that_is_stopped_in_mid_batch_repeats_that_batch(world: World) -> None:
    gate, begun = world.root / "gate", world.root / "begun"
    world.input.add_batches(1)
    backend = world.backend(settings={"lease_timeout_s": 1.0})
    frame = world.ledger(backend, processor=StuckLedger(str(gate), str(begun)))
    world.run(backend, frame)
    world.input.add_batches(2)
    gate.touch()
    query = world.start(backend, frame)
    until(begun.exists, "a key's call has begun")
    query.stop()
    assert not query.isActive
    gate.unlink()
    assert world.committed() == [0]
    world.run(backend, frame)
    world.check(backend)


def test_a_sink_that_fails_after_the_epoch_was_durable_is_given_the_same_batch_again(
    world: World,
) -> None:
    calls: list[tuple[int, int]] = []

    def failing(frame: DataFrame, batch: int) -> None:
        rows = frame.collect()
        calls.append((batch, len(rows)))
        world.sink.write(rows, batch)
        if calls.count((1, len(rows))) == 1 and batch == 1:
            raise RuntimeError("the sink is full")

    world.input.add_batches(3)
    backend = world.backend()
    frame = world.ledger(backend)
    assert "the sink is full" in world.fail(backend, frame, failing)
    assert world.committed() == [0]
    assert backend.lineages()["ledger"].last_epoch == 1, "durable, and not committed by Spark"
    first = world.sink.batches()[1]

    again = world.backend()
    world.run(again, world.ledger(again), failing)
    assert [batch for batch, _ in calls] == [0, 1, 1, 2]
    assert sorted(map(str, world.sink.batches()[1])) == sorted(map(str, first))
    world.check(again)
    assert [epoch for _, epoch in checkpoints(again)] == [0, 1, 1, 2]


def test_local_copies_that_vanish_while_the_query_runs_are_made_up_for(world: World) -> None:
    def losing(frame: DataFrame, batch: int) -> None:
        if batch == 2:
            shutil.rmtree(world.local)
        world.sink(frame, batch)

    world.input.add_batches(8)
    backend = world.run_ledger(losing)
    world.check(backend)
    again = [r for r in backend.restores() if r.epoch == 1]
    assert [r.source for r in again] == ["durable"] * 2
    assert all("no local copy" in r.reason for r in again)
    assert {r.epoch for r in backend.restores()} == {-1, 1}, "from then on they are found again"


def test_a_start_that_spark_refuses_leaves_the_job_as_it_was(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend)
    with pytest.raises(Exception, match="nowhere"):
        backend.start(frame.writeStream.format("nowhere"))
    world.run(backend, frame)
    world.check(backend)


# --- sinks and triggers ---------------------------------------------------------------------------


def test_a_running_query_takes_in_what_comes_and_may_be_stopped_between_batches(
    world: World,
) -> None:
    backend = world.backend()
    frame = world.ledger(backend)
    for _ in range(2):
        world.input.add_batches(1)
        query = backend.start(world.writer(frame).trigger(processingTime="0 seconds"))
        query.processAllAvailable()
        world.input.add_batches(2)
        query.processAllAvailable()
        query.stop()
        world.check(backend)
    assert backend.epoch == 5


def _parquet(world: World, frame: DataFrame) -> DataStreamWriter:
    options = {"checkpointLocation": str(world.location), "path": str(world.root / "table")}
    return frame.writeStream.format("parquet").options(**options).trigger(availableNow=True)


def _check_parquet(world: World, backend: StateBackend) -> None:
    rows = world.spark.read.parquet(str(world.root / "table")).collect()
    for row in rows:  # 20 ids in each batch
        assert len({(i - 1) // 20 for i in row.ids}) == 1
    for batch in {(row.ids[0] - 1) // 20 for row in rows}:
        world.sink.write([row for row in rows if (row.ids[0] - 1) // 20 == batch], batch)
    world.check(backend)


@pytest.mark.promise
def test_a_file_sink_is_exact_over_restarts(world: World) -> None:
    backend = world.backend()
    frame = world.ledger(backend)
    for _ in range(2):
        world.input.add_batches(2)
        finish(backend.start(_parquet(world, frame)))
        _check_parquet(world, backend)


def test_a_crash_between_the_sinks_commit_and_sparks_costs_nothing(world: World) -> None:
    backend = world.backend()
    frame = world.ledger(backend)
    world.input.add_batches(2)
    finish(backend.start(_parquet(world, frame)))
    (world.location / "commits" / "1").unlink()
    (world.location / "commits" / ".1.crc").unlink(missing_ok=True)
    world.input.add_batches(1)
    # The sink has batch 1 already: it does not look at the frame when Spark repeats it.
    again = world.backend()
    finish(again.start(_parquet(world, world.ledger(again))))
    _check_parquet(world, again)
