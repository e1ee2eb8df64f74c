"""foreachBatch with `once`: a repeated batch is in the table once, and in the state once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import statebackend
from statebackend import once_batches
from statebackend.errors import SettingError
from statebackend.spark.start import checked_batches
from tests.continuous.sinks.lake_tables import LakeTable
from tests.spark.local.repeated_batches import (
    check_refusals,
    check_rows,
    run_beside_a_clone,
    run_with_repeats,
)
from tests.spark.local.world import finish

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from statebackend.runtime.driver.session import RunSession
    from tests.spark.local.world import World

pytestmark = pytest.mark.full  # starts a query again after each kind of failure


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_batch_that_fails_after_the_table_has_it_is_there_once(
    world: World, tmp_path: Path, kind: str, commit: str
) -> None:
    table = LakeTable(kind, tmp_path / "table")
    sink = table.sink()
    run_with_repeats(world, commit, lambda frame, once: once.append(frame, sink))
    check_rows(world, table.read().to_pylist())


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_query_that_begins_with_a_savepoint_has_batches_of_its_own(
    world: World, tmp_path: Path, kind: str
) -> None:
    table = LakeTable(kind, tmp_path / "table")
    run_beside_a_clone(world, table.sink())
    assert sum(len(row["ids"]) for row in table.read().to_pylist()) == 4 * 20 + 2 * 20


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_batch_that_would_be_taken_for_another_one_is_refused(
    world: World, tmp_path: Path, kind: str
) -> None:
    table = LakeTable(kind, tmp_path / "table")
    check_refusals(world.spark.createDataFrame([(1,)], "n bigint"), table.sink())
    assert len(table.read()) == 3


def test_a_batch_that_is_faster_than_the_drivers_checks_waits_for_them(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()

    def session_of(frame: DataFrame) -> RunSession | None:
        called.set()
        return checked_batches.session_of(frame)

    monkeypatch.setattr(once_batches, "session_of", session_of)
    table = LakeTable("delta", tmp_path / "table")
    world.input.add_batches(1)
    backend = world.backend()
    writer = world.ledger(backend).writeStream.foreachBatch(backend.once(table.sink()))
    writer = writer.option("checkpointLocation", str(world.location)).trigger(availableNow=True)
    with backend.starting():
        query = writer.start()
        assert called.wait(60)  # the query is bound to the job when the block is left
    finish(query)
    check_rows(world, table.read().to_pylist())


def test_a_sink_alone_is_appended_to_and_a_query_of_no_operator_is_refused(
    world: World, tmp_path: Path
) -> None:
    table = LakeTable("delta", tmp_path / "table")
    world.input.add_batches(2)
    backend = world.backend()
    world.run(backend, world.ledger(backend), backend.once(table.sink()))
    assert sum(len(row["ids"]) for row in table.read().to_pylist()) == 40
    with pytest.raises(SettingError, match="once"):
        statebackend.once("a table")  # type: ignore[arg-type]
    plain = world.input.stream(world.spark).writeStream.trigger(availableNow=True)
    query = plain.foreachBatch(statebackend.once(table.sink())).start()
    with pytest.raises(Exception, match="without an operator"):
        query.awaitTermination()
